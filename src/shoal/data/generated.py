"""Data that is computed, not downloaded: every sample a function of (seed, index), with a known best score.

clicks   click logs in the shape of Criteo's     `best_auc`
images   striped discs, a direction per class
text     characters from a planted rule          `best_loss`

Random numbers are looked up, not drawn: they depend on their coordinates alone
(a sample's index, a column, a pixel), so any sample can be made by itself, in
any order, in any process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.dataset import Dataset
from shoal.data.order import GOLDEN, splitmix64
from shoal.errors import ConfigError
from shoal.runtime.seeds import mix

__all__ = ["ALPHABET", "best_auc", "best_loss", "click_arrays", "clicks", "decode", "images", "text"]

Bits = NDArray[np.uint64]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def bits(key: int, *coordinates: Ints) -> Bits:
    """64 random bits for every combination of the coordinates, which broadcast (splitmix64 per coordinate).

    Put the small coordinate last: each one costs a pass over what has been broadcast so far.
    """
    state = np.array([key], dtype=np.uint64)
    for coordinate in coordinates:
        state = splitmix64(state + coordinate.astype(np.uint64) + GOLDEN)
    return state


def uniform(random: Bits) -> Floats:
    """Numbers in [0, 1), 53 bits fine."""
    return (random >> np.uint64(11)).astype(np.float64) * 2.0**-53


def bell(random: Bits) -> Floats:
    """Numbers of mean 0 and variance 1, near normal and never beyond ±3.47: the sum of four 16-bit pieces."""
    mask = np.uint64(0xFFFF)
    total = random & mask
    for shift in (16, 32, 48):
        total = total + ((random >> np.uint64(shift)) & mask)
    centred: Floats = total.astype(np.float64) - 2 * 65535
    return centred * (math.sqrt(3) / 65536)


NUM_DENSE = 13
NUM_COLUMNS = 26

# fmt: off
_CRITEO_SIZES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)
# fmt: on
_PAIRS = ((0, 1), (4, 5), (6, 7), (8, 13), (16, 24))  # columns whose ids act together
_LABEL_RATE = 0.25  # Criteo's is 0.256
_LOGIT_SPREAD = 1.35  # standard deviation of the planted logit: sets the best AUC, about 0.80
_DAMPING = 0.1  # an id of a column of n rows weighs about n**-0.1
_MISSING = 0.2  # share of numeric values that are 0
_BLOCK = 4096  # samples made at a time: what they need stays in a core's cache

_Inputs = dict[str, torch.Tensor]


def clicks(num_samples: int, *, seed: int = 0, num_ids: int = 1_000_000, zipf: float = 1.05) -> Dataset:
    """A click log in the shape of Criteo's as a dataset, made as it is read; the best possible AUC is known.

    Batches are ({"dense": float32 [N, 13], "ids": int64 [N, 26]}, label float32 [N]). Columns differ in size
    as Criteo's do, from 3 rows to a tenth of all; ids are 0 to `num_ids` - 1 over all columns, each with a
    range of its own, so that one table holds them all. The id of popularity rank k is seen about k**-zipf as
    often as the first of its column; 0 is uniform. Another `seed` is another world: other samples, and other
    weights behind the labels. `dense` is heavy-tailed like a count: take log1p.
    """
    return Dataset.from_function(_log(seed, num_ids, zipf).samples, num_samples)


def click_arrays(
    num_samples: int, *, seed: int = 0, num_ids: int = 1_000_000, zipf: float = 1.05
) -> tuple[_Inputs, torch.Tensor]:
    """The samples of `clicks` at once, in memory: 264 bytes each. `Dataset.from_arrays` takes them as they are."""
    return _log(seed, num_ids, zipf).samples(np.arange(num_samples))


def best_auc(
    num_samples: int = 100_000, *, seed: int = 0, num_ids: int = 1_000_000, zipf: float = 1.05
) -> float:
    """The AUC of a model that knows the planted probabilities: what training can approach and not pass.

    It is the expected AUC over the first `num_samples` samples, the coins not yet fallen. On a small test set
    a perfect model scores a little above or below it.
    """
    probability = np.sort(_log(seed, num_ids, zipf).probability(np.arange(num_samples)))
    negatives_below = np.cumsum(1 - probability) - (1 - probability)
    return float((probability * negatives_below).sum() / (probability.sum() * (1 - probability).sum()))


class ClickLog:
    """Computes samples and the probability behind each label.

    The logit is a weight per id, a weight per numeric value and a few products of two ids' weights, moved and
    stretched so that label rate and best AUC are about the same for every configuration.
    """

    def __init__(self, seed: int = 0, num_ids: int = 1_000_000, zipf: float = 1.05) -> None:
        if num_ids < 3 * NUM_COLUMNS:
            raise ConfigError(f"num_ids must be at least {3 * NUM_COLUMNS}, three per column, got {num_ids}")
        if zipf < 0:
            raise ConfigError(f"zipf must not be negative, got {zipf}")
        self.sizes = column_sizes(num_ids)
        self._ids = _ZipfColumns(self.sizes, zipf, key=mix(seed, 1))
        self._numeric_key, self._weight_key, self._coin_key = (mix(seed, what) for what in (2, 3, 4))
        # Most ids of a large column occur once or never: their weights cannot be learnt, so they are small.
        self._column_scale = self.sizes[:, None] ** -_DAMPING
        self._numeric_weights = bell(bits(mix(seed, 5), np.arange(NUM_DENSE)))
        # Calibration samples precede the log's first, so that no sample calibrates itself.
        raw = self._raw_logit(*self._features(np.arange(-4 * _BLOCK, 0)))
        self._stretch = _LOGIT_SPREAD / float(raw.std())
        self._shift = _intercept(self._stretch * raw, _LABEL_RATE)

    def samples(self, indices: Ints) -> tuple[_Inputs, torch.Tensor]:
        dense = np.empty((len(indices), NUM_DENSE), dtype=np.float32)
        ids = np.empty((len(indices), NUM_COLUMNS), dtype=np.int64)
        labels = np.empty(len(indices), dtype=np.float32)
        for begin in range(0, len(indices), _BLOCK):
            block = indices[begin : begin + _BLOCK]
            numeric, rows = self._features(block)
            dense[begin : begin + _BLOCK] = np.expm1(numeric).T
            ids[begin : begin + _BLOCK] = rows.T
            coin = uniform(bits(self._coin_key, block))
            labels[begin : begin + _BLOCK] = coin < self._link(numeric, rows)
        inputs = {"dense": torch.from_numpy(dense), "ids": torch.from_numpy(ids)}
        return inputs, torch.from_numpy(labels)

    def probability(self, indices: Ints) -> Floats:
        """The planted probability that each sample's label is 1."""
        blocks = [indices[begin : begin + _BLOCK] for begin in range(0, len(indices), _BLOCK)]
        return np.concatenate([self._link(*self._features(block)) for block in blocks])

    def _features(self, indices: Ints) -> tuple[Floats, Ints]:
        """Log-scale numeric values [13, N] and rows [26, N]: a line per column keeps the inner loops long."""
        random = bits(self._numeric_key, indices, np.arange(NUM_DENSE)[:, None])
        numeric = np.maximum(1.5 + bell(random), 0.0)
        # The lowest bits decide what is missing; the bell's shape hardly depends on them.
        numeric[(random & np.uint64(0xFF)) < 256 * _MISSING] = 0.0
        return numeric, self._ids.rows(indices)

    def _raw_logit(self, numeric: Floats, rows: Ints) -> Floats:
        weights = self._column_scale * bell(bits(self._weight_key, rows))
        # Added line by line: numpy's own sum takes another order for a single sample, and other bits.
        logit = np.zeros(rows.shape[1])
        for line in weights:
            logit += line
        for first, second in _PAIRS:
            logit += weights[first] * weights[second]
        for line, weight in zip(numeric, self._numeric_weights, strict=True):
            logit += weight * line
        return logit

    def _link(self, numeric: Floats, rows: Ints) -> Floats:
        return _logistic(self._stretch * self._raw_logit(numeric, rows) + self._shift)


