"""A forward that mixes the samples of a batch is refused by its layer; what only looks like it is not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.collectives.sync_batchnorm import RanksOfBatch, synchronise
from shoal.data.slice import Slice
from shoal.errors import ForwardMixesSamples, GradientMixesSamples
from shoal.parallel import gathering
from shoal.parallel.compute import Compute
from shoal.parallel.loss import loss_rule
from shoal.parallel.protocol import TrainJob
from shoal.parallel.sample_mixing import (
    NUM_SAMPLES_ONCE,
    buffers_of_slices,
    refuse_mixed_gradients,
    refuse_mixed_samples,
)


class Of(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Between(nn.Module):
    """Mixes in its own forward, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden -= hidden.mean(0)  # in place, in what the layer gave
        return self.second(hidden.relu())


class Counting(nn.Module):
    """Keeps a count, a list and a hidden state as plain attributes, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.seen, self.carried = nn.Linear(6, 3), 0, list[int](), torch.zeros(3)
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.total += 1
        self.centre = 0.9 * self.centre + 0.1 * x.mean(0)  # another tensor in its stead
        self.carried = self.layer(x).mean(0).detach()
        return self.layer(x) / (1 + self.total) + self.carried.detach() * 0


class Experts(nn.Module):
    """Sends each sample to the expert it scores highest, and returns a balance over the batch beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.router(x).softmax(-1)
        chosen, output = scores.argmax(-1), x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            output[chosen == number] = expert(x[chosen == number])
        return {"logits": output, "balance": (scores.mean(0) ** 2).sum(), "share": scores.mean(0)}


def run(model: nn.Module, *, num: int = 8, strategy: str | None = "ddp", num_steps: int = 1) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(num, 6), torch.randint(0, 3, (num,))
    job = TrainJob(model=model, loss=loss_rule(nn.CrossEntropyLoss()), build_optimizer=None)
    compute = Compute(job, check_loss=True, check_mixing=strategy)
    for step in range(num_steps):
        compute.forward_backward(Slice((x, y), num, 2 * num), rank=0, step=step)


def stack(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 3))


MIXING = {
    "centred": Of(lambda x: x - x.mean(0)),
    "whitened": Of(lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5)),
    "softmax over samples": Of(lambda x: x.softmax(0)),
    "scaled by the largest": Of(lambda x: x / x.abs().max()),
    "neighbours": Of(lambda x: x - x.roll(1, 0)),
    "attention of samples": Of(lambda x: (x @ x.T).softmax(-1) @ x),
    "centred after dropout and BatchNorm": nn.Sequential(
        nn.BatchNorm1d(6), nn.Dropout(0.5), Of(lambda x: x - x.mean(0))
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_refused_by_its_layer_before_anything_is_updated(name: str) -> None:
    with pytest.raises(ForwardMixesSamples) as refused:
        run(stack(MIXING[name]))
    assert refused.value.layer in ("1", "1.2")
    assert refused.value.kind == "Of"
    assert "Nothing of this step was updated" in str(refused.value)


def test_mixing_between_layers_is_that_of_the_module_around_them() -> None:
    with pytest.raises(ForwardMixesSamples) as refused:
        run(nn.Sequential(nn.Linear(6, 6), Between()))
    assert (refused.value.layer, refused.value.kind) == ("1", "Between")


def test_an_attention_that_takes_samples_for_a_sequence_is_told_of_batch_first() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=False)
    with pytest.raises(ForwardMixesSamples, match="batch_first=True"):
        run(
            nn.Sequential(
                Of(lambda x: x.reshape(-1, 1, 6).expand(-1, 2, 6)), layer, Of(lambda x: x[:, 0, :3])
            )
        )


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(6),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.Dropout(0.5),
        nn.LayerNorm(6),
        nn.Sequential(
            Of(lambda x: torch.stack([x, -x], 1)),
            nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2),
            nn.Flatten(),
            nn.Linear(12, 6),
        ),
        nn.Sequential(Of(lambda x: x[None].expand(2, -1, -1)), nn.LSTM(6, 6), Of(lambda found: found[0][1])),
        Of(lambda x: F.dropout(x, 0.5)),  # in evaluation mode too
        Of(lambda x: x + torch.randn_like(x)),
        Of(lambda x: (x * 8).round() / 8),
        Of(lambda x: torch.where(x > x.median(-1, keepdim=True).values, x, -x)),
        Of(lambda x: x * 1e30 * 1e30),  # overflows
        Of(lambda x: x[0] * 0 + x),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_what_is_known_random_or_of_each_sample_is_let_through(layer: nn.Module) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(layer, nn.Linear(6, 3))
    run(model, num_steps=5)


def test_synchronised_batchnorm_sums_over_the_ranks_in_steps_alone() -> None:
    model, sums = stack(nn.BatchNorm1d(6)), list[int]()
    ranks = RanksOfBatch(rank=0, num_ranks=1, add_up=lambda tensor: sums.append(tensor.numel()))
    synchronise(model, ranks)
    run(model, num_steps=4)
    assert len(sums) == 4 * 2, "a trial waits for ranks that try nothing"


