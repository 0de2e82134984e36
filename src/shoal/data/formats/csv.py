"""CSV files as one table, parsed by Arrow.

Types are found in the first rows, or said by `schema=`; numbers with a point
are float32, as torch means floats, and whole ones int64. A block that Arrow
refuses is read again as text, to name each bad row of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.arguments import OnError, by_name, flag, skipping
from shoal.data.arguments import names as list_of_names
from shoal.data.cache.disk_cache import identity_of
from shoal.data.files import Files, SharedFiles, Where, in_threads
from shoal.data.formats.arrow import BadRows, Fill, decoded
from shoal.data.formats.csv_format import CsvConfig, CsvParser
from shoal.data.formats.csv_text import careful_columns
from shoal.data.formats.schema import (
    arrow_type,
    as_torch_means,
    check_names,
    chosen,
    columns_of,
    label_names,
    readable_type,
    wrong_value,
)
from shoal.data.formats.source import TableSource
from shoal.data.formats.table import Rows
from shoal.data.formats.text_stream import UnpackedFiles, is_compressed, open_text_stream
from shoal.data.formats.text_table import COMPRESSED, LineAddress, Place, TextTable, first_texts, read_head
from shoal.data.stream import Stream
from shoal.errors import ConfigError, FileDamaged, SchemasDiffer

if TYPE_CHECKING:
    import pyarrow as pa

ENDINGS = tuple(f"{kind}{packed}" for kind in (".csv", ".tsv") for packed in ("", *COMPRESSED))

_NUM_TEXTS = 4  # blocks looked at for the type of a column that is empty in those before


def open_csv(
    path: Where,
    *,
    label: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    schema: Mapping[str, Any] | None = None,
    fill: Mapping[str, Any] | None = None,
    delimiter: str | None = None,
    quote: str | None = '"',
    header: bool | None = None,
    names: Sequence[str] | None = None,
    cache: Any = "auto",
    on_error: OnError = "raise",
    max_skips: int | None = None,
    files: Files | None = None,
) -> TableSource | Stream:
    """The source behind `Dataset.from_csv`; a stream where files are compressed."""
    on_error, max_skips = skipping("", on_error, max_skips)
    files = files or SharedFiles()
    infos = files.expand(path, ENDINGS)
    if delimiter is None:
        delimiter = "\t" if ".tsv" in infos[0].url.rpartition("/")[2].lower() else ","
    config = CsvConfig(
        delimiter=delimiter,
        quote=quote,
        has_header=names is None if header is None else flag("header=", header),
        names=None if names is None else tuple(list_of_names("names=", names)),
    )
    parser, rules, urls = CsvParser(config), config.rules, [info.url for info in infos]
    description = {"format": "csv", "delimiter": delimiter}
    asked: dict[str, Any] = {"columns": columns, "needed": label_names(label), "schema": schema, "fill": fill}
    if any(is_compressed(url) for url in urls):
        unpacked = UnpackedFiles(files, infos, rules, has_header=config.has_header)
        heads = in_threads(unpacked.head, range(len(infos)))
        named = parser.names_of_files(urls, heads, unpacked.first_texts())
        decoder = CsvDecoder(parser, named, urls, unpacked.first_texts(), **asked)
        return open_text_stream(
            unpacked,
            decoder,
            description,
            label=label,
            on_error=on_error,
            max_skips=max_skips,
        )
    heads = in_threads(lambda info: read_head(files, info, rules, has_header=config.has_header), infos)
    named = parser.names_of_files(urls, heads, first_texts(files, infos, heads, rules))
    decoder = CsvDecoder(parser, named, urls, first_texts(files, infos, heads, rules), **asked)
    identity = identity_of(infos, **description, types=decoder.describe(), fill=fill, names=named)
    table = TextTable(files, infos, heads, rules, decoder, identity=identity, description=description)
    return TableSource(table, label=label, cache=cache, on_error=on_error, max_skips=max_skips)


class CsvDecoder:
    """Text of CSV to columns of known types."""

    def __init__(
        self,
        parser: CsvParser,
        named: Sequence[Sequence[str]],
        urls: Sequence[str],
        texts: Iterable[tuple[int, bytes]],
        *,
        columns: Sequence[str] | None,
        needed: Sequence[str],
        schema: Mapping[str, Any] | None,
        fill: Mapping[str, Any] | None,
    ) -> None:
        self._parser, self._named = parser, named
        self._wanted = chosen(named[0], columns, urls[0], needed=needed)
        check_names("schema=", schema, named[0], urls[0])
        check_names("fill=", fill, self._wanted, urls[0])
        self._check_names(urls, is_chosen=columns is not None)
        given = {
            name: arrow_type(name, said)
            for name, said in by_name("schema=", schema).items()
            if name in self._wanted
        }
        self._num_looked_at, self._inferred = 0, set(self._wanted) - given.keys()
        found = self._find_types(given, urls, texts)
        import pyarrow as pa

        self.columns = columns_of(pa.schema([(name, found[name]) for name in self._wanted]), urls[0])
        self._types = {name: readable_type(kind) for name, kind in found.items()}
        lists = [
            column.name
            for column in self.columns
            if column.shape or column.is_list or (column.is_ragged and column.kind == "number")
        ]
        if lists:
            raise ConfigError(
                f"schema= says that {', '.join(lists)} hold lists, which CSV cannot: write JSON lines or Parquet"
            )
        self._fill = Fill(fill, self.columns)

    def decode(self, text: bytes, num_rows: int, place: Place) -> Rows:
        """The rows of a text; bad ones are told by line and column."""
        import pyarrow as pa

        names = self._named[place.file]
        bad = BadRows(LineAddress(text, place, self._parser.config.rules))
        try:
            table = self._parser.parse(text, names, self._types, self._wanted)
        except pa.ArrowInvalid:
            table = careful_columns(self._parser, text, names, self._types, self._wanted, bad, self._explain)
        if table.num_rows != num_rows:
            raise FileDamaged(
                url=place.url,
                problem=f"the {len(text)} bytes from line {place.first_line:,} on hold {num_rows} rows by their line ends "
                f"and {table.num_rows} by their fields; a quote stands where none is meant, perhaps: try quote=None",
            )
        return decoded(table, self.columns, self._fill, bad)

    def describe(self) -> dict[str, str]:
        """The types."""
        return {name: str(self._types[name]) for name in self._wanted}

    def _check_names(self, urls: Sequence[str], *, is_chosen: bool) -> None:
        first = self._named[0]
        for url, names in zip(urls[1:], self._named[1:], strict=True):
            differences = [f"its header has no column '{name}'" for name in self._wanted if name not in names]
            if not is_chosen:
                differences += [
                    f"its header has a column '{name}' more" for name in names if name not in first
                ]
            if differences:
                raise SchemasDiffer(first=urls[0], other=url, differences=differences)

    def _find_types(
        self, given: Mapping[str, pa.DataType], urls: Sequence[str], texts: Iterable[tuple[int, bytes]]
    ) -> dict[str, pa.DataType]:
        """Given ones, and what Arrow finds in the first rows where something stands."""
        import pyarrow as pa

        types = {name: kind for name, kind in given.items() if not pa.types.is_timestamp(kind)}
        unknown = [name for name in self._wanted if name not in types]
        for number, (file, text) in enumerate(texts):
            if not unknown or number == _NUM_TEXTS:
                break
            try:
                found = self._parser.parse(text, self._named[file], {}, unknown)
            except pa.ArrowInvalid:
                # A row of another number of fields, which is told when it is asked for; unless all are such.
                names, bad = self._named[file], BadRows(lambda row: {"where": urls[0], "row": row + 1})
                found = careful_columns(self._parser, text, names, {}, unknown, bad, None)
                if number == 0 and len(bad) == found.num_rows:
                    raise bad[0] from None
            self._num_looked_at += found.num_rows
            types |= {
                field.name: as_torch_means(field.type, given.get(field.name))
                for field in found.schema
                if not pa.types.is_null(field.type)
            }
            unknown = [name for name in unknown if name not in types]
        empty = pa.null() if self._num_looked_at else pa.float32()  # a table without rows may have any types
        return types | {name: given.get(name, empty) for name in unknown}

    def _explain(self, name: str, value: str) -> str:
        looked_at = self._num_looked_at if name in self._inferred else None
        return wrong_value(name, value, self._types[name], looked_at)
