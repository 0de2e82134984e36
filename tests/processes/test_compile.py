"""`compile=True`: the model is compiled under each strategy that can, which is said, and refused under the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.errors import ConfigError
from whole_matrix import matrix_only

SCRIPT = """
import torch, shoal
from torch import nn
from shoal.parallel import fsdp as fsdp_cut
fsdp_cut.UNIT_BYTES = 100
torch._dynamo.config.suppress_errors = False
torch.manual_seed(0)
x, y = torch.randn(24, 8), torch.randint(0, 3, (24,))
model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 3))
compile = torch.compile
torch.compile = lambda function: compile(function, backend="aot_eager")  # as good as any other to be seen, and quick
trainer = shoal.Trainer(
    model, loss=nn.CrossEntropyLoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1), compile=True
)
trainer.fit(shoal.Dataset.from_arrays((x, y)).batch(8), epochs=1)
"""


@pytest.mark.parametrize(
    ("strategy", "workers"), [("ddp", 2), ("fsdp", 2), ("tp", 2), *matrix_only(("single", 1), ("ps", 2))]
)
def test_a_sequential_is_compiled_and_the_graphs_are_counted(
    launch_script: Callable[..., Any], strategy: str, workers: int
) -> None:
    done = launch_script(SCRIPT, workers=workers, strategy=strategy)
    assert done.exit_code == 0, done.stderr
    assert "compile: Sequential runs as 1 compiled graph" in done.stderr


DROPS = SCRIPT.replace("nn.Tanh()", "nn.Dropout(0.1)")
# A rule of its own for what is traced: what is compiled is not what runs one by one.
DIFFERS = SCRIPT.replace("nn.Linear(16, 3))", "nn.Linear(16, 3), Odd())").replace(
    "torch.manual_seed(0)",
    "class Odd(nn.Module):\n    def forward(self, x):\n"
    "        return x.tanh() * (1.1 if torch.compiler.is_compiling() else 1.0)\ntorch.manual_seed(0)",
)


@pytest.mark.parametrize(
    ("source", "strategy", "says"),
    [
        (SCRIPT, "pp", "pp runs it in stages"),
        (DROPS, "tp", "takes models that draw no random numbers"),
        (DIFFERS, "tp", "computes something else than before on the first batch"),
    ],
)
def test_a_model_that_cannot_be_compiled_in_parts_is_refused_before_the_first_step(
    launch_script: Callable[..., Any], source: str, strategy: str, says: str
) -> None:
    done = launch_script(source, workers=2, strategy=strategy)
    assert isinstance(done.error, ConfigError), done.stderr
    assert says in str(done.error)
    assert "Nothing was trained; leave compile out, or use" in str(done.error) or says.startswith("takes")
