"""Gradients in a loop of the user's own: clipped, accumulated and changed as one process would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file

from whole_matrix import matrix_only

Launch = Callable[..., Launched]

HEAD = """
import pathlib, sys
import torch, shoal
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_  # before shoal.setup extends it

OUT = pathlib.Path(sys.argv[1])
g = torch.Generator().manual_seed(1)
x = torch.randn(41, 6, dtype=torch.float64, generator=g)
label = torch.arange(41) * 5 % 4
# Slices differ in size, and the last batch has one sample: of three workers two borrow it.
data = shoal.Dataset.from_arrays((x, label)).shuffle(seed=2).batch(10)
results = {}

def mlp(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()

def keep(name, model, *numbers):
    results.update({f"{name}/{k}": v.clone() for k, v in model.state_dict().items()})
    results[f"{name}/numbers"] = torch.tensor([float(n) for n in numbers] or [0.0], dtype=torch.float64)

def set_up(seed, optimizer=torch.optim.Adam, **settings):
    model = mlp(seed)
    return shoal.setup(model, optimizer(model.parameters(), **(settings or {"lr": 0.02})), data)
"""

TAIL = """
save_file({k: v.contiguous() for k, v in results.items()}, OUT / f"rank-{shoal.rank()}.safetensors")
"""

CLIPPED = """
def by_torch(model, optimizer):
    return clip_grad_norm_(model.parameters(), 0.3)

def by_shoal(model, optimizer):
    return shoal.clip_grad_norm_(model.parameters(), 0.3, norm_type=1.0)

def by_value(model, optimizer):
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
    return 0.0

def in_two_calls(model, optimizer):
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.3, norm)
    return norm

def by_hand(model, optimizer):
    shoal.sum_gradients(optimizer)
    for p in model.parameters():
        p.grad = p.grad.sign() * p.grad.abs().sqrt()
    return max(float(p.grad.abs().max()) for p in model.parameters())

for seed, clip in enumerate((by_torch, by_shoal, by_value, in_two_calls, by_hand)):
    model, optimizer, batches = set_up(seed)
    norms = []
    for number, (a, b) in enumerate(batches):
        F.cross_entropy(model(a), b).backward()
        norms.append(clip(model, optimizer))
        if number == 1:  # a step that is skipped once its gradient was seen
            optimizer.zero_grad(set_to_none=seed % 2 == 0)
            continue
        optimizer.step()
        optimizer.zero_grad()
    keep(clip.__name__, model, *norms)
"""

ACCUMULATED = """
model, optimizer, batches = set_up(0)
for _ in range(2):
    for number, (a, b) in enumerate(batches, 1):
        (F.cross_entropy(model(a), b) / 3).backward()
        if number % 3 == 0 or number == len(batches):
            optimizer.step()
            optimizer.zero_grad()
keep("over batches", model)

model, optimizer, batches = set_up(1, torch.optim.SGD, lr=0.1, momentum=0.9)
for number, (a, b) in enumerate(batches, 1):
    F.cross_entropy(model(a), b).backward()
    (0.1 * model(a).square().mean()).backward()
    kept = b != 0
    shoal.mean((F.cross_entropy(model(a), b, reduction="none") * kept).sum(), kept.sum()).backward()
    if number % 2 == 0:
        norm = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
keep("several of a batch", model, norm)

# A generator and a discriminator; the generator's backward leaves gradients in the discriminator, too.
one, opt_one, _ = set_up(2)
two, opt_two, batches = set_up(3)
for number, (a, b) in enumerate(batches, 1):
    opt_two.zero_grad()
    F.mse_loss(two(a), one(a).detach()).backward()
    clip_grad_norm_(two.parameters(), 0.2)
    opt_two.step()
    opt_one.zero_grad()
    (F.cross_entropy(one(a), b) + two(one(a) @ torch.ones(4, 6, dtype=torch.float64)).square().mean()).backward()
    opt_one.step()
keep("one", one)
keep("two", two)

