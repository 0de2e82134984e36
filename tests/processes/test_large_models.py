"""Factories under fsdp, tp and pp: the weights of a model built whole, and never the whole model in a worker's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.config.faults import Faults
from shoal.train.checkpoint.checkpoint import list_checkpoints, open_checkpoint
from whole_matrix import matrix_only

BITS = """
import hashlib, torch, shoal
from torch import nn
from shoal.parallel import fsdp as fsdp_cut, parameter_file
from shoal.runtime.seeds import mix

parameter_file.LEAST_BYTES, parameter_file.RESIDENT_BYTES, fsdp_cut.UNIT_BYTES = 1, 0, 100

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, 12), nn.LayerNorm(12)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12)) for _ in range(4)))
        self.head = nn.Linear(12, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.rand(12))
        self.apply(self.again)
        self.blocks[1][2].weight.data.mul_(0.5)

    def again(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.2)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.embedding(x).mean(1) + self.shift)))

def normed():
    layers = [nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6)) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(6, 20))
    for parameter in model.parameters():
        parameter.data = torch.rand(parameter.shape) - 0.5
    return model

def digest(trainer, *, of=""):
    pieces = [(piece.name, piece.tensor.double().numpy().tobytes()) for piece in trainer.strategy.state() if piece.name.startswith(of)]
    return hashlib.sha256(repr(sorted(pieces)).encode()).hexdigest()

def trained(model, x):
    trainer = shoal.Trainer(
        model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.Adam(p, lr=0.01), seed=3, snapshot_every=0
    )
    y = torch.arange(len(x)) % 20
    trainer.fit(shoal.Dataset.from_arrays((x, y)).batch(12), max_steps=2)
    return trainer

generator = torch.Generator().manual_seed(0)
inputs = {Words: torch.randint(20, (24, 5), generator=generator), normed: torch.randn(24, 6, generator=generator)}
for factory, x in inputs.items():
    torch.manual_seed(mix(3))
    whole = factory()
    a, b = trained(factory, x), trained(whole, x)
    saved = a.save_checkpoint(f"saved-{factory.__name__}")
    same = [digest(a), digest(b)]
    a.fit(shoal.Dataset.from_arrays((x, torch.zeros(len(x), dtype=torch.long))).batch(12), max_steps=1)
    moved = digest(a)
    a.load(saved)
    weights = [digest(trainer, of="model/") for trainer in (a, b)]
    if shoal.rank() == 0:
        print("bits", factory.__name__, same[0] == same[1], moved != same[0], weights[0] == weights[1])
"""


@pytest.mark.parametrize(
    ("strategy", "workers"), [("fsdp", 3), ("tp", 2), ("pp", 3), *matrix_only(("fsdp=2,tp=2", 4))]
)
def test_factory_gives_the_bits_of_a_model_built_whole(
    launch_script: Callable[..., Any], strategy: str, workers: int
) -> None:
    done = launch_script(BITS, workers=workers, strategy=strategy)
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    assert [line for line in done.stdout.splitlines() if line.startswith("bits")] == [
        "bits Words True True True",
        "bits normed True True True",
    ]


KILLED = """
import torch, shoal
from torch import nn
from shoal.callbacks import ModelCheckpoint
from shoal.train.checkpoint import background

background.LEAST_BYTES = 0
x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
trainer = shoal.Trainer(
    lambda: nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 6)), loss=nn.MSELoss(),
    optimizer=lambda params: torch.optim.Adam(params, lr=0.01), callbacks=[ModelCheckpoint(every_steps=2, keep_last=99)],
)
data = shoal.Dataset.from_arrays((x, x))
trainer.fit(data.batch(6), max_steps=8)
loss = trainer.evaluate(data.batch(48))["loss"]
if shoal.rank() == 0:
    print("result", loss.hex())
"""


def test_worker_killed_within_a_background_checkpoint_costs_no_bit_and_leaves_none_half_written(
    launch_script: Callable[..., Any],
) -> None:
    results = []
    for faults in (None, Faults().kill("worker-1", at_step=5, at="worker: part of a checkpoint written")):
        done = launch_script(KILLED, workers=3, strategy="fsdp", **({"faults": faults} if faults else {}))
        assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        results.append([line for line in done.stdout.splitlines() if line.startswith("result")])
        assert any(event["event"] == "worker-exited" and event["code"] for event in done.events) == bool(
            faults
        )
        checkpoints = done.run_dir / "checkpoints"
        assert sorted(path.name for path in checkpoints.iterdir()) == [f"step-{n:09d}" for n in (2, 4, 6, 8)]
        assert [open_checkpoint(path).progress["step"] for path in list_checkpoints(checkpoints)] == [
            2,
            4,
            6,
            8,
        ]
        assert (checkpoints / "step-000000008" / "model.rank-2.safetensors").exists()
    assert results[0] == results[1]
    assert len(results[0]) == 1


MEMORY = """
import torch, shoal
from pathlib import Path
from torch import nn
from shoal.parallel import parameter_file

parameter_file.RESIDENT_BYTES = 16 << 20
WIDTH, MIB = 1448, 2**20  # 8 MiB a layer

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.layer(x)

def model():
    built = nn.Sequential(*(Residual() for _ in range(32)))
    for parameter in built.parameters():  # once more, when all of them are there
        nn.init.normal_(parameter, std=0.001)
    return built

def figures():
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 / MIB for line in lines if line.startswith(("VmRSS", "VmHWM"))}

x = torch.zeros(8, WIDTH)
batches = shoal.Dataset.from_arrays((x, x)).batch(4)
trainer = shoal.Trainer(model, loss=nn.MSELoss(), pipeline_cut=["10", "21"])
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
before = figures()["VmRSS"]
trainer.evaluate(batches)
Path(f"peak-{shoal.rank()}").write_text(f"{figures()['VmHWM'] - before:.0f}")
"""


@pytest.mark.parametrize("strategy", ["fsdp", "pp"])
def test_no_worker_has_the_whole_model_in_memory_while_it_starts(
    launch_script: Callable[..., Any], tmp_path: Any, strategy: str
) -> None:
    done = launch_script(MEMORY, workers=3, strategy=strategy)
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    peaks = [int((tmp_path / f"peak-{rank}").read_text()) for rank in range(3)]
    # A share of 85 MiB, some of the file's pages, and a layer or two. Built whole, it is 256 MiB and the share.
    assert max(peaks) < 230, peaks
