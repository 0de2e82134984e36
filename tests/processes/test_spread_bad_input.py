"""User errors in cutting a model over workers: one paragraph each, before training where possible."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
from launched import Launched

from shoal.config.launch import LaunchConfig
from shoal.errors import CallsDiffer, CollectiveLeftOut, ConfigError, ModelsDiffer, WaitTimedOut

Launch = Callable[..., Launched]

PRELUDE = """
import time, torch, shoal
from torch import nn
from shoal.parallel import fsdp as fsdp_cut; from shoal.parallel.tensor_parallel import plan as tensor_plan

fsdp_cut.UNIT_BYTES = tensor_plan.ALONE_BYTES = 100
rank = shoal.rank()
torch.manual_seed(0)
data = shoal.Dataset.from_arrays((torch.randn(20, 6), torch.arange(20) % 4))

def fit(model, **options):
    trainer = shoal.Trainer(
        model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), seed=0, **options
    )
    trainer.fit(data.batch(8))
    if rank == 0:
        print("loss", trainer.evaluate(data.batch(8))["loss"])
    else:
        trainer.evaluate(data.batch(8))

"""


def script(source: str) -> str:
    return PRELUDE + textwrap.dedent(source)


def paragraph(done: Launched, kind: type[Exception], *said: str) -> None:
    message = str(done.error)
    assert isinstance(done.error, kind), (done.error, done.stderr)
    assert "\n" not in message
    assert "Traceback" not in message
    for words in said:
        assert words in message, message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "dp=2,tp=2", "workers": 3}, "4 workers, and 3 were asked for"),
        ({"strategy": "dp=2048,tp=2", "workers": 4096}, "4096 workers cannot be started"),
        (
            {"strategy": "fsdp", "workers": 2, "compress": "bf16"},
            "--compress bf16 makes the gradients of ddp",
        ),
        ({"strategy": "fsdp", "workers": 2, "exchange": "ring"}, "--exchange ring sums the gradients of ddp"),
        ({"strategy": "ps", "workers": 2, "exchange": "tree"}, "--exchange tree sums the gradients of ddp"),
        ({"workers": 2, "compress": "topk:ratio=7"}, "ratio"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_launch_that_cannot_be_is_refused_before_anything_starts(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        LaunchConfig(script="train.py", **options)  # type: ignore[arg-type]
    assert "Nothing was started" in str(refused.value)


@pytest.mark.parametrize("strategy", ["fsdp", "tp", "pp"])
def test_ranks_with_different_models_are_told_apart(launch_script: Launch, strategy: str) -> None:
    model = "nn.Sequential(nn.Linear(6, 8 + 4 * (rank == 1)), nn.Tanh(), nn.Linear(8 + 4 * (rank == 1), 4))"
    done = launch_script(script(f"fit({model})"), workers=2, strategy=strategy)
    paragraph(done, ModelsDiffer, "rank 1 built another model than rank 0", "'0.weight' is (8, 6)")


STUCK = """
    class Stuck(nn.Linear):
        calls = 0
        def forward(self, x):
            self.calls += self.training and torch.is_grad_enabled()  # not in trials of a forward
            if rank == 1 and self.calls == 3:
                time.sleep(1000)
            return super().forward(x)

    fit(Stuck(6, 4))
"""


@pytest.mark.parametrize(
    ("strategy", "operation"),
    [("ddp", "the exchange of losses and statistics"), ("fsdp", "forward and backward")],
)
def test_a_rank_that_does_not_come_is_named_with_the_operation_and_the_step(
    launch_script: Launch, strategy: str, operation: str
) -> None:
    done = launch_script(
        script(STUCK), workers=3, strategy=strategy, step_timeout_s=3.0, max_restarts=0, grace_s=0.2
    )
    paragraph(done, WaitTimedOut, f"{operation} of step 3 waited", "for rank 1", "--step-timeout (now 3 s)")


def test_a_rank_that_trains_on_while_the_others_exchange_is_told_so(launch_script: Launch) -> None:
    done = launch_script(
        script(
            """
            class Sums(shoal.callbacks.Callback):
                ranks = "every"
                def on_step_end(self, trainer, logs):
                    if rank != 1 or trainer.step < 2:
                        shoal.collectives.all_reduce(torch.ones(3), timeout_s=20.0)

            fit(nn.Linear(6, 4), callbacks=[Sums()])
            """
        ),
        workers=3,
    )
    paragraph(
        done,
        CallsDiffer,
        "called all_reduce(float32 [3], op=sum)",
        "rank 1 is at another place (a step of training",
    )


CAST = """
    class Cast(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.dtype = dtype
        def forward(self, x):
            return x.to(self.dtype)
"""

MIXED = """
    middle = nn.Sequential(Cast(torch.float64), nn.Linear(8, 8).double(), nn.LayerNorm(8).double(), Cast(torch.float32))
    fit(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), middle, nn.Linear(8, 4)))
