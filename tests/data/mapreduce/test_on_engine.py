"""map_reduce on an engine, without one: tasks in any order and place, begun twice, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.config import job as jobs
from shoal.config.job import Job
from shoal.data.mapreduce import tasks
from shoal.engines import registry
from shoal.engines import tasks as engine_tasks
from shoal.errors import ConfigError, DataError, MapReduceFailed

DATA = shoal.Dataset.from_torch([f"w{i % 7} w{i % 31}" for i in range(900)])


def words(line: str) -> Any:
    return ((word, 1) for word in line.split())


def add(word: str, counts: Any) -> Any:
    return sum(counts)


def broken(line: str) -> Any:
    raise KeyError(line)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An engine that runs each task twice, the last one first, in another directory; the tasks that it ran."""
    ran: list[str] = []

    def run_tasks(function: Callable[[str], None], names: Sequence[str], **_: Any) -> None:
        with contextlib.chdir("/"):
            for name in reversed([*names, *names]):
                function(name)
                ran.append(name)

    monkeypatch.setattr(registry, "load", lambda name: None)
    monkeypatch.setattr(tasks, "run_tasks", run_tasks)
    monkeypatch.setattr(engine_tasks, "session", lambda on: contextlib.nullcontext())
    return ran


def content(aggregate: Any) -> list[bytes]:
    return [path.read_bytes() for path in sorted(aggregate.directory.glob("part-*"))]


def test_tasks_in_another_order_and_begun_twice_give_the_bytes_of_one_process(
    engine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = DATA.map_reduce(words, add, partitions=3, directory="here")
    assert not engine
    there = DATA.map_reduce(words, add, partitions=3, on="spark", directory="there")
    assert engine.count("map-00000") == engine.count("part-00002") == 2
    assert content(there) == content(here)
    assert {path.name for path in there.directory.iterdir()} == {
        path.name for path in here.directory.iterdir()
    }


def test_files_are_sent_as_their_description_and_not_with_the_rows_that_are_kept(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    data = shoal.Dataset.from_jsonl(tmp_path / "lines.jsonl")
    assert [sample["a"] for sample in data] == [1, 2]
    sent = copy.deepcopy(data)  # by the same methods as engines
    assert [sample["a"] for sample in sent] == [1, 2]


def test_an_error_of_a_function_leaves_no_files_and_says_that_it_was_the_last_attempt(
    engine: list[str], tmp_path: Path
) -> None:
    with pytest.raises(MapReduceFailed, match="raised by spark, at its last attempt") as raised:
        DATA.map_reduce(broken, add, on="spark", directory=tmp_path)
    call, arguments = raised.value.__reduce__()  # type: ignore[misc]
    assert str(call(*arguments)) == str(raised.value)  # it comes back from an engine as it was
    assert {path.name for path in tmp_path.glob("*/*")} == {"claims", "used"}


def test_a_machine_that_does_not_see_the_folder_is_named_before_it_computes(
    engine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_here = tasks.Tasks.within

    def within(self: tasks.Tasks, directory: Path) -> tasks.Tasks:
        found = seen_here(self, directory)
        found.directory = Path("/not/here")
        return found

    monkeypatch.setattr(tasks.Tasks, "within", within)
    with pytest.raises(DataError, match=rf"does not see the folder /not/here on {socket.gethostname()}"):
        DATA.map_reduce(broken, add, on="spark", directory=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"on": "mpi"}, "--on mpi gives hosts, and map-reduce runs tasks"),
        ({"on": "rai"}, "there is no engine 'rai'. Did you mean ray"),
        ({"on": "spark:spark://h:7077"}, "give directory=, a folder that all of them see"),
        ({"on": "spark:spark://h:7077", "directory": "there"}, "give key=, which names the data"),
    ],
)
def test_what_an_engine_cannot_be_asked_for_is_refused_before_anything_runs(
    engine: list[str],
    arguments: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "is_local", lambda on: False)
    unknown = contextlib.ExitStack()  # of which nobody can tell whether it is another's
    with pytest.raises(ConfigError, match=said):
        DATA.map_reduce(lambda line: [(str(unknown), 1)], add, **arguments)  # type: ignore[arg-type]
    assert not engine


def test_workers_of_a_job_are_not_sent_to_an_engine(
    engine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(name="a", run_dir=tmp_path, num_workers=3)
    monkeypatch.setattr(jobs, "share", lambda: job)
    with pytest.raises(ConfigError, match="the 3 workers of this job share them themselves"):
        DATA.map_reduce(words, add, on="ray")
