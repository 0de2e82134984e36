"""Files of JSON lines as one table, parsed by Arrow: one object per line, its keys are columns.

Types are found in the first rows, or said by `schema=`; numbers with a point
are float32 and whole ones int64. A block that Arrow refuses is read again line
by line, to name each bad one of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.arguments import OnError, by_name, names, skipping
from shoal.data.cache.disk_cache import identity_of
from shoal.data.files import Files, SharedFiles, Where, in_threads
from shoal.data.formats.arrow import BadRows, Fill, decoded
from shoal.data.formats.csv_text import as_file
from shoal.data.formats.json_text import careful_columns
from shoal.data.formats.lines import Rules
from shoal.data.formats.schema import (
    arrow_type,
    as_torch_means,
    check_names,
    chosen,
    columns_of,
    is_unknown,
    label_names,
    readable_type,
    wrong_value,
)
from shoal.data.formats.source import TableSource
from shoal.data.formats.table import Rows
from shoal.data.formats.text_stream import UnpackedFiles, is_compressed, open_text_stream
from shoal.data.formats.text_table import COMPRESSED, LineAddress, Place, TextTable, first_texts, read_head
from shoal.data.stream import Stream
from shoal.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

ENDINGS = tuple(f"{kind}{packed}" for kind in (".jsonl", ".ndjson", ".json") for packed in ("", *COMPRESSED))
RULES = Rules(blanks_are_empty=True)

_NUM_TEXTS = 4  # blocks looked at for the type of a column that is null in those before


def open_jsonl(
    path: Where,
    *,
    label: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    schema: Mapping[str, Any] | None = None,
    fill: Mapping[str, Any] | None = None,
    cache: Any = "auto",
    on_error: OnError = "raise",
    max_skips: int | None = None,
    files: Files | None = None,
) -> TableSource | Stream:
    """The source behind `Dataset.from_jsonl`; a stream where files are compressed."""
    on_error, max_skips = skipping("", on_error, max_skips)
    files = files or SharedFiles()
    infos = files.expand(path, ENDINGS)
    description = {"format": "jsonl"}
    asked: dict[str, Any] = {"columns": columns, "needed": label_names(label), "schema": schema, "fill": fill}
    if any(is_compressed(info.url) for info in infos):
        unpacked = UnpackedFiles(files, infos, RULES, has_header=False)
        decoder = JsonDecoder(infos[0].url, unpacked.first_texts(), **asked)
        return open_text_stream(
            unpacked,
            decoder,
            description,
            label=label,
            on_error=on_error,
            max_skips=max_skips,
        )
    heads = in_threads(lambda info: read_head(files, info, RULES, has_header=False), infos)
    decoder = JsonDecoder(infos[0].url, first_texts(files, infos, heads, RULES), **asked)
    identity = identity_of(infos, **description, types=decoder.describe(), fill=fill)
    table = TextTable(files, infos, heads, RULES, decoder, identity=identity, description=description)
    return TableSource(table, label=label, cache=cache, on_error=on_error, max_skips=max_skips)


class JsonDecoder:
    """Lines of JSON to columns of known types."""

    def __init__(
        self,
        url: str,
        texts: Iterable[tuple[int, bytes]],
        *,
        columns: Sequence[str] | None,
        needed: Sequence[str],
        schema: Mapping[str, Any] | None,
        fill: Mapping[str, Any] | None,
    ) -> None:
        import pyarrow as pa

        given = {name: arrow_type(name, said) for name, said in by_name("schema=", schema).items()}
        self._num_looked_at = 0
        asked = None if columns is None else [*names("columns=", columns), *needed]
        found = self._find_types(url, given, asked, texts)
        wanted = chosen(list(found), columns, url, needed=needed)
        check_names("fill=", fill, wanted, url)
        self._inferred = found.keys() - given.keys()
        self._spelled = {name for name, kind in given.items() if kind == pa.string()}
        self._types = {name: found[name] for name in wanted}
        self.columns = columns_of(pa.schema(list(self._types.items())), url)
        self._readable = pa.schema([(name, readable_type(kind)) for name, kind in self._types.items()])
        self._fill = Fill(fill, self.columns)

    def decode(self, text: bytes, num_rows: int, place: Place) -> Rows:
        """The rows of a text; bad ones are told by line and column."""
        import pyarrow as pa

        bad = BadRows(LineAddress(text, place, RULES))
        try:
            # Arrow takes strings as they are.
            if not text.isascii():
                text.decode()
            table = _parsed(text, self._readable)
            is_whole = table.num_rows == num_rows
        except (pa.ArrowInvalid, UnicodeDecodeError):
            is_whole = False
        if not is_whole:
            table = careful_columns(text, self._readable, bad, self._explain, self._spelled)
        return decoded(table, self.columns, self._fill, bad)

    def describe(self) -> dict[str, str]:
        """The types."""
        return {name: str(kind) for name, kind in self._types.items()}

    def _find_types(
        self,
        url: str,
        given: Mapping[str, pa.DataType],
        wanted: Sequence[str] | None,
        texts: Iterable[tuple[int, bytes]],
    ) -> dict[str, pa.DataType]:
        """Of all columns, or at least of those wanted: given ones, and what Arrow finds in the first rows."""
        import pyarrow as pa

        found: dict[str, pa.DataType] = {}  # in the order of the file, types that nobody knows yet among them
        for number, (_, text) in enumerate(texts):
            asked = found.keys() | given.keys() if wanted is None else wanted
            known = [name for name in asked if name in given or not is_unknown(found.get(name, pa.null()))]
            if number == _NUM_TEXTS or (number and len(known) == len(asked)):
                break
            try:
                schema = _parsed(text, None).schema
            except pa.ArrowInvalid:
                bad = BadRows(lambda row: {"where": url, "row": row + 1})
                schema = careful_columns(text, None, bad, None).schema
                if number == 0 and not schema.names and len(bad):
                    if text.lstrip().startswith(b"["):
                        raise _one_array(url) from None
                    raise bad[0] from None
            self._num_looked_at += text.count(b"\n") + (not text.endswith(b"\n"))
            for field in schema:
                if is_unknown(found.get(field.name, pa.null())):
                    found[field.name] = as_torch_means(field.type)
        return {name: given.get(name, kind) for name, kind in found.items()} | dict(given)

    def _explain(self, name: str, value: str) -> str:
        looked_at = self._num_looked_at if name in self._inferred else None
        return wrong_value(name, value, self._types[name], looked_at, text="text")


def _one_array(url: str) -> DataError:
    return DataError(
        f"the file {url} is one JSON array, and one object per line is wanted, so that it can be read in pieces. Nothing was "
        f"read; write it so with `jq -c '.[]' {url} > lines.jsonl`, or read it yourself: "
        "Dataset.from_torch(json.load(open(...)))."
    )


def _parsed(text: bytes, schema: pa.Schema | None) -> pa.Table:
    import pyarrow.json

    options = pyarrow.json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
    )
    return pyarrow.json.read_json(as_file(text), parse_options=options)
