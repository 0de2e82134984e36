"""One slice through model and loss: what is divided, seeded, borrowed and checked."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.config import job as jobs
from shoal.data.slice import Slice, bounds
from shoal.errors import ConfigError, LossDoesNotRecombine
from shoal.parallel import compute as compute_module
from shoal.parallel.compute import Compute, ModelCall, blocks, place, run_again
from shoal.parallel.loss import StepLoss, loss_rule
from shoal.parallel.protocol import LossSum, TrainJob, Turn

X = torch.arange(24, dtype=torch.float64).reshape(8, 3) / 10
Y = X[:, :1].sin()


def compute(model: nn.Module, loss: Any = None, *, check_loss: bool = True, **options: Any) -> Compute:
    rule = loss_rule(loss or nn.MSELoss())
    return Compute(
        TrainJob(model=model, loss=rule, build_optimizer=None, seed=7, **options), check_loss=check_loss
    )


def part(rank: int = 0, num_workers: int = 1, *, num_samples: int = 8, start: int = 0) -> Slice:
    begin, end = bounds(num_samples, rank, num_workers)
    at = min(begin, num_samples - 1)
    return Slice(
        batch=(X[at : max(end, at + 1)], Y[at : max(end, at + 1)]),
        num_local=end - begin,
        num_global=num_samples,
        first=begin,
        start=start,
    )


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 1).double()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("num_micro", [1, 3])
def test_the_slices_gradients_add_up_to_those_of_the_mean(num_workers: int, num_micro: int) -> None:
    model, reference = linear(), linear()
    results = [
        compute(model, num_micro=num_micro).forward_backward(part(rank, num_workers), rank=rank, step=0)
        for rank in range(num_workers)
    ]
    nn.functional.mse_loss(reference(X), Y).backward()
    for ours, theirs in zip(gradients(model), gradients(reference), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert sum(result.count for result in results) == 8
    outputs = torch.cat([result.outputs for result in results if result.outputs is not None])
    torch.testing.assert_close(outputs, reference(X).detach())


def test_a_borrowed_sample_contributes_nothing_but_presence() -> None:
    model = linear()
    result = compute(model).forward_backward(part(0, 3, num_samples=2), rank=0, step=0)
    assert (float(result.total), result.count, result.outputs) == (0.0, 0.0, None)
    assert gradients(model) == []


def test_a_borrowed_sample_leaves_nothing_in_batchnorm_but_the_count() -> None:
    # One value per channel: in training BatchNorm would refuse it.
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    compute(model).forward_backward(part(0, 3, num_samples=2), rank=0, step=0)
    assert torch.equal(model[0].running_mean, torch.zeros(3, dtype=torch.float64))
    assert model[0].num_batches_tracked == 1
    assert model[0].training
    with pytest.raises(ValueError, match="more than 1 value") as raised:
        compute(model).forward_backward(part(1, 3, num_samples=2), rank=1, step=0)
    assert "This worker had 1 sample to normalise, of a batch of 2" in raised.value.__notes__[0]


def test_everything_but_the_gradients_is_told_before_the_last_backward() -> None:
    model, told = linear(), []

    def before(loss: LossSum) -> None:
        told.append((float(loss.total), loss.count, len(gradients(model))))

    result = compute(model, num_micro=4).forward_backward(part(), rank=0, step=0, before_backward=before)
    assert told == [(float(result.total), 8.0, 2)], "once, with the first three parts' gradients in place"


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.rand(len(x), 1, dtype=torch.float64)


def test_randomness_is_a_function_of_seed_rank_step_and_part() -> None:
    def drawn(*, rank: int = 0, step: int = 0, **options: Any) -> list[float]:
        torch.rand(3)  # whatever was drawn before
        outputs: Any = compute(Noise(), **options).forward_backward(part(), rank=rank, step=step).outputs
        return [float(value) for value in outputs]

    assert drawn() == drawn()
    assert drawn(rank=1) != drawn()
    assert drawn(step=1) != drawn()
    halves = drawn(num_micro=2)
    assert halves[:4] != halves[4:]
    assert drawn(num_micro=2) == halves


def test_evaluation_draws_by_position_and_keeps_every_mode() -> None:
    model = nn.Sequential(Noise(), nn.Dropout(0.5))
    model[1].eval()
    run = compute(model)
    first = run.forward(part(), rank=0)
    assert torch.equal(run.forward(part(), rank=0), first)
    assert not torch.equal(run.forward(part(start=8), rank=0), first)
    assert [module.training for module in model.modules()] == [True, True, False]
    assert not first.requires_grad


def test_the_loss_is_checked_on_the_first_slice_that_has_halves() -> None:
    def spread(output: Tensor, target: Tensor) -> Tensor:
        return output.amax() - target.mean()

    run = compute(linear(), spread)
    run.forward_backward(part(0, 8), rank=0, step=0)  # one sample
    run.forward_backward(part(0, 3, num_samples=2), rank=0, step=1)  # a borrowed one
    with pytest.raises(LossDoesNotRecombine):
        run.forward_backward(part(0, 2), rank=0, step=2)
    compute(linear(), spread).forward_backward(
        part(), rank=0, step=0
    )  # the whole batch, of which nothing is divided
    compute(linear(), spread, check_loss=False).forward_backward(part(0, 2), rank=0, step=0)


class Pairs(nn.Module):
    """Computes its own loss: of pairs, each alone or against the others of its batch."""

    def __init__(self, *, is_alone: bool, draws: bool = False) -> None:
        super().__init__()
        self.layer, self.drop = linear(), nn.Dropout(0.5)
        self.is_alone, self.draws = is_alone, draws
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.num_calls += 1
        made = self.drop(self.layer(x))
        if self.draws:
            made = nn.functional.dropout(made)
        if self.is_alone:
            return nn.functional.mse_loss(made, y)
        return nn.functional.cross_entropy(made @ y.T, torch.arange(len(x)))


def pairs() -> Slice:
    return Slice(batch={"x": X, "y": Y}, num_local=8, num_global=16)


def test_a_models_own_loss_that_compares_samples_is_refused() -> None:
    model = Pairs(is_alone=False)
    with pytest.raises(LossDoesNotRecombine, match=r"'model' does not recombine.*shoal\.gather"):
        compute(model, "model").forward_backward(pairs(), rank=0, step=0)
    assert gradients(model) == []


@pytest.mark.parametrize("draws", [False, True])
def test_the_check_of_a_models_own_loss_leaves_no_trace(draws: bool) -> None:
    checked, plain = Pairs(is_alone=True, draws=draws), Pairs(is_alone=True, draws=draws)
    for model, check_loss in ((checked, True), (plain, False)):
        compute(model, "model", check_loss=check_loss).forward_backward(pairs(), rank=0, step=0)
        assert model.training
        assert model.drop.training
        assert model.num_calls == 1
    assert all(map(torch.equal, gradients(checked), gradients(plain)))


def test_a_loss_is_checked_at_the_first_step_and_ever_more_rarely() -> None:
    calls = []

    def counted(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(output))
        return (output - target).pow(2).mean()

    run = compute(linear(), counted)
    for step in range(9):
        run.forward_backward(part(0, 2), rank=0, step=step)
    checks = [number for number, size in enumerate(calls) if size == 2]
    assert len(checks) == 2 * 4  # at steps 1, 2, 4 and 8


def test_a_mask_that_leaves_the_first_batch_whole_is_noticed_at_a_later_one() -> None:
    def masked(output: Tensor, target: Any) -> Tensor:
        values, mask = target
        return ((output - values).pow(2) * mask).sum() / mask.sum()

    run = compute(linear(), masked)
    whole, ragged = torch.ones_like(Y), (torch.arange(8).reshape(8, 1) % 3 == 0).double()
    run.forward_backward(Slice(batch=(X, (Y, whole)), num_local=8, num_global=16), rank=0, step=0)
    with pytest.raises(LossDoesNotRecombine, match="pair"):
        run.forward_backward(Slice(batch=(X, (Y, ragged)), num_local=8, num_global=16), rank=0, step=1)


def test_a_gradient_penalty_within_the_loss_recombines() -> None:
    """The loss differentiates by a leaf of its own, which is another one for each half."""
    model = nn.Sequential(linear(), nn.Tanh())

    def penalised(output: Tensor, target: Tensor) -> Tensor:
        points = target.expand(-1, 3).detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
        return (output - target).pow(2).mean() + (slope.norm(dim=1) - 1).pow(2).mean()

    compute(model, penalised).forward_backward(part(), rank=0, step=0)


@pytest.mark.parametrize("num_local", [8, 1])
def test_where_forward_is_collective_every_rank_runs_the_check_as_often(num_local: int) -> None:
    """A rank with one sample has no halves, and others wait for its forwards."""
    model = Pairs(is_alone=True)
    seen: list[bool] = []

    def note(module: nn.Module, args: Any) -> None:
        seen.append(module.training)

    model.register_forward_pre_hook(note)
    job = TrainJob(model=model, loss=loss_rule("model"), build_optimizer=None, seed=7)
    batch = pairs()
    if num_local == 1:
        batch = dataclasses.replace(batch, batch={k: v[:1] for k, v in batch.batch.items()}, num_local=1)
    run = Compute(job, check_loss=True, borrowed_run_back=True)
    for step in range(3):
        run.forward_backward(batch, rank=0, step=step)
    assert seen == [*[True, False, False, False] * 2, True]  # at powers of two


def test_where_forward_is_collective_a_loss_that_compares_samples_is_refused() -> None:
    job = TrainJob(model=Pairs(is_alone=False), loss=loss_rule("model"), build_optimizer=None, seed=7)
    with pytest.raises(LossDoesNotRecombine, match="in-batch"):
        Compute(job, check_loss=True, borrowed_run_back=True).forward_backward(pairs(), rank=0, step=0)


def test_only_floating_tensors_are_cast() -> None:
    batch = {"x": torch.ones(2), "ids": torch.arange(2), "text": ["a", "b"]}
    placed = place(batch, torch.device("cpu"), torch.float64)
    assert placed["x"].dtype == torch.float64
    assert placed["ids"].dtype == torch.int64
    assert placed["text"] == ["a", "b"]
    assert place(batch, torch.device("cpu")) is batch


A, B = torch.tensor(1.0), torch.tensor(2.0)


class One(nn.Module):
    def forward(self, x: Any) -> Any:
        return ("x", x)


class Two(nn.Module):
    def forward(self, x: Any, y: Any = None) -> Any:
        return ("x, y", x, y)


class Many(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (args, kwargs)


@pytest.mark.parametrize(
    ("model", "inputs", "given"),
    [
        (One(), A, ("x", A)),
        (One(), (A,), ("x", A)),
        (One(), {"x": A}, ("x", A)),
        (One(), {"dense": A, "ids": B}, ("x", {"dense": A, "ids": B})),
        (One(), {"dense": A}, ("x", {"dense": A})),
        (Two(), A, ("x, y", A, None)),
        (Two(), (A, B), ("x, y", A, B)),
        (Two(), [A, B], ("x, y", A, B)),
        (One(), [A, B], ("x", [A, B])),
        (Two(), {"y": B, "x": A}, ("x, y", A, B)),
        (Many(), (A, B), ((A, B), {})),
        (Many(), {"a": A}, ((), {"a": A})),
    ],
    ids=str,
)
def test_tensors_tuples_and_dicts_become_arguments(model: nn.Module, inputs: Any, given: Any) -> None:
    assert ModelCall(model)(inputs) == given


class Generates(nn.Module):
    def forward(self, x: Tensor, use_cache: bool = True) -> Any:
        return x, use_cache


@pytest.mark.parametrize("rank", [0, 1])
def test_caches_for_generation_are_off_and_rank_0_says_so_once(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "rank", lambda: rank)
    compute_module._note_caches_off.cache_clear()
    for _ in range(2):
        assert ModelCall(Generates())(A) == (A, False)
    assert capsys.readouterr().err.count("use_cache=False") == (rank == 0)


def test_hooks_of_the_model_are_heard() -> None:
    model, heard = One(), []
    model.register_forward_hook(lambda *args: heard.append(args))
    ModelCall(model)(A)
    assert len(heard) == 1


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 8))


def kept_numbers(model: nn.Module, x: Tensor) -> int:
    """How many numbers autograd keeps for backward, parameters aside."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() if tensor.data_ptr() not in own else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return kept


