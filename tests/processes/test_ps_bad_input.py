"""Script errors under the parameter server end soon, in one paragraph that says what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from launched import Launched

from shoal.errors import ConfigError
from whole_matrix import matrix_only

PROLOGUE = """
import torch, shoal
from torch import nn
rank = shoal.rank()
data = shoal.Dataset.from_arrays((torch.ones(64, 4), torch.ones(64, 1))).batch(8)
class Ids(nn.Module):
    num_calls = 0
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(10, 1)
    def forward(self, x):
        self.num_calls += 1
        return self.rows((x[:, 0] * (12 if self.num_calls > 3 else 3)).long())
class Own(torch.optim.SGD):
    pass
def train(model, build=lambda params: torch.optim.SGD(params, lr=0.01)):
    shoal.Trainer(model, loss=nn.MSELoss(), optimizer=build, seed=0).fit(data, epochs=1)
"""

CASES = {
    "models differ": (
        "train(nn.Linear(4, 1) if rank == 0 else nn.Linear(4, 1, bias=False))",
        3,
        "'bias' is (1,) torch.float32 on rank 0 and absent on rank 1",
    ),
    "optimizers differ": (
        "train(nn.Linear(4, 1), lambda params: (torch.optim.SGD if rank else torch.optim.Adam)(params, lr=0.1))",
        3,
        "workers built different optimizers or models: the optimizer is",
    ),
    "settings differ": (
        "train(nn.Linear(4, 1), lambda params: torch.optim.SGD(params, lr=0.1 + rank))",
        3,
        "lr of parameter group 0 is",
    ),
    "lbfgs": (
        "train(nn.Linear(4, 1), torch.optim.LBFGS)",
        2,
        "LBFGS runs the model several times per update",
    ),
    "a class of ones own": (
        "train(nn.Linear(4, 1), lambda params: Own(params, lr=0.1))",
        2,
        "servers run torch's own classes by name",
    ),
    "an id out of range": (
        "train(Ids(), lambda params: torch.optim.Adagrad(params))",
        1,
        "IndexError: id 12 is out of range: the embedding of 'rows.weight' has 10 rows",
    ),
    "one rank leaves": (
        "if rank == 0: train(nn.Linear(4, 1))",
        3,
        "the ranks disagree about call 1 into shoal",
    ),
}


@pytest.mark.parametrize("strategy", ["ps", *matrix_only("ps:async")])
@pytest.mark.parametrize("case", CASES)
def test_a_mistake_ends_the_job_with_what_to_do(
    launch_script: Callable[..., Launched], case: str, strategy: str
) -> None:
    source, code, said = CASES[case]
    done = launch_script(
        PROLOGUE + source,
        workers=2,
        strategy=strategy,
        quiet=True,
        step_timeout_s=20.0,
        join_timeout_s=20.0,
    )
    assert done.exit_code == code
    assert said in str(done.error)
    assert ("Traceback" in str(done.error)) == (code == 1)  # the script's own errors have their own


def test_relaxed_strategies_refuse_data_of_unknown_length(launch_script: Callable[..., Launched]) -> None:
    done = launch_script(
        PROLOGUE
        + "from torch.utils.data import DataLoader, IterableDataset\n"
        + "class Stream(IterableDataset):\n"
        + "    def __iter__(self):\n"
        + "        yield from ((torch.ones(4), torch.ones(1)) for _ in range(40))\n"
        + "data = DataLoader(Stream(), batch_size=8)\n"
        + "train(nn.Linear(4, 1))\n",
        workers=2,
        strategy="ps:async",
        quiet=True,
    )
    assert done.exit_code == 2
    assert "use shoal.Dataset, or an exact strategy" in str(done.error)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "ps", "servers": 0}, "needs a server"),
        ({"strategy": "ddp", "servers": 2}, "has no servers"),
        ({"strategy": "ps", "servers": 1, "replicas": 2}, "need as many servers"),
        ({"strategy": "ps:ssp"}, "ps:ssp"),
        ({"strategy": "ps", "servers": 65}, "65 servers cannot be started"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_anything_starts(
    launch_script: Callable[..., Launched], options: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        launch_script(PROLOGUE, workers=2, **options)
