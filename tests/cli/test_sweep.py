"""A sweep tries every combination, or samples ranges, and compares its runs by one metric."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from invoking import Command, Shoal

from shoal.cli.sweep import Dimension, _as_options, _Signals, grid, parse_dimension
from shoal.errors import ConfigError

SCRIPT = """
import argparse, torch, shoal
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
lr = parser.parse_args().lr
assert lr < 1
torch.manual_seed(0)
x = torch.randn(64, 4)
trainer = shoal.Trainer(nn.Linear(4, 1), loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=lr))
trainer.fit(shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).batch(16), epochs=1)
"""


def test_lists_and_ranges() -> None:
    assert parse_dimension("lr=0.1,0.01", is_option=False).choices == ("0.1", "0.01")
    assert parse_dimension("data=../a,../b", is_option=False).choices == ("../a", "../b")
    assert parse_dimension("data=a..b", is_option=False).choices == ("a..b",)
    assert parse_dimension("hidden=32..256", is_option=False) == Dimension(
        name="hidden", is_option=False, low=32, high=256, is_integer=True
    )
    drawn = parse_dimension("--lr=log:1e-4..1e-1", is_option=False)
    assert (drawn.name, drawn.low, drawn.high, drawn.is_log, drawn.is_integer) == (
        "lr",
        1e-4,
        0.1,
        True,
        False,
    )


@pytest.mark.parametrize(
    "said", ["lr", "lr=", "=3", "lr=3..1", "lr=log:a..b", "lr=log:1,2", "lr=log:0..1", "lr=1..inf"]
)
def test_what_names_no_values_is_refused(said: str) -> None:
    with pytest.raises(ConfigError, match="Nothing was"):
        parse_dimension(said, is_option=False)


def test_every_combination_is_tried_once() -> None:
    lists = [parse_dimension(said, is_option=False) for said in ("a=1,2", "b=x,y,z")]
    tried = grid(lists)
    assert len({tuple(each.items()) for each in tried}) == 6
    with pytest.raises(ConfigError, match="1,001 combinations"):
        grid([parse_dimension("a=" + ",".join(map(str, range(1001))), is_option=False)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--minimize", "loss"], "nothing varies"),
        (["--arg", "lr=1"], "compares its runs by one metric"),
        (["--arg", "lr=1", "--arg", "lr=2", "--minimize", "x"], "lr is varied twice"),
        (["--option", "wrkers=1,2", "--minimize", "x"], "Did you mean 'workers'"),
        (["--arg", "lr=1..2", "--minimize", "x"], "add --trials"),
        (["--arg", "lr=1,2", "--minimize", "x", "--seed", "3"], "--seed is of the sampler"),
        (["--option", "name=a,b", "--minimize", "x"], "name cannot be varied"),
        (["--option", "config=a,b", "--minimize", "x"], "config cannot be varied"),
        (["--option", "script=a,b", "--minimize", "x"], "script is no option"),
        (["--option", "offload=1,2", "--minimize", "x"], "is a flag"),
        (["--arg", "lr=" + "1," * 1001, "--minimize", "x"], "combinations"),
        (["--arg", "lr=1,2", "--minimize", "x", "--", "--config", "run.toml"], "names no script"),
        (["--arg", "lr=1,2", "--minimize", "x", "--", "--name", "a", "train.py"], "--name stands behind --"),
        (
            ["--option", "workers=1,2", "--minimize", "x", "--", "-n", "3", "train.py"],
            "--workers is varied and",
        ),
    ],
)
def test_wrong_words_are_refused_and_nothing_starts(
    shoal: Shoal, tmp_path: Path, words: list[str], said: str
) -> None:
    result = shoal("sweep", *words, *([] if "--" in words else ["--", "train.py"]))
    assert result.exit_code != 0
    assert said in " ".join(str(result.output).split())
    assert not (tmp_path / "runs").exists()


def test_a_flag_is_given_or_not() -> None:
    (flag,) = _as_options([parse_dimension("offload=true,false", is_option=True)], ["train.py"])
    assert [flag.words(value) for value in flag.choices] == [["--offload"], []]
    (valued,) = _as_options([parse_dimension("workers=1,2", is_option=True)], ["--config", "run.toml"])
    assert valued.words("2") == ["--workers", "2"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_under_way(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "isatty", lambda fd: False)
    waiting = f"import os, signal; os.kill(os.getppid(), {number:d}); signal.pause()"
    with _Signals() as signals:
        assert signals.run([sys.executable, "-c", waiting]) == -signal.SIGTERM
    assert signals.exit_code == code


@pytest.mark.slow
def test_the_best_run_is_named_and_a_failed_one_does_not_end_the_sweep(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = command("sweep", "--arg", "lr=2,0.1", "--minimize", "loss", "--", "train.py")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "runs/sweep/sweep.json").read_text())
    assert found["best"] == 1
    assert [trial["exit"] == 0 for trial in found["trials"]] == [False, True]
    assert "best" in done.stdout
    again = command("sweep", "--arg", "lr=0.1", "--minimize", "loss", "--", "train.py")
    assert again.returncode != 0
    assert "another --name" in again.stderr
