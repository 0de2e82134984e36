"""Layers cut over the workers: the result of one process, also together with shards and replicas."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from shoal.cluster.faults import Faults

SCRIPT = """
import json, torch, shoal
import torch.nn.functional as F
from torch import nn
from shoal.strategies import fsdp_cut, tensor_plan
from shoal.train import snapshots

fsdp_cut.UNIT_BYTES = tensor_plan.ALONE_BYTES = 100
snapshots.EVERY_STEPS = 3

class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).bool())
    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = (f(x).view(batch, length, self.heads, dim // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1) / 2.0).masked_fill(~self.mask[:length, :length], float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, dim))

class Block(nn.Module):
    def __init__(self, dim=12, heads=4 if HEADS else 12):
        super().__init__()
        self.norm, self.attention, self.norm2 = nn.LayerNorm(dim), Attention(dim, heads), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 24), nn.GELU(), nn.Linear(24, dim))
    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(12, 12), nn.Sequential(Block(), Block()), nn.Linear(12, 12)
    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids))).transpose(1, 2)

ids = torch.randint(0, 12, (41, 7), generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = Net().double()
trainer = shoal.Trainer(
    model, loss=nn.CrossEntropyLoss(), optimizer=lambda params: torch.optim.AdamW(params, lr=0.02), seed=0, clip_norm=0.5,
)
data = shoal.Dataset.from_arrays((ids[:, :-1], ids[:, 1:]))
trainer.fit(data.shuffle(seed=0).batch(8), epochs=2)
result = trainer.evaluate(data.batch(16))
predicted = trainer.predict(data.batch(16))
if shoal.rank() == 0:
    print("result", json.dumps([result["loss"].hex(), float(predicted.abs().sum()).hex()]))
"""


def result(done: Any) -> list[float]:
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    [line] = [line for line in done.stdout.splitlines() if line.startswith("result")]
    return [float.fromhex(each) for each in json.loads(line.removeprefix("result "))]


def script(heads: int) -> str:
    return SCRIPT.replace("HEADS", str(heads))


@pytest.mark.parametrize(
    ("strategy", "workers", "heads"),
    [("tp", 2, 4), ("tp", 3, 0), ("tp", 4, 4), ("fsdp=2,tp=2", 4, 4), ("dp=2,tp=2", 4, 4)],
)
def test_cut_layers_compute_what_whole_ones_do(
    launch_script: Callable[..., Any], strategy: str, workers: int, heads: int
) -> None:
    alone = result(launch_script(script(heads)))
    done = launch_script(script(heads), workers=workers, strategy=strategy)
    assert result(done) == pytest.approx(alone, rel=1e-9)
    assert "blocks.0.attention.q" in done.stderr
    assert "colwise" in done.stderr


def test_a_killed_rank_takes_all_back_and_the_bits_are_equal(launch_script: Callable[..., Any]) -> None:
    undisturbed = result(launch_script(script(4), workers=2, strategy="tp"))
    killed = launch_script(
        script(4),
        workers=2,
        strategy="tp",
        faults=Faults().kill("worker-1", at_step=5, at="worker: before commit"),
    )
    assert result(killed) == undisturbed
    assert killed.summary["restarts"] == 1


def test_a_model_that_cannot_be_cut_is_refused_by_layer(launch_script: Callable[..., Any]) -> None:
    done = launch_script(
        """
        import torch, shoal
        from torch import nn
        trainer = shoal.Trainer(nn.Linear(5, 5), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        trainer.fit(shoal.Dataset.from_arrays((torch.zeros(8, 5), torch.zeros(8, 5))).batch(4), epochs=1)
        """,
        workers=2,
        strategy="tp",
    )
    assert done.exit_code
    assert "no layer of this model can be cut over 2 ranks" in str(done.error)
    assert "its 5 outputs cannot be divided by 2" in str(done.error)
