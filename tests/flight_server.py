"""An Arrow Flight server for tests: a process with one Flight, whose endpoints are files of a folder.

    python flight_server.py FOLDER PORT_FILE

The Flight `clicks` has an endpoint for each `*.arrow` in the folder, in the order of
their names: a file that is added is an endpoint more. Reads are counted in `FOLDER/reads`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from waiting import wait_until


class FolderServer(flight.FlightServerBase):
    def __init__(self, folder: Path, location: str) -> None:
        super().__init__(location)
        self._folder = folder

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        if descriptor.path != [b"clicks"]:
            raise flight.FlightServerError(f"there is no Flight {descriptor.path}")
        files = sorted(self._folder.glob("*.arrow"))
        schema = pa.ipc.open_file(files[0]).schema
        endpoints = [flight.FlightEndpoint(file.name.encode(), []) for file in files]
        return flight.FlightInfo(schema, descriptor, endpoints, -1, -1)

    def do_get(self, context: Any, ticket: Any) -> Any:
        name = ticket.ticket.decode()
        with (self._folder / "reads").open("a") as reads:
            reads.write(f"{name}\n")
        return flight.RecordBatchStream(pa.ipc.open_file(self._folder / name).read_all())


def add_endpoint(folder: Path, number: int, rows: Sequence[int]) -> None:
    """Rows (x, y = 2 x) as one more endpoint."""
    table = pa.table(
        {"x": pa.array(rows, pa.int64()), "y": pa.array([2 * row for row in rows], pa.float32())}
    )
    unfinished = folder / f"{number:04}.part"
    with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    unfinished.rename(folder / f"{number:04}.arrow")


class FlightProcess:
    """The server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, port = folder, folder / "port"
        self.process = subprocess.Popen([sys.executable, __file__, str(folder), str(port)])
        wait_until(lambda: port.exists() or self.process.poll() is not None, 60.0)
        self.url = f"grpc://127.0.0.1:{port.read_text()}/clicks"

    def reads(self) -> list[str]:
        return (self.folder / "reads").read_text().split()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


if __name__ == "__main__":
    server = FolderServer(Path(sys.argv[1]), "grpc://127.0.0.1:0")
    written = Path(sys.argv[2] + ".part")
    written.write_text(str(server.port))
    written.rename(sys.argv[2])
    server.serve()
