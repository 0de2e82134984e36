"""What a script changes between two fits, at the model or at its optimizer, counts as in one process, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file

SCRIPT = """
import sys
import torch, shoal
from torch import nn
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = shoal.Dataset.from_arrays((torch.arange(48) % 10, torch.randint(0, 2, (48,)))).batch(12)
model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
def trainer_of(optimizer):
    return shoal.Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=optimizer, seed=0)
"""
CHANGED = """
BEFORE
trainer = trainer_of(optimizer)
trainer.fit(data)
CHANGE
trainer.fit(data)
trainer.save(sys.argv[1])
"""

Launch = Callable[..., Launched]

UNFROZEN = ("model[1].requires_grad_(False)", "model[1].requires_grad_(True)", "was unfrozen since")


def written(before: str, change: str) -> str:
    return SCRIPT + CHANGED.replace("BEFORE", before).replace("CHANGE", change)


@pytest.mark.parametrize(
    ("strategy", "before", "change", "said"),
    [
        ("ddp", *UNFROZEN),
        ("fsdp", *UNFROZEN),
        ("ps", *UNFROZEN),
        ("ps", "", "model[1].weight.data.zero_()", "the weights '1.weight' were changed"),
        ("ps", "", "torch.nn.init.zeros_(model[0].weight)", "the weights '0.weight' were changed"),
        ("ps", "", "model[0].weight.data.zero_()", "the weights '0.weight' were changed"),
        ("ps", "", "optimizer.param_groups[0]['momentum'] = 0.9", "the rows of '0.weight' on the servers cannot follow"),
        ("ps", "", "optimizer.state.clear()", "this state is on the servers"),
        ("ps", "", "optimizer.state_dict()", "this state is on the servers"),
        ("ps", "kept = optimizer.state_dict()", "optimizer.load_state_dict(kept)", "this state is on the servers"),
        (
            "ps",
            "optimizer = torch.optim.SGD(model[3].parameters(), lr=0.5)",
            "optimizer.add_param_group({'params': list(model[1].parameters())})",
            "had [2] parameters when they were laid out",
        ),
        ("fsdp", "", "trainer = trainer_of(torch.optim.SGD)", "was split over the workers by another Trainer"),
        ("tp", "model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)); data = "
         "shoal.Dataset.from_arrays((torch.randn(48, 4), torch.randint(0, 2, (48,)))).batch(12); "
         "optimizer = torch.optim.SGD(model.parameters(), lr=0.5)",
         "import copy; model = copy.deepcopy(model); trainer = trainer_of(torch.optim.SGD)",
         "was split over the workers by another Trainer"),
    ],
)  # fmt: skip
def test_a_change_that_would_be_lost_is_refused(
    launch_script: Launch, tmp_path: Path, strategy: str, before: str, change: str, said: str
) -> None:
    done = launch_script(
        written(before, change),
        workers=2,
        strategy=strategy,
        args=(str(tmp_path / "model"),),
        step_timeout_s=20.0,
    )
    assert done.exit_code == 2, done.stderr
    assert said in str(done.error)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("strategy", "before", "change"),
    [
        ("ps", "", "model[0].requires_grad_(False)"),
        ("ps", "", "model[3].requires_grad_(False)"),
        ("ps", "optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)", ""),
        ("fsdp", "optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)", ""),
        ("ps", "optimizer = torch.optim.Adafactor(model.parameters())", ""),
    ],
)
def test_two_fits_train_what_one_process_does(
    launch_script: Launch, tmp_path: Path, strategy: str, before: str, change: str
) -> None:
    for workers, of in ((1, "single"), (2, strategy)):
        done = launch_script(
            written(before, change), workers=workers, strategy=of, args=(str(tmp_path / of),)
        )
        assert done.exit_code == 0, done.error
    one, two = (load_file(tmp_path / of / "model.safetensors") for of in ("single", strategy))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-10, atol=1e-12)


def test_a_layer_unfrozen_for_an_optimizer_that_lacks_it_is_named(
    launch_script: Launch, tmp_path: Path
) -> None:
    source = written(UNFROZEN[0], UNFROZEN[1]).replace(
        "trainer_of(optimizer)\n", "trainer_of(torch.optim.SGD)\n"
    )
    done = launch_script(source, workers=1, args=(str(tmp_path / "model"),))
    assert done.exit_code == 0, done.error
    assert "'1.weight' and 1 more parameters of the model had requires_grad=False" in done.stderr


def test_an_optimizer_that_has_taken_steps_is_refused_by_servers(
    launch_script: Launch, tmp_path: Path
) -> None:
    stepped = (
        "optimizer = torch.optim.Adam(model.parameters()); model(torch.arange(4)).sum().backward(); "
        "optimizer.step(); optimizer.zero_grad()"
    )
    done = launch_script(written(stepped, ""), workers=2, strategy="ps", args=(str(tmp_path / "model"),))
    assert done.exit_code == 2, done.stderr
    assert "has taken steps already" in str(done.error)


def test_a_norm_over_gradients_that_are_not_sent_is_refused(launch_script: Launch, tmp_path: Path) -> None:
    source = written("optimizer = torch.optim.SGD(model[3].parameters(), lr=0.5)", "").replace(
        "seed=0)", "seed=0, clip_norm=0.1)"
    )
    done = launch_script(source, workers=2, strategy="ps", args=(str(tmp_path / "model"),))
    assert done.exit_code == 2, done.stderr
    assert "the optimizer does not have 3 of them ('0.weight')" in str(done.error)
