"""Memory of a worker for a model of 30 M parameters with Adam, over what it had before: OUT STEPS."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch import nn

import shoal
from benchmarks.scripts import mesh_job


def memory_kb(file: str, field: str) -> int:
    """A figure of this process's, as the kernel has it."""
    for line in Path(f"/proc/self/{file}").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise SystemExit(f"no {field} in /proc/self/{file}")


class Look(shoal.callbacks.Callback):
    """What it holds when a step is done."""

    ranks = "every"

    def __init__(self) -> None:
        self.pss_kb = 0

    def on_step_end(self, trainer: shoal.Trainer, logs: object) -> None:
        self.pss_kb = max(self.pss_kb, memory_kb("smaps_rollup", "Pss"))


x, y = mesh_job.arrays()
torch.nn.functional.linear(x, torch.zeros(8, 64)).sum().item()  # what a first call loads
pss_before = memory_kb("smaps_rollup", "Pss")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
rss_before = memory_kb("status", "VmRSS")
look = Look()
model = mesh_job.model(width=960)
num_weights = sum(parameter.numel() for parameter in model.parameters())
trainer = shoal.Trainer(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-4),
    callbacks=[look],
    device="cpu",
    progress=False,
)
trainer.fit(shoal.Dataset.from_arrays((x, y)).batch(mesh_job.BATCH), max_steps=int(sys.argv[2]))
Path(f"{sys.argv[1]}.{shoal.rank()}").write_text(
    json.dumps(
        {
            "held_mb": (look.pss_kb - pss_before) / 1024,
            "peak_mb": (memory_kb("status", "VmHWM") - rss_before) / 1024,
            "weights_mb": num_weights * 4 / 2**20,
        }
    )
)
