from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.generated import images, pictures
from shoal.errors import ConfigError

PIXELS, LABELS = pictures(np.arange(1000))


@settings(max_examples=30)
@given(indices=st.lists(st.integers(0, 999), min_size=1, max_size=70))
def test_a_picture_is_the_same_to_the_bit_whatever_is_read_with_it(indices: list[int]) -> None:
    pixels, labels = pictures(np.array(indices))
    assert torch.equal(pixels, PIXELS[indices])
    assert torch.equal(labels, LABELS[indices])


def test_the_dataset_holds_the_pictures() -> None:
    piece = next(images(8, size=16).batch(8).slices(epoch=0, start=0, rank=0, num_workers=1))
    pixels, labels = pictures(np.arange(8), size=16)
    assert torch.equal(piece.inputs, pixels)
    assert torch.equal(piece.target, labels)


@pytest.mark.parametrize("size", [8, 17, 32])
def test_shapes_and_types_are_those_of_the_interface(size: int) -> None:
    pixels, labels = pictures(np.arange(5), size=size)
    assert (pixels.shape, pixels.dtype) == ((5, 3, size, size), torch.float32)
    assert (labels.shape, labels.dtype) == ((5,), torch.int64)


def test_another_seed_gives_other_pictures() -> None:
    other, labels = pictures(np.arange(1000), seed=1)
    assert not torch.equal(other, PIXELS)
    assert (labels == LABELS).float().mean() < 0.2


def test_classes_are_about_equally_frequent() -> None:
    counts = LABELS.bincount(minlength=10)
    assert counts.min() > 60
    assert counts.max() < 150


def test_noise_has_the_standard_deviation_that_was_asked_for() -> None:
    clean, _ = pictures(np.arange(50), noise=0.0)
    noisy, _ = pictures(np.arange(50), noise=0.5)
    assert abs((noisy - clean).std().item() - 0.5) < 0.01
    assert abs((noisy - clean).mean().item()) < 0.01


def test_the_class_is_the_direction_of_the_stripes() -> None:
    pixels, labels = pictures(np.arange(400), noise=0.0)
    # The gradient of stripes points across them, whatever their phase and colour: average it with doubled angle.
    down, across = np.gradient(pixels.numpy().sum(axis=1), axis=(1, 2))
    doubled = np.arctan2((2 * across * down).sum(axis=(1, 2)), (across**2 - down**2).sum(axis=(1, 2)))
    guessed = np.round(doubled / (2 * np.pi) * 10).astype(int) % 10
    assert (guessed == labels.numpy()).mean() > 0.85


@pytest.mark.parametrize("wrong", [{"size": 7}, {"num_classes": 0}, {"noise": -0.1}])
def test_pictures_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        images(10, **wrong)  # type: ignore[arg-type]  # the point is the wrong value
