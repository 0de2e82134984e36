"""Stages of a forward that decides by the length of its batches: the result of one process, or the layer that is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.config.faults import Faults

SCRIPT = """
import json, torch, shoal
import torch.nn.functional as F
from torch import nn
from safetensors.torch import load_file


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.first, self.pool = nn.Embedding(13, 8), nn.Linear(8, 8), nn.AvgPool1d(2, 1)
        self.cell, self.long, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, ids):
        x = F.dropout(self.first(self.table(ids)), 0.1, self.training)
        if ids.shape[1] > 4:  # the first batch is shorter, and needs neither this nor `long`
            x = self.pool(x.transpose(1, 2)).transpose(1, 2)
        state = torch.zeros(len(x), 8, dtype=x.dtype)
        for at in range(x.shape[1]):
            state = (self.cell(x[:, at]) + state).tanh()
        if ids.shape[1] != OTHER:
            state = self.long(state).tanh()
        return self.head(F.dropout(state, 0.1, self.training))


generator = torch.Generator().manual_seed(0)
ids = torch.randint(0, 13, (36, 7), generator=generator)
torch.manual_seed(0)
model = Net().double()
trainer = shoal.Trainer(
    model, loss=nn.CrossEntropyLoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.2), seed=0, snapshot_every=2, OPTIONS
)
def cut(batch):  # texts of other lengths in every batch
    return batch[0][:, : 3 + int(batch[0][0, 5]) % 4], batch[1]

data = shoal.Dataset.from_arrays((ids, (ids.sum(1) > 41).long())).batch(12).map(cut)
trainer.fit(data, epochs=2)
result = trainer.evaluate(data)
trainer.save("there")
if shoal.rank() == 0:
    state = load_file("there/model.safetensors").values()
    print("result", json.dumps([result["loss"].hex(), *(float((v * (v + 1)).sum()).hex() for v in state)]))
"""


def launched(launch_script: Callable[..., Any], strategy: str, workers: int, **options: Any) -> Any:
    text = options.pop("script", SCRIPT).replace("OTHER", str(options.pop("other", 3)))
    text = text.replace("OPTIONS", options.pop("given", ""))
    return launch_script(text, strategy=strategy, workers=workers, **options)


def test_every_length_is_trained_as_in_one_process_through_a_death(launch_script: Callable[..., Any]) -> None:
    alone = launched(launch_script, "single", 1, given="accumulate=6").printed()
    fault = Faults().kill("worker-1", at_step=3, at="worker: before commit")
    killed = launched(launch_script, "pp", 3, faults=fault)
    assert killed.printed() == pytest.approx(alone, rel=1e-9)
    assert killed.summary["restarts"] == 1


def test_workers_whose_parts_of_a_batch_have_different_lengths_are_in_step(
    launch_script: Callable[..., Any],
) -> None:
    several = launched(launch_script, "ddp", 2, given="accumulate=4", other=0).printed()
    spread = launched(launch_script, "pp=2,fsdp=2", 4, other=0)
    assert spread.printed() == pytest.approx(several, rel=1e-9)


def test_a_length_that_needs_a_layer_of_another_stage_is_refused_with_its_name(
    launch_script: Callable[..., Any],
) -> None:
    # Defined first, and not needed by the first batch: it is taken for a layer of the first stage.
    early = SCRIPT.replace("super().__init__()", "super().__init__(); self.long = nn.Linear(8, 8)")
    refused = launched(launch_script, "pp", 2, script=early)
    assert refused.exit_code == 3
    assert "for inputs of (3, 6) it takes another way" in str(refused.error)
    assert "it needs 'long' in stage 1, and that is in stage 0" in str(refused.error)
    assert "The step was not applied" in str(refused.error)
