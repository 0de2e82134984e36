"""A job that stopped goes on, at any number of workers, and ends where the undisturbed one ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file

from shoal.cluster.launch.api import resume_config
from shoal.errors import Interrupted
from waiting import wait_until
from whole_matrix import matrix_only

Launch = Callable[..., Launched]
AtFile = Callable[[Path, Callable[[], object]], None]
Results = tuple[dict[str, torch.Tensor], dict[str, Any]]

SCRIPT = Path(__file__).parent / "scripts" / "resumed.py"


class Job:
    """Runs the script to its end, undisturbed; or until something, and on from there."""

    def __init__(self, launch: Launch, folder: Path, kind: str) -> None:
        self._launch, self._folder, self._kind = launch, folder, kind

    def run(self, name: str, *, workers: int, **files: int) -> Launched:
        out = self._folder / f"out-{name}"
        out.mkdir(exist_ok=True)
        for file, number in files.items():
            (self._folder / file.replace("_", "-")).write_text(str(number))
        done = self._launch(SCRIPT, workers=workers, name=name, args=(str(out), self._kind), quiet=True)
        for file in files:
            (self._folder / file.replace("_", "-")).unlink()
        return done

    def resume(self, name: str, *, workers: int | None = None, strategy: str | None = None) -> Launched:
        config = resume_config(self._folder / "runs" / name, workers=workers, strategy=strategy)
        return self._launch(
            Path(config.script),
            workers=config.workers,
            strategy=config.strategy,
            name=name,
            args=config.args,
            resume=True,
            seed=config.seed,
        )

    def results(self, name: str) -> Results:
        out = self._folder / f"out-{name}"
        return load_file(out / "weights"), json.loads((out / "report").read_text())


def assert_same_bits(one: Results, other: Results) -> None:
    assert [name for name in one[0] if not torch.equal(one[0][name], other[0][name])] == []
    assert one[1] == other[1]


@pytest.mark.parametrize(("workers", "stop"), [(1, 6), (3, 7), *matrix_only((3, 3))])
def test_at_the_same_number_of_workers_the_bits_are_those_of_an_undisturbed_job(
    launch_script: Launch, tmp_path: Path, workers: int, stop: int
) -> None:
    job = Job(launch_script, tmp_path, "random")
    assert job.run("whole", workers=workers).exit_code == 0
    assert job.run("cut", workers=workers, stop=stop).exit_code == 0
    resumed = job.resume("cut")
    assert resumed.exit_code == 0, resumed.stderr
    assert (
        f"going on from {tmp_path / f'runs/cut/checkpoints/step-{stop:09d}'}: step {stop}," in resumed.stderr
    )
    assert_same_bits(job.results("cut"), job.results("whole"))
    lines = [json.loads(line) for line in (resumed.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 17))
    assert json.loads((resumed.run_dir / "config.json").read_text())["resumed"] is True


@pytest.mark.parametrize(
    ("before", "after", "strategy", "stop"), [(2, 4, "ps", 6), (4, 1, None, 9), *matrix_only((3, 2, None, 3))]
)
def test_at_another_number_of_workers_it_ends_where_one_process_ends(
    launch_script: Launch, tmp_path: Path, before: int, after: int, strategy: str | None, stop: int
) -> None:
    job = Job(launch_script, tmp_path, "plain")
    assert job.run("one", workers=1).exit_code == 0
    assert job.run("cut", workers=before, stop=stop).exit_code == 0
    resumed = job.resume("cut", workers=after, strategy=strategy)
    assert resumed.exit_code == 0, resumed.stderr
    assert resumed.summary["workers"] == after
    (weights, report), (expected, whole) = job.results("cut"), job.results("one")
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-12, atol=1e-12, msg=name)
    for epochs, wanted in zip(report["histories"], whole["histories"], strict=True):
        assert len(epochs) == len(wanted)
        for epoch, logs in zip(epochs, wanted, strict=True):
            assert epoch == pytest.approx(logs, rel=1e-6), "the interrupted epoch's metrics included"
    same = ("step", "epoch", "learning rates", "without improvement")
    assert [report[key] for key in same] == [whole[key] for key in same]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_leave_it_finishes_the_step_saves_and_goes_on_to_the_same_bits(
    launch_script: Launch, at_file: AtFile, tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    job = Job(launch_script, tmp_path, "random")
    at_file(tmp_path / "now-1", lambda: os.kill(os.getpid(), signum))
    left = job.run("cut", workers=2, ask_at=5)
    assert isinstance(left.error, Interrupted)
    assert (left.exit_code, left.summary["exit"], left.error.signal_name) == (code, code, signum.name)
    saved = tmp_path / "runs/cut/checkpoints/step-000000006"
    assert (saved / "manifest.json").exists()
    assert str(left.error) == (
        f"stopped by {signum.name} after step 6; the newest checkpoint is {saved}. "
        "Go on with `shoal resume runs/cut`."
    )
    assert "Traceback" not in left.stderr
    assert not list(saved.parent.glob(".*")), "no temporary is left"
    if signum == signal.SIGTERM:
        return  # what comes after is the same
    assert job.resume("cut").exit_code == 0
    assert job.run("whole", workers=2).exit_code == 0
    assert_same_bits(job.results("cut"), job.results("whole"))


def test_ctrl_c_under_plain_python_is_the_same(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import pathlib, signal, time
import torch, shoal
from torch import nn

class Now(shoal.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        if logs.step == 2:
            caught = []
            before = signal.getsignal(signal.SIGINT)
            signal.signal(signal.SIGINT, lambda *args: (before(*args), caught.append(1)))
            pathlib.Path("now").touch()
            while not caught:
                time.sleep(0.005)

data = shoal.Dataset.from_arrays((torch.ones(40, 3), torch.ones(40, 1))).batch(8)
trainer = shoal.Trainer(nn.Linear(3, 1), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), callbacks=[Now()])
trainer.fit(data, epochs=2)
print("never")
"""
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert wait_until((tmp_path / "now").exists, 60.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    checkpoint = "runs/train/checkpoints/step-000000003"
    assert f"stopped by SIGINT after step 3; the newest checkpoint is {checkpoint}. Go on with fit(" in err
    assert (tmp_path / checkpoint / "manifest.json").exists()


@pytest.mark.parametrize("where", ["between calls", "in evaluate", "in predict"])
def test_asked_outside_of_a_fit_it_leaves_and_names_the_checkpoint_there_is(
    launch_script: Launch, at_file: AtFile, tmp_path: Path, where: str
) -> None:
    at_file(tmp_path / "now-1", lambda: os.kill(os.getpid(), signal.SIGINT))
    source = """
        import pathlib, time, torch, shoal
        from torch import nn
        from shoal.cluster.worker import session

        def wait(batch=None):
            pathlib.Path(f"now-{shoal.rank()}").touch()
            while session.stop_requested() is None:
                time.sleep(0.005)
            return batch

        data = shoal.Dataset.from_arrays((torch.ones(40, 3), torch.ones(40, 1))).batch(8)
        run = shoal.Trainer(nn.Linear(3, 1), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                            callbacks=[shoal.callbacks.ModelCheckpoint(every_steps=3)])
        run.fit(data)
        CALL
        pathlib.Path("survived").touch()
    """
    calls = {
        "between calls": "wait(); run.evaluate(data)",
        "in evaluate": "run.evaluate(data.map(wait))",
        "in predict": "run.predict(data.map(wait))",
    }
    done = launch_script(source.replace("CALL", calls[where]), workers=2)
    assert isinstance(done.error, Interrupted)
    assert done.exit_code == 130
    assert "after step 5; the newest checkpoint is" in str(done.error)
    assert "step-000000003. Go on with `shoal resume runs/script-1`." in str(done.error)
    assert "did not leave in time" not in str(done.error)
    assert not (tmp_path / "survived").exists()


TWO_FITS = Path(__file__).parent / "scripts" / "two_fits.py"


def _two_fits(
    launch: Launch, folder: Path, name: str, *, stop: int | None = None, kind: str = "files"
) -> Launched:
    out = folder / f"out-{name}"
    out.mkdir(exist_ok=True)
    if stop is not None:
        (folder / "stop").write_text(str(stop))
    done = launch(
        TWO_FITS, workers=2, name=name, args=(str(out), kind), resume=(folder / f"runs/{name}").exists()
    )
    (folder / "stop").unlink(missing_ok=True)
    return done


def test_calls_between_two_fits_have_the_results_that_they_had_before_the_stop(
    launch_script: Launch, tmp_path: Path
) -> None:
    assert _two_fits(launch_script, tmp_path, "whole").exit_code == 0
    assert _two_fits(launch_script, tmp_path, "cut", stop=4).exit_code == 0
    saved = tmp_path / "out-cut/between/model.safetensors"
    written = saved.read_bytes()
    resumed = _two_fits(launch_script, tmp_path, "cut")
    assert resumed.exit_code == 0, resumed.stderr
    whole, cut = (json.loads((tmp_path / f"out-{name}/report").read_text()) for name in ("whole", "cut"))
    assert cut == whole  # and not those of the weights that the script begins with
    assert saved.read_bytes() == written
    assert "what it wrote is left as it is" in resumed.stderr


def test_a_resumed_script_with_two_trainers_gives_neither_the_weights_of_the_other(
    launch_script: Launch, tmp_path: Path
) -> None:
    script = Path(__file__).parent / "scripts" / "two_trainers.py"
    for name, stop in (("whole", None), ("cut", 4), ("cut", None)):
        out = tmp_path / f"out-{name}"
        out.mkdir(exist_ok=True)
        (tmp_path / "stop").write_text(str(stop)) if stop else (tmp_path / "stop").unlink(missing_ok=True)
        resume = (tmp_path / f"runs/{name}").exists()
        done = launch_script(script, workers=2, name=name, args=(str(out),), resume=resume)
        assert done.exit_code == 0, done.stderr
    for fold in range(2):
        whole, cut = (
            load_file(tmp_path / f"out-{name}/fold-{fold}/model.safetensors") for name in ("whole", "cut")
        )
        assert all(torch.equal(whole[key], cut[key]) for key in whole), fold


def test_predictions_between_two_fits_that_were_not_kept_are_refused(
    launch_script: Launch, tmp_path: Path
) -> None:
    assert _two_fits(launch_script, tmp_path, "cut", stop=4, kind="gathered").exit_code == 0
    resumed = _two_fits(launch_script, tmp_path, "cut", kind="gathered")
    assert resumed.exit_code != 0
    assert "after fit 1 of the script, comes before the checkpoint" in str(resumed.error)
