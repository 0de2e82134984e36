"""Layers cut over the workers: the result of one process, dropout included, also together with shards and replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.config.faults import Faults
from whole_matrix import matrix_only

SCRIPT = """
import json, torch, shoal
import torch.nn.functional as F
from torch import nn
from shoal.parallel import fsdp as fsdp_cut; from shoal.parallel.tensor_parallel import plan as tensor_plan
from shoal.train.checkpoint import saving

fsdp_cut.UNIT_BYTES = tensor_plan.ALONE_BYTES = 100
saving.EVERY_STEPS = 2

class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.warmth = heads, nn.Parameter(torch.ones(1))
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).bool())
    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = (f(x).view(batch, length, self.heads, dim // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1) / 2.0 * self.warmth).masked_fill(~self.mask[:length, :length], float("-inf"))
        return self.o((F.dropout(scores.softmax(-1), DROPOUT, self.training) @ v).transpose(1, 2).reshape(batch, length, dim))

class Block(nn.Module):
    def __init__(self, dim=12, heads=12):
        super().__init__()
        self.norm, self.attention, self.norm2 = nn.LayerNorm(dim), Attention(dim, heads), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 24), nn.GELU(), nn.Dropout(DROPOUT), nn.Linear(24, dim), nn.Dropout(DROPOUT))
    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))

def along(x):  # what torch computes wrongly on parts of a sequence, or forgets
    shifted = x.clone()
    shifted[:, 1:] = x[:, :-1]
    held = torch.zeros(x.shape, dtype=x.dtype)
    for place in range(x.shape[1]):
        held[:, place] = 0.5 * held[:, place - 1] + x[:, place]
    near = F.conv1d(x.transpose(1, 2), torch.ones(12, 12, 3, dtype=x.dtype) / 36, padding=1).transpose(1, 2)
    sums = x.cumsum(-2) + x.softmax(-2) + x - x.logsumexp(-2, keepdim=True)
    turned = x.flip(-2) + x.roll(1, -2) + x.sort(-2).values + x.index_select(-2, torch.arange(5, -1, -1)) + x.topk(1, -2).values
    told = x.select(-2, 1).mean(-1)[:, None, None]
    if DROPOUT:  # a batch that is not cut
        told = told + F.mse_loss(x, shifted) + F.smooth_l1_loss(x, turned) + x.amax() + x.detach().sum().item()
    return x + 0.01 * (shifted + held + near + sums + turned + told)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.norm = nn.Embedding(12, 12, padding_idx=0), nn.Sequential(Block(), Block()), nn.LayerNorm(12)
        self.places, self.head = nn.Parameter(torch.randn(6, 12) / 10), nn.Linear(12, 12, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, ids):
        return self.head(self.norm(along(self.blocks(self.embed(ids) + self.places)))).transpose(1, 2)

ids = torch.randint(0, 12, (18, 7), generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = Net().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)  # built before anything is cut
trainer = shoal.Trainer(
    model, loss=nn.CrossEntropyLoss(), optimizer=optimizer, seed=0, clip_norm=0.5, accumulate=2,
)
data = shoal.Dataset.from_arrays((ids[:, :-1], ids[:, 1:]))
trainer.fit(data.shuffle(seed=0).batch(8), epochs=1)
result = trainer.evaluate(data.batch(16))
predicted = trainer.predict(data.batch(16))
if shoal.rank() == 0:
    print("result", json.dumps([result["loss"].hex(), float(predicted.abs().sum()).hex()]))
"""


SEQUENCE = {"sequence_parallel": True}
_results: dict[str, list[float]] = {}


def run(
    launch_script: Callable[..., Any], strategy: str, workers: int, *, dropout: float, **options: Any
) -> Any:
    """Launches once, and caches the result for the tests that compare with it."""
    done = launch_script(
        SCRIPT.replace("DROPOUT", str(dropout)), workers=workers, strategy=strategy, **options
    )
    if "faults" not in options:
        _results[f"{strategy} {workers} {dropout}"] = done.printed()
    return done


def known(
    launch_script: Callable[..., Any], strategy: str, workers: int, *, dropout: float, **options: Any
) -> list[float]:
    if f"{strategy} {workers} {dropout}" not in _results:
        run(launch_script, strategy, workers, dropout=dropout, **options)
    return _results[f"{strategy} {workers} {dropout}"]


@pytest.mark.parametrize(
    ("strategy", "workers", "dropout", "options"),
    [
        ("tp", 3, 0.1, SEQUENCE),
        ("tp", 4, 0.1, SEQUENCE | {"checkpoint_activations": True}),
        ("fsdp=2,tp=2", 4, 0.0, SEQUENCE),
        *matrix_only(("tp", 2, 0.1, {}), ("dp=2,tp=2", 4, 0.0, {})),
    ],
)
def test_cut_layers_compute_what_whole_ones_do(
    launch_script: Callable[..., Any], strategy: str, workers: int, dropout: float, options: dict[str, Any]
) -> None:
    alone = known(launch_script, "single", 1, dropout=dropout)
    done = run(launch_script, strategy, workers, dropout=dropout, **options)
    assert done.printed() == pytest.approx(alone, rel=1e-9)
    table = done.stderr
    for layer in ("blocks.0.attention.q", "colwise", "rowwise       its weight is also that of head"):
        assert layer in table
    assert ("blocks.1.norm2        sequence" in table) == ("sequence_parallel" in options)
    assert ("a sequence of 6 cannot be divided by 4" in table) == (workers == 4 and strategy == "tp")


def test_a_killed_rank_takes_all_back_and_the_bits_are_equal(launch_script: Callable[..., Any]) -> None:
    undisturbed = known(launch_script, "tp", 3, dropout=0.1, **SEQUENCE)
    faults = Faults().kill("worker-1", at_step=3, at="worker: before commit")
    killed = run(launch_script, "tp", 3, dropout=0.1, faults=faults, **SEQUENCE)
    assert killed.printed() == undisturbed
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


ATTENTIONS = """
import json, sys, torch, shoal
from torch import nn
from shoal.parallel import fsdp as fsdp_cut

