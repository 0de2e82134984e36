"""Stages of a pipeline: the result of one process, checkpoints for every other strategy, and deaths without a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.config.faults import Faults
from whole_matrix import matrix_only

SCRIPT = """
import json, torch, shoal
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.act = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8), nn.ReLU(inplace=True)

    def forward(self, x, mask):
        return x + F.dropout(self.down(self.act(self.up(self.norm(x)))), 0.1, self.training) * mask

class Net(nn.Module):
    # Tied weights, a parameter of its own, a mask that every block needs, random numbers, outputs in a dict.
    def __init__(self):
        super().__init__()
        self.table, self.places = nn.Embedding(13, 8), nn.Parameter(torch.randn(6, 8) / 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, known):
        num, length = ids.shape
        assert length <= 6
        mask = (known > 0).to(self.places.dtype)[:, :, None]
        x = self.table(ids) + self.places[:length]
        for block in self.blocks:
            x = block(x, mask)
        return {"scores": self.head(x).flatten(1), "norm": x.norm(dim=(1, 2))}

def loss(output, target):
    scores = output["scores"].unflatten(1, (-1, 13)).transpose(1, 2)
    return F.cross_entropy(scores, target, reduction="none").mean() + 0.01 * output["norm"].mean()

class Decides(Net):
    # Nothing that can be traced: reads numbers out of the batch; every block takes a value that is computed before them.
    def forward(self, ids, known):
        mask = (known > 0).to(self.places.dtype)[:, :, None]
        if bool((known < 0).any()):
            mask = mask + 0.1 * torch.tensor((known < 0).tolist(), dtype=mask.dtype)[:, :, None]
        x = self.table(ids) + self.places[: ids.shape[1]]
        gate = mask * x.sigmoid()
        for block in self.blocks:
            x = block(x, gate)
        return {"scores": self.head(x).flatten(1), "norm": x.norm(dim=(1, 2))}

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second, self.last = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 13)
        self.other = nn.BatchNorm1d(8)

    def forward(self, ids, known):
        x = self.norm(self.first(ids.to(self.first.weight.dtype) / 13))
        return {"scores": self.last(self.other(self.second(x)).relu() + x).repeat(1, 6), "norm": known.sum(1, keepdim=True)}

generator = torch.Generator().manual_seed(0)
ids = torch.randint(0, 13, (31, 6), generator=generator)
known = torch.rand(31, 6, generator=generator, dtype=torch.float64) - 0.2
torch.manual_seed(0)
model = MODEL().double()
trainer = shoal.Trainer(
    model, loss=loss, optimizer=lambda params: torch.optim.Adam(params, lr=0.02), seed=0, clip_norm=0.5, snapshot_every=4, OPTIONS
)
data = shoal.Dataset.from_arrays((ids, known, ids.roll(-1, 1)))
trainer.fit(data.shuffle(seed=0).batch(14, drop_last=isinstance(model, Normed)), epochs=EPOCHS, resume=RESUME)
result = trainer.evaluate(data.batch(14))
predicted = trainer.predict(data.batch(14))
path = trainer.save_checkpoint("DIRECTORY")
if shoal.rank() == 0:
    from safetensors.torch import load_file
    from pathlib import Path
    saved = [load_file(file) for file in sorted(Path(path).rglob("model*.safetensors"))]  # every rank writes its own part
    weights = sum(float(tensor.double().square().sum()) for part in saved for name, tensor in sorted(part.items()))
    numbers = [result["loss"], float(predicted["scores"].sum()), float(predicted["norm"].sum()), weights]
    print("result", json.dumps([number.hex() for number in numbers] + [path]))
