"""Orders: the sample at each position of an epoch, as a function (position, epoch) -> index of the source.

Shuffles, ranges, parts of a split, filters and repetitions, each built on the order before it. A
shuffle is computed and never stored, so any position can be read first. Nothing here reads a
sample; a filter's selection is a bitmap of two bits per position.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shoal.runtime.seeds import mix

if TYPE_CHECKING:
    from shoal.data.sources.source import Source


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: the step of splitmix64."""

_MULTIPLIERS = (GOLDEN, np.uint64(0xD6E8FEB86659FD93))
_HALF = np.uint64(32)

# Rounds are even, so that the two halves end where they began. Measured: with 6 rounds the orders of 5 or 6
# samples are visibly not uniform (chi-square 5 per degree of freedom), with 12 they are (1.1).
_NUM_ROUNDS = 6
_NUM_ROUNDS_SMALL = 12
_SMALL = 1024
_MASK = (1 << 64) - 1


class Permutation:
    """A bijection of [0, n), one for each (seed, epoch).

    A Feistel network over pairs (left, right) with left < a and right < b,
    where a·b is the smallest near-square product that holds n. An image that
    falls into the few values between n and a·b is permuted again until it is
    below n (cycle walking), which keeps the map a bijection of [0, n). Halves
    of bits instead of residues would hold up to 4n values and walk far more.
    """

    def __init__(self, num_samples: int, *, seed: int, epoch: int = 0) -> None:
        if not 1 <= num_samples <= 1 << 62:
            raise ValueError(f"a permutation needs 1 to 2^62 samples, got {num_samples}")
        self.num_samples = num_samples
        a = math.isqrt(num_samples - 1) + 1
        self._sizes = np.uint64(a), np.uint64(-(-num_samples // a))
        num_rounds = _NUM_ROUNDS_SMALL if num_samples < _SMALL else _NUM_ROUNDS
        self._round_keys: list[Any] = [np.uint64(mix(seed, epoch, number)) for number in range(num_rounds)]

    @classmethod
    def of_epochs(cls, num_samples: int, *, seed: int, epochs: NDArray[np.uint64]) -> Permutation:
        """One for each position that it is asked for, of the epoch that stands at its place: many small ones at once."""
        several = cls(num_samples, seed=seed)
        several._round_keys = [
            mix_arrays(np.uint64(seed & _MASK), epochs, np.uint64(number))
            for number in range(len(several._round_keys))
        ]
        return several

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        end = np.uint64(self.num_samples)
        images = self._permute(positions.astype(np.uint64), self._round_keys)
        outside = np.flatnonzero(images >= end)
        while outside.size:
            keys = [key[outside] if key.ndim else key for key in self._round_keys]
            images[outside] = again = self._permute(images[outside], keys)
            outside = outside[again >= end]
        return images.view(np.int64)

    def _permute(self, values: NDArray[np.uint64], round_keys: list[Any]) -> NDArray[np.uint64]:
        a, b = self._sizes
        left, right = np.divmod(values, b)
        mixed, shifted = np.empty_like(left), np.empty_like(left)
        for key in round_keys:
            # A keyed hash of `right`, 32 bits of it scaled to [0, a): no division, and no overflow as a <= 2^31.
            np.bitwise_xor(right, key, out=mixed)
            np.multiply(mixed, _MULTIPLIERS[0], out=mixed)
            np.right_shift(mixed, _HALF, out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            np.multiply(mixed, _MULTIPLIERS[1], out=mixed)
            np.right_shift(mixed, _HALF, out=mixed)
            np.multiply(mixed, a, out=mixed)
            np.right_shift(mixed, _HALF, out=mixed)
            # left = (left + mixed) mod a: where the sum is below a, subtracting a wraps to something huge.
            np.add(left, mixed, out=left)
            np.subtract(left, a, out=mixed)
            np.minimum(left, mixed, out=left)
            left, right, a, b = right, left, b, a
        np.multiply(left, b, out=left)
        return np.add(left, right, out=left)


def mix_arrays(*parts: Any) -> NDArray[np.uint64]:
    """`shoal.runtime.seeds.mix`, of arrays or single numbers of 64 bits."""
    with np.errstate(over="ignore"):
        state: Any = GOLDEN
        for part in parts:
            state = splitmix64(state + part + GOLDEN)
        mixed: NDArray[np.uint64] = np.asarray(state >> np.uint64(1))
    return mixed


def splitmix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 bits well mixed, the finalizer of splitmix64; wraps."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


_ONES = np.uint64(0x0101010101010101)
_HIGH = np.uint64(0x8080808080808080)
_BITS_OF = ((np.arange(256)[:, None] >> np.arange(8)) & 1).astype(np.uint8)

# Where the k-th set bit of each byte is.
_PLACE = np.zeros((256, 8), dtype=np.int64)
for _byte in range(256):
    _set = np.flatnonzero(_BITS_OF[_byte])
    _PLACE[_byte, : len(_set)] = _set


class Bitmap:
    """A set of positions in [0, n), with the k-th smallest of it at hand.

    One bit per position, and for every 64 of them how many are set up to there.
    """

    def __init__(self, is_kept: NDArray[np.bool_]) -> None:
        packed = np.packbits(is_kept, bitorder="little")
        padded = np.zeros(-(-len(packed) // 8) * 8, dtype=np.uint8)
        padded[: len(packed)] = packed
        self._words = padded.view("<u8").astype(np.uint64, copy=False)
        self._ends = np.cumsum((_counts_up_to(self._words) >> np.uint64(56)).astype(np.int64))
        self.num_kept = int(self._ends[-1]) if len(self._ends) else 0

    def select(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions that are the k-th of those kept, for each k in `numbers`."""
        at = np.searchsorted(self._ends, numbers, side="right")
        words = self._words[at]
        up_to = _counts_up_to(words)
        counts = up_to >> np.uint64(56)
        rest = (numbers - self._ends[at]).view(np.uint64) + counts  # among those of the word
        # Bytes whose count is not above it come before: all eight are compared in one subtraction.
        num_bytes = ((((rest * _ONES) | _HIGH) - up_to) & _HIGH) >> np.uint64(7)
        shift = (num_bytes * _ONES >> np.uint64(56)) << np.uint64(3)
        before = (up_to << np.uint64(8)) >> shift & np.uint64(0xFF)
        byte = words >> shift & np.uint64(0xFF)
        found: NDArray[np.int64] = at * 64 + shift.view(np.int64) + _PLACE[byte, rest - before]
        return found

    @property
    def digest(self) -> str:
        """Differs, but by chance, where another position is kept."""
        return f"{zlib.crc32(self._words.tobytes()):08x}"


def _counts_up_to(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Number of bits that are set in each byte and the lower ones."""
    pairs = words - (words >> np.uint64(1) & np.uint64(0x5555555555555555))
    fours = (pairs & np.uint64(0x3333333333333333)) + (pairs >> np.uint64(2) & np.uint64(0x3333333333333333))
    counts: NDArray[np.uint64] = (fours + (fours >> np.uint64(4)) & np.uint64(0x0F0F0F0F0F0F0F0F)) * _ONES
    return counts


Positions = range | NDArray[np.int64]
"""Places in an epoch: a range where they are contiguous, which lets a source read them without a gather."""

Indices = range | NDArray[np.int64] | list[Any]
"""Indices of a source; a list where a foreign sampler names its samples by something else than integers."""

ENDLESS = 1 << 62
"""Samples of an endless epoch: more than are ever read."""

_SPLIT = 0x53504C4954  # keeps split(seed=0) and shuffle(seed=0) from being one permutation


def as_array(positions: Positions) -> NDArray[np.int64]:
    if isinstance(positions, range):
        return np.arange(positions.start, positions.stop, dtype=np.int64)
    return positions


def integers(indices: Indices) -> NDArray[np.int64]:
    return np.asarray(indices, dtype=np.int64) if isinstance(indices, list) else as_array(indices)


def shifted(positions: Positions, by: int) -> Positions:
    if isinstance(positions, range):
        return range(positions.start + by, positions.stop + by)
    return positions + by


class Order(ABC):
    """The samples of a dataset in the order of an epoch."""

    name = ""
    """Name of the stage, as of the method that makes it."""

    is_computed = False
    """True where indices come out of arithmetic, which is cheaper over many positions at once."""

    seed = 0
    """The seed of the last shuffle."""

    varies = False
    """True where a position holds another sample in another epoch."""

    changes_set = False
    """True if epochs hold different samples: for example a few of a shuffled dataset."""

    length_varies = False
    """True where an epoch holds more samples than another."""

    is_endless = False
    """True where an epoch has no end."""

    is_counted = True
    """False if the number of samples is only known after reading."""

    @property
    def num_samples(self) -> int:
        """Samples in the first epoch."""
        return self.length(0)

    @abstractmethod
    def length(self, epoch: int) -> int:
        """Samples in this epoch."""

    @abstractmethod
    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The source's indices at these positions of an epoch."""

    @abstractmethod
    def describe(self) -> list[dict[str, Any]]:
        """The stages from the source on, fit for JSON."""

    def names(self) -> list[str]:
        return [self.name] if self.name else []


class InOrder(Order):
    """As the source has them."""

    def __init__(self, num_samples: int | Callable[[], int], *, parts: Sequence[Order] = ()) -> None:
        """A function where the number follows from orders inside the source (`parts`), which may have to read first."""
        self._num_samples, self._parts = num_samples, parts
        self.is_endless = num_samples == ENDLESS or (bool(parts) and all(part.is_endless for part in parts))

    @property
    def is_counted(self) -> bool:  # type: ignore[override]  # a property may stand for a plain attribute
        return all(part.is_counted for part in self._parts)

    def length(self, epoch: int) -> int:
        return self._num_samples if isinstance(self._num_samples, int) else self._num_samples()

    def indices(self, positions: Positions, epoch: int) -> Indices:
        return positions

    def describe(self) -> list[dict[str, Any]]:
        return []


class DerivedOrder(Order):
    """An order made of another one, which it resembles in all that it does not say."""

    def __init__(self, parent: Order) -> None:
        self.parent = parent
        self.seed, self.is_computed = parent.seed, parent.is_computed
        self.varies, self.changes_set = parent.varies, parent.changes_set
        self.length_varies, self.is_endless = parent.length_varies, parent.is_endless

    @property
    def is_counted(self) -> bool:  # type: ignore[override]  # a property may stand for a plain attribute
        return self.parent.is_counted

    def length(self, epoch: int) -> int:
        return self.parent.length(epoch)

    def names(self) -> list[str]:
        return [*self.parent.names(), self.name]

    def describe(self) -> list[dict[str, Any]]:
        return [*self.parent.describe(), {"stage": self.name, **self.settings()}]

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Settings by which this stage differs from another of its kind, fit for JSON."""


class Shuffled(DerivedOrder):
    """Another permutation each epoch."""

    name = "shuffle"

    def __init__(self, parent: Order, seed: int) -> None:
        super().__init__(parent)
        self.seed, self.is_computed, self.varies = seed, True, True

    def indices(self, positions: Positions, epoch: int) -> Indices:
        permutation = Permutation(self.parent.length(epoch), seed=self.seed, epoch=epoch)
        return self.parent.indices(permutation(as_array(positions)), epoch)

    def indices_of(self, positions: NDArray[np.int64], epochs: NDArray[np.uint64]) -> Indices:
        """The same, each position in an epoch of its own; for a parent that does not vary."""
        several = Permutation.of_epochs(self.parent.length(0), seed=self.seed, epochs=epochs)
        return self.parent.indices(several(positions), 0)

    def settings(self) -> dict[str, Any]:
        return {"seed": self.seed}


class SplitPart(DerivedOrder):
    """A range of a fixed permutation: one side of a split. Without a seed, a range of the parent itself."""

    name = "split"

    def __init__(self, parent: Order, *, begin: int, num_samples: int, split_seed: int | None) -> None:
        super().__init__(parent)
        self.begin, self._num_samples = begin, num_samples
        self.split_seed = split_seed
        self.is_computed = parent.is_computed or split_seed is not None
        self.changes_set = parent.changes_set or parent.varies

    def length(self, epoch: int) -> int:
        return self._num_samples

    def indices(self, positions: Positions, epoch: int) -> Indices:
        return self.parent.indices(self._within(self._moved(positions)), epoch)

    def settings(self) -> dict[str, Any]:
        return {"seed": self.split_seed, "begin": self.begin, "num_samples": self._num_samples}

    def _moved(self, positions: Positions) -> Positions:
        return shifted(positions, self.begin)

    def _within(self, moved: Positions) -> Positions:
        if self.split_seed is None:
            return moved
        # No epoch here: a sample must stay on its side of the split in every epoch.
        return Permutation(self.parent.num_samples, seed=mix(_SPLIT, self.split_seed))(as_array(moved))


class SplitRest(SplitPart):
    """The whole without one part: the training side of a fold."""

    name = "folds"

    def __init__(self, parent: Order, *, begin: int, num_left_out: int, split_seed: int | None) -> None:
        num_samples = parent.num_samples - num_left_out
        super().__init__(parent, begin=begin, num_samples=num_samples, split_seed=split_seed)
        self._num_left_out = num_left_out

    def settings(self) -> dict[str, Any]:
        return {"seed": self.split_seed, "begin": self.begin, "num_left_out": self._num_left_out}

    def _moved(self, positions: Positions) -> Positions:
        places = as_array(positions)
        return np.where(places < self.begin, places, places + self._num_left_out)


class Window(DerivedOrder):
    """A range of another order."""

    def __init__(self, parent: Order, *, begin: int = 0, num_samples: int | None = None) -> None:
        """From `begin` on; at most `num_samples`, where that is given."""
        super().__init__(parent)
        self.name = "skip" if num_samples is None else "take"
        self._begin, self._num_samples = begin, num_samples
        self.changes_set = parent.changes_set or parent.varies
        self.is_endless = parent.is_endless and num_samples is None

    def length(self, epoch: int) -> int:
        left = max(self.parent.length(epoch) - self._begin, 0)
        return left if self._num_samples is None else min(left, self._num_samples)

    def indices(self, positions: Positions, epoch: int) -> Indices:
        return self.parent.indices(shifted(positions, self._begin), epoch)

    def settings(self) -> dict[str, Any]:
        if self._num_samples is None:
            return {"num_samples": self._begin}
        return {"num_samples": self._num_samples} | ({"begin": self._begin} if self._begin else {})


class Kept(DerivedOrder):
    """Another order without some of its samples; the others stay in their order.

    The selection is computed at the first request for the length or an index. If the previous order
    varies (a shuffle), so do the kept positions, and those of the current epoch are cached beside
    those of the first.
    """

    def __init__(
        self,
        parent: Order,
        choose: Callable[[int], NDArray[np.bool_]],
        *,
        name: str,
        settings: dict[str, Any],
    ) -> None:
        """`choose` says of each position of an epoch of the parent whether it is kept."""
        super().__init__(parent)
        self.name, self._choose, self._settings = name, choose, settings
        self.is_computed = True
        self.length_varies = parent.length_varies or parent.changes_set
        self._chosen: dict[int, Bitmap] = {}

    @property
    def is_counted(self) -> bool:  # type: ignore[override]  # a property may stand for a plain attribute
        return 0 in self._chosen

    def length(self, epoch: int) -> int:
        return self.chosen(epoch if self.length_varies else 0).num_kept

    def indices(self, positions: Positions, epoch: int) -> Indices:
        return self.parent.indices(self.chosen(epoch).select(as_array(positions)), epoch)

    def chosen(self, epoch: int) -> Bitmap:
        epoch = epoch if self.parent.varies else 0
        if epoch not in self._chosen:
            bits = Bitmap(self._choose(epoch))
            self._chosen = {kept: old for kept, old in self._chosen.items() if kept == 0} | {epoch: bits}
        return self._chosen[epoch]

    def settings(self) -> dict[str, Any]:
        first = self.chosen(0)
        return {**self._settings, "num_samples": first.num_kept, "digest": first.digest}


_MANY = 8  # repetitions whose shuffles are better computed together than one by one


class Repeated(DerivedOrder):
    """Another order, k times or without end.

    Repetition r of epoch e is epoch e·k + r of what is repeated: a shuffle
    before it is another one in each repetition, and so is an augmentation.
    Each repetition has indices of its own (r·n + index), so whatever comes
    after can tell them apart.
    """

    name = "repeat"

    def __init__(self, parent: Order, *, times: int | None, source: Source) -> None:
        """A repetition takes as many indices as the source has."""
        super().__init__(parent)
        self.times, self._source = times, source
        self.is_endless = times is None

    def length(self, epoch: int) -> int:
        if self.times is None:
            return ENDLESS if self.parent.length(0) else 0
        return self.times * self.parent.length(0)

    def indices(self, positions: Positions, epoch: int) -> Indices:
        each = self.parent.length(0)
        if isinstance(positions, range):
            repetition = positions.start // each
            if positions.stop <= (repetition + 1) * each:  # all of them in one
                inside = self.parent.indices(
                    shifted(positions, -repetition * each), self._epoch(epoch, repetition)
                )
                return _moved(inside, repetition * self._source.num_samples)
        repetitions, places = np.divmod(as_array(positions), each)
        if not self.parent.varies:
            return _moved(self.parent.indices(places, epoch), repetitions * self._source.num_samples)
        many = int(repetitions.max() - repetitions.min()) >= _MANY
        if many and isinstance(self.parent, Shuffled) and not self.parent.parent.varies:
            base = np.uint64(self._epoch(epoch, 0) & _MASK)
            inside = self.parent.indices_of(places, repetitions.astype(np.uint64) + base)
            return _moved(inside, repetitions * self._source.num_samples)
        found = np.empty(len(places), dtype=np.int64)
        for repetition in np.unique(repetitions).tolist():
            of = repetitions == repetition
            inside = self.parent.indices(places[of], self._epoch(epoch, repetition))
            found[of] = _moved(inside, repetition * self._source.num_samples)
        return found

    def settings(self) -> dict[str, Any]:
        return {"times": self.times}

    def _epoch(self, epoch: int, repetition: int) -> int:
        return inner_epoch(epoch, repetition, self.times)


def inner_epoch(epoch: int, repetition: int, times: int | None) -> int:
    """The epoch of what is repeated, in one repetition of an epoch."""
    return epoch * (ENDLESS if times is None else times) + repetition


def _moved(indices: Indices, by: Any) -> Indices:
    if isinstance(indices, range) and isinstance(by, int):
        return shifted(indices, by)
    found: NDArray[np.int64] = np.asarray(indices, dtype=np.int64) + by
    return found
