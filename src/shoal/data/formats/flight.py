"""Arrow Flights as logs: an endpoint is a partition, a row of it an offset.

A ticket can only be read from its beginning, so an endpoint is read in one piece. A server adds
endpoints as data arrive, and never changes one that it has named.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa

from shoal.data.formats import flight_client
from shoal.data.formats.arrow import Fill, columns_of, decoded
from shoal.data.formats.stream import RecordSegment, Wish
from shoal.data.formats.table import Column, DecodedRows
from shoal.data.formats.table_source import check_names, chosen
from shoal.data.order import ENDLESS
from shoal.errors import ConfigError, StreamRewound, StreamUnreachable

_LEAST_S = 2.0  # for a connection and an answer, however short timeout_s is
_MOST_S = 1e6  # timeout_s may be infinite, and a deadline may not
_SAME_SERVER = b"arrow-flight-reuse-connection:"


class FlightLog:
    """A Flight."""

    segment_rows = ENDLESS  # a ticket can only be read from its beginning

    def __init__(self, url: str, wish: Wish) -> None:
        try:
            import pyarrow.flight as flight
        except ImportError as error:
            raise ConfigError(f"this pyarrow was built without Flight ({error}). Nothing was read.") from None
        parts = urlsplit(url)
        command = parse_qs(parts.query).get("command")
        path = [unquote(part) for part in parts.path.split("/") if part]
        if not parts.hostname or not parts.port or bool(command) == bool(path):
            raise ConfigError(
                f"an Arrow Flight is 'grpc://host:8815/path' or 'grpc://host:8815/?command=...' (grpc+tls:// with TLS), got {url!r}. "
                "Nothing was read."
            )
        self._flight: Any = flight
        scheme = "grpc" if parts.scheme == "flight" else parts.scheme
        self._address = f"{scheme}://{parts.netloc}"
        asked = f"?command={command[0]}" if command else ""
        self.place, self._wish, self.row_bytes = f"{self._address}{parts.path}{asked}", wish, 64
        make = flight.FlightDescriptor
        self._descriptor = make.for_command(command[0]) if command else make.for_path(*path)
        self._owner = os.getpid()
        self._endpoints: list[Any] = []
        self._counts: list[int] = []

    def begins(self, start: str | Mapping[int, int]) -> list[int]:
        ends = self.ends([])
        if isinstance(start, str):
            return [0] * len(ends) if start == "earliest" else ends
        begins = [start.get(number, 0) for number in range(len(ends))]
        if any(begin not in (0, end) for begin, end in zip(begins, ends, strict=True)) or len(ends) <= max(
            start, default=0
        ):
            raise ConfigError(
                f"start= of a Flight gives for an endpoint 0 or its number of rows, and {self.place} has endpoints of {ends} rows; "
                f"got {dict(start)}. Nothing was read."
            )
        return begins

    def ends(self, known: Sequence[int]) -> list[int]:
        # A planned endpoint was planned completely; 0 is one that was not.
        self._counts += itertools.takewhile(bool, known[len(self._counts) :])
        info = self._info()
        tickets = [endpoint.ticket.ticket for endpoint in info.endpoints]
        for number, endpoint in enumerate(self._endpoints):
            if number >= len(tickets) or tickets[number] != endpoint.ticket.ticket:
                rows = self._counts[number] if number < len(self._counts) else 0
                raise StreamRewound(place=self.place, partition=number, offset=rows, first=None, end=0)
        self._endpoints = list(info.endpoints)
        self._schema = info.schema
        for number in range(len(self._counts), len(self._endpoints)):
            # A single endpoint is the whole Flight; of several each is read once to count its rows.
            said = info.total_records if len(self._endpoints) == 1 else -1
            self._counts.append(said if said >= 0 else self._read(number, None).num_rows)
        return list(self._counts)

    def open(self, first: Callable[[], RecordSegment], types: str | None) -> tuple[Column, ...]:
        if not self._endpoints:
            self._located(first().partition)
        names = chosen(self._schema.names, self._wish.columns, self.place, needed=self._wish.label)
        check_names("fill=", self._wish.fill, names, self.place)
        if self._wish.schema:
            raise ConfigError("schema= is for JSON: a Flight says its types itself. Nothing was read.")
        self._columns = columns_of(self._schema, self.place, names)
        self._fill = Fill(self._wish.fill, self._columns)
        return self._columns

    def types(self) -> str:
        """None: the server gives the types on request."""
        return ""

    def read(self, segment: RecordSegment) -> DecodedRows:
        self._located(segment.partition)
        number, begin, end = segment
        table = self._read(number, [column.name for column in self._columns])
        if table.num_rows < end:
            raise StreamRewound(
                place=self.place, partition=number, offset=end, first=None, end=table.num_rows
            )

        def address(row: int) -> dict[str, Any]:
            return {"where": f"{self.place}, endpoint {number}", "row": begin + row + 1}

        return decoded(table.slice(begin, end - begin), self._columns, self._fill, address)

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {"format": "flight", "stream": self.place}
        return {**described, "fill": self._wish.fill} if self._wish.fill else described

    def _located(self, number: int) -> None:
        """A worker that did not plan itself asks for the endpoints' locations."""
        if number >= len(self._endpoints):
            info = self._info()
            self._endpoints, self._schema = list(info.endpoints), info.schema
        if number >= len(self._endpoints):
            raise StreamRewound(place=self.place, partition=number, offset=0, first=None, end=0)

    def _read(self, number: int, names: list[str] | None) -> pa.Table:
        endpoint = self._endpoints[number]
        uris = [location.uri for location in endpoint.locations if not location.uri.startswith(_SAME_SERVER)]
        address = uris[0].decode() if uris else self._address

        data = self._asked("get", address, endpoint.ticket.serialize())
        table: pa.Table = pa.ipc.open_stream(data).read_all() if isinstance(data, bytes) else data
        return table if names is None else table.select(names)

    def _info(self) -> Any:
        data = self._asked("info", self._address, self._descriptor.serialize())
        return self._flight.FlightInfo.deserialize(data) if isinstance(data, bytes) else data

    def _asked(self, what: str, address: str, of: bytes) -> Any:
        """A server's answer, retried until the time is over if it cannot be reached."""
        since, waited_s = time.monotonic(), 0.0
        ask = flight_client.ask if self._owner == os.getpid() else flight_client.ask_apart
        while True:
            try:
                left_s = min(max(self._wish.timeout_s - waited_s, _LEAST_S), _MOST_S)
                return ask(what, address, of, self._wish.options, left_s)
            except ConnectionError as error:
                waited_s = time.monotonic() - since
                if waited_s > min(self._wish.timeout_s, 30.0):
                    raise StreamUnreachable(place=self.place, reason=str(error), waited_s=waited_s) from None
            except OSError as error:
                waited_s = time.monotonic() - since
                raise StreamUnreachable(place=self.place, reason=str(error), waited_s=waited_s) from None
            time.sleep(0.1)
