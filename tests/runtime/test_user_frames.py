"""A traceback shows the user's own lines; ours are left out where they say nothing."""

from __future__ import annotations

import bdb
import io
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import shoal
from shoal.config import job as jobs
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


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: shoal.Trainer(None, optimiser="adam"), "did you mean optimizer=? Trainer takes model, loss"),  # type: ignore[call-arg, arg-type]
        (lambda: shoal.Trainer.fit(None, 1, num_epochs=3), "did you mean epochs=? Trainer.fit takes data"),  # type: ignore[call-arg, arg-type]
        (lambda: shoal.Trainer(None, learning_rate=1.0), "did you mean lr=?"),  # type: ignore[call-arg, arg-type]
        (
            lambda: shoal.Trainer.fit(None, 1, callbacks=[]),
            "did you mean callbacks= of Trainer? Trainer.fit takes data",
        ),  # type: ignore[call-arg, arg-type]
        (lambda: shoal.Trainer(None, max_epochs=3), "did you mean epochs= of Trainer.fit?"),  # type: ignore[call-arg, arg-type]
        (
            lambda: shoal.estimator.RunConfig(model_dirr="x"),
            "did you mean model_dir=? EstimatorConfig takes model_dir",
        ),
        (lambda: shoal.Dataset.from_arrays(1, 2), "from_arrays((x, y)), with a tuple?"),  # type: ignore[call-arg, arg-type]
        (lambda: shoal.Trainer(None, devices=2), "chosen at launch: shoal run -n 4 train.py"),  # type: ignore[call-arg, arg-type]
        (
            lambda: shoal.callbacks.StopAtConvergence(patience=3),
            "StopAtConvergence takes steps, min_delta, smoothing",
        ),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_argument_is_answered_with_the_one_that_was_meant(
    call: Callable[[], object], said: str
) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    for _ in range(2):  # an error may be shown more than once
        hide_ours(caught.value)
    assert said in "".join(traceback.format_exception(caught.value))
    assert len(caught.value.__notes__) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("shoal.size()", "did you mean shoal.num_workers()?"),
        ("shoal.init()", "leave it out: `shoal run` sets the workers up"),
        ("shoal.ModelCheckpoint()", "did you mean shoal.callbacks.ModelCheckpoint?"),
        ("shoal.Dataset.from_tensor_slices", "did you mean shoal.Dataset.from_arrays((x, y))?"),
        ("shoal.Dataset.from_arrays(torch.zeros(2)).batch(1).shuffle()", "data.shuffle(seed=0).batch(32)"),
        ("from shoal.ps.client.kv import Kv; Kv.init", "a table is declared first"),
        ("shoal.estimator.DNNClassifier", "give Estimator a model_fn"),
        ("shoal.Dateset", "did you mean shoal.Dataset?"),
        ("from shoal import Accelerator", "shoal.setup(model, optimizer, data)"),
        ("from shoal.callbacks import EarlyStoping", "did you mean shoal.callbacks.EarlyStopping?"),
        ("from shoal.estimator import Estimater", "did you mean shoal.estimator.Estimator?"),
        ("from shoal.estimator import DNNClassifier", "give Estimator a model_fn"),
        ("shoal.Trainer(lambda: None, loss='mse').train()", "did you mean trainer.fit(data, epochs=...)?"),
    ],
)
def test_a_name_of_another_library_is_answered_with_ours(wrong: str, said: str) -> None:
    with pytest.raises((AttributeError, ImportError)) as caught:
        exec(wrong, {"shoal": shoal, "torch": torch})
    hide_ours(caught.value)
    assert said in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "wrong",
    [
        "shoal.setup(1, 2, 3, 4)",
        "shoal.setup(1, 2, 3, scheduler=4)",
        "from shoal import setup; setup(1, 2, 3, 4)",
        "import shoal as ours; del shoal; ours.setup(1, 2, 3, 4)",
    ],
)
def test_setup_with_a_scheduler_is_told_that_it_stays_with_the_script(wrong: str) -> None:
    with pytest.raises(TypeError) as caught:
        exec(wrong, {"shoal": shoal})
    hide_ours(caught.value)
    assert "call scheduler.step() as before" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("wrong", ["def setup(a, b, c): ...\nsetup(1, 2, 3, 4)", "theirs.setup(1, 2, 3, 4)"])
def test_another_setup_with_too_many_arguments_gets_no_hint(wrong: str) -> None:
    theirs = ModuleType("theirs")
    exec("def setup(a, b, c): ...", vars(theirs))
    with pytest.raises(TypeError) as caught:
        exec(wrong, {"shoal": shoal, "theirs": theirs})
    hide_ours(caught.value)
    assert not hasattr(caught.value, "__notes__")


def test_other_peoples_calls_get_no_hint() -> None:
    with pytest.raises(TypeError) as caught:
        _Calls(value=1.0)  # type: ignore[call-arg]
    hide_ours(caught.value)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(
    ("error", "said"), [(EOFError("EOF when reading a line"), "-n 1"), (bdb.BdbQuit(), "--debug-rank 0")]
)
def test_several_workers_without_a_terminal_are_told_so(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hide_ours(error)
    assert not hasattr(error, "__notes__")  # one process reads what is typed
    monkeypatch.setattr(jobs, "_current", jobs.Job(name="job", run_dir=tmp_path, num_workers=2))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    hide_ours(error)
    [note] = error.__notes__
    assert said in note
