"""Requests to a Flight server, from this process or from an interpreter of its own.

gRPC hangs in a fork of a process that has used it, and reader processes are forks: these start this
file, which imports nothing of shoal, for each request.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

_TRY_AGAIN = 75

_START_S = 30.0  # for an interpreter, on a busy machine

_clients: list[tuple[str, dict[str, Any], Any]] = []  # options need not have a hash


def ask(what: str, address: str, of: bytes, options: Mapping[str, Any], timeout_s: float) -> Any:
    """FlightInfo or table, within timeout_s. ConnectionError where trying again may help, OSError where not."""
    import pyarrow.flight as flight

    try:
        client = _connected(address, dict(options))
        call = flight.FlightCallOptions(timeout=timeout_s)
        if what == "info":
            return client.get_flight_info(flight.FlightDescriptor.deserialize(of), call)
        return client.do_get(flight.Ticket.deserialize(of), call).read_all()
    except (flight.FlightUnavailableError, flight.FlightTimedOutError) as error:
        _clients[:] = [each for each in _clients if each[:2] != (address, options)]
        raise ConnectionError(_short(error)) from None
    except (flight.FlightError, pa.ArrowException, TypeError, ValueError) as error:
        raise OSError(_short(error)) from None


def ask_apart(what: str, address: str, of: bytes, options: Mapping[str, Any], timeout_s: float) -> bytes:
    """The same as bytes, from an interpreter that is no fork."""
    try:
        asked = json.dumps([what, address, of.hex(), dict(options), timeout_s]).encode()
    except TypeError as error:
        raise OSError(f"options= of a reader process must be fit for JSON: {error}") from None
    command, limit_s = [sys.executable, "-P", __file__], timeout_s + _START_S
    try:
        done = subprocess.run(command, input=asked, capture_output=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise ConnectionError(f"no answer came within {limit_s:.0f} s") from None
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    raise (ConnectionError if done.returncode == _TRY_AGAIN else OSError)(said)


def _connected(address: str, options: dict[str, Any]) -> Any:
    import pyarrow.flight as flight

    for place, of, client in _clients:
        if (place, of) == (address, options):
            return client
    client = flight.connect(address, **options)
    _clients.append((address, options, client))
    return client


def _short(error: BaseException) -> str:
    """The first sentence: gRPC adds addresses of its own code."""
    return str(error).partition(". gRPC client debug")[0].partition("\n")[0]


def _answer() -> int:
    try:
        what, address, of, options, timeout_s = json.load(sys.stdin)
        found = ask(what, address, bytes.fromhex(of), options, timeout_s)
    except OSError as error:
        print(error, file=sys.stderr)
        return _TRY_AGAIN if isinstance(error, ConnectionError) else 1
    if isinstance(found, pa.Table):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, found.schema) as writer:
            writer.write_table(found)
        sys.stdout.buffer.write(sink.getvalue())
    else:
        sys.stdout.buffer.write(found.serialize())
    return 0


if __name__ == "__main__":
    sys.exit(_answer())
