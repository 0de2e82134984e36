"""The training job of both sides of a comparison: MODEL STEPS OUT [--live], where each step is told at once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plain_models import ClickModel, click_arrays, image_arrays, resnet18


class ByName(nn.Module):
    """Gives a sequential model's input a name, so that both sides call it alike."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, image: Tensor) -> Tensor:
        return self.body(image)


class Job:
    def __init__(self, argv: list[str]) -> None:
        self._kind, self.steps, self._out = argv[1], int(argv[2]), Path(argv[3])
        self.batch = {"click": 1024, "resnet": 32, "tiny": 32, "mlp": 256}[self._kind]
        self._times: list[float] = []
        self._is_live = argv[4:] == ["--live"]

    def model(self) -> nn.Module:
        if self._kind == "tiny":
            return ByName(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)))
        if self._kind == "mlp":  # 2.1 M parameters
            layers = [nn.Linear(784, 1100), nn.ReLU(), nn.Linear(1100, 1100), nn.ReLU(), nn.Linear(1100, 10)]
            return ByName(nn.Sequential(*layers))
        return ClickModel() if self._kind == "click" else ByName(resnet18())

    def loss(self) -> nn.Module:
        return nn.BCEWithLogitsLoss() if self._kind == "click" else nn.CrossEntropyLoss()

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self._kind == "click":
            return torch.optim.Adagrad(params, lr=0.02)
        return torch.optim.SGD(params, lr=0.01, momentum=0.9)

    def arrays(self) -> tuple[dict[str, Tensor], Tensor]:
        if self._kind == "click":
            dense, ids, label = click_arrays(50_000)
            return {"dense": dense, "ids": ids}, label
        if self._kind == "mlp":
            generator = torch.Generator().manual_seed(0)
            labels = torch.randint(0, 10, (4096,), generator=generator)
            return {"image": torch.randn(4096, 784, generator=generator)}, labels
        images, labels = image_arrays(256)
        return {"image": images}, labels

    def step_done(self, at: float) -> None:
        self._times.append(at)
        if self._is_live:
            with open(self._out, "a") as file:
                file.write(f"{at}\n")

    def write(self) -> None:
        """The moment of the first step, and the seconds of each later one."""
        steps: list[Any] = [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
        self._out.write_text(json.dumps({"first_step_at": self._times[0], "steps_s": steps}))