fsdp_cut.UNIT_BYTES = 100
dropout, epochs, resume = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]

class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(24, 72), nn.Linear(24, 24), nn.Dropout(dropout)
    def forward(self, x, mask=None, need_weights=True):
        q, k, v = (each.unflatten(-1, (12, 2)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        scores = (q @ k.transpose(-2, -1)).masked_fill(mask[:, None, None, :], float("-inf"))
        weights = self.drop(scores.softmax(-1))
        out = self.out((weights @ v).transpose(1, 2).flatten(-2))
        return (out, weights) if need_weights else out

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.packed, self.head = nn.Embedding(20, 24), Packed(), nn.Linear(24, 20)
        layer = nn.TransformerEncoderLayer(24, 12, 24, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.cross = nn.MultiheadAttention(24, 12, kdim=24, vdim=12, dropout=dropout)
        self.values = nn.Linear(24, 12)
    def forward(self, ids, padding):
        x, seen = self.packed(self.embed(ids), padding)
        memory = self.encoder(x, src_key_padding_mask=padding)
        causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=x.dtype)
        size = ids.shape[0] * 12
        each = causal.expand(size, 6, 6) + 0.1 * (torch.arange(size)[:, None, None] % 12)
        keys = memory.transpose(0, 1)
        y, weights = self.cross(x.transpose(0, 1), keys, self.values(keys), attn_mask=each, average_attn_weights=False)
        told = (weights * seen).sum((1, 3))[..., None]
        return self.head(y.transpose(0, 1) + memory + told).transpose(1, 2)

generator = torch.Generator().manual_seed(0)
ids = torch.randint(0, 20, (12, 6), generator=generator)
padding = torch.arange(6) >= torch.randint(3, 7, (12, 1), generator=generator)
torch.manual_seed(0)
trainer = shoal.Trainer(
    Net().double(), loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-4), seed=0
)
data = shoal.Dataset.from_arrays(({"ids": ids, "padding": padding}, ids.roll(1, 1)))
trainer.fit(data.shuffle(seed=0).batch(8), epochs=epochs, resume=resume[0] if resume else None)
result = trainer.evaluate(data.batch(8))
predicted = trainer.predict(data.batch(8))
trainer.save_checkpoint(f"after-{epochs}")
if shoal.rank() == 0:
    print("result", json.dumps([result["loss"].hex(), float(predicted.abs().sum()).hex()]))
"""


def attend(launch_script: Callable[..., Any], strategy: str, workers: int, *args: str, **options: Any) -> Any:
    return launch_script(ATTENTIONS, workers=workers, strategy=strategy, args=list(args), **options)


def test_attentions_cut_by_heads_draw_what_one_process_does(launch_script: Callable[..., Any]) -> None:
    alone = attend(launch_script, "single", 1, "0.1", "1").printed()
    cut = attend(launch_script, "tp", 4, "0.1", "1", **SEQUENCE)
    assert cut.printed() == pytest.approx(alone, rel=1e-9)
    for row in ("heads         3 of its 12 heads on each rank", "closed by packed.out, in 3 blocks"):
        assert row in cut.stderr


def test_checkpoints_of_attentions_by_heads_are_those_of_one_process(
    launch_script: Callable[..., Any], tmp_path: Path
) -> None:
    alone = attend(launch_script, "single", 1, "0.0", "3").printed()
    attend(launch_script, "tp", 3, "0.0", "1").printed()
    [first] = (tmp_path / "after-1").iterdir()
    attend(launch_script, "fsdp=2,tp=2", 4, "0.0", "2", str(first)).printed()
    [second] = (tmp_path / "after-2").iterdir()
    done = attend(launch_script, "single", 1, "0.0", "3", str(second))
    assert done.printed() == pytest.approx(alone, rel=1e-9)
