"""Weights in a loop of the user's own that something besides the given optimizer's step changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file
from typer.testing import Result

Launch = Callable[..., Launched]

HEAD = """
import pathlib, sys
import torch, shoal
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

OUT = pathlib.Path(sys.argv[1])
g = torch.Generator().manual_seed(1)
x = torch.randn(41, 6, dtype=torch.float64, generator=g)
label = torch.arange(41) * 5 % 4
data = shoal.Dataset.from_arrays((x, label)).shuffle(seed=2).batch(10)
results = {}

class Wrapper(torch.optim.Optimizer):  # as public implementations have it: the groups are the inner optimizer's
    def __init__(self, inner):
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = {}

    def parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    def zero_grad(self):
        self.inner.zero_grad()

class SharpnessAware(Wrapper):
    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        for p in self.parameters():
            self.state[p] = {"before": p.clone()}
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for p in self.parameters():
            p.copy_(self.state[p]["before"])
        self.inner.step()
        if zero_grad:
            self.zero_grad()

    def step(self):
        raise NotImplementedError

class Lookahead(Wrapper):
    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.count = getattr(self, "count", 0) + 1
        with torch.no_grad():
            for p in self.parameters():
                state = self.state.setdefault(p, {"slow": p.clone()})
                if self.count % 2 == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])
        return loss

def set_up(seed, wrap=lambda inner: inner):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    return shoal.setup(model, wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)), data)

def loss_of(model, a, b):
    return F.cross_entropy(model(a), b)

def keep(name, model):
    results.update({f"{name}/{k}": getattr(v, "full_tensor", lambda v=v: v)().clone() for k, v in model.state_dict().items()})
"""

WRAPPED = """
model, optimizer, batches = set_up(0, SharpnessAware)
for _ in range(2):
    for a, b in batches:
        loss_of(model, a, b).backward()
        optimizer.first_step(zero_grad=True)
        loss_of(model, a, b).backward()
        optimizer.second_step(zero_grad=True)
keep("sharpness-aware", model)

model, optimizer, batches = set_up(1, Lookahead)
for _ in range(2):
    for a, b in batches:
        optimizer.zero_grad()
        loss_of(model, a, b).backward()
        optimizer.step()
keep("lookahead", model)
"""

SUMMED = """
model, optimizer, batches = set_up(2)
for a, b in batches:
    loss_of(model, a, b).backward()
    shoal.sum_gradients(optimizer)
    with torch.no_grad():
        before = [p.clone() for p in model.parameters()]
        for p in model.parameters():
            p.add_(0.05 * p.grad)
    optimizer.zero_grad()
    loss_of(model, a, b).backward()
    shoal.sum_gradients(optimizer)
    with torch.no_grad():
        for p, old in zip(model.parameters(), before):
            p.copy_(old)
    optimizer.step()
    optimizer.zero_grad()
keep("by hand", model)
"""

TAIL = """
save_file({k: v.contiguous() for k, v in results.items()}, OUT / f"rank-{shoal.rank()}.safetensors")
"""


@pytest.mark.parametrize(
    ("strategy", "body"),
    [("ddp", WRAPPED + SUMMED), ("fsdp", WRAPPED + SUMMED), ("ps", SUMMED)],
    ids=["ddp", "fsdp", "ps"],
)
def test_weights_changed_by_sums_are_those_of_one_process(
    launch_script: Launch, tmp_path: Path, strategy: str, body: str
) -> None:
    trained: dict[int, list[dict[str, torch.Tensor]]] = {}
    for workers in (1, 2, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        settings = {"strategy": strategy} if workers > 1 else {}
        done = launch_script(HEAD + body + TAIL, workers=workers, args=(str(folder),), **settings)
        assert done.exit_code == 0, done.error
        trained[workers] = [load_file(folder / f"rank-{rank}.safetensors") for rank in range(workers)]
    [expected] = trained[1]
    for workers in (2, 3):
        for name in expected:
            torch.testing.assert_close(trained[workers][0][name], expected[name], rtol=1e-9, atol=1e-11)
            assert all(torch.equal(rank[name], trained[workers][0][name]) for rank in trained[workers]), name


BY_HAND = """
model, optimizer, batches = set_up(0)
for a, b in batches:
    loss_of(model, a, b).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
            p.grad = None
