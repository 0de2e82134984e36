"""ps:async and ps:ssp=K: every sample of an epoch once, under deaths too; ends that all agree on; workers know no workers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import Launched

from shoal import Faults
from shoal.observe import runs
from whole_matrix import matrix_only

SCRIPT = Path(__file__).parent / "scripts" / "ps_counting.py"
NUM_STEPS = 60  # of an epoch
Launch = Callable[..., Launched]
Counted = Callable[..., dict[str, Any]]


@pytest.fixture
def counted(launch_script: Launch, tmp_path: Path) -> Counted:
    """Run the counting script; what all ranks say of it."""

    def counted(what: str, *, workers: int, source: str | Path = SCRIPT, **options: Any) -> dict[str, Any]:
        launched = launch_script(
            source, workers=workers, args=(str(tmp_path), what), quiet=True, step_timeout_s=20.0, **options
        )
        assert launched.exit_code == 0, f"{launched.error}\n{launched.stderr}"
        # Segments of 16 MiB to each server, one or two of them; what is told is what was reserved, over all workers.
        reserved = launched.summary["exchange_bytes"]
        assert 0 < reserved <= workers * options["servers"] * (64 << 20)
        ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(workers)]
        for rank in ranks:
            del rank["samples"]
        assert all(rank == ranks[0] for rank in ranks), [rank["steps"] for rank in ranks]
        return dict(ranks[0])

    return counted


@pytest.mark.parametrize(
    ("strategy", "workers", "servers", "faults"),
    [
        ("ps:async", 3, 2, None),
        *matrix_only(("ps:async", 3, 2, Faults().kill("worker-1", at_step=30))),
        ("ps:async", 2, 2, Faults().kill("coordinator", at_step=20).kill("worker-1", at_step=90)),
        ("ps:ssp=2", 3, 1, Faults().kill("worker-0", at_step=30, at="worker: committed, not counted")),
        ("ps:ssp=2", 2, 2, Faults().kill("server-1", at_step=30)),
        ("ps:ssp=0", 2, 1, None),
    ],
)
def test_every_sample_of_every_epoch_is_trained_on_once(
    counted: Counted, strategy: str, workers: int, servers: int, faults: Faults | None
) -> None:
    told = counted("epochs", strategy=strategy, workers=workers, servers=servers, faults=faults)
    assert Counter(told["times"]) == {3.0: 8 * NUM_STEPS}
    assert (told["steps"], told["epoch"], told["bias"]) == ([NUM_STEPS, 3 * NUM_STEPS], 3, 24.0 * NUM_STEPS)


def test_fewer_batches_than_workers_leave_nobody_behind(counted: Counted) -> None:
    source = SCRIPT.read_text().replace("8 * 60", "8 * 2")
    told = counted("epochs", source=source, strategy="ps:async", workers=4, servers=1)
    assert told["times"] == [3.0] * 16
    assert told["steps"] == [2, 6]


@pytest.mark.parametrize(
    ("strategy", "what", "servers"), [("ps:async", "late stop", 1), ("ps:ssp=1", "stop", 2)]
)
def test_a_stop_ends_one_fit_and_not_the_next(
    counted: Counted, strategy: str, what: str, servers: int
) -> None:
    told = counted(what, strategy=strategy, workers=3, servers=servers)
    first, last = told["steps"]
    assert first < NUM_STEPS or what == "late stop"
    assert min(told["times"]) >= 2
    assert last - first > NUM_STEPS
    # Stopped at its very end, the epoch may be whole, and two more came; else the second is the one begun anew.
    assert told["epoch"] in ((3, 2) if what == "late stop" else (2,))


def test_early_stopping_ends_where_it_does_in_one_process(counted: Counted) -> None:
    told = counted("early", strategy="ps:async", workers=2, servers=1)
    assert told["steps"] == [2 * NUM_STEPS, 3 * NUM_STEPS]
    assert Counter(told["times"]) == {3.0: 8 * NUM_STEPS}


def test_max_steps_is_passed_by_less_than_the_number_of_workers(counted: Counted) -> None:
    told = counted("steps", strategy="ps:ssp=1", workers=3, servers=1)
    first, last = told["steps"]
    assert 25 <= first < 28
    assert first + 80 <= last < first + 83
    assert min(told["times"]) >= 1  # 80 steps are more than an epoch


CLICKS = """
import json, pathlib, sys, torch, shoal
from torch import nn
from shoal.data import generated

class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(500, 8)
        nn.init.normal_(self.rows.weight, std=0.05)
        self.layers = nn.Sequential(nn.Linear(13 + 26 * 8, 32), nn.ReLU(), nn.Linear(32, 1))
    def forward(self, dense, ids):
        return self.layers(torch.cat([dense.log1p(), self.rows(ids).flatten(1)], dim=1)).squeeze(1)

