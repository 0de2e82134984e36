"""A loop with several optimizers: those of one model, known to shoal.setup or not, train what one process does, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file

Launch = Callable[..., Launched]

SCRIPT = """
import sys
import torch
from torch import nn
from safetensors.torch import save_file
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
arrays = torch.randn(48, 4), torch.randint(0, 2, (48,))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
of_head, of_body = torch.optim.Adam(model[2].parameters(), lr=0.1), torch.optim.SGD(model[0].parameters(), lr=0.5)
SETUP
for _ in range(2):
    for x, y in batches:
        of_body.zero_grad()
        of_head.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        of_body.step()
        of_head.step()
if shoal.rank() == 0:
    save_file(model.state_dict(), sys.argv[1])
"""
DATA = "import shoal\ndata = shoal.Dataset.from_arrays(arrays).batch(12)\n"
ONE = DATA + "_, _, batches = shoal.setup(model, of_body, data)"
BOTH = DATA + "shoal.setup(model, of_head, data)\n_, _, batches = shoal.setup(model, of_body, data)"


def by_hand() -> dict[str, torch.Tensor]:
    space: dict[str, object] = {}
    source = SCRIPT.partition("if shoal.rank")[0]
    kept = torch.get_default_dtype()
    try:
        exec(source.replace("SETUP", "batches = list(zip(*(each.split(12) for each in arrays)))"), space)
    finally:
        torch.set_default_dtype(kept)
    state: dict[str, torch.Tensor] = space["model"].state_dict()  # type: ignore[attr-defined]
    return state


@pytest.mark.parametrize(
    ("workers", "setup"),
    [(1, ONE), (1, BOTH), (3, ONE), (3, BOTH)],
    ids=["one", "both", "one with three workers", "both with three workers"],
)
def test_an_optimizer_that_setup_does_not_know_steps_on_the_same_gradients(
    launch_script: Launch, tmp_path: Path, workers: int, setup: str
) -> None:
    done = launch_script(SCRIPT.replace("SETUP", setup), workers=workers, args=(str(tmp_path / "model"),))
    assert done.exit_code == 0, done.error
    trained = load_file(tmp_path / "model")
    for name, wanted in by_hand().items():
        torch.testing.assert_close(trained[name], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strategy", ["ps", "fsdp"])
def test_a_second_optimizer_of_a_model_that_is_kept_for_one_is_refused(
    launch_script: Launch, tmp_path: Path, strategy: str
) -> None:
    source = SCRIPT.replace("SETUP", ONE)
    done = launch_script(source, workers=2, strategy=strategy, args=(str(tmp_path / "model"),))
    assert done.exit_code == 2, done.stderr
    assert "a second optimizer (Adam) steps parameters of a model" in str(done.error)


@pytest.mark.parametrize("strategy", ["ps", "fsdp"])
def test_a_learning_rate_computed_from_a_workers_own_loss_is_refused(
    launch_script: Launch, tmp_path: Path, strategy: str
) -> None:
    source = SCRIPT.replace("SETUP", DATA + "_, _, batches = shoal.setup(model, of_body, data)")
    source = source.replace(
        "of_head, of_body = torch.optim.Adam(model[2].parameters(), lr=0.1), ", "of_body = "
    )
    source = source.replace("model[0].parameters()", "model.parameters()")
    source = source.replace("        of_head.zero_grad()\n", "").replace("        of_head.step()\n", "")
    source = source.replace(
        "        nn.functional.cross_entropy(model(x), y).backward()\n",
        "        loss = nn.functional.cross_entropy(model(x), y)\n        loss.backward()\n"
        "        of_body.param_groups[0]['lr'] = loss.item()\n",
    )
    done = launch_script(source, workers=2, strategy=strategy, args=(str(tmp_path / "model"),))
    assert done.exit_code == 3, done.stderr
    assert "have different settings" in str(done.error)