class _ZipfColumns:
    """Ids of every column by bounded Zipf's law, each column within its own range of rows."""

    def __init__(self, sizes: Ints, zipf: float, *, key: int) -> None:
        self._key = key
        self._sizes = sizes[:, None]
        self._starts = (np.cumsum(sizes) - sizes)[:, None]
        # Popular ids would be neighbours: steps of a golden section spread them, and visit every row once.
        self._strides = np.array([_coprime_near(size, 0.618 * size) for size in sizes.tolist()])[:, None]
        self._exponent = 1.0 - zipf
        self._reach = (self._sizes + 1.0) ** self._exponent - 1.0
        self._log_reach = np.log(self._sizes + 1.0)

    def rows(self, indices: Ints) -> Ints:
        share = uniform(bits(self._key, indices, np.arange(NUM_COLUMNS)[:, None]))
        # The inverse of the distribution's integral, from 1 to size + 1; its whole part is the popularity rank.
        if abs(self._exponent) < 1e-6:
            position = np.exp(share * self._log_reach)
        else:
            position = np.exp(np.log1p(share * self._reach) / self._exponent)
        rank = np.minimum(position.astype(np.int64) - 1, self._sizes - 1)
        rows: Ints = self._starts + rank * self._strides % self._sizes
        return rows


