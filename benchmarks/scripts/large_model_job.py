"""Trains a model of NUM blocks for a few steps; each rank writes its peak memory to OUT.RANK: `large_model_job.py OUT NUM FORM STEPS`.

FORM "factory" gives the Trainer a function, "instance" a model that the script built whole, as every worker had to before.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shoal

WIDTH = 1024


class Block(nn.Module):
    """8 M parameters, 32 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def figures() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmHWM", "VmRSS"))}


def main(out: str, num_blocks: int, form: str, steps: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(num_blocks)))

    before, began_at = figures()["VmRSS"], time.monotonic()
    model = build() if form == "instance" else build
    trainer = shoal.Trainer(
        model, loss=nn.MSELoss(), optimizer=lambda params: torch.optim.Adam(params, lr=1e-5), snapshot_every=0
    )
    x = torch.zeros(16 * steps, WIDTH)
    batches = shoal.Dataset.from_arrays((x, x)).batch(16)
    trainer.evaluate(batches)
    started_s, at_start = time.monotonic() - began_at, figures()["VmHWM"]
    trainer.fit(batches, max_steps=steps)
    measured = {
        "peak_mib": figures()["VmHWM"] / 1024,
        "peak_at_start_mib": at_start / 1024,
        "before_mib": before / 1024,
        "start_s": started_s,
    }
    Path(f"{out}.{shoal.rank()}").write_text(json.dumps(measured))


main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
