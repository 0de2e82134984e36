"""Hit rates and bytes moved are written down with every epoch."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.runtime import events


def test_each_epoch_tells_how_its_caches_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gc.collect()  # stores of other tests
    events.emitted.clear()
    arrays = torch.randn(64, 3), torch.randn(64, 1)
    data = shoal.Dataset.from_arrays(arrays).map(lambda row: row).cache(ram_bytes=400, directory=tmp_path)
    trainer = shoal.Trainer(
        nn.Linear(3, 1), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), progress=False
    )
    trainer.fit(data.shuffle(seed=0).batch(16), epochs=2)
    told = [facts for kind, facts in events.emitted if kind == "memory figures"]
    assert [facts["epoch"] for facts in told] == [0, 1]
    [store] = [each for each in told[-1]["stores"] if each["kind"] == "rows" and each["disk"]["num_hits"]]
    assert store["name"] == "arrays > map"
    assert store["ram"]["num_hits"] + store["disk"]["num_hits"] == 128
    assert store["disk"]["bytes_out"] > 0
    assert store["ram"]["bytes_in"] + store["disk"]["bytes_in"] == 64 * 16, "each row once, and all of them"
