"""Click models in DLRM's form of input: bags as lists of ids with offsets by table, whose first dimension is not the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched
from safetensors.torch import load_file
from torch.testing import assert_close

from shoal.errors import TrainingError

Launch = Callable[..., Launched]

SCRIPT = """
import torch, shoal
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
TABLES, ROWS, WIDTH, SAMPLES = 3, 20, 4, 22

class Clicks(torch.utils.data.Dataset):
    dense, clicked = torch.randn(SAMPLES, 5), torch.rand(SAMPLES).round()
    bags = [[torch.randint(0, ROWS, (number % 3 + 1,)) for _ in range(TABLES)] for number in range(SAMPLES)]

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        return self.dense[number], self.bags[number], self.clicked[number]

def collate(samples):
    dense, bags, clicked = zip(*samples)
    by_table = list(zip(*bags))
    offsets = [torch.tensor([0, *map(len, table[:-1])]).cumsum(0) for table in by_table]
    inputs = torch.stack(dense), torch.stack(offsets), list(map(torch.cat, by_table))
    return INPUTS, torch.stack(clicked)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(TABLES))
        self.bottom, self.top = nn.Linear(5, WIDTH), nn.Linear((1 + TABLES) * WIDTH, 1)

    def forward(self, dense, offsets, ids):
        rows = [table(ids[number], offsets[number]) for number, table in enumerate(self.tables)]
        return self.top(torch.cat([self.bottom(dense), *rows], 1)).squeeze(1)

trainer = shoal.Trainer(
    Model(), loss=nn.BCEWithLogitsLoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1), accumulate=ACCUMULATE
)
trainer.fit(torch.utils.data.DataLoader(Clicks(), batch_size=8, collate_fn=collate), epochs=2)
trainer.save("SAVED")
"""
AS_ARGUMENTS = "inputs"
BY_NAME = 'dict(zip(("dense", "offsets", "ids"), inputs))'


def script(saved: Path, inputs: str, *, accumulate: int = 1) -> str:
    return (
        SCRIPT.replace("SAVED", str(saved)).replace("INPUTS", inputs).replace("ACCUMULATE", str(accumulate))
    )


@pytest.mark.parametrize("inputs", [AS_ARGUMENTS, BY_NAME])
def test_offsets_by_table_train_the_weights_of_one_process(
    launch_script: Launch, tmp_path: Path, inputs: str
) -> None:
    found = {}
    for strategy, workers in (("ddp", 1), ("ddp", 3), ("ps", 2)):
        done = launch_script(
            script(tmp_path / strategy, inputs),
            workers=workers,
            strategy=strategy,
            name=f"{strategy}-{workers}",
        )
        assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        found[strategy, workers] = load_file(tmp_path / strategy / "model.safetensors")
    expected = found.pop(("ddp", 1))
    for job, tensors in found.items():
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(tensors[name], value, rtol=1e-11, atol=1e-12, msg=f"{job}: {name}")


def test_offsets_by_table_cannot_be_accumulated(launch_script: Launch, tmp_path: Path) -> None:
    done = launch_script(script(tmp_path / "saved", BY_NAME, accumulate=2), workers=2)
    assert done.exit_code == 3
    assert isinstance(done.error, TrainingError)
    assert "which cannot be cut by samples" in str(done.error)
    assert not (tmp_path / "saved").exists()
