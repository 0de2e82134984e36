"""Ranks of a host divide the sum of sparse rows; one that dies while it adds leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal import Faults

SCRIPT = """
import os, pathlib, signal, sys
import torch, shoal
from torch import nn
from shoal.collectives import sparse_rows
from shoal.collectives.reducer import SharedParts
from shoal.collectives.sparse_rows import SharedRowExchange
from shoal.errors import WireError
from shoal.runtime.transport import memfd

moment, died, shared, sums = sys.argv[1], pathlib.Path("died"), [], sparse_rows._sum
finish = SharedRowExchange.finish

def add(lists, like, out):
    num_rows = sums(lists, like, out)
    if moment == "summed" and len(shared) == 4 and shoal.rank() == 2 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)  # rows are in memory that the others read, and nobody was told
    return num_rows

def finish_one(exchange):
    shared.append(exchange)
    rows = finish(exchange)
    if moment == "copied" and len(shared) == 4 and shoal.rank() == 2 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)  # the others may have updated their tables
    return rows

sparse_rows._sum, SharedRowExchange.finish = add, finish_one

def grow(memory, num_bytes):
    mapped = memfd.map_shared
    if moment == "unmapped" and shoal.rank() == 2:
        memfd.map_shared = lambda fd, num_bytes: fail()
    try:
        larger(memory, num_bytes)
    finally:
        memfd.map_shared = mapped
    assert bool(memory.num_bytes) == (moment != "unmapped"), "ranks disagree"

def fail():
    raise WireError("shared memory that cannot be mapped (Cannot allocate memory)")

larger, SharedParts.grow = SharedParts.grow, grow
sparse_rows._SHARED_FROM = 1 << 40 if moment == "by each" else 1
generator = torch.Generator().manual_seed(0)
ids = (torch.rand(4096, 16, generator=generator) ** 3 * 6000).long()
y = (ids.sum(1) % 5 < 2).float()
torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.last = nn.Embedding(6000, 4, sparse=True), nn.Linear(64, 1)
    def forward(self, ids):
        return self.last(self.rows(ids).flatten(1)).squeeze(1)

model = Model()
trainer = shoal.Trainer(model, loss=nn.BCEWithLogitsLoss(), optimizer=lambda p: torch.optim.Adagrad(p, lr=0.1), seed=0)
trainer.fit(shoal.Dataset.from_arrays((ids, y)).shuffle(seed=0).batch(1024), epochs=2)
assert moment in ("by each", "unmapped") or shared[-1]._memory.num_bytes, "the sum was not divided"
if shoal.rank() == 0:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()
    print("weights", flat.sum().item().hex(), (flat * torch.arange(len(flat))).sum().item().hex())
"""


def weights(done: Any) -> str:
    assert done.exit_code == 0, done.error
    [line] = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    return str(line)


@pytest.fixture(scope="module")
def known() -> list[str]:
    return []


@pytest.mark.parametrize("moment", ["by each", "summed", "copied", "mapped", "unmapped"])
def test_a_divided_sum_has_the_bits_of_a_sum_by_each_rank_and_a_death_in_it_leaves_no_trace(
    launch_script: Callable[..., Any], known: list[str], moment: str
) -> None:
    if not known:
        known.append(weights(launch_script(SCRIPT, workers=4, args=("none",))))
    faults = Faults().kill("worker-2", at="worker: larger memory mapped") if moment == "mapped" else None
    done = launch_script(SCRIPT, workers=4, args=(moment,), faults=faults)
    assert weights(done) == known[0]
    assert done.summary["restarts"] == (moment in ("summed", "copied", "mapped"))
