from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
import torchmetrics
import torchmetrics.classification as classification
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from shoal.errors import ConfigError
from shoal.train.metrics import Gather, MetricSet, Specs

T = TypeVar("T")


def alone(value: Tensor | None) -> list[Tensor]:
    """The gather of one process."""
    return [value if value is not None else torch.empty(0)]


def together(sets: Sequence[MetricSet], call: Callable[[MetricSet, Gather], T]) -> list[T]:
    """`call` on every rank at once, with a gather that waits for all of them."""
    barrier = threading.Barrier(len(sets), timeout=10)
    sent: list[Tensor] = [torch.empty(0)] * len(sets)
    results: list[Any] = [None] * len(sets)

    def run(rank: int) -> None:
        def gather(value: Tensor | None) -> list[Tensor]:
            sent[rank] = torch.empty(0) if value is None else value.clone()
            barrier.wait()
            received = [tensor.clone() for tensor in sent]
            barrier.wait()
            return received

        try:
            results[rank] = call(sets[rank], gather)
        except BaseException as error:
            barrier.abort()
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(sets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def build(specs: Specs, **options: Any) -> MetricSet:
    return MetricSet(specs, **{"loss_kind": "logits", **options})


def feed(metrics: MetricSet, outputs: Tensor, targets: Tensor, sizes: Sequence[int]) -> None:
    """Update with consecutive slices of these sizes; 0 is a borrowed sample."""
    position = 0
    for size in sizes:
        begin, end = (position, position + size) if size else (0, 1)
        metrics.update(outputs[begin:end], targets[begin:end], size)
        position += size


# Accuracy and top-k


def test_accuracy_of_classes_is_the_share_that_is_right() -> None:
    metrics = build(["accuracy", "loss"])
    metrics.update(torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]), torch.tensor([0, 0, 0]), 3)
    assert metrics.compute(alone) == {"accuracy": 2 / 3}


