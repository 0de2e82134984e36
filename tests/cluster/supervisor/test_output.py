from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.supervisor.output import (
    MAX_LINE_BYTES,
    TAIL_BYTES,
    LineCutter,
    Log,
    Pipe,
    stderr_pipe,
    stdout_pipe,
)


class FakeScreen:
    def __init__(self, takes_parts: bool = True) -> None:
        self.takes_parts = takes_parts
        self.shown = {"out": b"", "err": b""}

    def out(self, data: bytes) -> None:
        self.shown["out"] += data

    def err(self, data: bytes) -> None:
        self.shown["err"] += data


def test_lines_are_marked_once_each_however_they_come() -> None:
    cutter = LineCutter(b"[rank 1] ")
    assert cutter.feed(b"one\ntw") == b"[rank 1] one\n"
    assert cutter.feed(b"o\n\n") == b"[rank 1] two\n[rank 1] \n"
    assert cutter.feed(b"rest") == b""
    assert cutter.flush() == b"[rank 1] rest\n"
    assert cutter.flush() == b""


def test_of_a_line_drawn_over_itself_the_last_state_is_shown() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"\r 10%\r 20%") == b""
    assert cutter.feed(b"\r100%\nnext\r\n") == b"100%\nnext\r\n"


def test_a_progress_bar_does_not_fill_the_memory() -> None:
    cutter = LineCutter()
    for _ in range(2000):
        assert cutter.feed(b"\r" + b"#" * 80) == b""
    assert cutter.flush() == b"#" * 80 + b"\n"


def test_an_endless_line_is_cut() -> None:
    cutter = LineCutter(b"> ")
    shown = b"".join(cutter.feed(b"x" * 10_000) for _ in range(100))
    lines = shown.splitlines()
    assert {len(line) for line in lines} == {MAX_LINE_BYTES + 2}
    assert len(shown.replace(b"> ", b"").replace(b"\n", b"")) + len(cutter.flush()[2:-1]) == 1_000_000


@given(st.lists(st.binary(max_size=40).map(lambda part: part.replace(b"\r", b"")), max_size=20))
def test_cutting_changes_nothing_but_the_ends(parts: list[bytes]) -> None:
    cutter = LineCutter()
    whole = b"".join(parts)
    shown = b"".join(map(cutter.feed, parts)) + cutter.flush()
    assert shown == whole + (b"" if whole.endswith(b"\n") or not whole else b"\n")


def through(pipe_of: object, data: bytes, tmp_path: Path, screen: FakeScreen, **place: int) -> str:
    read_fd, write_fd = os.pipe()
    log = Log(tmp_path / "log")
    pipe: Pipe = pipe_of(read_fd, log, screen, **place)  # type: ignore[operator]
    os.write(write_fd, data)
    while pipe.pump():
        pass
    os.close(write_fd)
    pipe.close()
    log.close()
    return (tmp_path / "log").read_text()


def test_rank_0s_stdout_is_shown_and_kept(tmp_path: Path) -> None:
    screen = FakeScreen()
    assert through(stdout_pipe, b"a\nb", tmp_path, screen, rank=0) == "a\nb"
    assert screen.shown == {"out": b"a\nb", "err": b""}


def test_other_ranks_stdout_is_kept_and_not_shown(tmp_path: Path) -> None:
    screen = FakeScreen()
    assert through(stdout_pipe, b"a\n", tmp_path, screen, rank=1) == "a\n"
    assert screen.shown == {"out": b"", "err": b""}


@pytest.mark.parametrize(("num_workers", "shown"), [(1, b"warning"), (2, b"[rank 0] warning\n")])
def test_stderr_is_marked_where_others_write_too(tmp_path: Path, num_workers: int, shown: bytes) -> None:
    screen = FakeScreen()
    assert through(stderr_pipe, b"warning", tmp_path, screen, rank=0, num_workers=num_workers) == "warning"
    assert screen.shown["err"] == shown


def test_below_a_table_only_whole_lines_are_shown(tmp_path: Path) -> None:
    screen = FakeScreen(takes_parts=False)
    through(stdout_pipe, b"whole\npart", tmp_path, screen, rank=0)
    assert screen.shown["out"] == b"whole\npart\n"


def test_a_log_remembers_its_newest_lines(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    for number in range(5000):
        log.write(b"line %d\n" % number)
    log.close()
    assert log.last_lines()[-2:] == ["line 4998", "line 4999"]
    assert sum(len(line) for line in log.last_lines()) <= TAIL_BYTES
