"""Taking turns is a function of the position, and it is the round-robin that everybody would write down."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import epoch_of, numbers
from shoal.data import Dataset
from shoal.data.sources.derived import Interleaving
from shoal.errors import DataError


def round_robin(lengths: list[int], block: int) -> list[tuple[int, int]]:
    taken, order = [0] * len(lengths), []
    while any(done < length for done, length in zip(taken, lengths, strict=True)):
        for which, length in enumerate(lengths):
            for _ in range(min(block, length - taken[which])):
                order.append((which, taken[which]))
                taken[which] += 1
    return order


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6), block=st.integers(1, 8), data=st.data())
def test_turns_are_those_of_a_naive_round_robin(lengths: list[int], block: int, data: st.DataObject) -> None:
    expected = round_robin(lengths, block)
    turns = Interleaving(lengths, block)
    assert turns.num_samples == len(expected)
    places = data.draw(st.permutations(range(len(expected)))) if expected else []
    which, inside = turns(np.array(places, dtype=np.int64))
    assert list(zip(which.tolist(), inside.tolist(), strict=True)) == [expected[place] for place in places]


def test_lengths_beyond_any_memory_cost_nothing() -> None:
    turns = Interleaving([10**15, 3, 10**16], 8)
    which, inside = turns(np.array([0, 8, 11, 10**15, turns.num_samples - 1]))
    assert which.tolist()[:3] == [0, 1, 2]
    assert (which[-1], inside[-1]) == (2, 10**16 - 1)


def test_datasets_in_turns_keep_their_own_orders() -> None:
    one, other = numbers(6).shuffle(seed=1), numbers(20).skip(10).map(lambda n: n)
    mixed = epoch_of(Dataset.interleave([one, other], block=2), 1)
    assert [n for n in mixed if n < 10] == epoch_of(one, 1)
    assert [n for n in mixed if n >= 10] == list(range(10, 20))
    assert [n >= 10 for n in mixed[:8]] == [False, False, True, True] * 2


def test_a_batch_of_several_sources_is_put_together() -> None:
    one = Dataset.from_arrays(({"x": torch.zeros(3, 2), "name": torch.arange(3)}, torch.zeros(3)))
    other = one.map(lambda sample: ({"x": sample[0]["x"] + 1, "name": sample[0]["name"] + 10}, sample[1] + 1))
    [batch] = Dataset.interleave([one, other]).batch(6)
    assert batch[0]["name"].tolist() == [0, 10, 1, 11, 2, 12]
    assert batch[1].tolist() == [0, 1] * 3


def test_rows_of_several_lengths_are_padded_to_one() -> None:
    one = Dataset.from_arrays(torch.ones(2, 3, dtype=torch.int64))
    other = Dataset.from_arrays(torch.ones(2, 2, dtype=torch.int64))
    [batch] = Dataset.interleave([one, other]).batch(4)
    assert batch.tolist() == [[1, 1, 1], [1, 1, -1]] * 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)),
        ((torch.zeros(2), torch.zeros(2)), torch.zeros(2)),
        ((torch.zeros(2), torch.zeros(2)), (torch.zeros(2),)),
        ({"x": torch.zeros(2)}, {"y": torch.zeros(2)}),
    ],
)
def test_what_cannot_be_one_batch_is_refused_by_its_shapes(one: object, other: object) -> None:
    with pytest.raises(DataError, match="datasets that differ"):
        list(Dataset.interleave([Dataset.from_arrays(one), Dataset.from_arrays(other)]).batch(4))


def test_a_zip_is_as_long_as_its_shortest_and_keeps_orders() -> None:
    left, right = numbers(7).shuffle(seed=2), numbers(20)
    pairs = Dataset.zip(left, right)
    assert len(pairs) == 7
    [batch] = pairs.batch(7)
    assert batch[0].tolist() == epoch_of(left)
    assert batch[1].tolist() == list(range(7))
    [second] = pairs.batch(7).slices(epoch=1, start=0, rank=0, num_workers=1)
    assert second.batch[0].tolist() == epoch_of(left, 1)
    assert repr(pairs) == "Dataset(7 samples: zip)"
