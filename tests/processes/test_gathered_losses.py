"""Losses over gathered rows: in-batch negatives train as in one process, under any split of the rows and under deaths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file

from shoal import Faults
from shoal.errors import ForwardMixesSamples
from whole_matrix import matrix_only

Launch = Callable[..., Launched]
SCRIPT = Path(__file__).parent / "scripts" / "in_batch_negatives.py"

_one_process: dict[str, dict[str, torch.Tensor]] = {}


def trained(launch: Launch, out: Path, kind: str, **options: object) -> dict[str, torch.Tensor]:
    done = launch(SCRIPT, args=(str(out), kind), **options)
    assert done.exit_code == 0, done.error
    return load_file(out)


@pytest.mark.parametrize("kind", ["trainer", "loop"])
@pytest.mark.parametrize(("workers", "strategy"), [(3, "ddp"), (3, "fsdp"), *matrix_only((2, "ddp"))])
def test_a_loss_over_gathered_rows_trains_the_weights_of_one_process(
    launch_script: Launch, tmp_path: Path, kind: str, workers: int, strategy: str
) -> None:
    if kind not in _one_process:
        _one_process[kind] = trained(launch_script, tmp_path / "one", kind, workers=1)
    expected = _one_process[kind]
    found = trained(launch_script, tmp_path / "many", kind, workers=workers, strategy=strategy)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", ["trainer", "loop"])
def test_a_worker_killed_between_gathering_and_commit_changes_no_bit(
    launch_script: Launch, tmp_path: Path, kind: str
) -> None:
    whole = trained(launch_script, tmp_path / "whole", kind, workers=3)
    faults = Faults().kill("worker-1", at_step=3, at="worker: exchange begun")
    faults = faults.kill("worker-0", at_step=4, at="worker: exchange finished, not committed")
    faults = faults.kill(
        "worker-2",
        at_step=6,
        at="worker: before commit" if kind == "trainer" else "worker: committed, not counted",
    )
    killed = trained(launch_script, tmp_path / "killed", kind, workers=3, faults=faults)
    assert [name for name in whole if not torch.equal(whole[name], killed[name])] == []


def test_gathering_is_refused_by_name_where_it_cannot_be(launch_script: Launch, tmp_path: Path) -> None:
    for strategy, said in (("ps", "no connection to each other"), ("tp", "compute the same part of a batch")):
        done = launch_script(
            SCRIPT, args=(str(tmp_path / "out"), "trainer"), workers=2, strategy=strategy, name=strategy
        )
        assert done.exit_code == 2
        assert said in str(done.error)


MIXING = """
import torch, shoal
from torch import nn

torch.manual_seed(0)

class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)

model = nn.Sequential(nn.Linear(6, 8), Centred(), nn.Linear(8, 3))
x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
# 14 samples are cut into 4, 5 and 5; of the last batch one worker has 4.
trainer = shoal.Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
trainer.fit(shoal.Dataset.from_arrays((x, y)).batch(14))
"""


@pytest.mark.parametrize(
    ("strategy", "workers"), [("ddp", 3), ("fsdp", 3), ("dp=2,tp=2", 4), ("fsdp=2,pp=2", 4)]
)
def test_a_forward_that_mixes_samples_is_refused_by_its_layer(
    launch_script: Launch, strategy: str, workers: int
) -> None:
    done = launch_script(MIXING, workers=workers, strategy=strategy)
    assert isinstance(done.error, ForwardMixesSamples), done.stderr
    assert (done.error.layer, done.error.kind) == ("1", "Centred")


@pytest.mark.parametrize("option", ["max_norm=1.0", "scale_grad_by_freq=True"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ps"])
def test_tables_that_look_at_the_whole_batch_are_refused(
    launch_script: Launch, option: str, strategy: str
) -> None:
    text = MIXING.replace("nn.Linear(6, 8), Centred()", f"nn.Embedding(9, 8, {option}), nn.Flatten()")
    text = text.replace("nn.Linear(8, 3)", "nn.Linear(48, 3)").replace(
        "torch.randn(40, 6)", "torch.randint(0, 9, (40, 6))"
    )
    done = launch_script(text, workers=2, strategy=strategy, servers=1 if strategy == "ps" else None)
    assert done.exit_code == 2
    assert f"the layer '0' (Embedding) has {option.removesuffix('.0')}" in str(done.error)
