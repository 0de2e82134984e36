"""Small pictures that a small network learns in seconds: striped discs, one stripe direction per class.

Where the disc lies, how large it is, the stripes' phase and colours and the
noise differ from picture to picture, so a class is learnt and not memorised.
Everything is a function of (seed, index); nothing is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.dataset import Dataset
from shoal.data.generated.draws import Ints, bits, uniform
from shoal.errors import ConfigError
from shoal.runtime.seeds import mix

_Pixels = NDArray[np.float32]

_BLOCK = 64  # pictures made at a time: what they need stays in a core's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """Parameters of the pictures."""

    seed: int = 0
    """Another seed gives other pictures of the same classes."""

    size: int = 32
    """Height and width in pixels."""

    num_classes: int = 10
    """Directions of stripes: class k is turned by k / num_classes of half a turn."""

    noise: float = 0.3
    """Standard deviation of what is added to each pixel; the stripes themselves lie between -1 and 1."""

    def __post_init__(self) -> None:
        if self.size < 8:
            raise ConfigError(
                f"size must be at least 8 pixels, or stripes cannot be told apart, got {self.size}"
            )
        if self.num_classes < 1:
            raise ConfigError(f"num_classes must be at least 1, got {self.num_classes}")
        if self.noise < 0:
            raise ConfigError(f"noise must not be negative, got {self.noise}")


def images(
    num_samples: int, *, seed: int = 0, size: int = 32, num_classes: int = 10, noise: float = 0.3
) -> Dataset:
    """Pictures as a dataset, made as they are read: (float32 [N, 3, size, size], int64 label [N])."""
    config = ImageConfig(seed=seed, size=size, num_classes=num_classes, noise=noise)
    return Dataset.from_function(lambda indices: pictures(config, indices), num_samples)


def pictures(config: ImageConfig, indices: Ints) -> tuple[torch.Tensor, torch.Tensor]:
    """(pictures, labels) of the samples at `indices`."""
    pixels = np.empty((len(indices), 3, config.size, config.size), dtype=np.float32)
    labels = np.empty(len(indices), dtype=np.int64)
    for begin in range(0, len(indices), _BLOCK):
        block = indices[begin : begin + _BLOCK]
        labels[begin : begin + _BLOCK] = bits(mix(config.seed, 1), block) % np.uint64(config.num_classes)
        pixels[begin : begin + _BLOCK] = _draw(config, block, labels[begin : begin + _BLOCK])
    return torch.from_numpy(pixels), torch.from_numpy(labels)


def _draw(config: ImageConfig, indices: Ints, labels: Ints) -> _Pixels:
    # One line per quantity, each [N, 1, 1, 1] so that it broadcasts over colours and pixels.
    shares = uniform(bits(mix(config.seed, 2), indices, np.arange(8)[:, None])).astype(np.float32)
    across, down, radius, cycles, phase, *tint = shares[:, :, None, None, None]
    angle = (np.pi / config.num_classes * labels).astype(np.float32)[:, None, None, None]

    line = np.linspace(-1, 1, config.size, dtype=np.float32)
    x, y = line[None, :] - (across - 0.5), line[:, None] - (down - 0.5)
    stripes = np.sin(np.pi * (2.5 + cycles) * (np.cos(angle) * x + np.sin(angle) * y) + 2 * np.pi * phase)
    inside = x * x + y * y < (0.6 + 0.4 * radius) ** 2
    colour = 0.2 + 0.8 * np.concatenate(tint, axis=1)  # [N, 3, 1, 1]
    drawn: _Pixels = colour * (stripes * inside) + _noise(config, indices)
    return drawn


def _noise(config: ImageConfig, indices: Ints) -> _Pixels:
    """Even noise for every pixel, 16 bits of randomness each."""
    num_pixels = 3 * config.size * config.size
    random = bits(mix(config.seed, 3), indices[:, None], np.arange(-(-num_pixels // 4)))
    pieces = random.view(np.uint16)[:, :num_pixels].astype(np.float32)
    spread = np.float32(config.noise * np.sqrt(12.0))
    even = pieces * (spread / np.float32(65535)) - spread / np.float32(2)
    return even.reshape(len(indices), 3, config.size, config.size)
