"""How many samples each part of a split gets, and which: by strata, by groups. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.order.permutation import Permutation
from shoal.errors import ConfigError

_ROUNDING = 1e-9  # how far fractions may miss 1: 0.7 + 0.2 + 0.1 is 0.9999999999999999


def part_sizes(num_samples: int, parts: Sequence[float]) -> list[int]:
    """Sizes of the parts, given as fractions (largest remainder) or as whole numbers of samples."""
    if not parts or any(isinstance(part, bool) or not isinstance(part, Real) for part in parts):
        raise ConfigError(
            f"split takes fractions, such as split(0.8, 0.1, 0.1), or numbers of samples, got {_list(parts)}"
        )
    if any(not part >= 0 for part in parts):
        raise ConfigError(f"split takes parts of 0 or more, got {_list(parts)}")
    if all(isinstance(part, Integral) for part in parts):
        sizes = [int(part) for part in parts]
        if sum(sizes) > num_samples:
            raise ConfigError(
                f"split({_list(parts)}) asks for {sum(sizes)} samples and the dataset has {num_samples}. Ask for fewer, "
                "or for fractions, such as split(0.8, 0.2)."
            )
        return sizes
    if any(isinstance(part, Integral) for part in parts):
        raise ConfigError(
            f"split({_list(parts)}) mixes fractions and numbers of samples; use one or the other (1.0 is everything, 1 is "
            "one sample)"
        )
    total = sum(parts)
    if total > 1 + _ROUNDING:
        raise ConfigError(
            f"split({_list(parts)}) asks for {total:g} times the dataset; the fractions may be 1 in all"
        )
    shares = [num_samples * part for part in parts]
    sizes = [math.floor(share) for share in shares]
    num_wanted = math.floor(num_samples * total + _ROUNDING * max(num_samples, 1))
    # The samples that rounding down left over go to those who lost most by it.
    by_remainder = sorted(range(len(parts)), key=lambda number: sizes[number] - shares[number])
    for number in by_remainder[: min(num_wanted, num_samples) - sum(sizes)]:
        sizes[number] += 1
    return sizes


def fold_sizes(num_samples: int, num_folds: int) -> list[int]:
    """Sizes of the folds, which differ by at most one."""
    return [num_samples * (k + 1) // num_folds - num_samples * k // num_folds for k in range(num_folds)]


def stratified(labels: NDArray[Any], sizes: Sequence[int], seed: int) -> NDArray[np.int64]:
    """The part of each sample, so that every label has its share of every part; -1 where the sizes leave some over.

    The parts are exactly as large as asked for, and of each label a part has
    its share to within two samples.
    """
    num_samples = len(labels)
    part_of = np.full(num_samples, -1, dtype=np.int64)
    if num_samples == 0:
        return part_of
    _, stratum = np.unique(labels, return_inverse=True)
    # At random within a label, and the labels in random order: who sorts first has no better chance of any part.
    label_order = Permutation(int(stratum.max()) + 1, seed=seed, epoch=1)
    keys = Permutation(num_samples, seed=seed)(np.arange(num_samples))
    left = np.lexsort((keys, label_order(stratum.astype(np.int64))))
    for number, size in enumerate(sizes):
        # Evenly spread over what is left, which is sorted by label: every stretch of it gives its share.
        before = np.arange(len(left), dtype=np.int64) * size // max(len(left), 1)
        after = np.arange(1, len(left) + 1, dtype=np.int64) * size // max(len(left), 1)
        is_taken = after > before
        part_of[left[is_taken]] = number
        left = left[~is_taken]
    return part_of


def grouped(groups: NDArray[Any], sizes: Sequence[int], seed: int) -> NDArray[np.int64]:
    """The part of each sample, so that a group is never divided; sizes are met as nearly as the groups allow.

    Groups come in random order, each to the part that lacks most.
    """
    names, group_of, counts = np.unique(groups, return_inverse=True, return_counts=True)
    part_of_group = np.full(len(names), -1, dtype=np.int64)
    lacking = np.append(np.array(sizes, dtype=np.int64), len(groups) - sum(sizes))  # the last is nobody's
    if len(names):
        for group in Permutation(len(names), seed=seed)(np.arange(len(names))).tolist():
            part = int(np.argmax(lacking))
            lacking[part] -= counts[group]
            part_of_group[group] = part if part < len(sizes) else -1
    return part_of_group[group_of]


def _list(parts: Sequence[object]) -> str:
    return ", ".join(repr(part) for part in parts) or "nothing"
