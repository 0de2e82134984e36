"""Layers cut by tp: attention by torch's kernels with masks of every shape, and random draws, as in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = """
import json, torch, shoal
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as held

HEADS, DIM, LENGTH = 6, 24, 6

class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.kv_heads = kind, 3 if kind == "grouped" else HEADS
        self.q, self.o = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.k, self.v = (nn.Linear(DIM, DIM * self.kv_heads // HEADS) for _ in range(2))
        shape = {"bias by head": (HEADS, LENGTH, LENGTH), "bias": (LENGTH, LENGTH)}.get(kind)
        self.bias = nn.Parameter(torch.randn(shape) / 3) if shape else None
        self.register_buffer("slopes", -torch.arange(HEADS)[:, None, None] * torch.rand(LENGTH, LENGTH))

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, HEADS, DIM // HEADS).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, DIM // HEADS).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, DIM // HEADS).transpose(1, 2)
        mask = self.bias
        if self.kind == "by sample":
            mask = (x[:, :, 0] < 1)[:, None, None, :] | torch.eye(length, dtype=torch.bool)
        if self.kind == "by head":
            mask = self.slopes
        if self.kind == "held":
            out = held(q, k, v, attn_mask=causal_lower_right(LENGTH, LENGTH))
        else:
            options = {"is_causal": mask is None, "enable_gqa": self.kv_heads != HEADS}
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        return x + self.o(out.transpose(1, 2).reshape(batch, length, DIM))

KINDS = ("causal", "bias by head", "bias", "by sample", "by head", "grouped", "held")

class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 12), nn.Linear(12, DIM)

    def forward(self, x):
        y = F.dropout(self.up(x).tanh(), 0.2, self.training)
        if self.training:
            y = y * torch.rand_like(y) + 0.1 * torch.randn_like(y) + 0.1 * torch.empty_like(y).exponential_()
        y = y.clone()
        y[:, 1:] = x[:, :-1, :12] * 2  # torch would write into a copy where positions are in parts
        return x + self.down(y)

class Gate(nn.Module):
    # What is dropped here is a sum over features, of which each rank has a part.
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return x + self.c(b * F.dropout((a * b).sum(-1, keepdim=True), 0.4, self.training))

torch.manual_seed(0)
model = nn.Sequential(*(Attention(kind) for kind in KINDS), Draws(), Gate(), nn.Linear(DIM, 2)).double()
x = torch.randn(24, LENGTH, DIM, dtype=torch.float64)
data = shoal.Dataset.from_arrays((x, torch.randn(24, LENGTH, 2, dtype=torch.float64))).batch(8)
trainer = shoal.Trainer(model, loss=nn.MSELoss(), optimizer=torch.optim.Adam(model.parameters(), lr=0.01), seed=0)
trainer.fit(data, epochs=2)
predicted = trainer.predict(data)
print("result", json.dumps([trainer.evaluate(data)["loss"], float(predicted.sum()), float(predicted.square().sum())]))
"""


def trained(done: Any) -> list[float]:
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    line = next(line for line in done.stdout.splitlines() if "result" in line)
    return list(json.loads(line.partition("result ")[2]))


_alone: list[float] = []


@pytest.mark.parametrize(
    ("workers", "options"),
    [(2, {"checkpoint_activations": True}), (3, {"sequence_parallel": True, "checkpoint_activations": True})],
)
def test_layers_in_parts_attend_and_draw_as_in_one_process(
    launch_script: Callable[..., Any], workers: int, options: dict[str, Any]
) -> None:
    if not _alone:
        _alone.extend(trained(launch_script(SCRIPT)))
    cut = launch_script(SCRIPT, workers=workers, strategy="tp", **options)
    assert trained(cut) == pytest.approx(_alone, rel=1e-9)
    by_heads = [
        number for number in range(7) if f"  {number}.q     colwise       closed by {number}.o" in cut.stderr
    ]
    assert by_heads == ([0, 1, 2, 4, 6] if workers == 2 else [0, 1, 2, 4, 5, 6]), cut.stderr
