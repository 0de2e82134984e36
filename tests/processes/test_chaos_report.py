"""`shoal chaos` on real processes: what it says was done, and that it notices a job that minds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

SCRIPT = """
import os, time
import torch, shoal
from torch import nn
torch.manual_seed(0)
x = torch.randn(512, 4)
data = shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True)))

class Slow(shoal.callbacks.Callback):
    ranks = "every"

    def on_step_end(self, trainer, *rest):
        time.sleep(0.02)

model = nn.Linear(4, 1)
{extra}
trainer = shoal.Trainer(
    model, loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.01), callbacks=[Slow()], seed=0
)
trainer.fit(data.shuffle(seed=0).batch(8), epochs=1)
"""


def test_it_tells_what_was_done_how_long_each_recovery_took_and_that_the_weights_are_equal(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(extra=""))
    words = ["chaos", "train.py", "-n", "2", "--seed", "11", "--rate", "800ms", "--for", "1500ms"]
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert re.search(r"^undisturbed: 64 steps in \d+\.\d s$", told, re.MULTILINE)
    faults = re.findall(r"^  run 1, +\d+\.\d s: (.+?): (.+)$", told, re.MULTILINE)
    assert any(what.startswith("kill ") for what, _ in faults), told
    assert any(re.fullmatch(r"recovered in \d+\.\d\d s", after) for _, after in faults), told
    assert re.search(r"^run 1: 64 steps in \d+\.\d s, weights equal to the bit$", told, re.MULTILINE)
    assert re.search(r"^\d+ recoveries: median \d+\.\d\d s, longest \d+\.\d\d s$", told, re.MULTILINE), told
    assert re.search(r"^goodput: \d+% of the undisturbed run's steps per second$", told, re.MULTILINE)
    assert told.rstrip().splitlines()[-1] == "equal"
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_job_that_computes_something_else_each_time_is_not_equal(
    invoke: Callable[..., Result], tmp_path: Path
) -> None:
    extra = "with torch.no_grad(): model.weight.fill_(time.time() % 1000)"
    (tmp_path / "train.py").write_text(SCRIPT.format(extra=extra))
    words = ("--seed", "7", "--rate", "10s", "--for", "1s")
    done = invoke("chaos", "train.py", "-n", "2", *words)
    told = done.stdout + done.stderr
    assert done.exit_code == 1, told
    assert re.search(r"run 1: .* tensors differ, first .*weight", told), told
    assert told.rstrip().splitlines()[-1] == "not equal: the faults changed what was computed"


@pytest.mark.parametrize(
    ("script", "words", "code", "expected"),
    [
        ("print(1)", (), 2, "it neither calls shoal nor forms a process group"),
        ("raise ValueError('mine')", (), 1, "ValueError: mine"),
        ("", ("--rate", "often"), 2, "--rate takes a time such as 15s"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_paragraph(
    invoke: Callable[..., Result],
    tmp_path: Path,
    script: str,
    words: tuple[str, ...],
    code: int,
    expected: str,
) -> None:
    (tmp_path / "train.py").write_text(script)
    done = invoke("chaos", "train.py", "-n", "2", *words)
    told = " ".join((done.stdout + done.stderr).split())
    assert (done.exit_code, expected in told) == (code, True), told