# torch.autograd.grad gives what it gives elsewhere, though its result counts only for a slice.
model, optimizer, batches = set_up(4)
for a, b in batches:
    loss = F.cross_entropy(model(a), b)
    (first,) = torch.autograd.grad(loss, model[0].weight, create_graph=True)
    assert torch.equal(first, torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
keep("autograd", model)
"""


BESIDE = """
# Two optimizers of one model, of which shoal.setup is given one or both; the step of either comes first.
for seed, is_given in enumerate((False, True)):
    model = mlp(seed)
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.02)
    model, first, batches = shoal.setup(model, first, data)
    if is_given:
        model, second, batches = shoal.setup(model, second, data)
    norm = 0.0
    for number, (a, b) in enumerate(batches):
        first.zero_grad(set_to_none=number % 2 == 0)
        second.zero_grad(set_to_none=number % 2 == 0)
        F.cross_entropy(model(a), b).backward()
        for optimizer in (first, second) if number % 2 else (second, first):
            optimizer.step()
        norm += float(sum(p.grad.square().sum() for p in model.parameters()))  # of the whole batch
    keep(f"beside {is_given}", model, norm)

# An evaluation on data of its own between forward and backward, and one batch of it in every step.
model, optimizer, batches = set_up(2)
held_out = shoal.Dataset.from_arrays((x[:14], label[:14])).batch(5)
_, _, validation = shoal.setup(model, optimizer, held_out)
_, _, endless = shoal.setup(model, optimizer, held_out)
hits, one_by_one = 0.0, iter(endless)
for number, (a, b) in enumerate(batches):
    loss = F.cross_entropy(model(a), b)
    with torch.no_grad():
        for c, d in validation:
            hits += float((model(c).argmax(1) == d).sum()) * (validation.num_local > 0)
        if number < len(endless):
            model(next(one_by_one)[0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
keep("evaluated", model, shoal.reduce(hits))
"""


def trained(
    launch: Launch, body: str, folder: Path, workers: int, **options: object
) -> list[dict[str, torch.Tensor]]:
    folder.mkdir()
    done = launch(HEAD + body + TAIL, workers=workers, args=(str(folder),), **options)
    assert done.exit_code == 0, done.error
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(workers)]


@pytest.mark.parametrize(
    ("body", "strategy"),
    [(CLIPPED, "ddp"), (CLIPPED, "ps"), (ACCUMULATED, "ddp"), (ACCUMULATED, "ps"), (BESIDE, "ddp")],
    ids=["clipped-ddp", "clipped-ps", "accumulated-ddp", "accumulated-ps", "beside-ddp"],
)
def test_gradients_of_an_own_loop_are_those_of_one_process(
    launch_script: Launch, tmp_path: Path, body: str, strategy: str
) -> None:
    expected = trained(launch_script, body, tmp_path / "1", 1)[0]
    for workers in (2, 3):
        ranks = trained(launch_script, body, tmp_path / str(workers), workers, strategy=strategy)
        for name in expected:
            torch.testing.assert_close(ranks[0][name], expected[name], rtol=1e-10, atol=1e-12, msg=name)
            assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks), name


CHANGED = """
model, optimizer, batches = set_up(0)
for a, b in batches:
    F.cross_entropy(model(a), b).backward()
    model[0].weight.grad.clamp_(-0.01, 0.01)
    optimizer.step()
"""
AFTER_THE_SUM = """
model, optimizer, batches = set_up(0)
for a, b in batches:
    F.cross_entropy(model(a), b).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    F.cross_entropy(model(a), b).backward()
    optimizer.step()
"""
NEVER_CLEARED = CHANGED.replace("model[0].weight.grad.clamp_(-0.01, 0.01)", "pass")
OUTSIDE = """
model, scale = mlp(0), nn.Parameter(torch.zeros((), dtype=torch.float64))
optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
model, optimizer, batches = shoal.setup(model, optimizer, data)
for a, b in batches:
    optimizer.step()
"""
OTHER_OPTIMIZER = """
model, optimizer, batches = set_up(0)
scale = nn.Parameter(torch.zeros((), dtype=torch.float64))
other = torch.optim.SGD([scale], lr=0.1)
for a, b in batches:
    F.cross_entropy(model(a) * scale.exp(), b).backward()
    other.step()
    optimizer.step()
"""
TWO_DATA = """
model, optimizer, batches = set_up(0)
_, _, others = shoal.setup(model, optimizer, shoal.Dataset.from_arrays(x).batch(17))
for (a, b), c in zip(batches, others):
    optimizer.zero_grad()
    (F.cross_entropy(model(a), b) + model(c).square().mean()).backward()
    optimizer.step()
"""
UNFROZEN = """
model = mlp(0)
model[0].weight.requires_grad_(False)
model, optimizer, batches = shoal.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
model[0].weight.requires_grad_(True)
for a, b in batches:
    F.cross_entropy(model(a), b).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("strategy", ["ddp", *matrix_only("ps")])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (CHANGED, "'0.weight' was changed between backward() and optimizer.step()"),
        (AFTER_THE_SUM, "after the gradients of this step had been summed"),
        (UNFROZEN, "'0.weight' has a gradient, and was frozen"),
        (
            CHANGED.replace(".grad.", ".grad.data."),
            "'0.weight' was changed between backward() and optimizer.step()",
        ),
        (NEVER_CLEARED, "call optimizer.zero_grad() once for each step"),
        (
            OUTSIDE,
            "the SGD trains 1 parameter (the first of shape ()) that the model given to shoal.setup does not have",
        ),
        (
            OTHER_OPTIMIZER,
            "the SGD trains 1 parameter (the first of shape ()) that the model given to shoal.setup does not have",
        ),
        (TWO_DATA, "slices are different shares of them"),
    ],
    ids=[
        "changed",
        "after the sum",
        "unfrozen",
        "through .data",
        "never cleared",
        "outside",
        "another optimizer",
        "two data",
    ],
)
def test_gradients_that_would_be_summed_wrongly_are_refused(
    launch_script: Launch, tmp_path: Path, body: str, said: str, strategy: str
) -> None:
    done = launch_script(HEAD + body + TAIL, workers=3, args=(str(tmp_path),), strategy=strategy)
    assert done.exit_code == 2, done.error
    assert said in str(done.error)
    assert "Nothing of this step was applied" in str(done.error)
    assert not list(tmp_path.glob("rank-*"))