torch.manual_seed(0)
train, test = generated.clicks(16_000, num_ids=500).split(0.75, 0.25, seed=0)
trainer = shoal.Trainer(Clicks(), loss=nn.BCEWithLogitsLoss(), metrics=["auroc"], seed=0,
                        optimizer=lambda params: torch.optim.Adagrad(params, lr=0.05))
trainer.fit(train.shuffle(seed=0).batch(128), epochs=2)
measured = trainer.evaluate(test.batch(1000))
pathlib.Path(f"{sys.argv[1]}-{shoal.rank()}").write_text(json.dumps(measured))
"""


def test_relaxed_modes_learn_about_as_well_as_exact_ones(launch_script: Launch, tmp_path: Path) -> None:
    auc = {}
    for name, strategy in (("exact", "ps"), ("async", "ps:async"), ("ssp", "ps:ssp=2")):
        done = launch_script(CLICKS, workers=2, strategy=strategy, args=(name,), quiet=True)
        assert done.exit_code == 0, done.error
        told = [json.loads((tmp_path / f"{name}-{rank}").read_text()) for rank in range(2)]
        assert told[0] == told[1]
        auc[name] = told[0]["auroc"]
    assert auc["exact"] > 0.65
    assert abs(auc["async"] - auc["exact"]) < 0.01
    assert abs(auc["ssp"] - auc["exact"]) < 0.01


WATCHED = """
import os, pathlib, sys, time, torch, shoal
from shoal.callbacks import Callback

class Looks(Callback):
    ranks = "every"
    def on_step_end(self, trainer, logs):
        mine = pathlib.Path(f"pid-{shoal.rank()}")
        if not mine.exists():
            mine.write_text(str(os.getpid()))
        if logs.step >= 10 and shoal.rank() == 0 and not pathlib.Path("now").exists():
            pathlib.Path("now").touch()
        while pathlib.Path("now").exists() and not pathlib.Path("seen").exists():
            time.sleep(0.01)

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
trainer = shoal.Trainer(model, loss=torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
                        callbacks=[Looks()], seed=0)
trainer.fit(shoal.Dataset.from_arrays((torch.ones(960, 4), torch.ones(960, 1))).batch(8), epochs=1)
"""


def connections(pid: int) -> tuple[set[str], list[str]]:
    """Inodes of the unix sockets that a process has, and whatever internet sockets."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    inet = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        inet += [line for line in lines if line.split()[9] in inodes]
    return inodes, inet


def unix_peers() -> dict[str, str]:
    """Inode of a connected unix socket -> inode of its other end, as `ss` tells."""
    peers = {}
    for line in subprocess.run(["ss", "-xn"], capture_output=True, text=True, check=True).stdout.splitlines()[
        1:
    ]:
        words = line.split()
        peers[words[5]] = words[7]
    return peers


@pytest.mark.skipif(shutil.which("ss") is None, reason="ss tells which sockets belong together")
@pytest.mark.parametrize("strategy", ["ps", "ps:ssp=1", "ps:async"])
def test_no_worker_has_a_connection_to_another_worker(
    launch_script: Launch,
    at_file: Callable[[Path, Callable[[], object]], None],
    tmp_path: Path,
    strategy: str,
) -> None:
    found: dict[int, tuple[set[str], list[str]]] = {}
    peers: dict[str, str] = {}

    def look() -> None:
        try:
            for path in tmp_path.glob("pid-*"):
                found[int(path.name[4:])] = connections(int(path.read_text()))
            peers.update(unix_peers())
        finally:
            (tmp_path / "seen").touch()

    at_file(tmp_path / "now", look)
    done = launch_script(WATCHED, workers=3, servers=2, strategy=strategy, quiet=True, step_timeout_s=20.0)
    assert done.exit_code == 0, done.error
    assert len(found) >= 2
    for rank, (inodes, inet) in found.items():
        assert inet == [], f"rank {rank}"
        assert sum(inode in peers for inode in inodes) >= 3  # the coordinator's and two servers' at least
        for other, (theirs, _) in found.items():
            assert other == rank or not {peers.get(inode) for inode in inodes} & theirs


def test_ctrl_c_ends_with_a_checkpoint(
    launch_script: Launch, at_file: Callable[[Path, Callable[[], object]], None], tmp_path: Path
) -> None:
    at_file(tmp_path / "now", lambda: os.kill(os.getpid(), signal.SIGINT))
    source = WATCHED.replace('and not pathlib.Path("seen").exists()', "and False").replace("960", "96000")
    done = launch_script(source, workers=3, servers=2, strategy="ps:async", quiet=True, step_timeout_s=20.0)
    assert done.exit_code == 130, done.error
    assert "checkpoint" in str(done.error)


