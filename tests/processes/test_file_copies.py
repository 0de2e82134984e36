"""Data with copies: a file that is lost is read from another place. Between hosts: tests/hosts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SCRIPT = """
import torch, shoal
from torch import nn
from shoal.data.remote import blocks

blocks.BLOCK_BYTES = 4096
data = shoal.Dataset.from_parquet({where}, label="y")
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


def weights(done: Any) -> str:
    assert done.exit_code == 0, done.error
    [line] = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    return str(line)


def test_a_file_lost_between_epochs_is_read_from_its_copy(
    launch_script: Callable[..., Any], table: Path, tmp_path: Path
) -> None:
    source = SCRIPT.format(where=f'shoal.data.copies("{table}/*.parquet", 2, at=["{tmp_path}/copies"])')
    shared = weights(launch_script(source, workers=2))
    (table / "part-1.parquet").unlink()
    done = launch_script(source, workers=2)
    assert weights(done) == shared
    events = [json.loads(line) for line in (done.run_dir / "events.jsonl").read_text().splitlines()]
    lost = [event for event in events if event["event"] == "file-lost"]
    assert {Path(event["file"]).name for event in lost} == {"part-1.parquet"}
