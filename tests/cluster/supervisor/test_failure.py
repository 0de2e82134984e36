from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from shoal.cluster.supervisor import failure
from shoal.errors import (
    BadSample,
    CallsDiffer,
    CheckpointDamaged,
    Interrupted,
    NonFiniteLoss,
    PeerLost,
    ScriptExited,
    ScriptFailed,
)
from shoal.runtime.transport import framing as codec


def raised_by(source: str, tmp_path: Path) -> BaseException:
    script = tmp_path / "script.py"
    script.write_text(source)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException as error:
        return error
    raise AssertionError("the script did not raise")


def frames(error: BaseException) -> list[str]:
    lines = failure.user_traceback(error).splitlines()
    return [line.split(", in ")[1] for line in lines if line.startswith("  File") and ", in " in line]


THROUGH_SHOAL = """
from shoal.runtime.seeds import mix
class Number(int):
    def __and__(self, other):
        raise TypeError("mine")
def train():
    mix(Number(3))
train()
"""


def test_shoals_frames_between_the_users_are_left_out(tmp_path: Path) -> None:
    error = raised_by(THROUGH_SHOAL, tmp_path)
    assert frames(error)[-3:] == ["<module>", "train", "__and__"]
    assert "seeds.py" not in failure.user_traceback(error)


def test_shoals_frames_stay_where_shoal_itself_broke(tmp_path: Path) -> None:
    error = raised_by("from shoal.runtime.seeds import mix\nmix('three')", tmp_path)
    assert frames(error)[-2:] == ["<module>", "mix"]


def test_causes_are_trimmed_too(tmp_path: Path) -> None:
    source = THROUGH_SHOAL.replace(
        "\ntrain()", "\ntry:\n    train()\nexcept TypeError as e:\n    raise RuntimeError('outer') from e"
    )
    text = failure.user_traceback(raised_by(source, tmp_path))
    assert "seeds.py" not in text
    assert "direct cause" in text
    assert text.index("TypeError: mine") < text.index("RuntimeError: outer")


def test_an_endless_recursion_is_told_briefly(tmp_path: Path) -> None:
    told = failure.describe(raised_by("def f(x): f(x + 1)\nf(0)", tmp_path), rank=0)
    assert told.error == "RecursionError"
    assert len(told.traceback) < failure.MAX_TEXT_CHARS + 100


def test_a_message_without_end_is_cut_in_the_middle() -> None:
    told = failure.describe(ValueError("x" * 1_000_000), rank=0)
    assert len(told.message) + len(told.traceback) < 3 * failure.MAX_TEXT_CHARS
    assert "characters left out" in told.message


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error", [Mute(), ValueError("caf\udce9"), ValueError("漢" * 100_000)], ids=["mute", "bytes", "long"]
)
def test_whatever_an_error_says_it_fits_a_packet(error: Exception) -> None:
    packet = b"".join(codec.encode(failure.describe(error, rank=0)))
    assert len(packet) < 200_000
    told, _ = codec.decode(packet)
    assert type(error).__name__ in told.traceback  # type: ignore[attr-defined]


def test_the_users_error_comes_back_as_its_traceback() -> None:
    error = failure.to_error(failure.describe(KeyError("lr"), rank=2), num_workers=4)
    assert isinstance(error, ScriptFailed)
    assert (error.rank, error.exit_code) == (2, 1)
    assert "KeyError: 'lr'" in error.traceback


@pytest.mark.parametrize(
    "error",
    [
        NonFiniteLoss(rank=1, step=3, value=1e30, samples=[1, 2], checkpoint="x"),
        CheckpointDamaged(path="x", problem="its manifest ends in the middle"),
        Interrupted(signal_name="SIGTERM", step=7, checkpoint="x"),
        BadSample(
            where="a.csv", row=3, column="x", reason="'b' is no float32", index=2
        ),  # of another file of the tree
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_shoals_comes_back_with_its_words_and_facts(error: Exception) -> None:
    back = failure.to_error(failure.describe(error, rank=0), num_workers=2)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == {**vars(error), "exit_code": error.exit_code}  # type: ignore[attr-defined]


def test_facts_that_are_not_plain_are_left_behind() -> None:
    error = CallsDiffer(number=2, calls={0: "called fit()"})
    error.extra = object()  # type: ignore[attr-defined]
    back = failure.to_error(failure.describe(error, rank=0), num_workers=2)
    assert isinstance(back, CallsDiffer)
    assert str(back) == str(error)


@pytest.mark.parametrize(
    ("code", "expected"), [(None, 0), (0, 0), (3, 3), (-1, 255), ("no data", 1), (True, 1)]
)
def test_exit_codes_are_those_of_python(code: object, expected: int) -> None:
    assert failure.exit_code_of(SystemExit(code)) == expected


def test_leaving_with_a_code_is_an_error_of_its_own() -> None:
    error = failure.to_error(failure.describe(SystemExit(9), rank=1), num_workers=2)
    assert isinstance(error, ScriptExited)
    assert (error.code, error.exit_code) == (9, 9)


def test_an_error_raised_from_a_broken_exchange_is_blamed_on_the_peer() -> None:
    later = ValueError("while handling it")
    later.__context__ = PeerLost(rank=0, operation="step 3", reason="reset")
    assert failure.describe(later, rank=0).kind == "peer"
    assert failure.describe(ValueError("by itself"), rank=0).kind == "script"


def test_ctrl_c_is_an_interruption_by_the_signal_that_asked() -> None:
    told = failure.describe(KeyboardInterrupt(), rank=0, stop="SIGTERM")
    assert (told.error, told.exit_code, told.kind) == ("Interrupted", 143, "shoal")


def test_a_crash_report_is_shown_without_the_launcher() -> None:
    ours = failure.__file__
    lines = [
        "Fatal Python error",
        '  File "/x/train.py", line 2 in <module>',
        f'  File "{ours}", line 1 in main',
    ]
    assert (
        failure.without_launcher([*lines, '  File "<frozen runpy>", line 2', "Extension modules: a, b"])
        == lines[:2]
    )