"""

PERTURBED = """
model, optimizer, batches = set_up(0)
for a, b in batches:
    loss_of(model, a, b).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * p.grad.sign())
    optimizer.zero_grad()
    loss_of(model, a, b).backward()
    optimizer.step()
"""

ANOTHER_OPTIMIZER = """
model, optimizer, batches = set_up(0)
another = torch.optim.Adam(model.parameters())
for a, b in batches:
    loss_of(model, a, b).backward()
    another.step()
    another.zero_grad()
"""

THROUGH_DATA = """
model, optimizer, batches = set_up(0)
for a, b in batches:
    loss_of(model, a, b).backward()
    for p in model.parameters():
        p.data -= 0.1 * p.grad
        p.grad = None
"""


def test_another_optimizer_of_the_model_is_refused_where_servers_hold_it(
    launch_script: Launch, tmp_path: Path
) -> None:
    done = launch_script(HEAD + ANOTHER_OPTIMIZER + TAIL, workers=2, args=(str(tmp_path),), strategy="ps")
    assert done.exit_code == 2
    assert "a second optimizer (Adam) steps parameters of a model" in str(done.error)


@pytest.mark.parametrize("strategy", ["ddp", "ps"])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (BY_HAND, "were changed between backward() and optimizer.step()"),
        (PERTURBED, "were changed between backward() and optimizer.step()"),
        (THROUGH_DATA, "workers 0 and 1 have different weights"),
        (
            THROUGH_DATA.replace("p.grad = None", "p.grad = None\n    if True: shoal.checkpoint()"),
            "workers 0 and 1 have different weights",
        ),
    ],
    ids=["by hand", "perturbed", "through .data", "before a checkpoint"],
)
def test_weights_changed_by_a_workers_own_gradient_are_refused(
    launch_script: Launch, tmp_path: Path, body: str, said: str, strategy: str
) -> None:
    done = launch_script(HEAD + body + TAIL, workers=2, args=(str(tmp_path),), strategy=strategy)
    assert done.exit_code != 0
    assert said in str(done.error)
    assert not list(tmp_path.glob("rank-*"))


def test_weights_changed_after_a_step_are_the_scripts_own_matter(
    launch_script: Launch, tmp_path: Path
) -> None:
    body = """
    critic, of_critic, _ = set_up(0)
    maker, of_maker, batches = set_up(1)
    for a, b in batches:
        of_critic.zero_grad()
        critic(a).mean().backward()
        of_critic.step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.2, 0.2)
        of_maker.zero_grad()
        critic(maker(a) @ torch.ones(4, 6, dtype=torch.float64)).mean().backward()  # reaches the critic, too
        of_maker.step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.1, 0.1)
    keep("critic", critic)
    """
    source = HEAD + "\n".join(line[4:] for line in body.splitlines()) + TAIL
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        done = launch_script(source, workers=workers, args=(str(tmp_path / str(workers)),))
        assert done.exit_code == 0, done.error
    one, two = (load_file(tmp_path / str(workers) / "rank-0.safetensors") for workers in (1, 2))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-10, atol=1e-12)


CLAMPED = """
model, optimizer, batches = set_up(0)
other, of_other, _ = set_up(1)
for a, b in batches:
    optimizer.zero_grad()
    loss_of(model, a, b).backward()
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            WRITE
    of_other.zero_grad()
    loss_of(other, a, b).backward()
    of_other.step()
