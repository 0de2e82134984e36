"""How CSV is written, and Arrow's parser with our settings for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.data.formats.csv_text import as_file
from shoal.data.formats.lines import Rules, rows_of
from shoal.data.formats.text_table import Head
from shoal.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

MISSING_VALUES = ("", "NA", "N/A", "#N/A", "null", "NULL", "None")
"""What stands for no value in a column that is not text; "nan" is a float."""


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
            if value is None:
                continue
            if not isinstance(value, str) or len(value) != 1 or ord(value) > 127 or value in "\r\n":
                raise ConfigError(f"{name}= takes one character, not a line end, got {value!r}")

    @property
    def rules(self) -> Rules:
        """What ends a row."""
        quote = -1 if self.quote is None else ord(self.quote)
        return Rules(delimiter=ord(self.delimiter), quote=quote, cr_ends=True)


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
            first = next((self._row(text, self.config.rules) for _, text in texts), None)
            if given is None:
                given = tuple(f"f{number}" for number in range(len(first or ())))
            elif first is not None and len(first) != len(given):
                raise ConfigError(
                    f"names= gives {len(given)} names, and the first row of {urls[0]} has {len(first)} fields: "
                    f"{', '.join(map(repr, first[:8]))}. Nothing was read; name each column."
                )
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
