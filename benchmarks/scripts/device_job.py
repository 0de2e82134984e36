"""Trains on whatever device it was given and says how fast, and with how much of the device's memory: KIND STEPS OUT."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch import Tensor, nn

import shoal
from benchmarks.on_device import Decoder

kind, steps, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]


class Clock(shoal.callbacks.Callback):
    """When each step was over, and how many samples of it were this worker's."""

    ranks = "every"

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step_end(self, trainer: shoal.Trainer, logs: object) -> None:
        self.at.append(time.monotonic())


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target.flatten())


generator = torch.Generator().manual_seed(0)
if kind == "gpt":
    text = torch.randint(0, 256, (256, 257), generator=generator)
    data = shoal.Dataset.from_arrays((text[:, :-1].contiguous(), text[:, 1:].contiguous())).batch(16)
    build = Decoder
else:
    x, y = torch.randn(16384, 784, generator=generator), torch.randint(0, 10, (16384,), generator=generator)
    data = shoal.Dataset.from_arrays((x, y)).batch(8192)

    def build() -> nn.Module:  # type: ignore[no-redef]
        """Much to compute and little to exchange: 0.9 M parameters over a batch of 8192."""
        return nn.Sequential(
            nn.Linear(784, 512),
            nn.GELU(),
            nn.Linear(512, 512),
            nn.GELU(),
            nn.Linear(512, 512),
            nn.Linear(512, 10),
        )


clock = Clock()
trainer = shoal.Trainer(
    build,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
    precision="bf16" if kind == "gpt" else "float32",
    callbacks=[clock],
    progress=False,
)
trainer.fit(data, max_steps=steps)
device = next(trainer.model.parameters()).device
later = sorted(b - a for a, b in zip(clock.at[steps // 4 :], clock.at[steps // 4 + 1 :], strict=False))
Path(f"{out}.{shoal.rank()}").write_text(
    json.dumps(
        {
            "device": str(device),
            "step_ms": round(1000 * later[len(later) // 2], 2),
            "peak_mib": round(torch.accelerator.max_memory_allocated() / 2**20)
            if torch.accelerator.is_available()
            else None,
        }
    )
)
