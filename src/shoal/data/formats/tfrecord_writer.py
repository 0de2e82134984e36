"""Writing TFRecord files, as TensorFlow reads them.

A local file has its name only once it is whole: until then it lies beside it
under another, and it is taken away where writing fails.
"""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, Literal, Self, cast

from shoal.data import arguments
from shoal.data.formats.example_wire import example_bytes
from shoal.errors import ConfigError

Compression = Literal["auto", "gzip"] | None


class TFRecordWriter:
    """Writes records to one file, a path or any URL that fsspec opens.

    A row is a dict: floats become a float list (of float32), whole numbers
    and booleans an int64 list, strings and bytes a bytes list; a value may be
    one of them, or an array, tensor or list. Bytes instead of a dict are
    written as they are. A name that ends in `.gz` is compressed, and then
    can only be read from its beginning.

        with TFRecordWriter("clicks.tfrecord") as out:
            out.write({"price": 1.5, "ids": [3, 7], "label": 1})
    """

    def __init__(self, path: str | os.PathLike[str], *, compression: Compression = "auto") -> None:
        self._path = arguments.path("a TFRecordWriter", path)
        if compression not in (None, "auto", "gzip"):
            raise ConfigError(f"compression is None, 'gzip' or 'auto' (by the name), got {compression!r}")
        self._is_gzip = compression == "gzip" or (compression == "auto" and self._path.endswith(".gz"))
        self._is_local = "://" not in self._path
        self._unfinished = f"{self._path}.{os.getpid()}.part"
        self._file: BinaryIO | None = None
        self._closing = contextlib.ExitStack()
        self.num_records = 0

    def __enter__(self) -> Self:
        try:
            raw = self._closing.enter_context(self._open())
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error}. Nothing was.") from error
        self._file = raw
        if self._is_gzip:
            # No time in the header: equal rows make equal files.
            packed = gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0)
            self._file = cast(BinaryIO, self._closing.enter_context(packed))
        return self

    def _open(self) -> BinaryIO:
        if self._is_local:
            return open(self._unfinished, "wb")
        import fsspec

        return cast(BinaryIO, fsspec.open(self._path, "wb").open())

    def write(self, row: Mapping[str, Any] | bytes) -> None:
        """One record."""
        from shoal.data.formats.record_files import frame

        if self._file is None:
            raise ConfigError(f"a TFRecordWriter writes inside a with statement; {self._path} is not open")
        if not isinstance(row, (Mapping, bytes)):
            raise ConfigError(
                f"record {self.num_records + 1} for {self._path} is a {type(row).__name__}, not a dict of features. For "
                "samples of (inputs, label), say the label's name: write_tfrecord(path, rows, label='y')."
            )
        self._file.write(frame(row if isinstance(row, bytes) else example_bytes(row)))
        self.num_records += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file = None
        is_whole = False
        try:
            self._closing.close()
            is_whole = kind is None
        finally:
            if self._is_local and is_whole:
                os.replace(self._unfinished, self._path)
            elif self._is_local:
                os.unlink(self._unfinished)


def write_tfrecord(
    path: str | os.PathLike[str],
    rows: Iterable[Any],
    *,
    label: str | None = None,
    compression: Compression = "auto",
) -> int:
    """Write rows, dicts of features, to a TFRecord file; how many there were.

    With `label="y"` rows are (inputs, label), as a dataset has them.

        write_tfrecord("train.tfrecord", ({"x": x, "y": y} for x, y in pairs))
        write_tfrecord("train.tfrecord", Dataset.from_csv("train.csv", label="y"), label="y")
    """
    if not isinstance(rows, Iterable):
        raise ConfigError(f"write_tfrecord takes rows, dicts of features, got {rows!r}. Nothing was written.")
    if label is not None and not isinstance(label, str):
        raise ConfigError(f"write_tfrecord(label=) takes the name of a feature, got {label!r}")
    with TFRecordWriter(path, compression=compression) as out:
        for row in rows:
            if label is not None:
                if not isinstance(row, tuple) or len(row) != 2 or not isinstance(row[0], Mapping):
                    raise ConfigError(
                        f"with label={label!r} rows are (dict of features, label), and row {out.num_records + 1} for "
                        f"{path} is a {type(row).__name__}. Nothing was written; take label= out, or give pairs."
                    )
                row = {**row[0], label: row[1]}
            out.write(row)
        return out.num_records
