"""Private random generators for user code: its draws become a function of (seed, epoch, position).

A user's dataset, transform or sampler draws from the global generators of torch, numpy and Python.
Otherwise its draws would depend on everything drawn before, and a killed and resumed run would see
other data. Here those generators are swapped for private ones while foreign code runs. Shuffling is
not concerned: it needs no generator.
"""

from __future__ import annotations

import functools
import os
import random
import threading
from types import TracebackType
from typing import Any

import numpy as np
import torch

from shoal.runtime.seeds import mix

_exchanging = threading.RLock()
"""The global generators are one set per process: a thread that has swapped them excludes others."""


def _reset_after_fork() -> None:
    global _exchanging
    _exchanging = threading.RLock()


os.register_at_fork(after_in_child=_reset_after_fork)  # the thread that held it does not exist in the child

EXCHANGE_TIMEOUT_S = 1.0
"""Time-out of the swap. Code that holds the generators may itself wait for another thread, which then goes without."""


class _Entered(threading.local):
    """Locks held by the `with` statements of this thread; None where one went without."""

    def __init__(self) -> None:
        self.locks: list[threading.RLock | None] = []


_entered = _Entered()


class ReadAhead(threading.Thread):
    """A thread that runs a pipeline ahead of its consumer.

    The global generators belong to the consumer, who may be in the middle of
    a dropout: in such a thread they are left alone.
    """


class PrivateGenerators:
    """While entered, the global generators are private ones; outside, they are as they were.

    Entered again, it goes on where it left. The one thing of the outer state
    that does not survive is a second Gaussian that `np.random.randn` had in
    store: saving numpy's whole state takes 95 µs, exchanging its generator 1.
    """

    def __init__(self, seed: int) -> None:
        self.drew = False
        """Set once foreign code has been seen to draw from these generators."""
        self._seed = seed
        self._own: tuple[Any, torch.Tensor, np.random.BitGenerator] | None = None

    def __enter__(self) -> PrivateGenerators:
        if _is_in_read_ahead():
            return self
        if _entered.locks and _entered.locks[-1] is None:
            _entered.locks.append(None)
            return self
        lock = _exchanging
        is_ours = lock.acquire(timeout=EXCHANGE_TIMEOUT_S)
        _entered.locks.append(lock if is_ours else None)
        if not is_ours:
            return self
        self._outer = (
            random.getstate(),
            torch.default_generator.get_state(),
            np.random.mtrand.get_bit_generator(),
        )
        if self._own is None:
            np.random.mtrand.set_bit_generator(np.random.MT19937(0))
            self.reseed(self._seed)
        else:
            _install(self._own)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _is_in_read_ahead():
            return
        lock = _entered.locks.pop()
        if lock is None:
            return
        if _watch is not None and error is None:
            self.drew = self.drew or self.were_used()
            _watch.drew |= self.drew
        self._own = (
            random.getstate(),
            torch.default_generator.get_state(),
            np.random.mtrand.get_bit_generator(),
        )
        _install(self._outer)
        lock.release()

    def reseed(self, seed: int) -> None:
        """Start all three anew. Only while entered."""
        if _is_left_alone():
            return
        self._seed = seed
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)

    def were_used(self) -> bool:
        """True where anything was drawn since they were seeded. Only while entered."""
        if _is_left_alone():
            return False
        number = torch.empty((), dtype=torch.int64, device="cpu").random_().item()
        if (random.random(), np.random.random_sample(), number) != _first_numbers(self._seed):
            return True
        self.reseed(self._seed)  # the check itself has drawn from them; as nothing else did, this undoes it
        return False


def own_the_generators() -> None:
    """Declare that this process only reads, so that nothing else in it uses the generators."""
    global _only_reads
    _only_reads = True


_only_reads = False


def _is_in_read_ahead() -> bool:
    return isinstance(threading.current_thread(), ReadAhead) and not _only_reads


def _is_left_alone() -> bool:
    """True where the generators are not swapped: in a read-ahead thread, or after a time-out."""
    return _is_in_read_ahead() or bool(_entered.locks and _entered.locks[-1] is None)


def _install(state: tuple[Any, torch.Tensor, np.random.BitGenerator]) -> None:
    random.setstate(state[0])
    torch.default_generator.set_state(state[1])
    np.random.mtrand.set_bit_generator(state[2])


@functools.lru_cache(maxsize=8)
def _first_numbers(seed: int) -> tuple[float, float, float]:
    generator = torch.Generator().manual_seed(seed)
    number = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item()
    return random.Random(seed).random(), np.random.RandomState(seed & 0xFFFFFFFF).random_sample(), number


class DrawsWatch:
    """Sees whether any foreign code draws random numbers while it is entered."""

    drew = False

    def __enter__(self) -> DrawsWatch:
        global _watch
        _watch = self
        return self

    def __exit__(self, *_: object) -> None:
        global _watch
        _watch = None


_watch: DrawsWatch | None = None


def seeded_generator(*parts: int) -> torch.Generator:
    return torch.Generator().manual_seed(mix(*parts))