"""


def test_layers_of_different_dtypes_are_trained_by_every_strategy(launch_script: Launch) -> None:
    losses = []
    for strategy, workers in (("single", 1), ("ddp", 2), ("fsdp", 2), ("tp", 2), ("pp", 2)):
        done = launch_script(
            script(CAST) + textwrap.dedent(MIXED), workers=workers, strategy=strategy, name=strategy
        )
        assert done.exit_code == 0, f"{strategy}: {done.error}"
        losses.append(float(done.stdout.split("loss")[1]))
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)


SCALED = """
    class Scaled(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.up, self.scale, self.down = nn.Linear(6, 8), nn.Parameter(torch.ones(8, dtype=dtype)), nn.Linear(8, 4)
        def forward(self, x):
            return self.down((self.up(x).tanh() * self.scale).float())
"""


def test_a_parameter_of_another_dtype_than_its_neighbours_is_refused_by_name(launch_script: Launch) -> None:
    source = SCALED + "    fsdp_cut.UNIT_BYTES = 1 << 20\n    fit(Scaled(torch.float64))"
    done = launch_script(script(source), workers=2, strategy="fsdp")
    paragraph(
        done,
        ConfigError,
        "'scale' is torch.float64",
        "is torch.float32",
        "Nothing was trained",
        "--strategy ddp",
    )


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))", "{'0': 'colwise'}"),
        ("nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))", "{'2': 'rowwise'}"),
        ("Scaled(torch.float32)", "None"),
    ],
    ids=["nobody closes", "nobody opens", "a parameter between"],
)
def test_a_layer_no_plan_covers_is_given_what_it_needs(launch_script: Launch, model: str, plan: str) -> None:
    source = script(SCALED + f"    fit({model}, tensor_plan={plan})")
    alone, cut = (
        launch_script(source, name="alone"),
        launch_script(source, workers=2, strategy="tp", name="tp"),
    )
    assert cut.exit_code == 0, f"{cut.error}\n{cut.stderr}"
    losses = [float(done.stdout.split("loss")[1]) for done in (alone, cut)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_rank_that_leaves_out_a_sum_of_its_loop_is_found_out_at_the_deadline(launch_script: Launch) -> None:
    done = launch_script(
        script(
            """
            model = nn.Linear(6, 4)
            model, optimizer, batches = shoal.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), data.batch(8))
            for number, (x, y) in enumerate(batches):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if rank != 1 or number != 1:
                    shoal.reduce(1.0)
            """
        ),
        workers=3,
        step_timeout_s=4.0,
    )
    paragraph(done, CallsDiffer, "rank 0 waits in a sum over the workers, rank 1 waits in a step")


def test_a_rank_that_leaves_out_a_collective_is_found_out_with_the_operation(launch_script: Launch) -> None:
    done = launch_script(
        script(
            """
            for number in range(4):
                if rank != 1 or number != 2:
                    shoal.collectives.all_reduce(torch.ones(3))
            """
        ),
        workers=3,
        step_timeout_s=4.0,
    )
    paragraph(
        done,
        CallsDiffer,
        "rank 0 waits in all_reduce(float32 [3], op=sum), its call 4 of shoal.collectives, rank 1 went on",
    )


def test_a_rank_whose_forward_leaves_its_layers_out_ends_the_job_with_a_word(launch_script: Launch) -> None:
    done = launch_script(
        script(
            """
            fsdp_cut.UNIT_BYTES = 1 << 20  # one unit: gloo aborts where it meets collectives of two sizes
            class Early(nn.Module):
                calls = 0
                def __init__(self, inner):
                    super().__init__()
                    self.inner = inner
                def forward(self, x):
                    Early.calls += 1
                    y = self.inner(x)
                    return y.detach().requires_grad_() if rank == 1 and Early.calls >= 2 else y
            fit(Early(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))))
            """
        ),
        workers=3,
        strategy="fsdp",
        step_timeout_s=4.0,
    )
    paragraph(
        done,
        CollectiveLeftOut,
        "ranks 0, 2 waited in forward and backward of step",
        "for rank 1",
        "shoal resume",
    )
