"""One PostgreSQL server for all tests of tables, started when the first of them wants it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from postgres_server import PostgresServer, Unavailable


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    try:
        server = PostgresServer.start()
    except Unavailable as why:
        pytest.skip(str(why))
    yield server
    server.remove()
