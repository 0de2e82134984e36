"""A real PostgreSQL server for tests: made in a directory of its own, on a free port of the loopback, ended with the tests.

    server = PostgresServer.start()     raises Unavailable with the reason where that is impossible
    server.url                          with user and password; server.url_as("other password")
    server.run("CREATE TABLE ...")      as the database's owner, committed
    server.stop(), server.go_on()       a shutdown in the middle, and the same data again

initdb refuses to run as root: then the server is another user's.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from waiting import wait_until

USER, PASSWORD = "shoal", "open sesame"
_DEATH = 1  # PR_SET_PDEATHSIG: the server ends with the tests, however they end


class Unavailable(Exception):
    """There can be no server here, and why."""


def _binary(name: str) -> str:
    found = shutil.which(name) or next(
        (str(path) for path in sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)), None
    )
    if found is None:
        raise Unavailable(f"PostgreSQL is not installed here: there is no {name}")
    return found


class PostgresServer:
    """One server and its data."""

    def __init__(self, folder: Path, port: int, owner: pwd.struct_passwd | None) -> None:
        self._folder, self._port, self._owner = folder, port, owner
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls) -> PostgresServer:
        """Make a cluster, start it, and wait until it answers."""
        initdb, _ = _binary("initdb"), _binary("postgres")
        try:
            import adbc_driver_postgresql.dbapi  # noqa: F401
        except ImportError:
            raise Unavailable("ADBC's driver for PostgreSQL is not installed here") from None
        owner = _another_user() if os.getuid() == 0 else None
        folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # short: a socket's path has 107 characters
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            server = cls(folder, free.getsockname()[1], owner)
        try:
            (folder / "password").write_text(PASSWORD)
            if owner is not None:
                for path in (folder, folder / "password"):
                    os.chown(path, owner.pw_uid, owner.pw_gid)
            where = ["-D", f"{folder}/data", "-U", USER, f"--pwfile={folder}/password"]
            how = ["--auth=scram-sha-256", "--no-sync", "--locale=C", "--encoding=UTF8"]
            made = server._as_owner([initdb, *where, *how])
            if made.wait(60):
                raise Unavailable(f"initdb failed: {(folder / 'log').read_text()[-500:]}")
            server.go_on()
        except BaseException:
            server.remove()
            raise
        return server

    @property
    def url(self) -> str:
        return self.url_as(PASSWORD)

    def url_as(self, password: str, *, user: str = USER, database: str = "postgres") -> str:
        return f"postgresql://{user}:{password.replace(' ', '%20')}@127.0.0.1:{self._port}/{database}"

    @property
    def place(self) -> str:
        """What messages call it."""
        return f"postgresql://{USER}@127.0.0.1:{self._port}/postgres"

    def go_on(self) -> None:
        """Start it, with the data that is there."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self._port,
            "unix_socket_directories": self._folder,
            "fsync": "off",
            "shared_buffers": "16MB",
            "max_connections": 20,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._process = self._as_owner([_binary("postgres"), "-D", f"{self._folder}/data", *options])
        if not wait_until(self._answers):
            raise Unavailable(f"the server does not answer: {(self._folder / 'log').read_text()[-500:]}")

    def stop(self) -> None:
        """A fast shutdown: who is connected is disconnected."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(60)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, *statements: str) -> None:
        """Each in a transaction of its own."""
        from adbc_driver_postgresql import dbapi

        with dbapi.connect(self.url, autocommit=True) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def ingest(self, table: str, columns: Any) -> None:
        """Make a table of Arrow's columns."""
        from adbc_driver_postgresql import dbapi

        with dbapi.connect(self.url) as connection, connection.cursor() as cursor:
            cursor.adbc_ingest(table, columns, mode="replace")
            connection.commit()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()[-500:]
        from adbc_driver_postgresql import dbapi

        try:
            dbapi.connect(self.url).close()
        except dbapi.Error:
            return False
        return True

    def _as_owner(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        libc = ctypes.CDLL(None)
        owner: dict[str, Any] = {}
        if self._owner is not None:
            owner = {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []}
        with open(self._folder / "log", "ab") as log:
            return subprocess.Popen(
                command,
                cwd="/",
                env={"PATH": os.defpath, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: libc.prctl(_DEATH, signal.SIGINT, 0, 0, 0),
                **owner,
            )


def _another_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise Unavailable("initdb does not run as root, and there is no user 'postgres' or 'nobody'")
