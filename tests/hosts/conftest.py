"""Namespaced hosts for tests; where the machine cannot have them, these tests skip and say why."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from jobs import SCRIPT, HostsJob
from namespaces import Cluster, unsupported
from zygote import Zygote

_unsupported = functools.cache(unsupported)


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    """`start_cluster(3)` is a `Cluster` of three hosts that ends with the test."""
    if reason := _unsupported():
        pytest.skip(reason)
    numbers = itertools.count()
    with contextlib.ExitStack() as clusters:
        yield lambda num_hosts: clusters.enter_context(
            Cluster(num_hosts, tmp_path / f"cluster-{next(numbers)}")
        )


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    if reason := _unsupported():
        pytest.skip(reason)
    zygote = Zygote()
    yield zygote
    zygote.close()


def _shared_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir="/var/tmp", prefix="shoal-hosts-")


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that all hosts see, as on a shared file system. /tmp is each host's own."""
    with _shared_folder() as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def undisturbed(zygote: Zygote) -> Iterator[Callable[..., Path]]:
    """`undisturbed(3, "--strategy", "tp")`: folder with the results of `training.py` where nothing fails.

    On one host unless `hosts=` says otherwise; each is run once.
    """
    with _shared_folder() as name, contextlib.ExitStack() as stack:
        folder = Path(name)

        @functools.cache
        def undisturbed(workers: int, *options: str, hosts: int = 1) -> Path:
            here = folder / str(len(list(folder.iterdir())))
            here.mkdir()
            cluster = stack.enter_context(Cluster(hosts, here / "cluster"))
            job = HostsJob(cluster, zygote, here, SCRIPT)
            stack.callback(job.close)
            assert job.start(workers, str(here), "--loop", options=options).wait() == 0, job.story()
            return here

        yield undisturbed


@pytest.fixture
def start_job(
    start_cluster: Callable[[int], Cluster], zygote: Zygote, shared_folder: Path
) -> Iterator[Callable[..., HostsJob]]:
    """`start_job(script, workers=3, hosts=2)`: a job on a new cluster, started."""
    jobs: list[HostsJob] = []

    def start(
        script: Path,
        *args: str,
        workers: int,
        hosts: int,
        options: Sequence[str] = (),
        own_disks: bool = False,
        join_options: Sequence[str] = (),
    ) -> HostsJob:
        folder = shared_folder / str(len(jobs))
        folder.mkdir()
        job = HostsJob(start_cluster(hosts), zygote, folder, script, own_disks=own_disks)
        jobs.append(job)
        return job.start(workers, *args, options=options, join_options=join_options)

    yield start
    for job in jobs:
        job.close()
