"""Random changes are a function of (seed, epoch, index)."""

from __future__ import annotations

import pytest
import torch

from pipelines import epoch_of, numbers, read, seen
from shoal.data import Dataset
from shoal.errors import ConfigError


def jitter(sample: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return sample * 1000 + torch.randint(1000, (), generator=generator)


def test_the_same_sample_is_changed_alike_in_any_order_at_any_number_of_workers() -> None:
    data = numbers(40).augment(jitter, seed=3)
    one = epoch_of(data, 1)
    assert [n // 1000 for n in one] == list(range(40))
    assert sorted(epoch_of(data.shuffle(seed=5), 1)) == one
    assert seen(read(data.batch(8), num_workers=3, epoch=1)) == one
    assert seen(read(data.batch(8), num_workers=4, epoch=1, start=16)) == one[16:]
    assert sorted(n for part in data.split(0.5, 0.5) for n in epoch_of(part, 1)) == one


def test_epochs_seeds_indices_and_repetitions_draw_anew() -> None:
    data = numbers(40).augment(jitter, seed=3)
    draws = [n % 1000 for n in epoch_of(data)]
    assert len(set(draws)) > 30
    assert draws != [n % 1000 for n in epoch_of(data, 1)]
    assert draws != [n % 1000 for n in epoch_of(numbers(40).augment(jitter, seed=4))]
    assert epoch_of(data.repeat(2)) == epoch_of(data, 0) + epoch_of(data, 1)
    after = epoch_of(numbers(40).repeat(2).augment(jitter, seed=3))
    assert after[:40] != after[40:]


def test_a_generator_of_its_own_can_be_read_ahead_and_leaves_the_global_ones_alone() -> None:
    batches = numbers(20).augment(jitter).batch(5).prefetch(2)
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    assert [n for batch in batches for n in batch.tolist()] == epoch_of(numbers(20).augment(jitter))
    assert torch.rand(()) == expected


def test_an_error_says_which_sample() -> None:
    with pytest.raises(TypeError) as caught:
        list(numbers(5).augment(lambda sample: sample).batch(2))  # type: ignore[arg-type]
    assert "raised by augment" in caught.value.__notes__[0]
    with pytest.raises(ConfigError, match="cache before that stage"):
        numbers(5).augment(jitter).cache()


def test_zipped_datasets_are_augmented_side_by_side() -> None:
    noisy = numbers(10).augment(jitter)
    pairs = Dataset.zip(numbers(10), noisy).shuffle(seed=1)
    [part] = pairs.batch(10).slices(epoch=2, start=0, rank=0, num_workers=1)
    assert (part.batch[1] // 1000).tolist() == part.batch[0].tolist()
    assert sorted(part.batch[1].tolist()) == epoch_of(noisy, 2)
