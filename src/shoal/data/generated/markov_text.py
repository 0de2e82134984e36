"""Text from a planted rule, so that the best possible loss is known.

The next character depends on the two before it: its logits are the sum of a
table for the last character and a table for the one before. A sample is a
window of an endless text (its first characters follow the text's own
statistics), and everything is a function of (seed, index).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch

from shoal.data.dataset import Dataset
from shoal.data.generated.draws import Floats, Ints, bell, bits, uniform
from shoal.errors import ConfigError
from shoal.runtime.seeds import mix

ALPHABET = " abcdefghijklmnopqrstuvwxyz.,!?\n"
"""The characters, in the order of their numbers."""

_SHARPNESS = 1.8  # standard deviation of the logits: higher makes the next character surer


def text(num_sequences: int, length: int = 64, *, seed: int = 0) -> Dataset:
    """Sequences of characters as a dataset, made as they are read.

    Batches are (int64 [N, length], int64 [N, length]): characters, and for each the one that follows it.
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


@lru_cache(maxsize=8)
def _rule(seed: int) -> MarkovRule:
    return MarkovRule(seed)


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
