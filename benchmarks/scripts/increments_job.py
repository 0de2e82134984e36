"""A table on servers of which each step changes a share; saved in turn whole and as changes. Arguments: file, rows, rounds."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.callbacks import Callback

OUT, NUM_ROWS, ROUNDS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
SHARE, FILL_STEPS = 100, 10  # a step trains each 100th row; the first ones train all


class Saves(Callback):
    """After every step both kinds, to directories of their own."""

    ranks = "every"

    def __init__(self) -> None:
        self.figures: dict[str, list[tuple[float, int]]] = {"whole": [], "changed": []}

    def on_step_end(self, trainer: shoal.Trainer, logs: Any) -> None:
        if trainer.step < FILL_STEPS:
            return
        kinds = list(self.figures)
        for kind in kinds if trainer.step % 2 else reversed(kinds):
            self.full_every = 1 if kind == "whole" else 1 << 30
            began = time.perf_counter()
            path = Path(trainer.save_checkpoint(str(OUT.parent / kind), background=True))
            stall_s = time.perf_counter() - began
            trainer.checkpoints.wait()
            if shoal.rank() == 0:
                num_bytes = sum(file.stat().st_size for file in path.iterdir())
                self.figures[kind].append((stall_s, num_bytes))
                if kind == "whole":
                    shutil.rmtree(path)


saves, per_step = Saves(), NUM_ROWS // SHARE
every = torch.arange(NUM_ROWS).split(NUM_ROWS // FILL_STEPS)
generator = torch.Generator().manual_seed(0)
some = [torch.randint(NUM_ROWS, (per_step,), generator=generator) for _ in range(ROUNDS + 1)]
ids = torch.nn.utils.rnn.pad_sequence([*every, *some], batch_first=True)  # the padding is id 0
trainer = shoal.Trainer(
    nn.Sequential(shoal.nn.HashEmbedding(16), nn.Flatten(), nn.AdaptiveAvgPool1d(8), nn.Linear(8, 1)),
    loss=nn.MSELoss(),
    optimizer=lambda params: torch.optim.Adagrad(params, lr=0.01),
    callbacks=[saves],
    progress=False,
)
trainer.fit(shoal.Dataset.from_arrays((ids, torch.zeros(len(ids), 1))).batch(1), epochs=1)
if shoal.rank() == 0:
    OUT.write_text(json.dumps(saves.figures))
