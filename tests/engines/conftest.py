"""Engines for tests: real ones, each started once. `make test` leaves them out; `make test-engines` installs and runs them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_jobs import IN_ROUNDS, ROUNDS, TRAINING, EngineJob

from shoal.engines import registry
from shoal.engines.spark_session import JAVA_OPTIONS
from shoal.errors import ConfigError

SLOWEST = (
    "test_spark.py",
    "test_ray.py",
    "test_object_stores.py",
    "test_public_models.py",
    "test_keras.py",
    "test_slurm.py",
)
"""Begun first: a file has one process, and the last one would run alone."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """More time than other tests have: each starts several interpreters on top of its engine."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(400))
    if os.environ.get("SHOAL_TEST_ENGINES"):
        order = {name: number for number, name in enumerate(SLOWEST)}
        items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session", autouse=True)
def quick_java() -> Iterator[None]:
    """Servers and drivers in Java that run for seconds: without the compiler for long runs, which takes twice as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JDK_JAVA_OPTIONS", JAVA_OPTIONS)
        yield


def _skip_unless_asked_for() -> None:
    if not os.environ.get("SHOAL_TEST_ENGINES"):
        pytest.skip("engines are started by `make test-engines` alone")


@pytest.fixture(scope="session")
def installed() -> Callable[[str], None]:
    """`installed("ray")` skips the test, with the reason, where the engine is not there."""

    def installed(name: str) -> None:
        _skip_unless_asked_for()
        try:
            registry.load(name)
        except ConfigError as error:
            pytest.skip(str(error))

    return installed


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., EngineJob]]:
    """`start_job("-n", "3", "--on", "mpi", script, *args)`: a job, ended with the test."""
    jobs: list[EngineJob] = []

    def start(*args: str, env: dict[str, str] | None = None) -> EngineJob:
        jobs.append(EngineJob(tmp_path / str(len(jobs)), args, env or {}))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """`shared("name", make)`: folder that `make` filled, once for all test processes of a run."""

    def shared(name: str, make: Callable[[Path], None]) -> Path:
        root = tmp_path_factory.getbasetemp()
        folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / f"shared-{name}"
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                unfinished = tmp_path_factory.mktemp(name)
                make(unfinished)
                unfinished.rename(folder)
        return folder

    return shared


@pytest.fixture(scope="session")
def undisturbed(shared: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """Results of `training.py` with 3 workers on this machine, without an engine."""
    _skip_unless_asked_for()
    return shared(
        "undisturbed",
        lambda out: _run(out / "job", "-n", "3", "--exchange", "native", str(TRAINING), str(out)),
    )


@pytest.fixture(scope="session")
def local_rounds(shared: Callable[[str, Callable[[Path], None]], Path]) -> dict[str, Any]:
    """Result of `rounds.py` under mapreduce on this machine, without an engine."""
    _skip_unless_asked_for()
    out = shared("rounds", lambda out: _run(out / "job", *IN_ROUNDS, str(ROUNDS), str(out / "result")))
    found: dict[str, Any] = torch.load(out / "result")
    return found


def _run(folder: Path, *args: str) -> None:
    job = EngineJob(folder, args, {})
    assert job.wait(360) == 0, job.output()
    job.close()
