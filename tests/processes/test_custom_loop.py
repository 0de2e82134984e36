"""A loop of the user's own over several workers: the same weights, one decision to stop, numbers of its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file

from shoal.observe import runs

Launch = Callable[..., Launched]
AtFile = Callable[[Path, Callable[[], object]], None]

LOOPS = """
import json, pathlib, sys
import torch, shoal
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

OUT = pathlib.Path(sys.argv[1])
g = torch.Generator().manual_seed(1)
x = torch.randn(33, 6, dtype=torch.float64, generator=g)
label = torch.arange(33) * 5 % 4
data = shoal.Dataset.from_arrays((x, label)).shuffle(seed=2).batch(10)  # the last batch has 3 samples
results, facts = {}, {}

def mlp(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()

# Before anything else is set up.
facts["ranks"] = shoal.reduce(1.0) == shoal.num_workers()
facts["vector"] = shoal.reduce(torch.arange(3) * (shoal.rank() + 1)).tolist() == [
    i * sum(range(1, shoal.num_workers() + 1)) for i in range(3)]

# A masked loss: slices count differently, so their sums and counts are reduced.
model = mlp(3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, batches = shoal.setup(model, optimizer, data)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
seen = 0
for _ in range(2):
    for a, b in batches:
        optimizer.zero_grad()
        kept = b != 0
        loss = shoal.mean((F.cross_entropy(model(a), b, reduction="none") * kept).sum(), kept.sum())
        loss.backward()
        optimizer.step()
        scheduler.step()
        seen += batches.num_local
results |= {f"masked/{k}": v.clone() for k, v in model.state_dict().items()}
facts["seen"] = shoal.reduce(seen)
facts["rate"] = optimizer.param_groups[0]["lr"]

# Two models in turn on one batch, sparse rows among them; one parameter is never used.
class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.table, self.unused = nn.Embedding(4, 4, sparse=True), nn.Linear(2, 2)
    def forward(self, ids):
        return self.table(ids)

left, right = mlp(5), Rows().double()
one, two = torch.optim.SGD(left.parameters(), lr=0.1, momentum=0.9), torch.optim.Adagrad(right.parameters(), lr=0.1)
shoal.setup(left, one, data)
_, _, batches = shoal.setup(right, two, data)
for a, b in batches:
    one.zero_grad()
    F.mse_loss(left(a), right(b).detach()).backward()
    one.step()
    two.zero_grad()
    F.mse_loss(right(b), left(a).detach()).backward()
    two.step()
results |= {f"left/{k}": v.clone() for k, v in left.state_dict().items()}
results |= {f"right/{k}": v.clone() for k, v in right.state_dict().items()}

# Every worker draws its own numbers, the same again in the next run.
model = nn.Linear(2, 1)
_, _, batches = shoal.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Dataset.from_arrays(x).batch(10))
(OUT / f"drawn-{shoal.rank()}").write_text(json.dumps([float(torch.rand(())) for _ in batches]))

save_file({k: v.contiguous() for k, v in results.items()}, OUT / f"rank-{shoal.rank()}.safetensors")
(OUT / f"rank-{shoal.rank()}.json").write_text(json.dumps(facts))
"""


def results(folder: Path, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    return load_file(folder / f"rank-{rank}.safetensors"), json.loads(
        (folder / f"rank-{rank}.json").read_text()
    )


def test_loops_over_several_workers_end_with_the_weights_of_one_process(
    launch_script: Launch, tmp_path: Path
) -> None:
    for workers in (1, 2, 4):
        (tmp_path / str(workers)).mkdir()
        done = launch_script(LOOPS, workers=workers, args=(str(tmp_path / str(workers)),))
        assert done.exit_code == 0, done.error
        epochs = runs.read_ledger(done.run_dir, is_alive=False)["epochs"]
        # Two of the first loop, and one of the second; from the last data batches were taken and nothing was made of them.
        assert [(epoch["trained"], epoch["is_exact"]) for epoch in epochs] == [(33, True)] * 3
        assert len(epochs[0]["workers"]) == workers
    expected, facts = results(tmp_path / "1", 0)
    assert facts == {"ranks": True, "vector": True, "seen": 66.0, "rate": 0.01 * 0.5**2}
    for workers in (2, 4):
        first, _ = results(tmp_path / str(workers), 0)
        for rank in range(workers):
            weights, told = results(tmp_path / str(workers), rank)
            assert told == facts
            assert [name for name in first if not torch.equal(first[name], weights[name])] == []
        for name in expected:
            torch.testing.assert_close(first[name], expected[name], rtol=1e-12, atol=1e-12, msg=name)


def test_workers_draw_different_numbers_and_the_same_again(launch_script: Launch, tmp_path: Path) -> None:
    for attempt in ("a", "b"):
        (tmp_path / attempt).mkdir()
        assert launch_script(LOOPS, workers=2, args=(str(tmp_path / attempt),), seed=3).exit_code == 0
    drawn = [[(tmp_path / a / f"drawn-{rank}").read_text() for rank in range(2)] for a in ("a", "b")]
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_should_stop_turns_true_on_all_ranks_after_the_same_step(
    launch_script: Launch, at_file: AtFile, tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    at_file(tmp_path / "now", lambda: os.kill(os.getpid(), signum))
    done = launch_script(
        """
        import pathlib, torch, shoal
        model = torch.nn.Linear(2, 1)
        data = shoal.Dataset.from_arrays(torch.ones(64, 2)).batch(8)
        model, optimizer, data = shoal.setup(model, torch.optim.SGD(model.parameters(), lr=1e-6), data)
        step = 0
        while not shoal.should_stop():
            for x in data:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                step += 1
                if step == 3 and shoal.rank() == 1:
                    pathlib.Path("now").touch()
                if shoal.should_stop():
                    break
        pathlib.Path(f"stopped-{shoal.rank()}").write_text(str(step))
        """,
        workers=3,
    )
    assert done.exit_code == code
    assert len({(tmp_path / f"stopped-{rank}").read_text() for rank in range(3)}) == 1
    assert "nothing is saved, since the loop calls no shoal.checkpoint" in done.stderr
    assert "Nothing was asked to be saved" in str(done.error)
    assert "and saving" not in done.stderr


@pytest.mark.parametrize(
    ("left_out", "code"), [(3, 2), (7, 3)], ids=["seen at the next step", "the last: timed out"]
)
def test_a_loop_that_leaves_out_a_step_on_one_rank_is_not_waited_for_for_ever(
    launch_script: Launch, left_out: int, code: int
) -> None:
    done = launch_script(
        """
        import sys, torch, shoal
        model = torch.nn.Linear(2, 1)
        data = shoal.Dataset.from_arrays(torch.ones(64, 2)).batch(8)
        model, optimizer, data = shoal.setup(model, torch.optim.SGD(model.parameters(), lr=1e-6), data)
        for number, x in enumerate(data):
            optimizer.zero_grad()
            model(x).mean().backward()
            if (number, shoal.rank()) != (int(sys.argv[1]), 1):
                optimizer.step()
        """,
        workers=2,
        args=(str(left_out),),
        step_timeout_s=1.0,
        join_timeout_s=1.0,
    )
    assert done.exit_code == code
    assert ("a backward or a step was left out" in str(done.error)) == (code == 2)
    assert "Traceback" not in str(done.error)
