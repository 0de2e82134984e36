"""Click logs in the shape of Criteo's, with the answer planted: the best possible AUC is known.

A sample is 13 numeric values, 26 ids and a label. Columns differ in size as
Criteo's do (from 3 rows to a tenth of all), ids follow Zipf's law within their
column, and the label is a coin that falls with a probability computed from the
sample. Everything is a function of (seed, index); nothing is stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from shoal.data.dataset import Dataset
from shoal.data.generated.draws import Floats, Ints, bell, bits, uniform
from shoal.errors import ConfigError
from shoal.runtime.seeds import mix

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickConfig:
    """Parameters of a click log. Two logs of equal configuration are equal in every part."""

    seed: int = 0
    """Another seed is another world: other samples, and other weights behind the labels."""

    num_ids: int = 1_000_000
    """Rows over all 26 columns: ids are 0..num_ids-1, each column has a range of its own, one table holds them all."""

    zipf: float = 1.05
    """An id of popularity rank k is seen about k**-zipf as often as the first of its column; 0 is uniform."""

    def __post_init__(self) -> None:
        if self.num_ids < 3 * NUM_COLUMNS:
            raise ConfigError(
                f"num_ids must be at least {3 * NUM_COLUMNS}, three per column, got {self.num_ids}"
            )
        if self.zipf < 0:
            raise ConfigError(f"zipf must not be negative, got {self.zipf}")


def clicks(num_samples: int, *, seed: int = 0, num_ids: int = 1_000_000, zipf: float = 1.05) -> Dataset:
    """A click log as a dataset, made as it is read.

    Batches are ({"dense": float32 [N, 13], "ids": int64 [N, 26]}, label float32 [N]). Ids are rows of one
    table of `num_ids`; see `ClickConfig` for the arguments. `dense` is heavy-tailed like a count: take log1p.
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

    def __init__(self, config: ClickConfig) -> None:
        self.config = config
        self.sizes = column_sizes(config.num_ids)
        self._ids = _ZipfColumns(self.sizes, config.zipf, key=mix(config.seed, 1))
        self._numeric_key, self._weight_key, self._coin_key = (mix(config.seed, what) for what in (2, 3, 4))
        # Most ids of a large column are seen once or never: what they weigh cannot be learnt, so let it be little.
        self._column_scale = self.sizes[:, None] ** -_DAMPING
        self._numeric_weights = bell(bits(mix(config.seed, 5), np.arange(NUM_DENSE)))
        # The samples to calibrate on lie before the log's first, so that no sample is its own yardstick.
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
        # Popular ids would be neighbours: steps of a golden section spread them, and meet every row once.
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


@lru_cache(maxsize=8)
def _log(seed: int, num_ids: int, zipf: float) -> ClickLog:
    return ClickLog(ClickConfig(seed=seed, num_ids=num_ids, zipf=zipf))


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
