"""`predict(out=URL)`: outputs streamed to Parquet files, one per worker, instead of gathered.

A row is a sample: its position in the data, and a column for each tensor of the output. A
replacement worker writes its file again from the start; _manifest.json, written last, lists the
files that belong together; readers of Parquet directories ignore names that begin with an
underscore.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.errors import ConfigError
from shoal.train.checkpoint.storage import Place

MANIFEST = "_manifest.json"
POSITION = "position"
ROW_GROUP_BYTES = 16 << 20


def refuse_written(url: str) -> None:
    """Refuse a directory that holds predictions already."""
    if Place.at(url).has(MANIFEST):
        raise ConfigError(
            f"predict(out={url!r}) would write over the predictions that are there. Nothing was predicted; name another directory, or "
            "remove this one."
        )


class PredictionFile:
    """This worker's file: rows are buffered until a row group is full."""

    def __init__(self, url: str, rank: int) -> None:
        self._place = Place.at(url)
        self.name, self.num_rows = f"part-{rank:05d}.parquet", 0
        self._writer: pq.ParquetWriter | None = None
        self._schema: pa.Schema | None = None
        self._waiting: list[pa.Table] = []
        self._num_bytes = 0

    @contextmanager
    def opened(self) -> Iterator[PredictionFile]:
        """Context in which rows are written; the file is renamed into place once all of them are there."""
        self._place.fs.makedirs(self._place.path, exist_ok=True)
        final = self._place.file(self.name)
        written = f"{final}.tmp" if self._place.local is not None else final
        with self._place.fs.open(written, "wb") as sink:
            self._sink = sink
            yield self
            self._flush()
            if self._writer is not None:
                self._writer.close()
        if self._writer is None:
            for name in dict.fromkeys((written, final)):  # one of an earlier run may be there
                with contextlib.suppress(FileNotFoundError):
                    self._place.fs.rm_file(name)
        elif written != final:
            os.replace(written, final)

    def write(self, part: Slice, output: Tree) -> None:
        if not part.num_local:
            return
        places = range(part.first, part.first + part.num_local) if part.places is None else part.places
        columns = {POSITION: pa.array(np.asarray(places, dtype=np.int64) + part.start)}
        for name, tensor in _named(output, "output"):
            if name in columns:
                what = (
                    "each row's position in the data" if name == POSITION else "another tensor of the output"
                )
                raise ConfigError(
                    f"predict(out={self._place.url!r}): the model's output has a tensor '{name}', and the column of that name holds {what}. "
                    "No predictions were put in place; give it another name in the model's output."
                )
            columns[name] = _column(tensor)
        table = pa.table(columns)
        self._refuse_other(table.schema)
        self.num_rows += part.num_local
        self._waiting.append(table)
        self._num_bytes += table.nbytes
        if self._num_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _refuse_other(self, schema: pa.Schema) -> None:
        """Refuse rows with other columns than the file's."""
        if self._schema is None:
            self._schema = schema
        if schema.equals(self._schema):
            return
        names = dict.fromkeys([*self._schema.names, *schema.names])
        before, now = (
            {name: str(each.field(name).type) if name in each.names else "absent" for name in names}
            for each in (self._schema, schema)
        )
        other = next((name for name in names if before[name] != now[name]), schema.names[-1])
        raise ConfigError(
            f"predict(out={self._place.url!r}): the column '{other}' was {before[other]} in the first batch and is {now[other]} after "
            f"{self.num_rows} rows, and a Parquet column has one type. No predictions were put in place; let the model pad its output to one "
            "width, or call predict without out=."
        )

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._sink, table.schema)
        self._writer.write_table(table)
        self._waiting, self._num_bytes = [], 0


def write_manifest(url: str, rows_by_rank: list[int]) -> None:
    files = {f"part-{rank:05d}.parquet": rows for rank, rows in enumerate(rows_by_rank) if rows}
    place = Place.at(url)
    for name in place.names():  # of an earlier, unfinished run with more workers
        part = re.fullmatch(r"part-(\d+)\.parquet(\.tmp)?", name)
        if part and name not in files and (part[2] is None or int(part[1]) >= len(rows_by_rank)):
            with contextlib.suppress(FileNotFoundError):
                place.fs.rm_file(place.file(name))
    with place.fs.open(place.file(MANIFEST), "wb") as sink:
        sink.write(json.dumps({"rows": sum(rows_by_rank), "files": files}, indent=1).encode())


def _named(output: Tree, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        yield name, output
    elif isinstance(output, dict) or hasattr(output, "items"):
        for key, value in output.items():
            yield from _named(value, str(key) if name == "output" else f"{name}.{key}")
    elif isinstance(output, (tuple, list)):
        for number, value in enumerate(output):
            yield from _named(value, f"{name}.{number}")


def _column(tensor: Tensor) -> Any:
    """One value per row, or a list of fixed size, rows of more dimensions flattened."""
    array = tensor.detach().cpu()
    values = (array.float() if array.dtype.itemsize == 2 and array.is_floating_point() else array).numpy()
    if values.ndim == 1:
        return pa.array(values)
    flat = values.reshape(len(values), -1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), flat.shape[1])
