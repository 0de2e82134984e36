from __future__ import annotations

from collections import Counter
from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.order import Permutation

seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 10_000)


def whole(num_samples: int, seed: int, epoch: int = 0) -> list[int]:
    return Permutation(num_samples, seed=seed, epoch=epoch)(np.arange(num_samples)).tolist()


@given(st.integers(1, 3000), seeds, epochs)
def test_every_index_stands_at_exactly_one_position(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(whole(num_samples, seed, epoch)) == list(range(num_samples))


@given(st.integers(1, 2**62), seeds, epochs, st.data())
def test_up_to_2_to_the_62_images_are_distinct_and_in_range(
    num_samples: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    some = data.draw(st.sets(st.integers(0, num_samples - 1), min_size=1, max_size=50))
    images = Permutation(num_samples, seed=seed, epoch=epoch)(np.array(sorted(some), dtype=np.int64))
    assert len(set(images.tolist())) == len(some)
    assert images.min() >= 0
    assert images.max() < num_samples


@given(st.integers(1, 3000), seeds, epochs, st.data())
def test_a_position_has_the_same_image_alone_as_among_others(
    num_samples: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, num_samples - 1))
    alone = Permutation(num_samples, seed=seed, epoch=epoch)(np.array([position]))
    assert alone.tolist() == [whole(num_samples, seed, epoch)[position]]


def test_orders_stay_what_they_are_from_version_to_version() -> None:
    # A checkpoint holds a position in such an order; another order would repeat and lose samples on resume.
    assert whole(10, seed=0) == [7, 8, 0, 9, 6, 2, 1, 5, 4, 3]
    assert whole(2000, seed=7, epoch=3)[:8] == [1755, 1583, 1361, 1704, 1160, 1370, 965, 635]
    large = Permutation(10**15, seed=1)(np.array([0, 1, 10**15 - 1]))
    assert large.tolist() == [860291845686509, 662755095282472, 339368098316508]


def test_another_seed_or_epoch_is_another_order() -> None:
    orders = {tuple(whole(100, seed, epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


@pytest.mark.parametrize("num_samples", [3, 4, 5, 6])
def test_all_orders_of_a_few_samples_are_about_equally_likely(num_samples: int) -> None:
    num_drawn = 5000
    counts = Counter(tuple(whole(num_samples, seed)) for seed in range(num_drawn))
    expected = num_drawn / factorial(num_samples)
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    chi_square += (factorial(num_samples) - len(counts)) * expected
    assert chi_square / (factorial(num_samples) - 1) < 2


@pytest.mark.parametrize(("num_samples", "num_epochs"), [(50, 1000), (2000, 400)])
def test_positions_meet_indices_about_equally_often(num_samples: int, num_epochs: int) -> None:
    positions = np.arange(num_samples)
    num_cells = 50
    table = np.zeros((num_cells, num_cells))
    for epoch in range(num_epochs):
        images = Permutation(num_samples, seed=5, epoch=epoch)(positions)
        np.add.at(table, (positions * num_cells // num_samples, images * num_cells // num_samples), 1)
    expected = num_samples * num_epochs / num_cells**2
    assert 0.9 < ((table - expected) ** 2 / expected).sum() / (num_cells - 1) ** 2 < 1.1


def test_neighbours_end_up_unrelated() -> None:
    order = np.array(whole(100_000, seed=0))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.02


@pytest.mark.parametrize("num_samples", [0, -1, 2**62 + 1])
def test_impossible_sizes_are_refused(num_samples: int) -> None:
    with pytest.raises(ValueError, match="1 to 2\\^62"):
        Permutation(num_samples, seed=0)


@given(num=st.integers(1, 1500), seed=st.integers(-3, 1 << 70), first=st.integers(0, 1 << 70))
def test_many_epochs_at_once_are_those_of_each_alone(num: int, seed: int, first: int) -> None:
    places = np.arange(40) % num
    epochs = [first + number // 3 for number in range(40)]
    masked = np.array([epoch & ((1 << 64) - 1) for epoch in epochs], dtype=np.uint64)
    found = Permutation.of_epochs(num, seed=seed, epochs=masked)(places)
    for at, epoch in enumerate(epochs):
        assert found[at] == Permutation(num, seed=seed, epoch=epoch)(places[at : at + 1])[0]
