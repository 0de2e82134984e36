"""Copies of a run directory over real sockets: whole or not at all, and never of another continuation of the run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.cluster.coordinator import journal, journal_reader
from shoal.cluster.hosts import joining, run_copy
from shoal.cluster.hosts.authority import Authority
from shoal.cluster.hosts.files import FileService, HeadFiles
from shoal.cluster.hosts.joining import Admission, Door, JobFacts
from shoal.cluster.hosts.run_copy import RunCopy
from shoal.cluster.launch.run_directory import RunDirectory
from shoal.errors import HostNotAdmitted, RunDirectoryError
from shoal.runtime.transport import tls

KEY = "a-key-of-more-than-twenty-characters"


class Head:
    """A run directory, and a door on loopback that serves it."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "head" / "job"
        (self.run_dir / "checkpoints").mkdir(parents=True)
        self.launches: list[float] = []
        self.begin_launch()
        (self.run_dir / "config.json").write_text('{"seed": 1}')
        (self.run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
        script = folder / "train.py"
        script.write_text("")
        listener = tls.listen("127.0.0.1")
        self.port = listener.getsockname()[1]
        facts = JobFacts(
            job="job",
            script=str(script),
            script_hash=joining.file_hash(str(script)),
            run_dir=str(self.run_dir),
            run_dir_mark="nowhere",
            is_shipped=False,
            launches=tuple(self.launches),
        )
        files = FileService(self.run_dir, None)
        self.door = Door(listener, Authority("job"), KEY, facts, (1,), files, {})

    @property
    def address(self) -> str:
        return f"tls://127.0.0.1:{self.port}"

    def begin_launch(self) -> None:
        journal.begin_launch(self.run_dir / journal.FILE_NAME, num_workers=2)
        self.launches = journal_reader.launch_times(self.run_dir)

    def save(self, step: int) -> Path:
        return save(self.run_dir, step)

    def join(self, base: Path) -> Admission:
        return joining.join(f"shoal://127.0.0.1:{self.port}", KEY, timeout_s=10.0, run_dir=base)


def save(run_dir: Path, step: int) -> Path:
    """Write a checkpoint's files."""
    folder = run_dir / "checkpoints" / f"step-{step:09d}"
    folder.mkdir(parents=True)
    content = os.urandom(3 << 20)
    (folder / "model.safetensors").write_bytes(content)
    files = {"model.safetensors": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))
    return folder


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    head = Head(tmp_path)
    yield head
    head.door.close()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "host" / "runs"


@pytest.fixture
def copy(head: Head, base: Path) -> Iterator[RunCopy]:
    copy = RunCopy.claim(base, "job", head.launches, lambda text: text)
    yield copy
    copy.close()


