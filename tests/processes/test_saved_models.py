"""A saved model loads strictly in plain torch, weights that are tied included, whatever strategy trained it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from launched import Launched
from safetensors.torch import load_file
from torch import nn

Launch = Callable[..., Launched]

MODEL = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embedding(ids)))).transpose(1, 2)
"""

SCRIPT = (
    MODEL
    + """
import shoal

draw = torch.Generator().manual_seed(1)
ids = torch.randint(0, 12, (26, 5), generator=draw)
trainer = shoal.Trainer(
    Tied().double(), loss=nn.CrossEntropyLoss(), optimizer=lambda params: torch.optim.Adam(params, lr=0.01)
)
trainer.fit(shoal.Dataset.from_arrays((ids, ids.roll(1, 1))).batch(12), epochs=1)
trainer.save("saved")
"""
)


def test_a_saved_model_loads_strictly_in_plain_torch(launch_script: Launch, tmp_path: Path) -> None:
    made: dict[str, type[nn.Module]] = {}
    exec(MODEL, made)
    outputs = {}
    ids = torch.arange(10).reshape(2, 5)
    strategies = {"single": 1, "ddp": 3, "fsdp": 3, "tp": 2, "pp": 2, "ps": 3}
    for strategy, workers in strategies.items():
        servers = {"servers": 1} if strategy == "ps" else {}
        done = launch_script(SCRIPT, workers=workers, strategy=strategy, name=strategy, **servers)
        assert done.exit_code == 0, done.error
        path = tmp_path / "saved" / "model.safetensors"
        model = made["Tied"]().double()
        model.load_state_dict(load_file(path), strict=True)
        assert model.head.weight is model.embedding.weight
        with torch.no_grad():
            outputs[strategy] = model(ids)
    for strategy, output in outputs.items():
        torch.testing.assert_close(output, outputs["single"], rtol=1e-10, atol=1e-11, msg=strategy)
    assert not torch.allclose(made["Tied"]().double()(ids), outputs["single"])  # it was trained
