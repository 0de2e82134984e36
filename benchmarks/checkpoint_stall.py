"""Stall of training for a checkpoint of 1 GiB of state: written while it waits, and in the background.

One process, alternated in one fit: after some steps a checkpoint is saved the one
way, after as many again the other. `stall` is the time within the call that saves;
`stretch` is that and the steps until the next save, in which a thread may still be
writing. Aim: a stall of at most 0.2 s, or 2 % of the time.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.harness import Report, summarise
from shoal.callbacks import Callback

WIDTH = 2048
LAYERS = 21  # 16 MiB each; with Adam's state 1,008 MiB


class Saves(Callback):
    """Every `every` steps a checkpoint, in turn blocking and in the background."""

    ranks = "every"

    def __init__(self, every: int) -> None:
        self._every, self._began_at, self._is_background = every, 0.0, True
        self.stalls: dict[bool, list[float]] = {False: [], True: []}
        self.stretches: dict[bool, list[float]] = {False: [], True: []}
        self.step_s: list[float] = []
        self._last_at = time.perf_counter()

    def on_step_end(self, trainer: shoal.Trainer, logs: Any) -> None:
        now = time.perf_counter()
        self.step_s.append(now - self._last_at)
        if trainer.step % self._every == 0:
            trainer.checkpoints.wait()
            shutil.rmtree(trainer.run_dir / "checkpoints", ignore_errors=True)
            now = time.perf_counter()
            if self._began_at:
                self.stretches[self._is_background].append(now - self._began_at)
            self._is_background = not self._is_background
            self._began_at = now
            trainer.save_checkpoint(background=self._is_background)
            self.stalls[self._is_background].append(time.perf_counter() - now)
        self._last_at = time.perf_counter()


def main(quick: bool = False) -> None:
    report = Report("checkpoint_stall")
    every, rounds = (2, 1) if quick else (2, 3)
    saves = Saves(every)
    x = torch.zeros(16, WIDTH)
    trainer = shoal.Trainer(
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-5),
        callbacks=[saves],
        progress=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer.job = type(trainer.job)(name="stall", run_dir=Path(folder))
        batches = shoal.Dataset.from_arrays((x, x)).repeat().batch(16)
        # The first of each kind warms up.
        trainer.fit(batches, max_steps=every * (2 * rounds + 3))
    configuration = {"state_mib": 3 * 16 * LAYERS, "steps_between": every, "workers": 1}
    for name, times in (("stall", saves.stalls), ("stretch", saves.stretches)):
        pairs = list(zip(times[True][1 : rounds + 1], times[False][1 : rounds + 1], strict=True))
        report.add(
            f"{name}: in the background / while training waits",
            {**summarise(pairs), "step_s": round(statistics.median(saves.step_s), 4)},
            aim="stall <= 0.2 s or 2 % of the time" if name == "stall" else "",
            **configuration,
        )
    report.save()


if __name__ == "__main__":
    main()
