from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc

from shoal.data.generated import ClickLog, best_auc, click_arrays, clicks, column_sizes
from shoal.errors import ConfigError

LOG = ClickLog()
INPUTS, LABELS = LOG.samples(np.arange(50_000))


@settings(max_examples=50)
@given(indices=st.lists(st.integers(0, 50_000 - 1), min_size=1, max_size=80))
def test_a_sample_is_the_same_to_the_bit_whatever_is_read_with_it(indices: list[int]) -> None:
    inputs, labels = LOG.samples(np.array(indices))
    assert torch.equal(inputs["dense"], INPUTS["dense"][indices])
    assert torch.equal(inputs["ids"], INPUTS["ids"][indices])
    assert torch.equal(labels, LABELS[indices])


def test_the_dataset_and_the_arrays_hold_the_same_samples() -> None:
    inputs, labels = click_arrays(100, seed=3, num_ids=5000)
    piece = next(clicks(100, seed=3, num_ids=5000).batch(100).slices(epoch=0, start=0, rank=0, num_workers=1))
    assert torch.equal(piece.inputs["dense"], inputs["dense"])
    assert torch.equal(piece.inputs["ids"], inputs["ids"])
    assert torch.equal(piece.target, labels)


def test_shapes_and_types_are_those_of_the_interface() -> None:
    inputs, labels = click_arrays(7)
    assert (inputs["dense"].shape, inputs["dense"].dtype) == ((7, 13), torch.float32)
    assert (inputs["ids"].shape, inputs["ids"].dtype) == ((7, 26), torch.int64)
    assert (labels.shape, labels.dtype) == ((7,), torch.float32)
    assert set(LABELS.unique().tolist()) == {0.0, 1.0}


def test_another_seed_is_another_world() -> None:
    first, second = click_arrays(1000, seed=0), click_arrays(1000, seed=1)
    assert not torch.equal(first[0]["dense"], second[0]["dense"])
    assert (first[0]["ids"] == second[0]["ids"]).float().mean() < 0.5
    assert not torch.equal(first[1], second[1])


def test_labels_are_drawn_with_the_planted_probability() -> None:
    probability = LOG.probability(np.arange(len(LABELS)))
    for low, high in itertools.pairwise((0.0, 0.1, 0.2, 0.4, 0.6, 1.0)):
        chosen = (probability >= low) & (probability < high)
        assert abs(LABELS.numpy()[chosen].mean() - probability[chosen].mean()) < 0.02


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("num_ids", "zipf"), [(1000, 0.0), (1000, 1.05), (200_000, 1.0), (1_000_000, 1.5)])
def test_label_rate_and_best_auc_hold_for_every_configuration(seed: int, num_ids: int, zipf: float) -> None:
    _, labels = click_arrays(20_000, seed=seed, num_ids=num_ids, zipf=zipf)
    assert 0.23 < labels.mean() < 0.27
    assert 0.78 < best_auc(20_000, seed=seed, num_ids=num_ids, zipf=zipf) < 0.82


def test_best_auc_is_what_the_planted_probabilities_score() -> None:
    probability = torch.from_numpy(LOG.probability(np.arange(len(LABELS))))
    measured = binary_auroc(probability, LABELS.long()).item()
    assert abs(measured - best_auc(len(LABELS))) < 0.01


def test_ids_alone_and_numbers_alone_each_tell_less_than_both() -> None:
    indices = np.arange(len(LABELS))
    numeric, rows = LOG._features(indices)
    labels = LABELS.long()
    both = binary_auroc(torch.from_numpy(LOG._raw_logit(numeric, rows)), labels).item()
    ids = binary_auroc(torch.from_numpy(LOG._raw_logit(numeric * 0, rows)), labels).item()
    numbers = binary_auroc(torch.from_numpy(LOG._numeric_weights @ numeric), labels).item()
    assert 0.55 < numbers < both - 0.02
    assert 0.55 < ids < both - 0.02


def test_ids_follow_zipfs_law_in_a_large_column() -> None:
    column = int(np.argmax(LOG.sizes))
    counts = np.sort(np.bincount(INPUTS["ids"][:, column]))[::-1]
    ranks = np.arange(1, LOG.sizes[column] + 1, dtype=float)
    # The law is that of a continuous k**-1.05, so a rank's share is its integral from k to k + 1.
    edges = 1 - np.append(ranks, ranks[-1] + 1) ** -0.05
    share = np.diff(edges) / edges[-1]
    head = counts[:1000] / counts.sum()
    assert abs(head[0] - share[0]) < 0.01
    assert abs(head[:10].sum() - share[:10].sum()) < 0.01
    assert abs(head.sum() - share[:1000].sum()) < 0.02


def test_popular_ids_are_spread_over_their_column() -> None:
    column = int(np.argmax(LOG.sizes))
    counts = np.bincount(INPUTS["ids"][:, column])
    popular = np.sort(np.argsort(counts)[::-1][:16])
    assert np.diff(popular).min() > LOG.sizes[column] // 64


@given(st.integers(78, 100_000_000))
def test_columns_share_all_ids_and_none_is_empty(num_ids: int) -> None:
    sizes = column_sizes(num_ids)
    assert sizes.sum() == num_ids
    assert len(sizes) == 26
    assert sizes.min() == 3


@settings(max_examples=20)
@given(num_ids=st.integers(78, 3000), zipf=st.floats(0, 3), seed=st.integers(0, 2**31))
def test_each_column_keeps_to_its_own_rows(num_ids: int, zipf: float, seed: int) -> None:
    inputs, _ = ClickLog(seed=seed, num_ids=num_ids, zipf=zipf).samples(np.arange(500))
    ends = np.cumsum(column_sizes(num_ids))
    starts = ends - column_sizes(num_ids)
    assert (inputs["ids"].numpy() >= starts).all()
    assert (inputs["ids"].numpy() < ends).all()


def test_every_row_of_a_small_log_can_be_met() -> None:
    inputs, _ = click_arrays(20_000, num_ids=1000, zipf=0.5)
    assert len(inputs["ids"].unique()) == 1000


def test_numbers_are_heavy_tailed_and_a_fifth_or_more_are_missing() -> None:
    dense = INPUTS["dense"]
    assert dense.min() == 0
    assert 0.2 < (dense == 0).float().mean() < 0.3
    assert dense.mean() > 1.5 * dense.median()


@pytest.mark.parametrize(("settings", "word"), [({"num_ids": 77}, "num_ids"), ({"zipf": -1.0}, "zipf")])
def test_a_log_that_cannot_be_is_refused(settings: dict[str, float], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        clicks(10, **settings)  # type: ignore[arg-type]  # the point is the wrong value
