"""Callbacks, metrics and checkpoints over several workers: who runs what, and that all of them agree."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from launched import Launched

from shoal import Faults
from shoal.train.checkpoint.checkpoint import list_checkpoints, open_checkpoint

SCRIPT = """
import json, pathlib, sys, torch, shoal
from torch import nn
from shoal.callbacks import Callback, CSVLog, EarlyStopping, JSONLog, LearningRateMonitor, ModelCheckpoint

class Note(Callback):
    def __init__(self, ranks):
        self.__class__ = type("Note", (Note,), {"ranks": ranks})
    def on_epoch_end(self, trainer, logs):
        pathlib.Path(f"heard-{self.ranks}-{shoal.rank()}").touch()

class Worse(Callback):
    ranks = "every"
    def on_epoch_end(self, trainer, logs):
        logs["val_loss"] = abs(trainer.epoch - 2) + 0.5   # the second epoch is the best

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(50, 3, generator=generator)
data = shoal.Dataset.from_arrays((inputs, (inputs.sum(1) > 0).float()))
torch.manual_seed(0)
trainer = shoal.Trainer(
    nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)),
    loss=nn.BCEWithLogitsLoss(),
    optimizer=lambda params: torch.optim.Adam(params, lr=0.1),
    metrics=["accuracy", "auroc"],
    callbacks=[
        ModelCheckpoint(every_steps=2, every_s=1e-9, best="val_loss", keep_last=2, directory="saved"),
        Note("zero"), Note("every"), Worse(), CSVLog(), JSONLog(), LearningRateMonitor(),
        EarlyStopping(patience=2, restore_best=True),
    ],
)
history = trainer.fit(data.shuffle(seed=0).batch(16), epochs=9, validation_data=data.batch(50), **json.loads(sys.argv[1]))
results = trainer.evaluate(data.batch(7))
pathlib.Path(f"result-{shoal.rank()}").write_text(json.dumps([history.epochs, results, trainer.step]))
"""

STEPS_PER_EPOCH = 4


def run(launch_script: Callable[..., Launched], workers: int, **options: object) -> Launched:
    launched = launch_script(SCRIPT, workers=workers, args=[json.dumps(options)])
    assert launched.exit_code == 0, launched.stderr
    return launched


def test_every_rank_comes_to_the_same_numbers_and_decisions(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = run(launch_script, workers=3)
    results = [json.loads((tmp_path / f"result-{rank}").read_text()) for rank in range(3)]
    assert results[0] == results[1] == results[2]
    epochs, _, step = results[0]
    assert (len(epochs), step) == (4, 4 * STEPS_PER_EPOCH)  # the best, and two without

    heard = sorted(path.name for path in tmp_path.glob("heard-*"))
    assert heard == ["heard-every-0", "heard-every-1", "heard-every-2", "heard-zero-0"]

    run_dir = Path(launched.run_dir)
    with (run_dir / "log.csv").open(newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [4, 8, 12, 16]
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, 17))
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {line["lr"] for line in steps} == {0.1}


def test_many_workers_measure_what_one_process_does(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    found = []
    for workers in (1, 2):
        run(launch_script, workers=workers)
        epochs, results, _ = json.loads((tmp_path / "result-0").read_text())
        found.append([*epochs, results])
    for one, many in zip(*found, strict=True):
        assert many == pytest.approx(one, rel=1e-5)


def test_a_run_goes_on_at_another_number_of_workers(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    run(launch_script, workers=1)
    straight = json.loads((tmp_path / "result-0").read_text())
    for path in tmp_path.glob("saved/*"):
        path.rename(tmp_path / f"old-{path.name}")

    run(launch_script, workers=2, max_steps=6)  # in the middle of the second epoch
    saved = list_checkpoints(tmp_path / "saved")[-1]
    assert saved.endswith("step-000000006")
    assert "optimizer/0.weight/exp_avg" in open_checkpoint(saved).pieces
    run(launch_script, workers=3, resume=saved)
    resumed = json.loads((tmp_path / "result-2").read_text())
    assert resumed[2] == straight[2]
    assert resumed[1] == pytest.approx(straight[1], rel=1e-4)
    assert resumed[0][-1] == pytest.approx(straight[0][-1], rel=1e-4)


LONG_RUN = """
import time, torch, shoal
from shoal.callbacks import Callback, ModelCheckpoint

class Slow(Callback):
    def on_step_end(self, trainer, logs):
        time.sleep(0.1)

x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
trainer = shoal.Trainer(
    torch.nn.Linear(4, 1),
    loss="mse",
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    callbacks=[ModelCheckpoint(every_steps=1, keep_last=1, keep_every_hours=1 / 3600, directory="saved"), Slow()],
)
trainer.fit(shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).batch(8), epochs=1)
"""


def test_of_a_long_run_a_checkpoint_stays_for_every_so_many_hours(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    """An hour is a second here; rank 0, which removes the others, dies in the middle of it."""
    done = launch_script(LONG_RUN, workers=2, faults=Faults().kill("worker-0", at_step=25))
    assert done.exit_code == 0, done.error
    kept = [Path(path) for path in list_checkpoints(tmp_path / "saved")]
    assert kept[0].name == "step-000000001"
    assert kept[-1].name == "step-000000050"
    *written, _last = [(path / "manifest.json").stat().st_mtime for path in kept]
    apart = [later - earlier for earlier, later in pairwise(written)]
    assert len(apart) >= 3  # 50 steps of a tenth of a second and more
    assert all(each >= 1.0 for each in apart), apart
    assert min(apart) < 2.5, apart  # and none was removed that should have stayed
    open_checkpoint(kept[1])