keep("model", model)
"""
ONE_MODEL = (
    CLAMPED.replace("other, of_other, _ = set_up(1)", "").replace("of_other", "int").split("    int.")[0]
)
WRITTEN = "changed by something besides optimizer.step()"


@pytest.mark.parametrize(
    "body",
    [
        ONE_MODEL.replace("WRITE", "p.clamp_(-0.1, 0.1)"),
        ONE_MODEL.replace("WRITE", "p.data.clamp_(-0.1, 0.1)"),
        CLAMPED.replace("WRITE", "p.clamp_(-0.1, 0.1)"),
        ONE_MODEL.replace("WRITE", "p.clamp_(-0.1, 0.1)") + "    if True: shoal.checkpoint()",
        "model, optimizer, batches = set_up(0)\nfor a, b in batches:\n    loss_of(model, a, b).backward()\n"
        "    shoal.sum_gradients(optimizer)\n    with torch.no_grad():\n        for p in model.parameters():\n"
        "            p.mul_(0.9)\n    optimizer.step()\n",
    ],
    ids=["in place", "through .data", "two models", "before a checkpoint", "before the step"],
)
def test_weights_changed_after_a_step_are_refused_where_servers_hold_them(
    launch_script: Launch, tmp_path: Path, body: str
) -> None:
    done = launch_script(HEAD + body + TAIL, workers=2, args=(str(tmp_path),), strategy="ps", servers=1)
    assert done.exit_code == 2, done.stderr
    assert WRITTEN in str(done.error)
    assert not list(tmp_path.glob("rank-*"))


def test_weights_that_are_restored_before_the_next_batch_are_those_of_the_servers(
    launch_script: Launch, tmp_path: Path
) -> None:
    body = """
before = None
model, optimizer, batches = set_up(0)
for a, b in batches:
    optimizer.zero_grad()
    loss_of(model, a, b).backward()
    optimizer.step()
    with torch.no_grad():
        kept = [p.clone() for p in model.parameters()]
        for p in model.parameters():
            p.zero_()
        for p, old in zip(model.parameters(), kept):
            p.copy_(old)
keep("model", model)
"""
    trained = []
    for strategy in ("ddp", "ps"):
        (tmp_path / strategy).mkdir()
        done = launch_script(
            HEAD + body + TAIL, workers=2, args=(str(tmp_path / strategy),), strategy=strategy
        )
        assert done.exit_code == 0, done.error
        trained.append(load_file(tmp_path / strategy / "rank-0.safetensors"))
    for name in trained[0]:
        torch.testing.assert_close(trained[1][name], trained[0][name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("workers", "write"), [(2, "weight.data.clamp_(-0.1, 0.1)"), (1, "weight.detach().clamp_(-0.1, 0.1)")]
)
def test_a_callback_that_changes_weights_is_refused_where_servers_hold_them(
    launch_script: Launch, workers: int, write: str
) -> None:
    source = f"""
import torch, shoal
from torch import nn
class Clamps(shoal.callbacks.Callback):
    ranks = "every"
    def on_step_end(self, trainer, logs):
        for weight in trainer.model.parameters():
            {write}
x = torch.ones(32, 2)
trainer = shoal.Trainer(nn.Linear(2, 1), loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
                        callbacks=[Clamps()], seed=0)
trainer.fit(shoal.Dataset.from_arrays((x, x[:, :1])).batch(8), epochs=1)
"""
    done = launch_script(source, workers=workers, strategy="ps", servers=1)
    assert done.exit_code == 2, done.stderr
    assert "they live on servers" in str(done.error)


def test_verify_names_weights_that_the_script_writes_itself(
    invoke: Callable[..., Result], tmp_path: Path
) -> None:
    script = tmp_path / "by_hand.py"
    script.write_text(HEAD + BY_HAND + TAIL)
    done = invoke("verify", "-n", "2", "--steps", "3", str(script), str(tmp_path))
    assert done.exit_code == 2
    assert "were changed between backward()" in " ".join(done.output.split())


def test_a_checkpoint_of_a_wrapper_names_the_optimizer_within(launch_script: Launch, tmp_path: Path) -> None:
    loop = """
model, optimizer, batches = set_up(0, Lookahead)
for a, b in batches:
    optimizer.zero_grad()
    loss_of(model, a, b).backward()
    optimizer.step()
    shoal.checkpoint(SAVED)
"""
    said = HEAD + loop.replace("SAVED", "inner=optimizer.inner")
    assert launch_script(said, workers=2, args=(str(tmp_path),)).exit_code == 0
    done = launch_script(HEAD + loop.replace("SAVED", ""), workers=2, args=(str(tmp_path),))
    assert done.exit_code == 2
    assert "not that of the SGD within it" in str(done.error)
