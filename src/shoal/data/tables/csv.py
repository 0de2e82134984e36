"""CSV files as one table, parsed by Arrow.

Types are found in the first rows, or said by `schema=`; numbers with a point
are float32, as torch means floats, and whole ones int64. A block that Arrow
refuses is read again as text, to name each bad row of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.core.data_errors import FileDamaged, SchemasDiffer
from shoal.core.errors import ConfigError
from shoal.data.files import Files, SharedFiles, Where, in_threads
from shoal.data.stream import Stream
from shoal.data.tables.arrow import BadRows, Fill, decoded
from shoal.data.tables.csv_text import as_file, careful_columns
from shoal.data.tables.lines import Rules, rows_of
from shoal.data.tables.remembering import identity_of
from shoal.data.tables.schema import (
    arrow_type,
    as_torch_means,
    check_names,
    chosen,
    columns_of,
    label_names,
    wrong_value,
)
from shoal.data.tables.source import OnError, TableSource, check_on_error
from shoal.data.tables.table import Rows
from shoal.data.tables.text_stream import UnpackedFiles, is_compressed, open_text_stream
from shoal.data.tables.text_table import (
    COMPRESSED,
    Head,
    LineAddress,
    Place,
    TextTable,
    first_texts,
    read_head,
)

if TYPE_CHECKING:
    import pyarrow as pa

ENDINGS = tuple(f"{kind}{packed}" for kind in (".csv", ".tsv") for packed in ("", *COMPRESSED))

MISSING_VALUES = ("", "NA", "N/A", "#N/A", "null", "NULL", "None")
"""What stands for no value in a column that is not text; "nan" is a float."""

_NUM_TEXTS = 4  # blocks looked at for the type of a column that is empty in those before


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvConfig:
    """How the text is written."""

    delimiter: str = ","
    """Between fields."""

    quote: str | None = '"'
    """Around fields that hold delimiters or line ends; twice within them for itself. None: there are none."""

    has_header: bool = True
    """The first row names the columns."""

    names: tuple[str, ...] | None = None
    """Of the columns, where the header does not say them or says them wrong."""

    def __post_init__(self) -> None:
        for name, value in (("delimiter", self.delimiter), ("quote", self.quote)):
            if value is not None and (len(value) != 1 or ord(value) > 127 or value in "\r\n"):
                raise ConfigError(f"{name}= takes one character, not a line end, got {value!r}")

    @property
    def rules(self) -> Rules:
        """What ends a row."""
        quote = -1 if self.quote is None else ord(self.quote)
        return Rules(delimiter=ord(self.delimiter), quote=quote, cr_ends=True)


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
    files = files or SharedFiles()
    infos = files.expand(path, ENDINGS)
    if delimiter is None:
        delimiter = "\t" if ".tsv" in infos[0].url.rpartition("/")[2].lower() else ","
    config = CsvConfig(
        delimiter=delimiter,
        quote=quote,
        has_header=names is None if header is None else header,
        names=None if names is None else tuple(names),
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
            on_error=check_on_error(on_error),
            max_skips=max_skips,
        )
    heads = in_threads(lambda info: read_head(files, info, rules, has_header=config.has_header), infos)
    named = parser.names_of_files(urls, heads, first_texts(files, infos, heads, rules))
    decoder = CsvDecoder(parser, named, urls, first_texts(files, infos, heads, rules), **asked)
    identity = identity_of(infos, **description, types=decoder.describe(), fill=fill, names=named)
    table = TextTable(files, infos, heads, rules, decoder, identity=identity, description=description)
    return TableSource(table, label=label, cache=cache, on_error=on_error, max_skips=max_skips)


class CsvParser:
    """Arrow's parser with our settings."""

    def __init__(self, config: CsvConfig) -> None:
        self.config = config

    def names_of_files(
        self, urls: Sequence[str], heads: Sequence[Head], texts: Iterable[tuple[int, bytes]]
    ) -> list[list[str]]:
        """The columns of each file, in the order in which it has them."""
        given = self.config.names
        if not self.config.has_header:
            if given is None:
                first = next((self._row(text, self.config.rules) for _, text in texts), [])
                given = tuple(f"f{number}" for number in range(len(first)))
            return [list(given)] * len(urls)
        named = [[name.strip() for name in self._row(head.text, self.config.rules)] for head in heads]
        if given is not None:
            for url, names in zip(urls, named, strict=True):
                if len(names) != len(given):
                    raise ConfigError(
                        f"names= gives {len(given)} names, and the header of {url} has {len(names)}: {', '.join(names)}"
                    )
            return [list(given)] * len(urls)
        for url, names in zip(urls, named, strict=True):
            doubled = sorted({name for name in names if names.count(name) > 1})
            if doubled:
                raise ConfigError(
                    f"the header of {url} names {', '.join(repr(name) for name in doubled)} more than once, and a sample is "
                    "a dict. Nothing was read; give all columns names of their own with names=[...]."
                )
        return named

    def parse(
        self, text: bytes, names: Sequence[str], types: Mapping[str, pa.DataType], wanted: Sequence[str]
    ) -> pa.Table:
        """The columns of a text without a header; those without a type as Arrow infers them."""
        import pyarrow.csv

        return pyarrow.csv.read_csv(
            as_file(text),
            read_options=pyarrow.csv.ReadOptions(column_names=list(names)),
            parse_options=self.parse_options(text),
            convert_options=self.convert_options(types, wanted),
        )

    def parse_options(self, text: bytes, invalid_row_handler: Any = None) -> Any:
        """How fields are found."""
        import pyarrow.csv

        quote = self.config.quote
        return pyarrow.csv.ParseOptions(
            delimiter=self.config.delimiter,
            quote_char=quote or False,
            newlines_in_values=quote is not None and quote.encode() in text,
            invalid_row_handler=invalid_row_handler,
        )

    def convert_options(self, types: Mapping[str, pa.DataType], wanted: Sequence[str]) -> Any:
        """What fields are taken for."""
        import pyarrow.csv

        return pyarrow.csv.ConvertOptions(
            include_columns=list(wanted),
            column_types=dict(types),
            null_values=list(MISSING_VALUES),
            strings_can_be_null=False,
        )

    def _row(self, text: bytes, rules: Rules) -> list[str]:
        """The fields of the first row."""
        import pyarrow.csv

        first = rows_of(text, rules)[0]
        text = text[first.begin : first.end]
        table = pyarrow.csv.read_csv(as_file(text), parse_options=self.parse_options(text))
        return list(table.column_names)


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
            name: arrow_type(name, said) for name, said in (schema or {}).items() if name in self._wanted
        }
        self._num_looked_at, self._inferred = 0, set(self._wanted) - given.keys()
        self._types = self._find_types(given, texts)
        import pyarrow as pa

        fields = pa.schema([(name, self._types[name]) for name in self._wanted])
        self.columns = columns_of(fields, urls[0])
        lists = [
            column.name
            for column in self.columns
            if column.shape or (column.is_ragged and column.kind == "number")
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
        self, given: Mapping[str, pa.DataType], texts: Iterable[tuple[int, bytes]]
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
                # A row of another number of fields, which is told when it is asked for.
                names = self._named[file]
                found = careful_columns(self._parser, text, names, {}, unknown, BadRows(lambda _: {}), None)
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