def test_blocks_keep_their_inputs_only_and_nothing_else_changes() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[block() for _ in range(4)], nn.Linear(8, 2))
    model = copy.deepcopy(plain)
    assert run_again(model, True) == ["0", "1", "2", "3"]
    run_again(model, True)  # once more is no more
    x = torch.randn(16, 8)
    for each in (plain, model):
        torch.manual_seed(1)
        each(x).square().sum().backward()
    assert model.state_dict().keys() == plain.state_dict().keys()
    for (name, one), other in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name  # BatchNorm counted every batch once
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
    assert kept_numbers(model, x) < kept_numbers(plain, x) / 4


def test_a_block_that_looks_up_rows_does_not_run_twice() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inside = nn.Embedding(4, 8), nn.Sequential(block())

    assert blocks(nn.Sequential(Looking(), block())) == ["0.inside.0", "1"]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (True, "none of its members holds layers of its own"),
        (["encoder.*"], "names 'encoder.*', and no layer of the model is called so"),
    ],
)
def test_what_cannot_run_again_is_refused(wanted: bool | list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_again(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), wanted)


def test_patterns_choose_layers_and_the_outer_of_two_nested() -> None:
    model = nn.Sequential(block(), block())
    assert run_again(model, ["1", "1.0", "0.4"]) == ["1", "0.4"]


def turns(training_step: Any) -> tuple[Compute, TrainJob]:
    job = TrainJob(model=linear(), loss=StepLoss(), build_optimizer=None, seed=7, training_step=training_step)
    return Compute(job, check_loss=True), job


def test_the_loss_of_each_turn_is_checked() -> None:
    def training_step(model: nn.Module, batch: Any, name: str) -> Tensor:
        made = model(batch[0])
        return made.mean() if name == "mean" or num_steps < 4 else made.std()

    run, job = turns(training_step)
    for num_steps in range(1, 4):
        for name in ("std", "mean"):
            job.turn = Turn(name, ())
            run.forward_backward(part(), rank=0, step=num_steps)
    job.turn, num_steps = Turn("std", ()), 4
    with pytest.raises(LossDoesNotRecombine):
        run.forward_backward(part(), rank=0, step=num_steps)


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_a_step_that_draws_for_each_call_is_no_mismatch_and_draws_as_without_the_check(draw: Any) -> None:
    def training_step(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).mean() * draw()

    random.seed(3)
    np.random.seed(3)
    draw()
    expected = draw()
    random.seed(3)
    np.random.seed(3)
    turns(training_step)[0].forward_backward(part(), rank=0, step=0)
    assert draw() == expected
