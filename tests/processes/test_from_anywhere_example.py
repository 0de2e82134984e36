"""The from_anywhere example: one model from every kind of source, the same weights to the bit, at any number of workers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from examples_expected import FOLDER
from launched import Launched

from postgres_server import PASSWORD, PostgresServer, Unavailable
from whole_matrix import matrix_only

SCRIPT = FOLDER / "from_anywhere.py"
SOURCES = ["arrays", "csv", "parquet", "tfrecord", "sqlite", "postgres"]


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    try:
        server = PostgresServer.start()
    except Unavailable as why:
        pytest.skip(str(why))
    yield server
    server.remove()


@pytest.fixture(autouse=True)
def _one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def check(output: str, sources: list[str]) -> tuple[str, float]:
    """Every source was trained from, and all gave one hash: that hash, and the loss."""
    found = re.findall(r"^(\w+) +loss ([\d.]+)  weights (\w+)$", output, re.MULTILINE)
    assert [source for source, _, _ in found] == sources, output
    assert len({weights for _, _, weights in found}) == 1, output
    assert "all weights are equal" in output
    return found[0][2], float(found[0][1])


@pytest.mark.parametrize("workers", [3, *matrix_only(1, 2)])
def test_every_source_gives_the_same_weights(
    postgres: PostgresServer, launch_script: Callable[..., Launched], workers: int
) -> None:
    args = ("--samples", "1500", "--postgres", postgres.url)
    launched = launch_script(SCRIPT, workers=workers, args=args, quiet=True)
    assert launched.exit_code == 0, launched.error
    assert "Warning" not in launched.stderr
    _, loss = check(launched.stdout, SOURCES)
    assert loss < 0.69
    for path in launched.run_dir.rglob("*"):
        if path.is_file() and path.name != "config.json":  # which holds the user's own command line
            assert PASSWORD.encode() not in path.read_bytes(), path
            assert PASSWORD.replace(" ", "%20").encode() not in path.read_bytes(), path


def test_it_starts_a_server_of_its_own_under_plain_python(tmp_path: Path, postgres: PostgresServer) -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--samples", "1000", "--source", "arrays", "postgres"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    check(ran.stdout, ["arrays", "postgres"])
