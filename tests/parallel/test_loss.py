"""A loss cut over slices is the loss of the whole batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.data.slice import Slice, split_target
from shoal.errors import ConfigError, LossDoesNotRecombine, TrainingError
from shoal.parallel.compute import Compute
from shoal.parallel.loss import loss_rule
from shoal.parallel.protocol import TrainJob

N, C = 12, 5


def logits() -> torch.Tensor:
    return torch.randn(N, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def labels(*, masked: bool = False) -> torch.Tensor:
    made = torch.arange(N) * 7 % C
    if masked:
        made[::3] = -100
    return made


def classes() -> torch.Tensor:
    return torch.linspace(0.1, 2.0, C, dtype=torch.float64)


def probabilities() -> torch.Tensor:
    return logits().flip(0).softmax(1)


CASES = {
    "cross entropy": (nn.CrossEntropyLoss(), logits(), labels()),
    "cross entropy, masked": (nn.CrossEntropyLoss(), logits(), labels(masked=True)),
    "cross entropy, masked, weighted": (nn.CrossEntropyLoss(weight=classes()), logits(), labels(masked=True)),
    "cross entropy, smoothed": (
        nn.CrossEntropyLoss(weight=classes(), label_smoothing=0.1),
        logits(),
        labels(masked=True),
    ),
    "cross entropy of probabilities": (nn.CrossEntropyLoss(), logits(), probabilities()),
    "cross entropy over positions": (
        nn.CrossEntropyLoss(ignore_index=0),
        logits().unsqueeze(2).repeat(1, 1, 4),
        labels().unsqueeze(1).repeat(1, 4),
    ),
    "nll": (nn.NLLLoss(weight=classes()), logits().log_softmax(1), labels(masked=True)),
    "bce": (nn.BCELoss(), logits().sigmoid(), logits().flip(0).sigmoid().round()),
    "bce with logits": (nn.BCEWithLogitsLoss(pos_weight=classes()), logits(), probabilities().round()),
    "mse": (nn.MSELoss(), logits(), logits().flip(0)),
    "l1": (nn.L1Loss(), logits(), logits().flip(0)),
    "huber": (nn.HuberLoss(), logits(), logits().flip(0)),
    "smooth l1": (nn.SmoothL1Loss(), logits(), logits().flip(0)),
    "poisson": (nn.PoissonNLLLoss(), logits(), probabilities()),
    "kl, batchmean": (nn.KLDivLoss(reduction="batchmean"), logits().log_softmax(1), probabilities()),
    "soft margin": (nn.SoftMarginLoss(), logits(), logits().flip(0).sign()),
    "multi margin": (nn.MultiMarginLoss(), logits(), labels()),
    "multilabel soft margin": (nn.MultiLabelSoftMarginLoss(), logits(), probabilities().round()),
    "sum": (nn.MSELoss(reduction="sum"), logits(), logits().flip(0)),
    "functional": (F.cross_entropy, logits(), labels(masked=True)),
    "a callable": (lambda output, target: ((output - target) ** 2).mean(), logits(), logits().flip(0)),
    "a pair": (
        lambda output, target: (((output - target) ** 2)[:, :2].sum(), output.shape[0] * 2),
        logits(),
        logits().flip(0),
    ),
}


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(1, N - 1), max_size=3))
def test_sums_of_slices_divided_by_their_counts_give_the_loss_of_the_batch(case: str, cuts: set[int]) -> None:
    loss, output, target = CASES[case]
    rule = loss_rule(loss)
    edges = [0, *sorted(cuts), N]
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for begin, end in itertools.pairwise(edges):
        part, counted = rule(output[begin:end], target[begin:end], end - begin, N)
        total, count = total + part, count + counted
    whole = loss(output, target)
    whole = whole[0] / whole[1] if isinstance(whole, tuple) else whole
    torch.testing.assert_close(total / count, whole, rtol=1e-12, atol=1e-12)


def test_a_masked_mean_of_the_users_own_is_refused_with_the_cure() -> None:
    def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept = target != -100
        return F.cross_entropy(output[kept], target[kept], reduction="none").mean()

    uneven = labels()
    uneven[:4] = -100
    with pytest.raises(LossDoesNotRecombine, match=r"return a pair \(sum, count\)") as caught:
        loss_rule(masked).check(logits(), uneven, N)
    assert caught.value.name == "masked"
    assert caught.value.whole != pytest.approx(caught.value.recombined)


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: F.cross_entropy(output, target, ignore_index=2),
        lambda output, target: F.cross_entropy(output[target != 2], target[target != 2]),
        lambda output, target: F.cross_entropy(output, target, reduction="sum"),
        lambda output, target: {"loss": F.nll_loss(output.log_softmax(1), target, ignore_index=2)},
        type("OwnLoss", (nn.CrossEntropyLoss,), {})(ignore_index=2),
    ],
    ids=["ignored", "left out", "sum", "by name", "subclass"],
)
def test_what_torch_divided_by_inside_a_function_is_the_count(loss: Any) -> None:
    rule, target = loss_rule(loss), labels()
    target[:3], target[3:] = (
        2,
        torch.where(labels()[3:] == 2, 1, labels()[3:]),
    )  # the first slice counts nothing
    rule.check(logits(), target, N)
    parts = [rule(logits()[at], target[at], at.stop - at.start, N) for at in (slice(0, 3), slice(3, N))]
    whole = loss(logits(), target)
    whole = whole["loss"] if isinstance(whole, dict) else whole
    torch.testing.assert_close(sum(p[0] for p in parts) / sum(p[1] for p in parts), whole, rtol=1e-12, atol=0)


def test_ignored_labels_inside_a_larger_loss_call_for_a_check_at_that_step() -> None:
    rule = loss_rule(lambda output, target: F.cross_entropy(output, target) + output.pow(2).mean())
    rule(logits()[:4], labels()[:4], 4, N)
    assert not rule.must_check
    uneven = labels()[:4]
    uneven[0] = -100
    rule(logits()[:4], uneven, 4, N)
    assert rule.must_check
    with pytest.raises(LossDoesNotRecombine):
        rule.check(logits()[:4], uneven, 4)


MASKED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "divided by a sum": lambda losses, mask: (losses * mask).sum() / mask.sum().clamp(min=1),
    "divided by a number": lambda losses, mask: (losses * mask).sum() / max(float(mask.sum()), 1.0),
    "rows of a mask": lambda losses, mask: losses[mask].mean(),
    "times an inverse": lambda losses, mask: (losses * mask).sum() * (1 / mask.sum()),
    "selected": lambda losses, mask: torch.masked_select(losses, mask).mean(),
    "rows by their places": lambda losses, mask: losses.index_select(0, torch.where(mask)[0]).mean(),
    "rows by argwhere": lambda losses, mask: losses[torch.argwhere(mask)[:, 0]].mean(),
    "a power": lambda losses, mask: (losses * mask).sum() * mask.sum().pow(-1.0),
    "a number of numpy": lambda losses, mask: (losses * mask).sum() / float(mask.numpy().sum()),
}


@pytest.mark.parametrize("mean", MASKED.values(), ids=MASKED)
def test_a_mean_over_a_mask_of_ones_own_calls_for_a_check_at_every_step(
    mean: Callable[[Tensor, Tensor], Any],
) -> None:
    def loss(output: Tensor, target: Tensor) -> Any:
        return mean(F.cross_entropy(output, target.clamp(min=0), reduction="none"), target >= 0)

    model = nn.Linear(3, 3).double()
    job = TrainJob(model=model, loss=loss_rule(loss), build_optimizer=None)
    compute = Compute(job, check_loss=True)
    target = labels()[:4] % 3
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for step in range(10):  # the checks of all losses are due at 1, 2, 4, 8
        compute.forward_backward(Slice((x, target), 4, 8), rank=0, step=step)
    uneven = target.clone()
    uneven[0] = -1
    with pytest.raises(LossDoesNotRecombine):
        compute.forward_backward(Slice((x, uneven), 4, 8), rank=0, step=10)


def test_a_pair_and_a_plain_mean_are_not_checked_at_every_step() -> None:
    for loss in (
        lambda output, target: ((output.sum(1) * (target > 0)).sum(), (target > 0).sum()),
        lambda output, target: (output[:, 0] / 2.0).square().mean() / 3 + output[1:, 1].sum() * 0.5,
    ):
        rule = loss_rule(loss)
        rule(logits()[:4].requires_grad_(), labels()[:4], 4, N)
        assert not rule.must_check


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.MSELoss(reduction="sum"), nn.HuberLoss()])
def test_outputs_and_targets_that_torch_broadcasts_over_samples_are_refused_where_a_batch_is_cut(
    loss: Any,
) -> None:
    column, row = logits()[:, :1], logits()[:, 0].sigmoid()
    with pytest.raises(
        TrainingError, match=r"every output is compared with the targets of all samples.*squeeze"
    ):
        loss_rule(loss)(column[:4], row[:4], 4, N)
    with pytest.warns(UserWarning, match="different to the input size"):  # as in torch
        loss_rule(loss)(column, row, N, N)


def test_a_loss_that_writes_into_its_target_is_checked_on_copies() -> None:
    def from_one(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target -= 1
        return F.cross_entropy(output, target, reduction="none").mean()

    given = labels() + 1
    loss_rule(from_one).check(logits(), given, N)
    assert torch.equal(given, labels() + 1)


def test_a_plain_mean_of_the_users_own_passes_the_check() -> None:
    rule = loss_rule(lambda output, target: ((output - target) ** 2).mean())
    rule.check(logits(), logits().flip(0), N)
    assert rule(logits(), logits(), N, N)[1] == N


def test_a_loss_over_something_that_cannot_be_cut_is_refused() -> None:
    rule = loss_rule(lambda output, target: output.mean())
    with pytest.raises(TrainingError, match="cannot be cut"):
        rule.check(torch.zeros(()), labels(), N)


def test_a_loss_of_the_whole_output_needs_no_target() -> None:
    rule = loss_rule(lambda output: (output[0] - output[1]).pow(2).mean())
    total, count = rule((logits(), logits().flip(0)), None, N, N)
    assert count == N
    assert total == pytest.approx(float((logits() - logits().flip(0)).pow(2).mean()) * N)


def test_a_loss_per_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match="reduction='none'"):
        loss_rule(nn.MSELoss(reduction="none"))
    with pytest.raises(TrainingError, match="one number"):
        loss_rule(lambda output, target: (output - target).sum(1))(logits(), logits(), N, N)


def test_something_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be callable"):
        loss_rule("mse")


def test_class_weights_follow_the_model_to_its_precision() -> None:
    rule = loss_rule(nn.CrossEntropyLoss(weight=classes().float()))
    total, count = rule(logits(), labels(), N, N)
    expected = F.cross_entropy(logits(), labels(), weight=classes().float().double())
    torch.testing.assert_close(total / count, expected)


def branching(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    error = ((output - target) ** 2).mean()
    return error if float(error.detach()) < 1e9 else error * 0


def knowing(output: torch.Tensor, target: torch.Tensor, sample_weight: Any = None) -> Any:
    each = ((output - target) ** 2).mean(1)
    return each.mean() if sample_weight is None else (each * sample_weight).sum() / sample_weight.sum()


MORE = {
    "a loss that branches on a value": (branching, logits(), logits().flip(0)),
    "a loss that knows of weights": (knowing, logits(), logits().flip(0)),
    "rows of several positions": (
        nn.CrossEntropyLoss(),
        logits().repeat_interleave(3, 0),
        labels(masked=True).repeat_interleave(3),
    ),
    "kl over elements": (nn.KLDivLoss(reduction="mean"), logits().log_softmax(1), logits().softmax(1)),
}


def replicated(tensor: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows = tensor.shape[0] // N
    return tensor.reshape(N, rows, *tensor.shape[1:]).repeat_interleave(weights, 0).flatten(0, 1)


@pytest.mark.parametrize("case", [*CASES, *MORE])
@settings(max_examples=10, deadline=None)
@given(
    weights=st.lists(st.integers(0, 3), min_size=N, max_size=N).filter(sum),
    cuts=st.sets(st.integers(1, N - 1), max_size=2),
)
def test_a_weight_of_k_counts_as_k_samples_also_in_slices(
    case: str, weights: list[int], cuts: set[int]
) -> None:
    loss, output, target = (CASES | MORE)[case]
    rule, weight = loss_rule(loss), torch.tensor(weights)
    more = int(weight.sum())
    expected, count = rule(replicated(output, weight), replicated(target, weight), more, more)
    rows, total, counted = output.shape[0] // N, torch.zeros((), dtype=torch.float64), 0.0
    for begin, end in itertools.pairwise([0, *sorted(cuts), N]):
        one, other = output[begin * rows : end * rows], target[begin * rows : end * rows]
        part, part_count = rule(one, other, end - begin, N, weight[begin:end].double())
        total, counted = total + part, counted + part_count
    torch.testing.assert_close(total / counted, expected / count, equal_nan=True)  # all masked is no number


def test_the_gradient_is_that_of_the_weighted_mean() -> None:
    weight = torch.linspace(0.1, 3, N, dtype=torch.float64)
    for loss in (nn.MSELoss(), lambda output, target: ((output - target) ** 2).mean(), branching):
        output = logits().requires_grad_()
        total, count = loss_rule(loss)(output, logits().flip(0), N, N, weight)
        (total / count).backward()
        by_hand = logits().requires_grad_()
        each = ((by_hand - logits().flip(0)) ** 2).mean(1)
        ((each * weight).sum() / weight.sum()).backward()
        torch.testing.assert_close(output.grad, by_hand.grad)


def test_rows_that_belong_to_no_sample_are_refused() -> None:
    weight = torch.ones(N, dtype=torch.float64)
    with pytest.raises(TrainingError, match="which weight belongs to which"):
        loss_rule(nn.MSELoss())(logits()[:-1], logits()[:-1], N, N, weight)
    with pytest.raises(TrainingError, match="sample_weight"):
        loss_rule(lambda output, target: output.mean())(logits()[:-1], logits()[:-1], N, N, weight)


SHAPES = {
    "mapping": lambda loss, output: {"loss": loss, "logits": output},
    "pair": lambda loss, output: (output, loss),
    "alone": lambda loss, output: loss,
}


RECOGNISED = [
    name
    for name, (loss, _, _) in CASES.items()
    if isinstance(
        loss, (nn.CrossEntropyLoss, nn.NLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.MSELoss, nn.L1Loss)
    )
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", [*RECOGNISED, "sum"])
def test_a_models_own_loss_is_cut_by_what_torch_divided_it_by(case: str, shape: str) -> None:
    summed = nn.CrossEntropyLoss(reduction="sum"), logits(), labels(masked=True)
    loss, output, target = CASES.get(case, summed)
    rule, rows = loss_rule("model"), output.shape[0] // N
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for begin, end in ((0, 6), (6, 7), (7, N)):  # the seventh sample alone may be masked: a mean over nothing
        one, other = output[begin * rows : end * rows], target[begin * rows : end * rows]
        made = rule.run(lambda a=one, b=other: SHAPES[shape](loss(a, b), a), one, end - begin, N)  # type: ignore[misc]
        if shape == "mapping":
            assert list(rule.predictions(made)) == ["logits"]
        part, counted = rule(made, None, end - begin, N)
        total, count = total + part, count + counted
    torch.testing.assert_close(total / count, loss(output, target))


def test_a_models_own_loss_that_torch_did_not_divide_is_counted_by_labels_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rule = loss_rule("model")
    batch = {"labels": labels(masked=True).repeat(2, 1).T}
    made = rule.run(lambda: {"loss": logits().mean() * 2.0}, batch, N, N)
    assert rule(made, None, N, N)[1] == 16
    assert "labels that are not -100" in capsys.readouterr().err


def own_mean(**options: Any) -> torch.Tensor:
    return F.cross_entropy(logits(), labels(masked=True), **options)


def test_a_models_own_loss_that_was_changed_in_place_is_none_of_torchs_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for reduction in ("sum", "mean"):
        rule = loss_rule("model")
        _, count = rule(
            rule.run(lambda by=reduction: own_mean(reduction=by).div_(3), {}, N, 2 * N), None, N, 2 * N
        )
        assert count == N
        assert "counts by its number of samples" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize("options", [{"size_average": False}, {"size_average": False, "reduce": True}])
def test_a_models_own_loss_that_is_a_sum_by_a_deprecated_option_is_a_sum(options: dict[str, bool]) -> None:
    rule = loss_rule("model")
    total, count = rule(rule.run(lambda: own_mean(**options), {}, N, 2 * N), None, N, 2 * N)
    torch.testing.assert_close(total, own_mean(reduction="sum"))
    assert count == 0.5


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(TrainingError, match="no loss"):
        loss_rule("model").run(lambda: {"logits": logits()}, {}, N, N)


def test_a_loss_of_one_parameter_is_given_the_output_alone() -> None:
    total, count = loss_rule(lambda output: output.mean())(logits(), labels(), N, N)
    torch.testing.assert_close(total / count, logits().mean())


def test_a_key_of_the_inputs_is_the_target_of_no_option_of_the_loss() -> None:
    def scaled(output: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (output * scale).mean()

    def labelled(output: torch.Tensor, labels: Any = None) -> torch.Tensor:
        return (output * labels).mean()

    number = torch.full((N, 1), 3.0, dtype=torch.float64)
    for loss, batch, factor in (
        (scaled, {"x": logits(), "target": number}, 1.0),
        (labelled, {"x": logits(), "labels": number}, 3.0),
        (lambda output, wanted: (output * wanted).mean(), {"x": logits(), "target": number}, 3.0),
        (scaled, (logits(), number), 3.0),
    ):
        rule = loss_rule(loss)
        inputs, target = split_target(batch)
        total, count = rule(rule.run(logits, inputs, N, N), target, N, N)
        torch.testing.assert_close(total / count, logits().mean() * factor)


def test_a_models_own_loss_that_ceases_to_recombine_is_told_apart() -> None:
    rule, values = loss_rule("model"), torch.arange(8.0)
    parts = [(values, 8), (values[:4], 4), (values[4:], 4)]
    with pytest.raises(LossDoesNotRecombine) as first:
        rule.check_forward(lambda x: x.std() * 1.0, parts, 8, values)
    assert not first.value.is_drift
    rule.check_forward(lambda x: x.mean() * 1.0, parts, 8, values)
    with pytest.raises(LossDoesNotRecombine) as later:
        rule.check_forward(lambda x: x.std() * 1.0, parts, 8, values)
    assert later.value.is_drift


def test_a_small_mean_over_many_may_be_rounded() -> None:
    rule, values = loss_rule("model"), torch.full((8, 1), 1e-4, dtype=torch.bfloat16)
    values[4:] = -1.01e-4
    parts = [(values, 4000), (values[:4], 2000), (values[4:], 2000)]
    rule.check_forward(lambda x: x.mean() * 1.0, parts, 8, values)


def test_a_class_in_the_place_of_a_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="the class CrossEntropyLoss, and takes a loss made of it"):
        loss_rule(nn.CrossEntropyLoss)