@pytest.fixture
def sync(head: Head, copy: RunCopy, base: Path) -> Callable[[], None]:
    credentials = head.join(base).credentials
    return lambda: copy.sync(head.address, credentials, in_background=True)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_holds_what_a_run_needs_to_go_on(head: Head, copy: RunCopy, sync: Callable[[], None]) -> None:
    for step in (2, 4, 6):
        head.save(step)
    sync()
    assert sorted(path.name for path in (copy.path / "checkpoints").iterdir()) == [
        "step-000000004",
        "step-000000006",
    ]
    newest = "checkpoints/step-000000006"
    assert tree(copy.path / newest) == tree(head.run_dir / newest)
    assert (copy.path / "config.json").read_text() == '{"seed": 1}'
    assert (copy.path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert journal_reader.launch_times(copy.path) == head.launches
    assert journal.begin_launch(copy.path / journal.FILE_NAME, num_workers=2) == 2


def test_a_copy_follows_the_head(head: Head, copy: RunCopy, sync: Callable[[], None]) -> None:
    head.save(2)
    sync()
    head.save(4)
    head.save(6)
    head.begin_launch()
    (head.run_dir / "config.json").write_text('{"seed": 2}')
    with open(head.run_dir / "metrics.jsonl", "a") as file:
        file.write('ep": 3}\n')
    sync()
    assert [path.name for path in sorted((copy.path / "checkpoints").iterdir())] == [
        "step-000000004",
        "step-000000006",
    ]
    assert (copy.path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert (copy.path / "config.json").read_text() == '{"seed": 2}'
    assert journal_reader.launch_times(copy.path) == head.launches
    (head.run_dir / "metrics.jsonl").write_text('{"step": 7}\n')  # a launch that began it anew
    sync()
    assert (copy.path / "metrics.jsonl").read_text() == '{"step": 7}\n'


def test_a_checkpoint_that_is_cut_short_or_changes_while_it_is_read_is_not_there(
    head: Head, copy: RunCopy, sync: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = head.save(2)
    read = HeadFiles.read

    def cut(self: HeadFiles, path: str, offset: int) -> bytes:
        if path.endswith("model.safetensors") and offset:
            raise OSError("the link is gone")
        return read(self, path, offset)

    with monkeypatch.context() as patch:
        patch.setattr(HeadFiles, "read", cut)
        with pytest.raises(OSError, match="the link is gone"):
            sync()
    assert tree(copy.path / "checkpoints") == {}
    (newest / "model.safetensors").write_bytes(os.urandom(3 << 20))  # not as its manifest says
    sync()
    assert tree(copy.path / "checkpoints") == {}


def test_checkpoints_newer_than_the_heads_are_moved_aside(
    head: Head, copy: RunCopy, sync: Callable[[], None]
) -> None:
    head.save(4)
    save(copy.path, 2)
    save(copy.path, 8)  # of a head that was lost before it could be copied
    sync()
    checkpoints = copy.path / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "before-1",
        "step-000000002",
        "step-000000004",
    ]
    assert (checkpoints / "before-1" / "step-000000008" / "manifest.json").exists()


def test_nobody_goes_on_from_a_copy_while_its_agent_lives(copy: RunCopy) -> None:
    with pytest.raises(RunDirectoryError, match="still alive"):
        RunDirectory.lock(copy.path)


def test_a_copy_leaves_other_runs_of_its_name_alone(head: Head, base: Path, copy: RunCopy) -> None:
    other = base / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    copies = [RunCopy.claim(base, name, head.launches, lambda text: text) for name in ("other", "job")]
    assert [each.path.name for each in copies] == ["other-copy-1", "job-copy-1"]
    for each in copies:
        each.close()
    assert list(other.iterdir()) == [other / "config.json"]


def test_a_host_with_another_continuation_of_the_run_is_refused(
    head: Head, base: Path, copy: RunCopy, sync: Callable[[], None]
) -> None:
    sync()
    copy.close()
    head.door.release(1, 0)
    assert head.join(base).number == 1  # its history is the head's
    head.door.release(1, 1)
    journal.begin_launch(copy.path / journal.FILE_NAME, num_workers=2)
    with pytest.raises(HostNotAdmitted, match=r"this run went on from the copy on .*: its launch 2 began"):
        head.join(base)


def test_a_host_on_which_a_supervisor_is_at_work_with_the_run_is_refused(
    head: Head, base: Path, copy: RunCopy, sync: Callable[[], None]
) -> None:
    sync()
    copy.close()
    head.door.release(1, 0)
    (copy.path / "copied-from").unlink()
    with (
        RunDirectory.lock(copy.path),
        pytest.raises(HostNotAdmitted, match="is at work with this run itself"),
    ):
        head.join(base)


def test_histories_are_compared_launch_by_launch() -> None:
    run_copy.refuse_fork("b", [1.0], "", [1.0, 2.0])
    run_copy.refuse_fork("b", [], "", [1.0])
    for theirs in ([1.0, 3.0], [1.0, 2.0, 3.0]):
        with pytest.raises(HostNotAdmitted):
            run_copy.refuse_fork("b", theirs, "", [1.0, 2.0])
