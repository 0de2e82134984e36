from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from torch import Tensor

from shoal.errors import CheckpointWriteFailed
from shoal.parallel.protocol import Piece
from shoal.runtime import replace_directory
from shoal.train.checkpoint.checkpoint import open_checkpoint, write_checkpoint
from shoal.train.checkpoint.storage import Place, step_name, step_of


def weights(tensor: Tensor) -> list[Piece]:
    return [Piece("model/w", tensor, tuple(tensor.shape), (0,) * tensor.dim())]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 2 MiB of its own, so that a full disk is a full disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small filesystem needs root and the right to mount")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_else(small_disk: Path) -> None:
    small = torch.rand(1000)
    previous = str(small_disk / "step-000000001")
    write_checkpoint(previous, weights(small), progress={"step": 1})
    with pytest.raises(CheckpointWriteFailed) as caught:
        write_checkpoint(
            small_disk / "step-000000002",
            weights(torch.rand(1_000_000)),
            progress={"step": 2},
            previous=previous,
        )
    assert "No space left on device (3.8 MiB are needed and 2.0 MiB are free" in str(caught.value)
    assert f"the previous one, {previous}, is whole" in str(caught.value)
    assert [path.name for path in small_disk.iterdir()] == ["step-000000001"]
    assert torch.equal(open_checkpoint(previous).pieces["model/w"], small)


def test_a_disk_that_fills_up_while_the_manifest_is_written_is_a_full_disk(small_disk: Path) -> None:
    # The weights fit to the page; the manifest, larger than what is left, does not.
    free_bytes = shutil.disk_usage(small_disk).free
    room = torch.zeros(free_bytes - 4096 - 512, dtype=torch.uint8)
    with pytest.raises(CheckpointWriteFailed, match="No space left on device"):
        write_checkpoint(small_disk / "step-000000001", weights(room), progress={"note": "x" * 8192})
    assert list(small_disk.iterdir()) == []


def test_replacing_on_a_full_disk_keeps_the_old_one(small_disk: Path) -> None:
    old = torch.rand(300_000)  # 1.2 of 2 MiB: no room for a second one beside it
    write_checkpoint(small_disk / "click", weights(old), progress={})
    with pytest.raises(CheckpointWriteFailed, match="there is no earlier one"):
        write_checkpoint(small_disk / "click", weights(torch.rand(300_000)), progress={})
    assert torch.equal(open_checkpoint(small_disk / "click").pieces["model/w"], old)
    assert [path.name for path in small_disk.iterdir()] == ["click"]


def test_a_read_only_filesystem_is_told(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointWriteFailed, match="Read-only file system"):
        write_checkpoint(small_disk / "runs" / "step-000000001", weights(torch.rand(10)), progress={})


def test_a_directory_that_may_not_be_written_is_told(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    if os.access(closed, os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(CheckpointWriteFailed, match="Permission denied"):
        write_checkpoint(closed / "step-000000001", weights(torch.rand(10)), progress={})


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file, not a directory")
    with pytest.raises(CheckpointWriteFailed, match=r"File exists|Not a directory"):
        write_checkpoint(tmp_path / "runs" / "step-000000001", weights(torch.rand(10)), progress={})
    with pytest.raises(CheckpointWriteFailed, match="there is a file of that name"):
        write_checkpoint(tmp_path / "runs", weights(torch.rand(10)), progress={})


def test_a_directory_of_other_things_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointWriteFailed, match=r"holds what is no checkpoint's \(thesis\.tex\)"):
        write_checkpoint(tmp_path / "out", weights(torch.rand(10)), progress={})
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_checkpoint(tmp_path / "out", weights(torch.ones(3)), progress={})
    assert open_checkpoint(tmp_path / "out").pieces["model/w"].tolist() == [1, 1, 1]


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    write_checkpoint(f"file://{tmp_path}/one", weights(torch.ones(3)), progress={})
    assert open_checkpoint(tmp_path / "one").pieces["model/w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("exchange", [True, False])
def test_an_old_checkpoint_and_a_new_one_change_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:  # as on filesystems that cannot
        monkeypatch.setattr(replace_directory, "_exchange", lambda one, other: False)
    write_checkpoint(tmp_path / "one", weights(torch.zeros(3)), progress={})
    write_checkpoint(tmp_path / "one", weights(torch.ones(3)), progress={})
    assert open_checkpoint(tmp_path / "one").pieces["model/w"].tolist() == [1, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_while_one_is_replaced_there_is_always_one(tmp_path: Path) -> None:
    path = tmp_path / "one"
    write_checkpoint(path, weights(torch.zeros(3)), progress={})
    missing, done = [], threading.Event()

    def look() -> None:
        while not done.is_set():
            if not (path / "manifest.json").exists():
                missing.append(path)

    watcher = threading.Thread(target=look)
    watcher.start()
    for number in range(50):
        write_checkpoint(path, weights(torch.full((3,), float(number))), progress={})
    done.set()
    watcher.join()
    assert missing == []


def left_behind(directory: Path, name: str) -> Path:
    path = directory / f".{name}.tmp-0123abcd"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"half of a file")
    return path


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    step, saved, foreign = (left_behind(tmp_path, name) for name in ("step-000000007", "click", "other"))
    write_checkpoint(tmp_path / "step-000000009", weights(torch.ones(3)), progress={})
    assert (step.exists(), saved.exists(), foreign.exists()) == (False, True, True)
    write_checkpoint(tmp_path / "click", weights(torch.ones(3)), progress={})
    assert (saved.exists(), foreign.exists()) == (False, True)


def test_what_a_living_writer_holds_is_left_alone(tmp_path: Path) -> None:
    held = left_behind(tmp_path, "step-000000007")
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    write_checkpoint(tmp_path / "step-000000009", weights(torch.ones(3)), progress={})
    assert held.exists()
    os.close(lock)


def test_elsewhere_a_failed_write_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    opened = memory.open

    def refuse_manifest(path: str, mode: str = "rb", **options: object) -> object:
        if mode == "wb" and path.endswith("manifest.json"):
            raise RuntimeError("the bucket is gone")  # not an OSError: remote libraries raise what they like
        return opened(path, mode, **options)

    monkeypatch.setattr(memory, "open", refuse_manifest)
    with pytest.raises(CheckpointWriteFailed, match="the bucket is gone"):
        write_checkpoint("memory://bucket/one", weights(torch.ones(3)), progress={})
    assert not memory.exists("/bucket/one")


def test_elsewhere_the_manifest_is_written_last_and_taken_away_first(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    written: list[tuple[str, bool]] = []
    opened = memory.open

    def note(path: str, mode: str = "rb", **options: object) -> object:
        if mode == "wb":
            written.append((Path(path).name, memory.exists("/bucket/two/manifest.json")))
        return opened(path, mode, **options)

    monkeypatch.setattr(memory, "open", note)
    for _ in range(2):
        write_checkpoint("memory://bucket/two", weights(torch.ones(3)), progress={})
    assert written == [("model.safetensors", False), ("manifest.json", False)] * 2
    memory.rm("/bucket", recursive=True)


def test_steps_are_in_the_names() -> None:
    assert step_name(500) == "step-000000500"
    assert step_of(step_name(12_345_678_901)) == 12_345_678_901
    assert step_of("step-12") is None
    assert step_of(".step-000000500.tmp-0123abcd") is None


def test_a_place_knows_its_children() -> None:
    assert Place.at("memory://a/b/").child("c").url == "memory://a/b/c"
    assert Place.at("runs").child("c").url == "runs/c"
