"""Data that not every host has: workers of several hosts train on it as if they all had it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.config.faults import Faults

SCRIPT = """
import torch, shoal
from torch import nn
from shoal.config import job
from shoal.data.remote import blocks; from shoal.data.remote import block_server as keeper

blocks.BLOCK_BYTES = keeper.BLOCK_BYTES = 4096
data = shoal.Dataset.from_parquet("{where}", label="y", {options})
{stage}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def forward(self, columns):
        return self.inner(torch.stack([columns[name] for name in ("a", "b", "c", "d")], 1))[:, 0]

trainer = shoal.Trainer(Net(), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), seed=0)
trainer.fit(data.shuffle(seed=1).batch(64), epochs=1)
if shoal.rank() == 0:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    print("weights", flat.double().sum().item().hex())
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        rng = np.random.default_rng(number)
        columns = {name: rng.normal(size=600).astype(np.float32) for name in "abcdy"}
        columns["unused"] = rng.normal(size=600)
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet", row_group_size=200)
    return folder


def script(table: Path, options: str = "", stage: str = "") -> str:
    return SCRIPT.format(where=f"{table}/*.parquet", options=options, stage=stage)


def weights(done: Any) -> str:
    assert done.exit_code == 0, done.error
    [line] = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    return str(line)


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ("location='central'", ""),
        ("location='central', spread='chain'", "data.stage()"),
        ("location='central', spread='broadcast'", "data.stage()"),
        ("location='resident'", ""),
    ],
)
def test_three_hosts_train_as_if_all_had_the_files(
    launch_script: Callable[..., Any], table: Path, options: str, stage: str
) -> None:
    shared = weights(launch_script(script(table), workers=3, exchange="native"))
    located = launch_script(script(table, options, stage), workers=3, pretend_hosts=3, exchange="native")
    assert weights(located) == shared
    assert not (located.run_dir / "scratch").exists()
    if stage:
        events = [json.loads(line) for line in (located.run_dir / "events.jsonl").read_text().splitlines()]
        assert [event["how"] for event in events if event["event"] == "files-spread"]


def test_the_host_that_has_the_files_may_lose_its_worker(
    launch_script: Callable[..., Any], table: Path
) -> None:
    shared = weights(launch_script(script(table), workers=3, exchange="native"))
    faults = Faults().kill("worker-0", at_step=5)
    done = launch_script(
        script(table, "location='central', cache='disk'"),
        workers=3,
        pretend_hosts=3,
        exchange="native",
        faults=faults,
    )
    assert weights(done) == shared
    assert done.summary["restarts"] == 1


def test_a_file_lost_between_epochs_is_read_from_its_copy(
    launch_script: Callable[..., Any], table: Path, tmp_path: Path
) -> None:
    source = script(table).replace(
        f'"{table}/*.parquet"', f'shoal.data.copies("{table}/*.parquet", 2, at=["{tmp_path}/copies"])'
    )
    shared = weights(launch_script(source, workers=2))
    (table / "part-1.parquet").unlink()
    done = launch_script(source, workers=2)
    assert weights(done) == shared
    events = [json.loads(line) for line in (done.run_dir / "events.jsonl").read_text().splitlines()]
    lost = [event for event in events if event["event"] == "file-lost"]
    assert {Path(event["file"]).name for event in lost} == {"part-1.parquet"}


def test_leases_go_to_the_host_that_has_their_files(
    launch_script: Callable[..., Any], table: Path, tmp_path: Path
) -> None:
    source = f"""
        import pathlib, torch, shoal
        from torch import nn
        from shoal.data.remote import located_files

        class Own(located_files.SharedFiles):
            # Two hosts that have different files at one place, as two machines would.
            def expand(self, where, endings=()):
                kept = ("part-0", "part-1") if shoal.rank() == 0 else ("part-2",)
                return [info for info in super().expand(where, endings) if pathlib.Path(info.url).stem in kept]

        located_files.SharedFiles = Own
        data = shoal.Dataset.from_parquet("{table}/*.parquet", label="y", columns=["a", "y"], location="resident")

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(1, 1)
            def forward(self, columns):
                return self.inner(columns["a"][:, None])[:, 0]

        batches = data.batch(20)
        near = batches.near(60)
        trainer = shoal.Trainer(Net(), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), seed=0)
        trainer.fit(batches, epochs=1)
        pathlib.Path(r"{tmp_path}", f"near-{{shoal.rank()}}").write_text(str(near))
    """
    done = launch_script(source, workers=2, strategy="ps:async", pretend_hosts=2)
    assert done.exit_code == 0, done.error
    near = [set(json.loads((tmp_path / f"near-{rank}").read_text())) for rank in range(2)]
    assert near == [set(range(20)), set(range(20, 30))]
    assert done.summary["samples"] == 1800