def test_experts_and_their_balance_are_let_through() -> None:
    run(Experts(), num_steps=3)


def test_the_check_leaves_no_trace_in_the_model() -> None:
    plain, checked = Counting(), Counting()
    checked.load_state_dict(plain.state_dict())
    run(plain, strategy=None, num_steps=5)
    run(checked, num_steps=5)
    assert (checked.calls, checked.seen, checked.total) == (plain.calls, plain.seen, plain.total)
    assert torch.equal(checked.carried, plain.carried)
    assert torch.equal(checked.centre, plain.centre)
    for one, other in zip(plain.parameters(), checked.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_one_process_and_slices_of_fewer_than_four_samples_are_not_judged() -> None:
    run(stack(Of(lambda x: x - x.mean(0))), strategy=None)
    run(stack(Of(lambda x: x - x.mean(0))), num=3)


def test_a_loop_of_ones_own_is_refused_at_its_forward_and_the_model_stays_one_that_can_be_copied() -> None:
    model, x = Between(), torch.randn(8, 6)
    job = TrainJob(model=model, loss=loss_rule(nn.CrossEntropyLoss()), build_optimizer=None, is_own_loop=True)
    Compute(job, check_loss=True, check_mixing="ddp")
    model(x)  # outside of a step
    with gathering.over(Slice((x,), 8, 24)):
        with torch.no_grad():
            model(x)
        model(x[:5])  # not the slice
        with pytest.raises(ForwardMixesSamples, match="model's own forward"):
            model(x)
        copied, saved = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        copied(x), saved(x)


class WithCapacity(nn.Module):
    """Experts that leave out the samples which exceed their even share of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), 4)
        is_kept = (chosen.cumsum(0) <= max(len(x) // 4, 1)) * chosen
        experts = torch.stack([expert(x) for expert in self.experts], 1)
        return x + ((is_kept * gates)[:, :, None] * experts).sum(1)


@pytest.mark.parametrize("seed", range(4))
def test_experts_with_a_capacity_are_refused_in_the_only_trial_of_a_mesh(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = WithCapacity(), torch.randn(35, 6)
    with torch.no_grad():
        refuse = refuse_mixed_samples(model, model, x, len(x), "fsdp", most=NUM_SAMPLES_ONCE)
    with pytest.raises(ForwardMixesSamples, match="WithCapacity"):
        refuse()


class InOtherOrders(nn.Module):
    """Rows that are of one sample each, and not in the order or the length of the batch."""

    def __init__(self, order: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.cells, self.order = nn.LSTM(2, 5), order

    def forward(self, x: Tensor) -> Tensor:
        places = self.cells(x.reshape(len(x), 3, 2).transpose(0, 1))[0]  # of the sequence, then samples
        return self.order(places)


def longest_alone(places: Tensor) -> Tensor:
    """As pad_packed_sequence returns it: as many places as the longest sample of the batch has."""
    lengths = 1 + (places[0, :, 0] > places[0, :, 0].new_tensor(0.0)).long() + (places[0, :, 1] > 0.1).long()
    return places[: int(lengths.max())].transpose(0, 1).flatten(2)


@pytest.mark.parametrize(
    "order",
    [
        lambda places: places.reshape(-1, 5),  # places of the sequence before samples
        lambda places: torch.cat([places[0], places[1]]),  # two views of each sample
        lambda places: places[0][places[0, :, 0].argsort()],  # sorted, as packed sequences are
        longest_alone,
    ],
)
def test_rows_in_another_order_or_of_another_length_are_no_mixing(order: Callable[[Tensor], Tensor]) -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        model = InOtherOrders(order)
        job = TrainJob(
            model=model, loss=loss_rule(lambda output: (output.sum(), output.numel())), build_optimizer=None
        )
        compute = Compute(job, check_loss=True, check_mixing="ddp")
        compute.forward_backward(Slice(torch.randn(8, 6), 8, 16), rank=0, step=0)


def test_similarities_of_samples_are_mixing() -> None:
    with pytest.raises(ForwardMixesSamples):
        run(nn.Sequential(nn.Linear(6, 6), Of(lambda x: x @ x.T)))


class WritesIntoItsInput(nn.Module):
    """Normalises in place, and keeps a buffer that backward needs and evaluation changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("factor", torch.full((6,), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(0.5)
        if not self.training:
            self.factor += 1
        return (
            self.layer(x) + (self.layer.weight * self.factor.nan_to_num(0.0)).sum(1) * self.factor.isnan()[0]
        )


def test_a_trial_writes_neither_into_inputs_nor_into_buffers() -> None:
    x, model = torch.randn(8, 6), WritesIntoItsInput()
    job = TrainJob(model=model, loss=loss_rule(nn.CrossEntropyLoss()), build_optimizer=None, is_own_loop=True)
    Compute(job, check_loss=True, check_mixing="ddp")
    given, factor = x.clone(), model.factor
    with gathering.over(Slice((x,), 8, 24)):
        model(given).sum().backward()  # refused where what it saved was written to
    assert torch.equal(given, x.sub(0.5))
    assert model.factor is factor
    assert factor.isnan().all()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_trial_is_not_seen_by_hooks_of_the_script() -> None:
    model, x, seen = stack(nn.ReLU()), torch.randn(8, 6), dict[str, list[Tensor]]()
    model[0] = torch.nn.utils.weight_norm(model[0])  # by a hook of torch's own
    model[1].register_forward_hook(lambda module, args, output: seen.setdefault("out", []).append(output))
    model[2].register_forward_pre_hook(lambda module, args: seen.setdefault("in", []).append(args[0]))
    job = TrainJob(model=model, loss=loss_rule(nn.CrossEntropyLoss()), build_optimizer=None, is_own_loop=True)
    Compute(job, check_loss=True, check_mixing="ddp")
    with gathering.over(Slice((x,), 8, 24)):
        model(x)
        model(x)
    assert [(len(each), each.requires_grad) for each in seen["out"]] == [(8, True)] * 2
    assert len(seen["in"]) == 2


def test_a_sequence_as_long_as_the_slice_has_samples_is_not_taken_for_them() -> None:
    model = nn.LSTM(6, 3)
    job = TrainJob(model=model, loss=loss_rule(nn.CrossEntropyLoss()), build_optimizer=None, is_own_loop=True)
    Compute(job, check_loss=True, check_mixing="ddp")
    with gathering.over(Slice((torch.randn(8, 8, 6),), 8, 24)):
        model(torch.randn(8, 8, 6))  # places of the sequence first


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_layers_are_let_through() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    run(nn.Sequential(scripted, nn.Linear(6, 3)), num_steps=2)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_inputs_that_cannot_be_cut_are_let_through() -> None:
    model = nn.Linear(6, 3)
    job = TrainJob(model=model, loss=loss_rule(nn.CrossEntropyLoss()), build_optimizer=None)
    sparse = torch.randn(8, 6).relu().to_sparse_csr()
    whole = Slice((sparse, torch.randint(0, 3, (8,))), 8, 16)
    Compute(job, check_loss=True, check_mixing="ddp").forward_backward(whole, rank=0, step=0)


class Keeps(nn.Module):
    """A layer that keeps something of each batch in training mode."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(3, 3), what
        self.register_buffer("kept", torch.zeros(3 if what != "queue" else (8, 3)))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "mean":
            self.kept = self.kept * 0.9 + 0.1 * x.mean(0)
        elif self.what == "sum":
            self.kept.mul_(0.9).add_(x.sum(0), alpha=0.1)
        elif self.what == "sum, past autograd":
            self.kept.data.mul_(0.9).add_(x.sum(0), alpha=0.1)  # which changes no version
        elif self.what == "variance":
            self.kept.copy_(x.var(0))
        elif self.what == "queue":
            self.kept = torch.cat([x, self.kept])[:8]
        self.count += len(x) if self.what == "samples" else 1
        return self.layer(x)


@pytest.mark.parametrize(
    ("what", "uneven"),
    [
        ("mean", []),
        ("steps", []),
        ("sum", ["kept"]),
        ("sum, past autograd", ["kept"]),
        ("variance", ["kept"]),
        ("queue", ["kept"]),
        ("samples", ["count"]),
    ],
)
def test_buffers_that_slices_change_otherwise_than_a_batch_are_named(what: str, uneven: list[str]) -> None:
    torch.manual_seed(0)
    model, x = Keeps(what), torch.randn(6, 3)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert buffers_of_slices(model, model, x) == uneven
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class Reversed(Normalised):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient.clamp(-1, 1)


@pytest.mark.parametrize(("function", "is_mixed"), [(Normalised, True), (Reversed, False)])
def test_a_backward_that_depends_on_the_slice_is_refused_by_parameter(function: Any, is_mixed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), Of(function.apply), nn.Tanh(), nn.Linear(5, 3))
    refuse = refuse_mixed_gradients(model, model, torch.randn(7, 6), "ddp")
    assert all(parameter.grad is None for parameter in model.parameters())
    if not is_mixed:
        refuse()
        return
    with pytest.raises(
        GradientMixesSamples, match=r"the gradient of '0\.weight' over four samples"
    ) as refused:
        refuse()
    assert refused.value.gap > 0.1


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(0.5), nn.LSTM(6, 6, batch_first=True), nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)],
)
def test_gradients_of_ordinary_layers_add_up(layer: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), layer).eval()
    refuse_mixed_gradients(model, model, torch.randn(5, 3, 6), "ddp")()


class Attention(nn.Module):
    """With biases of its own for queries and keys, as BERT has. A key's bias changes no output: its gradient is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


def test_a_gradient_of_rounding_alone_is_not_judged() -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 16), Attention(), nn.Linear(16, 16))
        refuse_mixed_gradients(model, model, 10 * torch.randn(4, 12, 16), "ddp")()


def test_gradients_of_a_large_model_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.parallel.sample_mixing.MAX_NUMEL_RUN_BACK", 20)
    model, seen = nn.Linear(6, 3), list[Tensor]()
    refuse_mixed_gradients(model, lambda x: seen.append(x) or model(x), torch.randn(4, 6), "ddp")()
    assert not seen
