"""Trainer over several workers: the same step on all of them, and the result of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import Launched, close, results

from shoal.train.checkpoint.checkpoint import list_checkpoints

Launch = Callable[..., Launched]
Told = list[tuple[dict[str, torch.Tensor], dict[str, Any]]]

SCRIPT = Path(__file__).parent / "scripts" / "training.py"
SLICED = (
    "skipped",
    "bf16",
)  # layers that mix the batch, or rounding: equal over the ranks, not to one process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture
def told(launch_script: Launch, folder: Path) -> Callable[[int], Told]:
    """What every rank wrote down, of one job per number of workers for all tests."""

    def told(workers: int) -> Told:
        out = folder / str(workers)
        if not out.exists():
            out.mkdir()
            done = launch_script(SCRIPT, workers=workers, args=(str(out),))
            assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        return [results(out, rank) for rank in range(workers)]

    return told


def test_every_rank_ends_with_the_same_bits_and_facts(told: Callable[[int], Told]) -> None:
    (weights, facts), *others = told(3)
    for other_weights, other_facts in others:
        assert other_facts == facts
        assert [name for name in weights if not torch.equal(weights[name], other_weights[name])] == []


def test_one_process_ends_with_the_same_weights_and_facts(told: Callable[[int], Told]) -> None:
    [(expected, facts)] = told(1)
    weights, many = told(3)[0]
    for name in expected:
        if not name.startswith(SLICED):
            torch.testing.assert_close(weights[name], expected[name], rtol=1e-12, atol=1e-12, msg=name)
    for name in facts:
        assert close(many[name], facts[name]), f"{name}: {many[name]}, in one process {facts[name]}"


def test_stop_on_one_rank_ends_all_after_the_same_step(told: Callable[[int], Told]) -> None:
    assert [facts["stopped"]["step"] for _, facts in told(3)] == [6, 6, 6]
    assert [facts["early"]["epoch"] for _, facts in told(3)] == [3, 3, 3]


def test_a_step_skipped_for_one_rank_leaves_no_trace_on_any(told: Callable[[int], Told]) -> None:
    for weights, facts in told(3):
        assert facts["skipped"]["skipped"] == 2
        assert all(tensor.isfinite().all() for tensor in weights.values())
        assert weights["skipped/2.num_batches_tracked"] == 4


def test_a_frozen_batchnorm_keeps_its_statistics_over_the_workers(told: Callable[[int], Told]) -> None:
    for weights, _ in told(3):
        assert torch.equal(weights["frozen/2.running_mean"], torch.zeros(16, dtype=torch.float64))
        assert torch.equal(weights["frozen/2.running_var"], torch.ones(16, dtype=torch.float64))
        assert weights["frozen/2.num_batches_tracked"] == 0


def test_batchnorm_takes_a_worker_without_samples_and_says_what_helps_one_with_one(
    launch_script: Launch,
) -> None:
    source = """
        import torch, shoal
        from torch import nn
        x = torch.arange(60.0).reshape(30, 2).sin()
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        run = shoal.Trainer(model, loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        run.fit(shoal.Dataset.from_arrays((x[:NUM], x[:NUM, :1])).batch(8), epochs=2)
        print(int(model[1].num_batches_tracked), bool(model[1].running_var.isfinite().all()))
    """
    # 26 = 3 * 8 + 2: over four workers two have one sample each, which BatchNorm cannot take in training.
    done = launch_script(source.replace("NUM", "26"), workers=4)
    assert done.exit_code == 1
    assert "Expected more than 1 value per channel" in str(done.error)
    assert "This worker had 1 sample to normalise, of a batch of 2" in str(done.error)
    assert "drop_last=True" in str(done.error)
    # Where a sample has several values per channel it can, and the two workers without a sample count along.
    sequences = "nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2), nn.Flatten()"
    several = source.replace("nn.BatchNorm1d(4)", sequences).replace("model[1]", "model[2]")
    done = launch_script(several.replace("NUM", "26"), workers=4)
    assert (done.exit_code, done.stdout) == (0, "8 True\n"), done.error


def test_a_line_per_step_a_summary_and_checkpoints_by_rank_0s_clock(launch_script: Launch) -> None:
    done = launch_script(
        """
        import torch, shoal
        from torch import nn

        class Logs(shoal.callbacks.Callback):
            ranks = "every"
            def on_step_end(self, trainer, logs):
                trainer.log("mine", logs.step * 10 + shoal.rank())

        x = torch.arange(40.0).reshape(20, 2)
        run = shoal.Trainer(
            nn.Linear(2, 1), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=1e-4),
            callbacks=[Logs(), shoal.callbacks.ModelCheckpoint(every_s=1e-9, keep_last=2)],
        )
        data = shoal.Dataset.from_arrays((x, x[:, :1])).batch(8)
        run.fit(data, epochs=2)
        print(run.evaluate(data)["loss"] == shoal.reduce(run.evaluate(data)["loss"]) / shoal.num_workers())
        """,
        workers=2,
        quiet=True,
    )
    assert (done.exit_code, done.stdout) == (0, "True\n"), done.error
    lines = [json.loads(line) for line in (done.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["samples"], line["mine"]) for line in lines] == [
        (step, 4 if step % 3 == 0 else 8, step * 10) for step in range(1, 7)
    ]
    assert done.summary["samples"] == 40
    assert done.summary["steps"] == 6
    assert set(done.summary["metrics"]) == {"loss"}
    names = [Path(path).name for path in list_checkpoints(done.run_dir / "checkpoints")]
    assert names == ["step-000000005", "step-000000006"]
    assert done.summary["checkpoint"].endswith("step-000000006")


def test_layers_that_depend_on_the_cut_are_named_once(launch_script: Launch) -> None:
    done = launch_script(
        """
        import torch, shoal
        from torch import nn
        model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        x = torch.randn(32, 2)
        run = shoal.Trainer(model, loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        run.fit(shoal.Dataset.from_arrays((x, x[:, :1])).batch(8), epochs=2)
        """,
        workers=2,
    )
    assert done.exit_code == 0
    assert done.stderr.count("note: 1 (BatchNorm1d): each worker normalises its own slice") == 1
    assert done.stderr.count("note: 2 (Dropout): each worker draws its own numbers") == 1


TWICE = """
import json, torch, shoal
from torch import nn

draw = torch.Generator().manual_seed(0)
x = torch.randn(20, 3, generator=draw, dtype=torch.float64)
data = shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).batch(7)
torch.manual_seed(0)
model, told = nn.Linear(3, 1).double(), []
for _ in range(2):
    trainer = shoal.Trainer(model, loss=nn.MSELoss(), optimizer=lambda params: torch.optim.Adam(params, lr=0.1))
    trainer.fit(data, epochs=1)
    told.append(trainer.evaluate(data)["loss"].hex())
told.append(shoal.Trainer(model, loss=nn.MSELoss()).evaluate(data)["loss"].hex())
if shoal.rank() == 0:
    print("result", json.dumps(told))
"""


def test_a_second_trainer_takes_the_model_of_the_first(launch_script: Launch) -> None:
    alone = launch_script(TWICE, workers=1).printed()
    for options in ({"workers": 3}, {"workers": 2, "servers": 1, "strategy": "ps"}):
        several = launch_script(TWICE, **options).printed()
        assert several == pytest.approx(alone, rel=1e-9)
        assert several[1] == several[2]