@pytest.mark.parametrize("name", ["top2", "top-2", "top_2"])
def test_top_k_takes_any_of_the_k_highest(name: str) -> None:
    metrics = build([name])
    metrics.update(torch.tensor([[3.0, 2.0, 1.0]] * 3), torch.tensor([0, 1, 2]), 3)
    assert metrics.compute(alone) == {name: 2 / 3}


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize("target_shape", [(4,), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_one_number_per_sample_is_binary(shape: Any, target_shape: Any, dtype: torch.dtype) -> None:
    metrics = build(["accuracy", "auroc"])
    logits = torch.tensor([-2.0, -1.0, 0.5, 0.25]).reshape(shape)
    metrics.update(logits, torch.tensor([0, 1, 1, 0]).to(dtype).reshape(target_shape), 4)
    assert metrics.compute(alone) == {"accuracy": 0.5, "auroc": 0.75}


def test_labels_beside_each_other_are_multilabel() -> None:
    metrics = build(["accuracy", "auroc"])
    logits = torch.tensor([[1.0, -1.0], [2.0, 1.0], [-1.0, 3.0]])
    target = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    metrics.update(logits, target, 3)
    expected = torchmetrics.functional.classification.multilabel_auroc(
        logits.sigmoid(), target.long(), num_labels=2
    )
    assert metrics.compute(alone) == {"accuracy": 4 / 6, "auroc": float(expected)}


@pytest.mark.parametrize("class_dim", [1, -1])
def test_classes_at_positions_are_counted_by_position(class_dim: int) -> None:
    scores = torch.randn(4, 5, 6)  # samples, positions, classes
    target = scores.argmax(-1)
    target[0] = (target[0] + 1) % 6
    metrics = build(["accuracy"])
    metrics.update(scores.movedim(-1, class_dim), target, 4)
    assert metrics.compute(alone) == {"accuracy": 0.75}


def test_a_model_that_flattened_its_positions_is_understood() -> None:
    scores = torch.randn(4 * 5, 6)
    metrics = build(["accuracy"])
    metrics.update(scores, scores.argmax(-1).reshape(4, 5), 4)
    assert metrics.compute(alone) == {"accuracy": 1.0}


def test_positions_to_ignore_do_not_count() -> None:
    scores = torch.eye(4).repeat(2, 1)
    target = torch.tensor([0, 1, 2, 3, -100, -100, 0, -100])
    metrics = build(["accuracy", "top2", "auroc"], ignore_index=-100)
    metrics.update(scores, target, 8)
    results = metrics.compute(alone)
    assert results["accuracy"] == 0.8
    counted = target != -100
    reference = classification.MulticlassAUROC(4)
    assert results["auroc"] == pytest.approx(float(reference(scores[counted].softmax(1), target[counted])))


def test_the_first_tensor_of_many_is_the_prediction() -> None:
    metrics = build(["accuracy"])
    metrics.update({"scores": (torch.tensor([[1.0, 0.0]]), torch.zeros(9))}, {"label": torch.tensor([0])}, 1)
    assert metrics.compute(alone) == {"accuracy": 1.0}


# What the model gives


@pytest.mark.parametrize("kind", ["logits", "probabilities", "log_probabilities"])
def test_what_the_loss_takes_is_what_the_model_gives(kind: Any) -> None:
    logits = torch.randn(50)
    target = torch.randint(0, 2, (50,)).float()
    given = {"logits": logits, "probabilities": logits.sigmoid(), "log_probabilities": F.logsigmoid(logits)}[
        kind
    ]
    metrics = build(["accuracy", "auroc"], loss_kind=kind)
    metrics.update(given, target, 50)
    expected = torchmetrics.functional.classification.binary_auroc(logits, target.long())
    results = metrics.compute(alone)
    assert results["accuracy"] == pytest.approx(float(((logits > 0) == target.bool()).float().mean()))
    assert results["auroc"] == pytest.approx(float(expected))


def test_a_batch_of_logits_that_look_like_probabilities_is_still_logits() -> None:
    # torchmetrics alone takes the first batch as probabilities and the second as logits, and finds 0.75.
    batches = [torch.tensor([0.9, 0.95]), torch.tensor([-3.0, 1.5])]
    target = torch.tensor([0, 1])
    metrics = build(["auroc", classification.BinaryAccuracy()])
    theirs = classification.BinaryAUROC()
    for batch in batches:
        metrics.update(batch, target, 2)
        theirs.update(batch, target)
    assert metrics.compute(alone) == {"auroc": 1.0, "accuracy": 0.75}
    assert theirs.compute() == 0.75


def test_narrow_floats_become_wide_probabilities() -> None:
    metrics = build(["auroc", "accuracy"])
    metrics.update(torch.tensor([2.0, -1.0], dtype=torch.bfloat16), torch.tensor([1.0, 0.0]), 2)
    assert metrics.compute(alone) == {"auroc": 1.0, "accuracy": 1.0}


# torchmetrics objects


def test_an_object_is_named_after_its_class_and_not_after_its_task() -> None:
    metrics = build(
        [
            torchmetrics.F1Score(task="binary"),
            classification.MulticlassAUROC(3),
            torchmetrics.MeanSquaredError(),
            torchmetrics.R2Score(),
        ]
    )
    assert list(metrics.compute(alone)) == ["f1_score", "auroc", "mean_squared_error", "r2_score"]


def test_objects_of_a_dict_are_named_by_it() -> None:
    metrics = build({"error": torchmetrics.MeanSquaredError()})
    metrics.update(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]), 2)
    assert metrics.compute(alone) == {"error": 2.0}


def test_a_collection_is_its_metrics() -> None:
    metrics = build(
        [
            torchmetrics.MetricCollection(
                {"mse": torchmetrics.MeanSquaredError(), "mae": torchmetrics.MeanAbsoluteError()}
            )
        ]
    )
    metrics.update(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]), 2)
    assert metrics.compute(alone) == {"mse": 2.0, "mae": 1.0}


def test_a_metric_that_needs_the_output_alone_gets_it_alone() -> None:
    metrics = build({"mean": torchmetrics.MeanMetric()})
    metrics.update(torch.tensor([1.0, 3.0]), None, 2)
    assert metrics.compute(alone) == {"mean": 2.0}


def test_several_numbers_are_numbered() -> None:
    metrics = build({"by_class": classification.MulticlassAccuracy(3, average="none")})
    metrics.update(torch.eye(3), torch.tensor([0, 1, 1]), 3)
    assert metrics.compute(alone) == {"by_class_0": 1.0, "by_class_1": 0.5, "by_class_2": 0.0}


def test_numbers_with_keys_are_called_by_them() -> None:
    wrapped = torchmetrics.ClasswiseWrapper(
        classification.MulticlassAccuracy(2, average=None), labels=["cat", "dog"]
    )
    metrics = build({"of": wrapped})
    metrics.update(torch.eye(2), torch.tensor([0, 0]), 2)
    assert metrics.compute(alone) == {"of_multiclassaccuracy_cat": 0.5, "of_multiclassaccuracy_dog": 0.0}