SPOILT = """
import torch
from torch import nn

import shoal

x, y = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(64, 1)
x[32:40], y[32:40] = 1e6, torch.nan  # the fifth batch
model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
trainer = shoal.Trainer(
    model, loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.01), on_nonfinite="skip"
)
trainer.fit(shoal.Dataset.from_arrays((x, y)).batch(8), epochs=1)
if shoal.rank() == 0:
    print("mean", float(model[0].running_mean.abs().max()))
"""


def test_a_step_that_is_left_out_leaves_the_running_statistics_alone(launch_script: Launch) -> None:
    launched = launch_script(SPOILT, workers=1, servers=1, strategy="ps:async", step_timeout_s=20.0)
    assert launched.exit_code == 0, f"{launched.error}\n{launched.stderr}"
    (mean,) = [line.split()[-1] for line in launched.stdout.splitlines() if " mean " in f" {line} "]
    assert float(mean) < 1.0


OWN_LOOP = """
import json, sys, torch, shoal
from torch import nn
from pathlib import Path
out, how = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
x = torch.arange(96)
y = (x % 7 == 0).float()[:, None]
table = shoal.nn.HashEmbedding(4, optimizer=shoal.nn.SGD(0.5)) if how == "rows" else nn.Embedding(96, 4)
model = nn.Sequential(table, nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, data = shoal.setup(model, optimizer, shoal.Dataset.from_arrays((x, y)).shuffle(seed=1).batch(4))
start = shoal.resume(epoch=0)
seen = []
for epoch in range(start.epoch, 3):
    mine = torch.zeros(96)
    for at, (keys, label) in enumerate(data):
        mine[keys] += 1
        loss = nn.functional.binary_cross_entropy_with_logits(model(keys), label)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        shoal.log(loss=loss)
        if how == "accumulates" and not at % 2:
            continue
        optimizer.step()
        optimizer.zero_grad()
        shoal.checkpoint(every=1, epoch=epoch)  # of workers that are apart: nothing is written here
        if how == "sums":
            shoal.reduce(1.0)
    seen.append(shoal.reduce(mine).tolist())
    shoal.checkpoint(every=1, epoch=epoch + 1)
weights = {name: value.tolist() for name, value in model.state_dict().items()}
(out / f"{shoal.rank()}.json").write_text(json.dumps({"seen": seen, "weights": weights, "start": start.epoch}))
"""


@pytest.mark.parametrize(
    ("strategy", "faults"), [("ps:async", None), ("ps:ssp=2", Faults().kill("worker-1", at_step=9))]
)
def test_a_loop_of_ones_own_trains_each_batch_on_one_worker(
    launch_script: Launch, tmp_path: Path, strategy: str, faults: Faults | None
) -> None:
    done = launch_script(
        OWN_LOOP, workers=2, servers=1, strategy=strategy, args=(str(tmp_path), ""), faults=faults
    )
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    # A worker that dies takes all back to the checkpoint between two epochs, or to the beginning.
    assert first["start"] == 0 if faults is None else first["start"] in (0, 1, 2)
    # At an epoch's end a batch may be handed to both: it counts once, for whoever is first.
    assert [min(epoch) for epoch in first["seen"]] == [1.0] * (3 - first["start"])
    if faults is None:
        epochs = runs.read_ledger(done.run_dir, is_alive=False)["epochs"]
        assert [(epoch["trained"], epoch["is_exact"]) for epoch in epochs] == [(96, True)] * 3
    steps = [json.loads(line)["step"] for line in (done.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))
    assert 24 < steps[-1] <= 72  # updates of all workers, of which rank 0 writes down its own
    assert (done.run_dir / "checkpoints" / "step-000000072").is_dir()


@pytest.mark.parametrize(
    ("strategy", "how", "says"),
    [
        ("ps:async", "accumulates", "each batch is pushed as one update"),
        ("ps:async", "sums", "each takes as many batches as it can"),
        ("ps:hybrid", "", "a loop of the script's own shows it none. Nothing was trained"),
    ],
)
def test_a_loop_that_workers_apart_cannot_run_is_refused_by_name(
    launch_script: Launch, tmp_path: Path, strategy: str, how: str, says: str
) -> None:
    done = launch_script(OWN_LOOP, workers=2, servers=1, strategy=strategy, args=(str(tmp_path), how))
    assert done.exit_code == 2, f"{done.error}\n{done.stderr}"
    assert says in str(done.error)
