"""A file that disappears or rots is read from its copy, and that is written down."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.data.remote import blocks
from shoal.data.remote.copies import CopiedFiles, copies
from shoal.errors import ConfigError, FileLost, NoFiles
from shoal.runtime import events

DATA = bytes(number % 253 for number in range(5500))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1000)


@pytest.fixture
def original(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "a.bin"
    path.parent.mkdir()
    path.write_bytes(DATA)
    return path


@pytest.fixture
def opened(original: Path, tmp_path: Path) -> Callable[..., CopiedFiles]:
    def opened(num_copies: int = 2) -> CopiedFiles:
        files = copies(
            original, num_copies, at=[tmp_path / f"copies-{number}" for number in range(1, num_copies)]
        )
        [info] = files.expand(files.where)
        assert info.url == str(original)
        return files

    return opened


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, 3000)


def rot(path: Path) -> None:
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(4444)
        file.write(b"\0\0\0")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # bits that flip leave no time behind


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (remove, "no such file"),
        (truncate, "3000 bytes instead of 5500"),
        (rot, "hash of its bytes from 4000 on"),
    ],
)
def test_a_harmed_file_is_read_from_its_copy(
    opened: Callable[..., CopiedFiles],
    original: Path,
    harm: Callable[[Path], None],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = opened()
    assert files.read(str(original), 0, 2500) == DATA[:2500]
    harm(original)
    events.emitted.clear()
    assert files.read(str(original), 3500, 5500) == DATA[3500:]
    with files.open(str(original)) as file:
        assert file.read() == DATA
    [(kind, facts)] = events.emitted
    assert kind == "file-lost"
    assert reason in facts["reason"]
    assert facts["read_from"].startswith(str(original.parent.parent / "copies-1"))
    assert reason in capsys.readouterr().err


def test_a_block_read_before_is_compared_again_when_its_file_was_written(
    opened: Callable[..., CopiedFiles], original: Path
) -> None:
    files = opened()
    assert files.read(str(original), 4000, 5000) == DATA[4000:5000]
    rot(original)
    os.utime(original)
    assert files.read(str(original), 4000, 5000) == DATA[4000:5000]


def test_with_three_copies_two_may_be_lost_and_then_all_are_named(
    opened: Callable[..., CopiedFiles], original: Path, tmp_path: Path
) -> None:
    files = opened(3)
    remove(original)
    [first] = (tmp_path / "copies-1").glob("*.bin")
    rot(first)
    assert files.read(str(original), 4000, 5000) == DATA[4000:5000]
    [second] = (tmp_path / "copies-2").glob("*.bin")
    truncate(second)
    with pytest.raises(
        FileLost, match=r"none of its 3 copies can be read .*no such file.*hash of.*3000 bytes"
    ):
        files.read(str(original), 0, 10)


@pytest.mark.parametrize("where", ["a.bin", "*.bin", ""])
def test_a_file_that_was_lost_between_two_runs_is_found_by_its_copy(
    opened: Callable[..., CopiedFiles], original: Path, tmp_path: Path, where: str
) -> None:
    opened()
    remove(original)
    files = copies(original.parent / where, 2, at=[tmp_path / "copies-1"])
    [info] = files.expand(files.where, [".bin"])
    assert files.read(info.url, 0, 5500) == DATA


def test_a_copy_is_made_once_and_anew_when_the_file_is_new(
    opened: Callable[..., CopiedFiles], original: Path, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: opened(), range(4)))
    [copy] = (tmp_path / "copies-1").glob("*.bin")
    made = copy.stat().st_ino
    opened()
    assert copy.stat().st_ino == made
    original.write_bytes(DATA[::-1])
    files = opened()
    remove(original)
    assert files.read(str(original), 0, 5500) == DATA[::-1]


def test_nothing_to_copy_and_nowhere_to(tmp_path: Path, original: Path) -> None:
    files = copies(tmp_path / "none*", 2, at=[tmp_path / "copies"])
    with pytest.raises(NoFiles):
        files.expand(files.where)
    with pytest.raises(ConfigError, match="3 copies are the original and 2 more, and at= names 1"):
        copies(original, 3, at=[tmp_path / "copies"])
    (tmp_path / "file").write_text("")
    files = copies(original, 2, at=[tmp_path / "file" / "below"])
    with pytest.raises(ConfigError, match=r"could not be copied to .*file.*: .*5500 bytes free"):
        files.expand(files.where)
