"""A fit for --strategy mapreduce: OUT [KILL]. With KILL, a process that trains part 1 is killed once, in its last step."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import shoal
from shoal.config import job as jobs

out = Path(sys.argv[1])
num_losses = 0


class Loss(nn.MSELoss):
    """Kills its process, where it was asked to."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        global num_losses
        num_losses += 1
        task = jobs.current().task
        if (
            len(sys.argv) > 2
            and task is not None
            and jobs.current().rank == 1
            and not out.with_suffix(".hit").exists()
        ):
            out.with_suffix(".hit").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(output, target)


torch.manual_seed(0)
x = torch.randn(20, 4)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
trainer = shoal.Trainer(model, loss=Loss(), optimizer=lambda params: torch.optim.Adam(params, lr=0.05))
data = shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).batch(5)
history = trainer.fit(data, epochs=1)
measured = trainer.evaluate(data)
torch.save(
    {
        "weights": model.state_dict(),
        "loss": history["loss"],
        "evaluated": measured["loss"],
        "step": trainer.step,
        "workers": shoal.num_workers(),
    },
    out,
)
