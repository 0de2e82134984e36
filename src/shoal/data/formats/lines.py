"""Where rows end in text, found by one scan, so that blocks of lines can be read apart.

Quotes are respected: a line end within a quoted field ends no row. Lines
without anything in them are no rows. The scan runs at the speed of memory
where there are no quotes, and of one compiled loop where there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.runtime.kernel_cache import INT, kernel, matrix, vector

BLOCK_BYTES = 4 << 20
"""Of text; a block is this long and ends with its row."""

_CHUNK_BYTES = 4 << 20
_LF, _CR = 10, 13

# Places of the kernel's state:
_MODE, _CONTENT, _AFTER_CR, _ROWS, _BEGIN, _LINES, _FIRST_LINE, _QUOTE_LINE, _QUOTED_ENDS = range(9)
_FIELD_START, _IN_FIELD, _IN_QUOTES, _AFTER_QUOTE = range(4)


class Stretch(NamedTuple):
    """Bytes of a file that hold whole rows."""

    begin: int
    end: int
    num_rows: int
    first_line: int
    """The number, from 1, of the line at `begin`, as editors count."""


class Rules(NamedTuple):
    """What ends a row."""

    delimiter: int = -1
    quote: int = -1
    """-1 where nothing is quoted."""

    cr_ends: bool = False
    """A lone carriage return ends a line too."""

    blanks_are_empty: bool = False
    """A line of nothing but spaces is no row."""


class Scanner:
    """Finds rows in text that comes in chunks."""

    def __init__(
        self, rules: Rules, *, begin: int = 0, first_line: int = 1, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self._rules, self._block_bytes = rules, block_bytes
        self._state = np.zeros(9, dtype=np.int64)
        self._state[[_BEGIN, _LINES, _FIRST_LINE]] = begin, first_line - 1, first_line
        self._at = begin

    @property
    def has_quoted_line_ends(self) -> bool:
        """Whether a line end was seen that ends no row."""
        return bool(self._state[_QUOTED_ENDS])

    def feed(self, chunk: bytes) -> list[Stretch]:
        """The stretches that end in the next chunk."""
        cuts = None if not chunk else self._feed_plain(chunk)
        cuts = self._feed_any(chunk).tolist() if cuts is None else cuts
        self._at += len(chunk)
        return [Stretch(*cut) for cut in cuts]

    def _feed_any(self, chunk: bytes) -> NDArray[np.int64]:
        """A line of (begin, end, rows, first line) for each stretch that ends here."""
        found = np.empty((len(chunk) // max(self._block_bytes, 1) + 1, 4), dtype=np.int64)
        data, rules = np.frombuffer(chunk, dtype=np.uint8), self._rules
        num_found = _scan(
            data,
            self._state,
            self._at,
            rules.delimiter,
            rules.quote,
            int(rules.cr_ends),
            int(rules.blanks_are_empty),
            self._block_bytes,
            found,
        )
        return found[:num_found]

    def finish(self) -> list[Stretch]:
        """The last stretch, whose last line may lack its end; raises where a quote is still open."""
        state = self._state
        if state[_MODE] == _IN_QUOTES:
            raise DataError(f"the quote that opens in line {state[_QUOTE_LINE]:,} is never closed")
        num_rows = int(state[_ROWS] + (1 if state[_CONTENT] else 0))
        if not num_rows:
            return []
        return [Stretch(int(state[_BEGIN]), self._at, num_rows, int(state[_FIRST_LINE]))]

    def _feed_plain(self, chunk: bytes) -> list[list[int]] | None:
        """A chunk without quotes, empty lines or lone carriage returns: counting line ends is enough. None for others."""
        state, rules = self._state, self._rules
        if state[_MODE] > _IN_FIELD or state[_AFTER_CR] or self._block_bytes < 1024:
            return None
        data = np.frombuffer(chunk, dtype=np.uint8)
        if (
            chunk[0] in b"\n\r \t"
            or chunk[-1] == _CR
            or _is_odd(data, rules.quote, int(rules.blanks_are_empty))
        ):
            return None
        cuts, at = [], 0
        while True:
            # The first line end at or behind the place where the block is long enough.
            wanted = int(state[_BEGIN]) + self._block_bytes - self._at
            end = chunk.find(b"\n", max(wanted - 1, at)) + 1
            if not end:
                break
            rows = _num_line_ends(data[at:end])
            state[_ROWS] += rows
            state[_LINES] += rows
            cuts.append([int(state[_BEGIN]), self._at + end, int(state[_ROWS]), int(state[_FIRST_LINE])])
            state[[_BEGIN, _ROWS, _FIRST_LINE]] = self._at + end, 0, state[_LINES] + 1
            state[_CONTENT] = 0
            at = end
        rows = _num_line_ends(data[at:])
        state[_ROWS] += rows
        state[_LINES] += rows
        last = chunk.rfind(b"\n") + 1
        rest = chunk[last:]
        if rest:
            has_content = not rules.blanks_are_empty or bool(rest.strip())
            state[_CONTENT] = int(has_content or (not last and bool(state[_CONTENT])))
            state[_MODE] = _FIELD_START if rest[-1] == rules.delimiter else _IN_FIELD
        else:
            state[_CONTENT], state[_MODE] = 0, _FIELD_START
        return cuts


def stretches(chunks: Iterable[bytes], scanner: Scanner) -> Iterator[Stretch]:
    """All stretches of a text."""
    for chunk in chunks:
        yield from scanner.feed(chunk)
    yield from scanner.finish()


def rows_of(text: bytes, rules: Rules) -> list[Stretch]:
    """Every row of a text as a stretch of its own."""
    scanner = Scanner(rules, block_bytes=1)
    return [*scanner.feed(text), *scanner.finish()]


def lines_of_rows(text: bytes, rules: Rules) -> NDArray[np.int64]:
    """The line, from 1, in which each row of a text begins."""
    scanner = Scanner(rules, block_bytes=1)
    found = scanner._feed_any(text)[:, 3]
    return np.append(found, [part.first_line for part in scanner.finish()])


_Array = NDArray[Any]


@kernel((vector(types.uint8),))
def _num_line_ends(data: _Array) -> Any:
    found: Any = 0
    for i in range(len(data)):
        found += np.int64(data[i] == 10)
    return found


@kernel((vector(types.uint8), INT, INT))
def _is_odd(data: _Array, quote: int, blanks_are_empty: int) -> bool:
    """Whether there is a quote, an empty line, or a carriage return without a line feed. Without branches: it is fast."""
    found: Any = 0
    for i in range(len(data) - 1):
        byte, after = np.int64(data[i]), np.int64(data[i + 1])
        is_end = byte == 10
        found |= np.int64(is_end & ((after == 10) | (after == 13)))
        found |= np.int64((byte == 13) & (after != 10))
        found |= np.int64(byte == quote)
        found |= np.int64(is_end & ((after == 32) | (after == 9))) & blanks_are_empty
    return found > 0 or (len(data) > 0 and np.int64(data[-1]) == quote)


@kernel(
    (
        vector(types.uint8),
        vector(types.int64, written=True),
        *[INT] * 6,
        matrix(types.int64, written=True),
    )
)
def _scan(
    data: _Array,
    state: _Array,
    at: int,
    delimiter: int,
    quote: int,
    cr_ends: int,
    blanks_are_empty: int,
    block_bytes: int,
    cuts: _Array,
) -> int:
    """Fill in where stretches begin and end, with their rows and first lines; return how many."""
    mode, content, after_cr = state[0], state[1], state[2]
    rows, begin, lines, first_line = state[3], state[4], state[5], state[6]
    num_cuts = 0
    for i in range(len(data)):
        byte = np.int64(data[i])
        end: Any = np.int64(-1)
        is_used = False
        if after_cr:
            # The line ended with the carriage return; a line feed right behind belongs to it.
            after_cr = 0
            end = i
            if byte == 10:
                end, is_used = i + 1, True
        elif mode == 2:
            if byte == quote:
                mode = 3
            elif byte == 10:
                lines += 1
                state[8] = 1
            elif byte == 13:
                state[8] = 1
            continue
        elif mode == 3:
            if byte == quote:
                mode = 2
                continue
            mode = 1
        if not is_used and end < 0 and byte == 10:
            end, is_used = i + 1, True
        if end >= 0:
            lines += 1
            rows += content
            content = 0
            mode = 0
            if rows > 0 and at + end - begin >= block_bytes:
                cuts[num_cuts, 0] = begin
                cuts[num_cuts, 1] = at + end
                cuts[num_cuts, 2] = rows
                cuts[num_cuts, 3] = first_line
                num_cuts += 1
                rows = np.int64(0)
            if rows == 0:  # a stretch ended, or none has begun: empty lines belong to no row
                begin, first_line = at + end, lines + 1
        if is_used:
            continue
        if cr_ends and byte == 13:
            after_cr = 1
        elif byte == quote and mode == 0:
            mode = 2
            content = 1
            state[7] = lines + 1
        elif byte == delimiter:
            mode = 0
            content = 1
        else:
            mode = 1
            if not (blanks_are_empty and (byte == 32 or byte == 9 or byte == 13)):
                content = 1
    state[0], state[1], state[2] = mode, content, after_cr
    state[3], state[4], state[5], state[6] = rows, begin, lines, first_line
    return num_cuts
