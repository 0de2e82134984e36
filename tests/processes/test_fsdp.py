"""Sharded parameters: the result of one process, checkpoints for every other strategy, and deaths without a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.config.faults import Faults
from shoal.errors import ForwardMixesSamples
from whole_matrix import matrix_only

SCRIPT = """
import sys, torch, shoal
from torch import nn
from shoal.parallel import fsdp as fsdp_cut

fsdp_cut.UNIT_BYTES = 100
generator = torch.Generator().manual_seed(0)
x = torch.randn(98, 6, generator=generator, dtype=torch.float64)
y = (x[:, 0] > x[:, 1] * x[:, 2]).long()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 33), nn.Dropout(0.0), nn.Tanh(), nn.Sequential(nn.Linear(33, 7), nn.Tanh()), nn.Linear(7, 2)).double()
trainer = shoal.Trainer(
    model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.Adam(model.parameters(), lr=0.02), seed=0,
    clip_norm=0.5, metrics=["accuracy"],
)
data = shoal.Dataset.from_arrays((x, y))
trainer.fit(data.shuffle(seed=0).batch(16), epochs=EPOCHS, resume=RESUME)
result = trainer.evaluate(data.batch(40))
predicted = trainer.predict(data.batch(40))
path = trainer.save_checkpoint("DIRECTORY") if "DIRECTORY" else ""
if shoal.rank() == 0:
    print("result", json.dumps([result["loss"].hex(), result["accuracy"], float(predicted.sum()).hex(), path]))
"""


def script(epochs: int = 2, resume: str | None = None, directory: str = "") -> str:
    text = "import json\n" + SCRIPT
    return text.replace("EPOCHS", str(epochs)).replace("RESUME", repr(resume)).replace("DIRECTORY", directory)


def result(done: Any) -> list[Any]:
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    [line] = [line for line in done.stdout.splitlines() if line.startswith("result")]
    loss, accuracy, predicted, path = json.loads(line.removeprefix("result "))
    return [float.fromhex(loss), accuracy, float.fromhex(predicted), path]


_alone: list[Any] = []


def alone_in_one_process(launch_script: Callable[..., Any]) -> list[Any]:
    if not _alone:
        _alone.extend(result(launch_script(script())))
    return _alone


@pytest.mark.parametrize(
    ("strategy", "workers", "options"),
    [
        ("fsdp", 3, {"checkpoint_activations": True, "offload": True}),
        ("dp=2,fsdp=2", 4, {}),
        *matrix_only(("fsdp", 2, {"checkpoint_activations": True}), ("fsdp", 3, {"offload": True})),
    ],
)
def test_sharded_training_is_that_of_one_process_and_a_kill_takes_all_back(
    launch_script: Callable[..., Any], strategy: str, workers: int, options: dict[str, Any]
) -> None:
    alone = alone_in_one_process(launch_script)
    done = launch_script(script(), workers=workers, strategy=strategy, **options)
    undisturbed = result(done)
    assert ("without an accelerator they are there anyway" in done.stderr) == ("offload" in options)
    assert undisturbed[:3] == pytest.approx(alone[:3], rel=1e-9)
    killed = launch_script(
        script(),
        workers=workers,
        strategy=strategy,
        faults=Faults().kill("worker-1", at_step=7, at="worker: before commit"),
        snapshot_every=4,
        **options,
    )
    assert result(killed) == undisturbed
    events = [json.loads(line) for line in (killed.run_dir / "events.jsonl").read_text().splitlines()]
    [went_back] = [event for event in events if event["event"] == "went-back"]
    assert went_back["to_step"] == 4
    assert "was killed by SIGKILL, and nobody else held its part of the model; going back" in killed.stderr
    assert "begin anew" not in killed.stderr  # which would say the same once more


def test_in_single_precision_too(launch_script: Callable[..., Any]) -> None:
    single = script().replace("float64", "float32").replace(".double()", "")
    alone = result(launch_script(single))
    assert result(launch_script(single, workers=3, strategy="fsdp"))[:1] == pytest.approx(alone[:1], rel=1e-3)


@pytest.mark.parametrize(
    ("first", "second"),
    [(("fsdp", 3), ("ddp", 2)), (("single", 1), ("fsdp", 2)), (("dp=2,fsdp=2", 4), ("single", 1))],
)
def test_a_checkpoint_of_one_strategy_goes_on_under_another(
    launch_script: Callable[..., Any], tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    whole = alone_in_one_process(launch_script)
    strategy, workers = first
    saved = result(
        launch_script(script(epochs=1, directory=f"{tmp_path}/there"), strategy=strategy, workers=workers)
    )
    strategy, workers = second
    resumed = result(
        launch_script(script(epochs=2, resume=saved[3]), strategy=strategy, workers=workers, name="second")
    )
    assert resumed[:3] == pytest.approx(whole[:3], rel=1e-9)


@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_an_optimizer_that_cannot_update_parts_is_refused_by_name(
    launch_script: Callable[..., Any], strategy: str
) -> None:
    text = script().replace("torch.optim.Adam(", "torch.optim.Rprop(").replace("33", "32")
    done = launch_script(text, workers=2, strategy=strategy)
    assert done.exit_code == 2
    assert "the update of Rprop uses aten.index_put_.default" in str(done.error)
    assert "--strategy ddp or ps" in str(done.error)


LAYOUTS = """
import sys, torch, shoal
from torch import nn
from shoal.parallel import fsdp as fsdp_cut

fsdp_cut.UNIT_BYTES = 100

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 3)
        self.nothing, self.row = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.zeros(8, 0))
    def forward(self, x):
        return self.second(self.first(x).relu()).mean((2, 3)) + self.nothing.sum() + self.row.sum()

torch.manual_seed(0)
model = Model().double().to(memory_format=torch.channels_last)
data = shoal.Dataset.from_arrays((torch.randn(24, 3, 5, 5).double(), torch.arange(24) % 2)).batch(8)
trainer = shoal.Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.Adam(model.parameters(), lr=0.02), clip_norm=0.1)
trainer.fit(data, epochs=2)
trainer.save(sys.argv[1])
"""


def test_layers_in_channels_last_and_parameters_without_numbers_are_sharded(
    launch_script: Callable[..., Any], tmp_path: Path
) -> None:
    for strategy, workers in (("single", 1), ("fsdp", 2)):
        args = (str(tmp_path / strategy),)
        done = launch_script(LAYOUTS, strategy=strategy, workers=workers, args=args, name=strategy)
        assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    one, sharded = (load_file(tmp_path / each / "model.safetensors") for each in ("single", "fsdp"))
    assert sharded["nothing"].shape == (0, 4)
    for name, value in one.items():
        torch.testing.assert_close(sharded[name], value, rtol=1e-9, atol=1e-12, msg=name)


CAPACITY = """
import torch, shoal
from torch import nn

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        chosen = nn.functional.one_hot(gates.argmax(-1), 4)
        is_kept = (chosen.cumsum(0) <= len(x) // 4) * chosen
        return x + ((is_kept * gates)[:, :, None] * torch.stack([each(x) for each in self.experts], 1)).sum(1)

torch.manual_seed(1)
x, y = torch.randn(64, 6), torch.arange(64) % 6
trainer = shoal.Trainer(Experts(), loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
trainer.fit(shoal.Dataset.from_arrays((x, y)).batch(64))
"""


def test_experts_that_drop_samples_by_capacity_are_refused(launch_script: Callable[..., Any]) -> None:
    done = launch_script(CAPACITY, workers=2, strategy="fsdp")
    assert isinstance(done.error, ForwardMixesSamples), done.stderr
    assert "Experts" in str(done.error)
