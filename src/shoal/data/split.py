"""How many samples each part of a split gets. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from shoal.core.errors import ConfigError

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


def _list(parts: Sequence[object]) -> str:
    return ", ".join(repr(part) for part in parts) or "nothing"
