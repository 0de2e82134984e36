"""Under `ps` two, three and four workers compute what one process computes, in float64, whatever holds the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import Launched, close, results
from test_custom_loop import LOOPS

from shoal.cluster.supervisor.warm_parent import WarmParent

SCRIPTS = Path(__file__).parent / "scripts"
TOLERANCE = 1e-9
Launch = Callable[..., Launched]
Results = tuple[dict[str, torch.Tensor], dict[str, Any]]


@pytest.fixture(scope="module")
def of_one_process() -> dict[str, Results]:
    """Results of one process by script; filled by the first test that needs them."""
    known: dict[str, Results] = {}
    return known


@pytest.fixture
def outcome(
    launch_script: Launch, tmp_path: Path, of_one_process: dict[str, Results]
) -> Callable[..., tuple[Results, list[Results], Launched]]:
    def outcome(
        script: str, *cases: str, workers: int, servers: int
    ) -> tuple[Results, list[Results], Launched]:
        if script not in of_one_process:
            (tmp_path / "one").mkdir()
            launched = launch_script(SCRIPTS / f"{script}.py", args=(str(tmp_path / "one"),), quiet=True)
            assert launched.exit_code == 0, launched.error
            of_one_process[script] = results(tmp_path / "one", 0)
        launched = launch_script(
            SCRIPTS / f"{script}.py",
            workers=workers,
            servers=servers,
            strategy="ps",
            args=(str(tmp_path), *cases),
            step_timeout_s=30.0,
            quiet=True,
        )
        assert launched.exit_code == 0, f"{launched.error}\n{launched.stderr}"
        return of_one_process[script], [results(tmp_path, rank) for rank in range(workers)], launched

    return outcome


HERE_AND_THERE = [
    (2, 1, ["hash", "adamw", "large", "groups", "sum", "spoilt", "tied", "adagrad rows"]),
    (3, 2, ["hash", "momentum", "adagrad rows", "sgd rows", "padded", "twice", "mean", "outside", "adam rows", "spoilt"]),
    (4, 3, ["adamw", "large", "groups", "weighted", "sgd rows", "unused"]),
]  # fmt: skip
REASONS = {
    "adagrad rows": "table.weight: rows on the servers (adagrad, pulled ahead of the step)",
    "sgd rows": "table.weight: rows on the servers (sgd, pulled ahead of the step)",
    "hash": "table.rows: rows on the servers (adagrad)",
    "tied": "table.weight: dense, because its weight is tied to another layer's",
    "outside": "table.weight: dense, because its weight is used outside of its own lookup",
    "adam rows": "table.weight: dense, because AdamW with weight_decay=0.01 changes rows that no gradient came for",
}


@pytest.mark.parametrize(("workers", "servers", "cases"), HERE_AND_THERE)
def test_rows_and_chunks_are_trained_as_in_one_process(
    outcome: Callable[..., Any], workers: int, servers: int, cases: list[str]
) -> None:
    (reference, report), ranks, launched = outcome("ps_equality", *cases, workers=workers, servers=servers)
    first, told = ranks[0]
    assert first.keys() == {name for name in reference if name.split("/")[0] in cases}
    for name, tensor in first.items():
        torch.testing.assert_close(
            tensor, reference[name], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True, msg=name
        )
    assert close(told, {case: report[case] for case in cases})
    for weights, theirs in ranks[1:]:
        assert all(torch.equal(weights[name].nan_to_num(), first[name].nan_to_num()) for name in first)
        assert close(theirs, told)
    for case, reason in REASONS.items():
        assert case not in cases or reason in launched.stderr


def test_losses_metrics_inputs_and_a_loop_of_ones_own_are_those_of_one_process(
    outcome: Callable[..., Any],
) -> None:
    (reference, report), ranks, _ = outcome("equality", workers=3, servers=2)
    for case in report.values():
        case.pop("none", None)  # where the optimizer's state is
    for weights, told in ranks:
        for case in told.values():
            case.pop("none", None)
        assert close(told, report)
        for name, tensor in reference.items():
            torch.testing.assert_close(weights[name], tensor, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


MIXING = """
import json, pathlib, sys, torch, shoal
from safetensors.torch import save_file
from torch import nn
OUT = pathlib.Path(sys.argv[1])
g = torch.Generator().manual_seed(1)
x = torch.randn(36, 6, dtype=torch.float64, generator=g)

class Centred(nn.Module):
    "A buffer of its own that follows the data."
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(6, dtype=torch.float64))
    def forward(self, x):
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        return x - self.centre

torch.manual_seed(0)
model = nn.Sequential(
    Centred(), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 4)).double()
trainer = shoal.Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), seed=0)
data = shoal.Dataset.from_arrays((x, torch.arange(36) % 4))
trainer.fit(data.shuffle(seed=4).batch(9), epochs=2, validation_data=data.batch(8))
save_file({k: v.contiguous() for k, v in model.state_dict().items()}, OUT / f"rank-{shoal.rank()}.safetensors")
(OUT / f"rank-{shoal.rank()}.json").write_text("{}")
"""


def test_layers_that_mix_or_draw_see_the_same_slices_and_numbers_as_under_ddp(
    launch_script: Launch,
    tmp_path: Path,
    warm_parent: WarmParent,
) -> None:
    for strategy in ("ddp", "ps"):
        (tmp_path / strategy).mkdir()
        done = launch_script(
            MIXING, workers=3, strategy=strategy, args=(str(tmp_path / strategy),), quiet=True
        )
        assert done.exit_code == 0, done.error
    expected, _ = results(tmp_path / "ddp", 0)
    for rank in range(3):
        got, _ = results(tmp_path / "ps", rank)
        for name, tensor in expected.items():
            torch.testing.assert_close(
                got[name], tensor, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{name} {rank}"
            )


def test_several_loops_of_ones_own_two_models_on_one_batch_are_those_of_one_process(
    launch_script: Launch, tmp_path: Path
) -> None:
    for name, options in (("one", {}), ("ps", {"workers": 3, "strategy": "ps", "servers": 2})):
        (tmp_path / name).mkdir()
        done = launch_script(LOOPS, args=(str(tmp_path / name),), quiet=True, **options)
        assert done.exit_code == 0, done.error
    expected, facts = results(tmp_path / "one", 0)
    for rank in range(3):
        got, told = results(tmp_path / "ps", rank)
        assert told == facts
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name], tensor, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