def column_sizes(num_ids: int) -> Ints:
    """Rows of each column: Criteo's own numbers of distinct ids, the large ones cut to one size so that all fit."""
    criteo = np.array(_CRITEO_SIZES)
    low, high = 1, num_ids
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.minimum(criteo, middle).sum() <= num_ids else (low, middle - 1)
    sizes: Ints = np.minimum(criteo, low)
    sizes[criteo.argmax()] += num_ids - sizes.sum()
    return sizes


_log = lru_cache(maxsize=8)(ClickLog)


def _coprime_near(size: int, wish: float) -> int:
    stride = max(round(wish), 1)
    while math.gcd(stride, size) != 1:
        stride += 1
    return stride


def _intercept(logits: Floats, rate: float) -> float:
    """Offset of the logits that makes the mean probability `rate` (bisection: the mean grows with it)."""
    low, high = -100.0, 100.0
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if _logistic(logits + middle).mean() < rate else (low, middle)
    return (low + high) / 2


def _logistic(logits: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-logits))


_Pixels = NDArray[np.float32]

_PICTURES = 64  # pictures made at a time: what they need stays in a core's cache


def images(
    num_samples: int, *, seed: int = 0, size: int = 32, num_classes: int = 10, noise: float = 0.3
) -> Dataset:
    """Small pictures that a small network learns in seconds: (float32 [N, 3, size, size], int64 label [N]).

    Striped discs; the stripes of class k are turned by k / num_classes of half a turn. Place and size of the
    disc, phase and colours of the stripes and the noise differ from picture to picture, so a class is learnt
    and not memorised. Stripes lie between -1 and 1, `noise` is the standard deviation of what is added to each
    pixel. Another `seed` gives other pictures of the same classes.
    """
    if size < 8:
        raise ConfigError(f"size must be at least 8 pixels, or stripes cannot be told apart, got {size}")
    if num_classes < 1:
        raise ConfigError(f"num_classes must be at least 1, got {num_classes}")
    if noise < 0:
        raise ConfigError(f"noise must not be negative, got {noise}")
    return Dataset.from_function(
        lambda indices: pictures(indices, seed=seed, size=size, num_classes=num_classes, noise=noise),
        num_samples,
    )


def pictures(
    indices: Ints, *, seed: int = 0, size: int = 32, num_classes: int = 10, noise: float = 0.3
) -> tuple[torch.Tensor, torch.Tensor]:
    """(pictures, labels) of the samples at `indices`."""
    pixels = np.empty((len(indices), 3, size, size), dtype=np.float32)
    labels = np.empty(len(indices), dtype=np.int64)
    for begin in range(0, len(indices), _PICTURES):
        block = indices[begin : begin + _PICTURES]
        drawn = bits(mix(seed, 1), block) % np.uint64(num_classes)
        labels[begin : begin + _PICTURES] = drawn
        angles = (np.pi / num_classes * drawn.astype(np.int64)).astype(np.float32)
        pixels[begin : begin + _PICTURES] = _discs(seed, size, block, angles) + _noise(
            seed, size, noise, block
        )
    return torch.from_numpy(pixels), torch.from_numpy(labels)


def _discs(seed: int, size: int, indices: Ints, angles: _Pixels) -> _Pixels:
    # One line per quantity, each [N, 1, 1, 1] so that it broadcasts over colours and pixels.
    shares = uniform(bits(mix(seed, 2), indices, np.arange(8)[:, None])).astype(np.float32)
    across, down, radius, cycles, phase, *tint = shares[:, :, None, None, None]
    angle = angles[:, None, None, None]

    line = np.linspace(-1, 1, size, dtype=np.float32)
    x, y = line[None, :] - (across - 0.5), line[:, None] - (down - 0.5)
    stripes = np.sin(np.pi * (2.5 + cycles) * (np.cos(angle) * x + np.sin(angle) * y) + 2 * np.pi * phase)
    inside = x * x + y * y < (0.6 + 0.4 * radius) ** 2
    colour = 0.2 + 0.8 * np.concatenate(tint, axis=1)  # [N, 3, 1, 1]
    drawn: _Pixels = colour * (stripes * inside)
    return drawn


