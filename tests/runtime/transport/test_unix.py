from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import system
from shoal.errors import ConfigError, WireError
from shoal.runtime.transport import unix


@pytest.fixture
def directory() -> Iterator[Path]:
    path = unix.runtime_dir()
    yield path
    shutil.rmtree(path)


def test_the_runtime_directory_is_private_short_and_new_each_time(directory: Path) -> None:
    other = unix.runtime_dir()
    other.rmdir()
    assert other != directory
    assert directory.name.startswith(f"shoal-{os.getuid()}-")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_the_runtime_directory_avoids_bases_that_are_too_deep_or_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    for base in (deep, tmp_path / "missing"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
        path = unix.runtime_dir()
        path.rmdir()
        assert base not in path.parents


def test_the_socket_is_for_its_user_alone(directory: Path) -> None:
    with unix.listen(directory / "s"):
        assert stat.S_IMODE((directory / "s").stat().st_mode) == 0o600


def test_both_sides_learn_who_the_other_is(directory: Path) -> None:
    with unix.listen(directory / "s") as listener, unix.connect(directory / "s", timeout_s=60.0) as ours:
        theirs, peer = unix.accept(listener)
        with theirs:
            assert peer == (os.getpid(), os.getuid())
            assert unix.peer_of(ours) == peer


def test_a_path_that_the_system_cannot_bind_is_refused_with_its_length(tmp_path: Path) -> None:
    path = str(tmp_path).ljust(108, "x")
    for attempt in (unix.listen, lambda path: unix.connect(path, timeout_s=60.0)):
        with pytest.raises(ConfigError, match=f"108 bytes.*at most {system.MAX_SOCKET_PATH_BYTES}"):
            attempt(path)


def test_a_socket_left_behind_by_a_dead_process_is_replaced(directory: Path) -> None:
    unix.listen(directory / "s").close()
    with unix.listen(directory / "s"):
        unix.connect(directory / "s", timeout_s=60.0).close()


def test_a_path_in_use_is_not_taken_over(directory: Path) -> None:
    with unix.listen(directory / "s"), pytest.raises(ConfigError, match="another process uses"):
        unix.listen(directory / "s")
    (directory / "file").write_text("a user's own")
    with pytest.raises(ConfigError, match="another process uses"):
        unix.listen(directory / "file")
    assert (directory / "file").read_text() == "a user's own"


def test_nobody_listening_is_an_error_at_once(directory: Path) -> None:
    with pytest.raises(FileNotFoundError):
        unix.connect(directory / "s", timeout_s=60.0)


def as_another_user(action: object) -> int:
    """Run `action` in a child of user 65534; its exit code: 0 done, 7 refused by its own check."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setuid(65534)
            action()  # type: ignore[operator]
            code = 0
        except WireError:
            code = 7
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@needs_root
def test_the_mode_keeps_another_user_out(directory: Path) -> None:
    with unix.listen(directory / "s"):
        assert as_another_user(lambda: unix.connect(directory / "s", timeout_s=60.0)) == 1


@needs_root
def test_another_user_is_refused_by_both_sides_even_where_the_modes_let_it_in(directory: Path) -> None:
    with unix.listen(directory / "s") as listener:
        directory.chmod(0o755)
        (directory / "s").chmod(0o666)
        assert as_another_user(lambda: unix.connect(directory / "s", timeout_s=60.0)) == 7
        with pytest.raises(WireError, match="belongs to user 65534"):
            unix.accept(listener)


def test_the_accepted_socket_of_a_stranger_is_closed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unix.listen(directory / "s") as listener, unix.connect(directory / "s", timeout_s=60.0) as ours:
        monkeypatch.setattr(os, "getuid", lambda: 4242)
        with pytest.raises(WireError, match="this one to user 4242"):
            unix.accept(listener)
        monkeypatch.undo()
        assert ours.recv(1) == b""