def test_a_users_object_keeps_its_own_state() -> None:
    theirs = torchmetrics.MeanSquaredError()
    theirs.update(torch.ones(2), torch.zeros(2))
    metrics = build([theirs])
    metrics.update(torch.zeros(2), torch.zeros(2), 2)
    assert metrics.compute(alone) == {"mean_squared_error": 0.0}
    assert theirs.compute() == 1.0


# Over many ranks

CLASSES = 4


def batches(kind: str, num: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num)
    if kind == "multiclass":
        return torch.randn(num, CLASSES, generator=generator), torch.randint(
            0, CLASSES, (num,), generator=generator
        )
    shape = (num,) if kind == "binary" else (num, 3)
    return torch.randn(shape, generator=generator), torch.randint(0, 2, shape, generator=generator).float()


class Running(torchmetrics.Metric):
    """States of every reduction there is, for the merging alone."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("average", torch.zeros(2), dist_reduce_fx="mean")
        self.add_state("highest", torch.tensor(-math.inf), dist_reduce_fx="max")
        self.add_state("lowest", torch.tensor(math.inf), dist_reduce_fx="min")
        self.add_state("all", [], dist_reduce_fx="cat")
        self.add_state("each", [], dist_reduce_fx=None)
        self.add_state("own", torch.ones(()), dist_reduce_fx=lambda stacked: stacked.prod(0))

    def update(self, output: Tensor, target: Tensor) -> None:
        flat = output.reshape(-1)
        self.total = self.total + flat.sum()
        mean = torch.stack([output.mean(), target.float().mean()])
        self.average = (self.average * self.count + mean * len(output)) / (self.count + len(output))
        self.count = self.count + len(output)
        self.highest = torch.maximum(self.highest, flat.max())
        self.lowest = torch.minimum(self.lowest, flat.min())
        self.all.append(flat)
        self.each.append(flat[:1])
        self.own = self.own * 2

    def compute(self) -> dict[str, Tensor]:
        every = torch.cat(list(self.all)).sort().values
        return {
            "total": self.total, "average": self.average, "highest": self.highest, "lowest": self.lowest,
            "median": every[len(every) // 2], "slices": torch.tensor(len(self.each)), "own": self.own,
        }  # fmt: skip


SPECS: dict[str, Callable[[], list[Any]]] = {
    "binary": lambda: ["accuracy", "auroc", torchmetrics.F1Score(task="binary")],
    "multiclass": lambda: ["accuracy", "top2", "auroc", classification.MulticlassConfusionMatrix(CLASSES)],
    "multilabel": lambda: ["accuracy", "auroc", torchmetrics.MeanSquaredError(), Running()],
}


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["binary", "multiclass", "multilabel"]),
    slices=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_many_ranks_compute_what_one_process_would(kind: str, slices: list[list[int]]) -> None:
    # Every rank has its own slices of uneven size; a size of 0 is borrowed, and a rank may have nothing but those.
    total = sum(map(sum, slices))
    if total == 0:
        return
    outputs, targets = batches(kind, total)
    specs = SPECS[kind]()
    one = build(specs)
    feed(one, outputs, targets, [size for rank in slices for size in rank if size])
    ranks = [build(specs) for _ in slices]
    position = 0
    for metrics, sizes in zip(ranks, slices, strict=True):
        end = position + sum(sizes)
        feed(
            metrics,
            outputs[position:end] if end > position else outputs,
            targets[position:end] if end > position else targets,
            sizes,
        )
        position = end
    expected = one.compute(alone)
    results = together(ranks, MetricSet.compute)
    for result in results:
        assert result == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)
        assert list(result) == list(expected)
        assert repr(result) == repr(results[0])  # to the bit, on every rank


def test_counts_are_exact_whatever_the_cut() -> None:
    outputs, targets = batches("multiclass", 100)
    expected = float((outputs.argmax(1) == targets).double().mean())
    for num in (1, 2, 3, 4):
        ranks = [build(["accuracy"]) for _ in range(num)]
        for rank, metrics in enumerate(ranks):
            metrics.update(outputs[rank::num], targets[rank::num], len(targets[rank::num]))
        assert together(ranks, MetricSet.compute) == [{"accuracy": expected}] * num


def test_a_metric_that_merges_by_itself_is_given_the_states_of_all() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(30), torch.randn(30)
    ranks = [build([torchmetrics.PearsonCorrCoef()]) for _ in range(4)]
    for metrics, (begin, end) in zip(ranks, [(0, 3), (3, 20), (0, 0), (20, 30)], strict=True):
        metrics.update(outputs[begin:end], targets[begin:end], end - begin)
    expected = float(torchmetrics.functional.pearson_corrcoef(outputs, targets))
    assert together(ranks, MetricSet.compute)[0]["pearson_corr_coef"] == pytest.approx(expected, abs=1e-6)


def test_a_rank_that_never_saw_a_batch_learns_the_task_from_the_others() -> None:
    idle, busy = build(["accuracy", "auroc"]), build(["accuracy", "auroc"])
    busy.update(torch.tensor([1.0, -1.0]), torch.tensor([1.0, 0.0]), 2)
    assert together([idle, busy], MetricSet.compute) == [{"accuracy": 1.0, "auroc": 1.0}] * 2


def test_where_nobody_saw_anything_it_is_nan() -> None:
    results = together(
        [build(["accuracy", torchmetrics.MeanSquaredError()]) for _ in range(2)], MetricSet.compute
    )
    assert all(list(result) == ["accuracy", "mean_squared_error"] for result in results)
    assert all(math.isnan(value) for result in results for value in result.values())


def test_without_metrics_nothing_is_exchanged() -> None:
    def never(value: Tensor | None) -> list[Tensor]:
        raise AssertionError("a collective for nothing")

    metrics = build([])
    metrics.update(torch.zeros(3), None, 3)
    assert (metrics.compute(never), metrics.state(never), len(metrics)) == ({}, {}, 0)


def test_computing_changes_nothing_and_can_be_done_again() -> None:
    metrics = build(["accuracy", "auroc"])
    metrics.update(torch.tensor([1.0, -1.0]), torch.tensor([1.0, 0.0]), 2)
    first = metrics.compute(alone)
    assert metrics.compute(alone) == first
    metrics.update(torch.tensor([1.0, -1.0]), torch.tensor([0.0, 1.0]), 2)
    assert metrics.compute(alone) == {"accuracy": 0.5, "auroc": 0.5}


def test_reset_forgets() -> None:
    metrics = build(["accuracy"])
    metrics.update(torch.tensor([1.0]), torch.tensor([0.0]), 1)
    metrics.compute(alone)
    metrics.reset()
    assert math.isnan(metrics.compute(alone)["accuracy"])
    metrics.update(torch.tensor([1.0]), torch.tensor([1.0]), 1)
    assert metrics.compute(alone) == {"accuracy": 1.0}


# In the middle of an epoch


@pytest.mark.parametrize("num_after", [1, 2, 3, 5])
def test_an_epoch_may_go_on_at_another_number_of_workers(num_after: int) -> None:
    outputs, targets = batches("multilabel", 60)
    specs = SPECS["multilabel"]()
    before = [build(specs) for _ in range(3)]
    for rank, metrics in enumerate(before[:2]):  # the third never saw a sample
        metrics.update(outputs[rank * 15 : rank * 15 + 15], targets[rank * 15 : rank * 15 + 15], 15)
    saved = together(before, MetricSet.state)[0]

    after = [build(specs) for _ in range(num_after)]
    cuts = [30 + 30 * rank // num_after for rank in range(num_after + 1)]
    for rank, metrics in enumerate(after):
        assert metrics.load_state(saved, rank, num_after)
        metrics.update(
            outputs[cuts[rank] : cuts[rank + 1]],
            targets[cuts[rank] : cuts[rank + 1]],
            cuts[rank + 1] - cuts[rank],
        )
    one = build(specs)
    feed(one, outputs, targets, [15, 15, *(end - begin for begin, end in itertools.pairwise(cuts))])
    expected = one.compute(alone)
    for result in together(after, MetricSet.compute):
        assert result == pytest.approx(expected, rel=1e-5)


def test_at_the_same_number_of_workers_it_goes_on_to_the_bit() -> None:
    outputs, targets = batches("multilabel", 64)
    specs = [
        "accuracy",
        "auroc",
        torchmetrics.MeanSquaredError(),
        torchmetrics.PearsonCorrCoef(num_outputs=3),
    ]

    def half(ranks: list[MetricSet], begin: int) -> None:
        for rank, metrics in enumerate(ranks):
            first = begin + rank * 16
            metrics.update(outputs[first : first + 16], targets[first : first + 16], 16)

    straight = [build(specs) for _ in range(2)]
    half(straight, 0)
    saved = together(straight, MetricSet.state)[1]
    half(straight, 32)
    resumed = [build(specs) for _ in range(2)]
    for rank, metrics in enumerate(resumed):
        assert metrics.load_state(saved, rank, 2)
    half(resumed, 32)
    assert together(resumed, MetricSet.compute) == together(straight, MetricSet.compute)


def test_saved_twice_nothing_is_lost() -> None:
    first = [build(["accuracy"]) for _ in range(3)]
    for metrics in first:
        metrics.update(torch.tensor([1.0]), torch.tensor([1.0]), 1)
    saved = together(first, MetricSet.state)[0]
    second = [build(["accuracy"]) for _ in range(2)]
    for rank, metrics in enumerate(second):
        metrics.load_state(saved, rank, 2)
    saved = together(second, MetricSet.state)[0]
    third = build(["accuracy"])
    third.load_state(saved, 0, 1)
    third.update(torch.tensor([1.0]), torch.tensor([0.0]), 1)
    assert third.compute(alone) == {"accuracy": 0.75}


def test_the_state_of_other_metrics_is_not_taken() -> None:
    metrics = build(["accuracy"])
    metrics.update(torch.tensor([1.0]), torch.tensor([1.0]), 1)
    other = build(["auroc"])
    assert not other.load_state(metrics.state(alone), 0)
    assert math.isnan(other.compute(alone)["auroc"])


# What cannot be meant


@pytest.mark.parametrize("name", ["accuracy", "auroc", "top5"])
def test_a_batch_without_target_is_refused_by_the_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' compares with a target, and these batches have none"):
        build([name]).update(torch.zeros(3, 9), None, 3)


def test_an_unknown_name_gets_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"no metric 'acuracy'\. Did you mean 'accuracy'\?"):
        build(["acuracy"])


@pytest.mark.parametrize("specs", ["accuracy", [3], {"a": "accuracy"}, torchmetrics.MeanMetric()])
def test_what_is_no_list_of_metrics_is_refused(specs: Any) -> None:
    with pytest.raises(ConfigError):
        build(specs)


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two metrics are called 'auroc'"):
        build(["auroc", classification.BinaryAUROC()])


def test_the_accuracy_of_a_regression_is_refused() -> None:
    with pytest.raises(ConfigError, match="these go from -1 to 7"):
        build(["accuracy"]).update(torch.zeros(2), torch.tensor([-1.0, 7.0]), 2)


def test_shapes_that_mean_nothing_are_refused_with_both() -> None:
    with pytest.raises(
        ConfigError, match=r"outputs of shape \(3, 4\) and targets of shape \(3, 5\) \(float32\)"
    ):
        build(["accuracy"]).update(torch.zeros(3, 4), torch.zeros(3, 5), 3)


@pytest.mark.parametrize("outputs", [torch.zeros(2), torch.zeros(2, 3)])
def test_top_k_needs_so_many_classes(outputs: Tensor) -> None:
    with pytest.raises(ConfigError, match="needs at least 5 classes"):
        build(["top5"]).update(outputs, torch.zeros(2, dtype=torch.int64), 2)


def test_one_sided_targets_give_nan_without_noise() -> None:
    metrics = build(["auroc", torchmetrics.F1Score(task="binary")])
    metrics.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]), 2)
    results = metrics.compute(alone)
    assert math.isnan(results["auroc"])
    assert results["f1_score"] == 1.0
    theirs = build([classification.BinaryAUROC()])
    theirs.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]), 2)
    assert math.isnan(theirs.compute(alone)["auroc"])


def test_a_class_that_does_not_occur_is_left_out_of_the_average() -> None:
    metrics = build(["auroc"])
    scores = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [1.0, 1.5, 0.0]])
    metrics.update(scores, torch.tensor([0, 1, 1]), 3)
    assert metrics.compute(alone) == {"auroc": 1.0}


class Wordy(torchmetrics.Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("words", [], dist_reduce_fx=None)

    def update(self, output: Tensor, target: Tensor) -> None:
        self.words.append("word")

    def compute(self) -> Tensor:
        return torch.tensor(len(self.words))


def test_a_state_that_is_no_tensor_is_refused_by_name() -> None:
    metrics = build([Wordy()])
    metrics.update(torch.zeros(1), torch.zeros(1), 1)
    with pytest.raises(ConfigError, match="the metric wordy keeps a list of str in 'words'"):
        metrics.compute(alone)