def _noise(seed: int, size: int, deviation: float, indices: Ints) -> _Pixels:
    """Even noise for every pixel, 16 bits of randomness each."""
    num_pixels = 3 * size * size
    random = bits(mix(seed, 3), indices[:, None], np.arange(-(-num_pixels // 4)))
    pieces = random.view(np.uint16)[:, :num_pixels].astype(np.float32)
    spread = np.float32(deviation * np.sqrt(12.0))
    even = pieces * (spread / np.float32(65535)) - spread / np.float32(2)
    return even.reshape(len(indices), 3, size, size)


ALPHABET = " abcdefghijklmnopqrstuvwxyz.,!?\n"
"""The characters, in the order of their numbers."""

_SHARPNESS = 1.8  # standard deviation of the logits: higher makes the next character surer


def text(num_sequences: int, length: int = 64, *, seed: int = 0) -> Dataset:
    """Sequences of characters from a planted rule as a dataset, made as they are read; the best loss is known.

    Batches are (int64 [N, length], int64 [N, length]): characters, and for each the one that follows it. Its
    logits are the sum of a table for the last character and a table for the one before. A sample is a window
    of an endless text: its first characters follow the text's own statistics.
    """
    if length < 1:
        raise ConfigError(f"length must be at least 1 character, got {length}")
    rule = _rule(seed)
    return Dataset.from_function(lambda indices: rule.samples(indices, length), num_sequences)


def best_loss(length: int = 64, *, seed: int = 0) -> float:
    """The cross-entropy, in nats per character, of a model that knows the rule: what training cannot pass.

    Exact: the first of the `length` targets is guessed from one character, all others from two.
    """
    rule = _rule(seed)
    return (rule.entropy_after_one + (length - 1) * rule.entropy_after_two) / length


def decode(characters: Iterable[int]) -> str:
    """Numbers as text."""
    return "".join(ALPHABET[character] for character in characters)


class MarkovRule:
    """Probabilities of the next character given the two before it, and what follows from them."""

    def __init__(self, seed: int) -> None:
        size = len(ALPHABET)
        numbers = np.arange(size)
        before, last = (
            _SHARPNESS * bell(bits(mix(seed, what), numbers[:, None], numbers)) for what in (1, 2)
        )
        weight = np.exp(before[:, None, :] + last[None, :, :])
        self.following: Floats = weight / weight.sum(axis=2, keepdims=True)
        """P(next | before, last), [before, last, next]."""

        self.pairs: Floats = _stationary(self.following)
        """Frequency of each pair (before, last) in an endless text."""

        after_one = np.einsum("ab,abc->bc", self.pairs, self.following)  # joint (last, next)
        self.entropy_after_one = _entropy(after_one) - _entropy(after_one.sum(axis=1))
        self.entropy_after_two = _entropy(self.pairs[:, :, None] * self.following) - _entropy(self.pairs)
        self._window_key = mix(seed, 3)
        # Divided by their own last entry, so that rounding never leaves a draw without a character.
        self._pair_steps = _steps(self.pairs.reshape(1, -1))[0]
        self._next_steps = _steps(self.following)

    def samples(self, indices: Ints, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        shares = uniform(bits(self._window_key, indices, np.arange(length + 1)[:, None]))
        characters = np.empty((len(indices), length + 1), dtype=np.int64)
        before, last = np.divmod(np.searchsorted(self._pair_steps, shares[0], side="right"), len(ALPHABET))
        characters[:, 0] = last
        for place in range(1, length + 1):
            passed = self._next_steps[before, last] <= shares[place][:, None]
            before, last = last, passed.sum(axis=1)
            characters[:, place] = last
        window = torch.from_numpy(characters)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


_rule = lru_cache(maxsize=8)(MarkovRule)


def _stationary(following: Floats) -> Floats:
    """The pairs' share in an endless text: what one more character leaves as it is."""
    size = len(following)
    pairs = np.full((size, size), 1.0 / size**2)
    for _ in range(1000):
        moved = np.einsum("ab,abc->bc", pairs, following)
        if np.abs(moved - pairs).max() < 1e-15:
            break
        pairs = moved
    return pairs


def _entropy(probability: Floats) -> float:
    return float(-(probability * np.log(probability)).sum())


def _steps(probability: Floats) -> Floats:
    total = probability.cumsum(axis=-1)
    steps: Floats = total / total[..., -1:]
    return steps
