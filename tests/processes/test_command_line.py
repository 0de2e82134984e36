"""The command line as a user has it: a process of its own, from the first word to the exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Shoal = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shoal(tmp_path: Path) -> Shoal:
    """`shoal(*words)` in a folder of its own, where `train.py` is `script`."""

    def run(*words: str, script: str = "", num_files: int | None = None) -> subprocess.CompletedProcess[str]:
        if script:
            (tmp_path / "train.py").write_text(textwrap.dedent(script))
        command = [sys.executable, "-m", "shoal", *words]
        if num_files is not None:
            command = ["sh", "-c", f'ulimit -n {num_files}; exec "$@"', "sh", *command]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)

    return run


def test_a_failed_run_shows_its_traceback_once_and_resume_goes_on_with_other_workers(
    shoal: Shoal, tmp_path: Path
) -> None:
    script = """
        import pathlib, sys, torch, shoal
        from torch import nn

        class FailOnce(shoal.callbacks.Callback):
            ranks = "every"

            def on_step_end(self, trainer, *rest):
                if trainer.step == 12 and not pathlib.Path("failed").exists():
                    pathlib.Path("failed").touch()
                    raise RuntimeError("the power went out")

        print("trains on", shoal.num_workers(), sys.argv[1:])
        x, y = torch.randn(64, 4), torch.randn(64, 1)
        trainer = shoal.Trainer(
            nn.Linear(4, 1),
            loss=nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            callbacks=[shoal.callbacks.ModelCheckpoint(every_steps=5), FailOnce()],
        )
        trainer.fit(shoal.Dataset.from_arrays((x, y)).batch(16), max_steps=20)
        print("to step", trainer.step)
        sys.exit(7)
    """
    given = ("train.py", "--lr", "0.1", "-n", "5")
    first = shoal("run", "-n", "2", "--name", "click", *given, script=script)
    assert first.returncode == 1, first.stderr
    assert first.stdout == "trains on 2 ['--lr', '0.1', '-n', '5']\n"
    assert first.stderr.count("RuntimeError: the power went out") == 1
    assert "cli/" not in first.stderr
    assert "cluster/" not in first.stderr
    (run,) = json.loads(shoal("status", "--json").stdout)
    assert (run["name"], run["state"], run["strategy"], run["workers"]) == ("click", "failed", "ddp", 2)
    assert json.loads(shoal("status", "click", "--json").stdout)["checkpoint"].endswith("step-000000010")

    taken = shoal("run", "-n", "2", "--name", "click", "train.py", "--lr", "0.2")
    assert taken.returncode == 2
    assert "--again starts anew" in taken.stderr

    second = shoal("resume", "click", "-n", "3")
    assert second.returncode == 7, second.stderr
    assert second.stdout == "trains on 3 ['--lr', '0.1', '-n', '5']\nto step 20\n"
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "runs/click/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, 21))
    status = json.loads(shoal("status", "click", "--json").stdout)
    assert (status["state"], status["workers"], status["step"]) == ("failed", 3, 20)


def test_verify_is_a_process_with_an_exit_code(shoal: Shoal) -> None:
    script = """
        import torch, shoal
        from torch import nn

        data = shoal.Dataset.from_arrays((torch.randn(50, 4), torch.randn(50, 1)))
        trainer = shoal.Trainer(
            nn.Linear(4, 1), loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.01)
        )
        trainer.fit(data.batch(16), epochs=2)
    """
    done = shoal("verify", "train.py", "-n", "2", "--strategy", "ddp", "--steps", "5", script=script)
    assert done.returncode == 0, done.stderr
    assert "equal: ddp on 2 workers computes what one process does" in done.stdout


def test_the_number_of_open_files_that_is_asked_for_is_enough(shoal: Shoal) -> None:
    script = """
        import torch, shoal
        from torch import nn

        trainer = shoal.Trainer(
            nn.Linear(4, 1), loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.01)
        )
        trainer.fit(shoal.Dataset.from_arrays((torch.randn(64, 4), torch.randn(64, 1))).batch(16), max_steps=4)
        print("step", trainer.step)
    """
    launch = ["run", "-n", "2", "--servers", "2", "--strategy", "ps", "--step-timeout", "60", "train.py"]
    refused = shoal(*launch, script=script, num_files=126)
    assert refused.returncode == 2
    asked_for = re.search(r"ulimit\s+-n\s+(\d+)", refused.stderr)
    assert asked_for is not None, refused.stderr
    trained = shoal(*launch, num_files=int(asked_for[1]))
    assert (trained.returncode, trained.stdout) == (0, "step 4\n"), trained.stderr
