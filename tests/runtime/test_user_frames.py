"""A traceback shows the user's own lines; ours are left out where they say nothing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, DataError
from shoal.runtime import serialization as plain
from shoal.runtime.user_frames import Elsewhere, calling_line, hide_ours


class _Calls(float):
    """A number of the user's that runs their code when shoal looks at it."""

    def __float__(self) -> float:
        raise KeyError("theirs")


class _Broken(dict[str, Any]):
    """Something that shoal cannot deal with, by a mistake of its own for all anybody knows."""

    items = None  # type: ignore[assignment]  # as broken as can be


def raised(value: Any) -> BaseException:
    try:
        plain.to_plain(value, "it")
    except BaseException as error:
        return error
    raise AssertionError


def files(error: BaseException) -> list[str]:
    return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]


def test_frames_between_the_users_are_left_out() -> None:
    error = raised([_Calls(1.0)])
    assert files(error)[1:-1] == ["serialization.py"] * 3
    hide_ours(error)
    assert files(error) == ["test_user_frames.py", "test_user_frames.py"]


def test_of_our_own_errors_and_those_from_elsewhere_only_the_users_frames_are_shown() -> None:
    ours = raised(object())
    assert isinstance(ours, ConfigError)
    hide_ours(ours)
    assert files(ours) == ["test_user_frames.py"]

    mistake = raised(_Broken(a=1))
    hide_ours(mistake)
    assert files(mistake)[-1] == "serialization.py"
    mistake.__cause__ = Elsewhere("Traceback ...")
    hide_ours(mistake)
    assert files(mistake) == ["test_user_frames.py"]


def test_the_line_that_called_is_found_from_within() -> None:
    line = calling_line()
    assert line is not None
    assert line.file == __file__
    assert str(line).endswith(": line = calling_line()")
    error = DataError("gone.").opened_by(line).opened_by("another")
    assert str(error) == f"gone. The data is opened at {line}"


def test_plain_python_prints_the_users_lines_alone_unless_asked_for_all(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import shoal
            from shoal.runtime import serialization as plain

            class Fails(float):
                def __float__(self):
                    raise KeyError("theirs")

            plain.to_plain([Fails(1.0)], "it")
            """
        )
    )

    def printed(*options: str) -> str:
        return subprocess.run([sys.executable, *options, script], capture_output=True, text=True).stderr

    told = printed()
    assert "serialization.py" not in told
    assert told.count(f'File "{script}"') == 2
    assert told.endswith("KeyError: 'theirs'\n")
    assert "serialization.py" in printed("-X", "dev")