@pytest.mark.parametrize("strategy", ["ddp", "ps", "fsdp"])
def test_a_backward_by_the_loss_of_a_slice_is_refused(
    launch_script: Launch, tmp_path: Path, strategy: str
) -> None:
    body = """
model, optimizer, batches = set_up(0)
for number, (a, b) in enumerate(batches):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(a), b)
    if number < 2 or shoal.rank() == 0:
        loss.backward()
    optimizer.step()
"""
    done = launch_script(HEAD + body + TAIL, workers=2, args=(str(tmp_path),), strategy=strategy)
    assert done.exit_code == 2, done.error
    assert "loss.backward()`" in str(done.error)
    assert "run backward() on every worker, of loss * 0" in str(done.error)
    assert not list(tmp_path.glob("rank-*"))


def test_a_step_by_the_loss_of_a_slice_is_refused(launch_script: Launch, tmp_path: Path) -> None:
    body = """
model, optimizer, batches = set_up(0)
for number, (a, b) in enumerate(batches):
    optimizer.zero_grad()
    F.cross_entropy(model(a), b).backward()
    if number != 1 or shoal.rank() == 0:
        optimizer.step()
"""
    done = launch_script(HEAD + body + TAIL, workers=2, args=(str(tmp_path),), strategy="ddp")
    assert done.exit_code == 2, done.error
    assert "worker 0 took 1 batches and ran backward() on 1 of them, and worker 1 took 2" in str(done.error)


def test_a_second_optimizer_of_a_model_is_refused_where_servers_hold_it(
    launch_script: Launch, tmp_path: Path
) -> None:
    body = BESIDE.partition("# An evaluation")[0]
    done = launch_script(HEAD + body + TAIL, workers=2, args=(str(tmp_path),), strategy="ps")
    assert done.exit_code == 2, done.error
    assert "a second optimizer (Adam) steps parameters of a model" in str(done.error)
