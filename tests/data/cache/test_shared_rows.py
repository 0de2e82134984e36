"""One copy of the same rows for several processes, which goes with the last of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.data.cache import row_file as nameless
from shoal.data.cache import row_file as sharing


def make(content: bytes) -> Callable[[], tuple[list[int], dict[str, Any]]]:
    def made() -> tuple[list[int], dict[str, Any]]:
        fd = nameless.in_memory("shared", len(content))
        os.pwrite(fd, content, 0)
        return [fd], {"length": len(content)}

    return made


def in_child(work: Callable[[], bool]) -> int:
    """Fork; what `work` says becomes the exit status. Returns the pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return pid


def test_the_second_finds_what_the_first_made(tmp_path: Path) -> None:
    first, facts, is_first = sharing.share(tmp_path, ["x"], make(b"hello"))
    assert is_first
    assert facts == {"length": 5}

    def work() -> bool:
        fds, facts, is_first = sharing.share(tmp_path, ["x"], make(b"other"))
        os.pwrite(fds[0], b"HE", 0)
        return not is_first and facts == {"length": 5} and os.pread(fds[0], 5, 0) == b"HEllo"

    assert os.waitpid(in_child(work), 0)[1] == 0
    assert os.pread(first[0], 5, 0) == b"HEllo"
    fds, _, is_first = sharing.share(tmp_path, ["y"], make(b"other"))
    assert is_first, "something else is somewhere else"
    nameless.close_all([*first, *fds])


def test_when_nobody_is_left_it_is_made_anew(tmp_path: Path) -> None:
    def work() -> bool:
        return sharing.share(tmp_path, ["x"], make(b"hello"))[2]

    for _ in range(2):
        assert os.waitpid(in_child(work), 0)[1] == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"], "and no rows are left behind"


def test_it_can_be_found_through_anybody_who_has_it(tmp_path: Path) -> None:
    asked, ask = os.pipe()
    told, tell = os.pipe()

    def first() -> bool:
        return sharing.share(tmp_path, ["x"], make(b"hello"))[2]

    def second() -> bool:
        fds = sharing.share(tmp_path, ["x"], make(b"other"))[0]
        os.write(tell, b"x")
        os.read(asked, 1)
        return os.pread(fds[0], 5, 0) == b"hello"

    kept: list[int] = []

    def both() -> bool:
        fds, _, is_first = sharing.share(tmp_path, ["x"], make(b"hello"))
        pid = in_child(second)
        os.read(told, 1)
        os.close(fds[0])  # the first one has it no more
        fds, _, again = sharing.share(tmp_path, ["x"], make(b"third"))
        found = os.pread(fds[0], 5, 0) == b"hello"
        os.write(ask, b"x")
        return os.waitpid(pid, 0)[1] == 0 and is_first and not again and found

    assert os.waitpid(in_child(both), 0)[1] == 0
    nameless.close_all([asked, ask, told, tell, *kept])


@pytest.mark.parametrize("damage", ["", "{", '{"identity": "another", "holders": [], "facts": {}}'])
def test_a_half_written_note_is_not_believed(tmp_path: Path, damage: str) -> None:
    fds, _, _ = sharing.share(tmp_path, ["x"], make(b"hello"))
    [note] = tmp_path.iterdir()
    note.write_text(damage)
    again, _, is_first = sharing.share(tmp_path, ["x"], make(b"again"))
    assert is_first
    assert os.pread(again[0], 5, 0) == b"again"
    nameless.close_all([*fds, *again])