"""

Launch = Callable[..., Any]

SEQUENCES = "dp=2,tp=2,pp=2"
"""Run with parts of sequences between layers, and between stages."""


def script(
    directory: Path, *, epochs: int = 2, resume: str | None = None, options: str = "", model: str = "Net"
) -> str:
    text = SCRIPT.replace("EPOCHS", str(epochs)).replace("RESUME", repr(resume)).replace("MODEL", model)
    return text.replace("DIRECTORY", f"{directory}/there").replace("OPTIONS", options)


def result(done: Any) -> list[Any]:
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    [line] = [line for line in done.stdout.splitlines() if line.startswith("result")]
    *numbers, path = json.loads(line.removeprefix("result "))
    return [*(float.fromhex(number) for number in numbers), path]


_references: dict[tuple[int, int], list[Any]] = {}
_staged: dict[tuple[str, int, str], list[Any]] = {}
_kept: dict[str, list[Any]] = {}


def reference(launch_script: Launch, tmp_path: Path, *, workers: int, parts: int) -> list[Any]:
    """What as many processes as there are parts of a batch compute, each in so many micro-batches."""
    key = (workers, parts)
    if key not in _references:
        text = script(tmp_path, options=f"accumulate={parts}")
        strategy = "ddp" if workers > 1 else "single"
        _references[key] = result(launch_script(text, workers=workers, strategy=strategy))[:-1]
    return _references[key]


def staged(launch_script: Launch, tmp_path: Path, strategy: str, workers: int, schedule: str) -> list[Any]:
    """What the stages compute; launched once for all who compare with it."""
    key = (strategy, workers, schedule)
    if key not in _staged:
        done = launch_script(
            script(tmp_path),
            workers=workers,
            strategy=strategy,
            schedule=schedule,
            sequence_parallel=strategy == SEQUENCES,
            name="staged",
        )
        _staged[key] = result(done)[:-1]
    return _staged[key]


@pytest.mark.parametrize(
    ("strategy", "workers", "schedule"),
    [
        ("pp", 3, "gpipe"),
        ("pp", 4, "1f1b"),
        ("pp", 2, "interleaved"),
        ("pp", 2, "zero-bubble"),
        ("pp=2,fsdp=2", 4, "1f1b"),
        ("pp=2,tp=2", 4, "1f1b"),
        (SEQUENCES, 8, "1f1b"),
    ],
)
def test_stages_train_as_one_process(
    launch_script: Launch, tmp_path: Path, strategy: str, workers: int, schedule: str
) -> None:
    num_stages = workers if strategy == "pp" else 2
    num_parts = 2 if "fsdp" in strategy or "dp" in strategy else 1
    alone = reference(launch_script, tmp_path, workers=num_parts, parts=2 * num_stages)
    trained = staged(launch_script, tmp_path, strategy, workers, schedule)
    assert trained == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "workers", "schedule"),
    [("pp", 3, "1f1b"), ("pp", 2, "interleaved"), ("pp", 2, "zero-bubble"), ("pp=2,fsdp=2", 4, "1f1b")],
)
def test_a_forward_that_reads_its_batch_is_cut_between_its_blocks(
    launch_script: Launch, tmp_path: Path, strategy: str, workers: int, schedule: str
) -> None:
    num_stages, num_parts = (workers, 1) if strategy == "pp" else (2, 2)
    text = script(tmp_path, options=f"accumulate={2 * num_stages}", model="Decides")
    key = f"Decides {num_parts} {num_stages}"
    if key not in _kept:
        alone = launch_script(text, workers=num_parts, strategy="ddp" if num_parts > 1 else "single")
        _kept[key] = result(alone)[:-1]
    done = launch_script(
        script(tmp_path, model="Decides"),
        strategy=strategy,
        workers=workers,
        schedule=schedule,
        name="staged",
    )
    assert result(done)[:-1] == pytest.approx(_kept[key], rel=1e-9)
    assert "a value computed from the data decides what is done next" in done.stderr
    assert "It is cut between its repeated blocks instead" in done.stderr


def test_batchnorm_sees_what_it_would_see_in_one_process(launch_script: Launch, tmp_path: Path) -> None:
    text = script(tmp_path, options="accumulate=2", model="Normed")
    alone = result(launch_script(text))
    cut = result(launch_script(text, workers=2, strategy="pp", name="staged"))
    assert cut[:-1] == pytest.approx(alone[:-1], rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "workers", "schedule"), [("pp", 3, "gpipe"), *matrix_only(("pp=2,tp=2", 4, "1f1b"))]
)
def test_a_killed_stage_takes_all_back_to_the_snapshot(
    launch_script: Launch, tmp_path: Path, strategy: str, workers: int, schedule: str
) -> None:
    undisturbed = staged(launch_script, tmp_path, strategy, workers, schedule)
    killed = launch_script(
        script(tmp_path),
        workers=workers,
        strategy=strategy,
        schedule=schedule,
        name="killed",
        faults=Faults().kill("worker-1", at_step=5, at="worker: before commit"),
    )
    assert result(killed)[:-1] == undisturbed
    events = [json.loads(line) for line in (killed.run_dir / "events.jsonl").read_text().splitlines()]
    [went_back] = [event for event in events if event["event"] == "went-back"]
    assert went_back["to_step"] == 4


@pytest.mark.parametrize(
    ("first", "second"),
    [(("pp", 3), ("pp=2,fsdp=2", 4)), (("pp=2,tp=2", 4), ("ddp", 2))],
)
def test_a_checkpoint_of_stages_goes_on_under_another_strategy(
    launch_script: Launch, tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    quiet = "F.dropout = lambda x, *_: x\n"  # else each would draw its own
    text = script(tmp_path, epochs=1).replace("\nclass Block", f"\n{quiet}\nclass Block", 1)
    strategy, workers = first
    saved = result(launch_script(text, strategy=strategy, workers=workers))
    strategy, workers = second
    text = script(tmp_path, resume=saved[-1]).replace("\nclass Block", f"\n{quiet}\nclass Block", 1)
    resumed = result(launch_script(text, strategy=strategy, workers=workers, name="second"))
    if "quiet" not in _kept:
        text = script(tmp_path).replace("\nclass Block", f"\n{quiet}\nclass Block", 1)
        _kept["quiet"] = result(launch_script(text, name="whole"))[:-1]
    assert resumed[:-1] == pytest.approx(_kept["quiet"], rel=1e-9)


def test_the_users_cut_and_its_refusal(launch_script: Launch, tmp_path: Path) -> None:
    text = script(
        tmp_path, epochs=1, options="pipeline_cut=['blocks.2'], precision='bf16', on_nonfinite='skip'"
    )
    done = launch_script(text, strategy="pp", workers=2)
    result(done)
    assert "blocks.2 ... head" in done.stderr
    text = script(tmp_path, epochs=1, options="pipeline_cut=['9']")
    refused = launch_script(text, strategy="pp", workers=2, name="refused")
    assert refused.exit_code == 2
    assert "pipeline_cut names '9', and no layer in a row is called so" in f"{refused.error}{refused.stderr}"
