"""Ranks as threads of this process, for what does not depend on how bytes travel.

    with_ranks(3, lambda group: gather_any(group, mine(group.rank)))   # every rank's result, in rank order

Real processes over gloo run the same functions in tests/processes/test_collectives.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Lockstep:
    """The collectives of one rank; all ranks of a `_Meeting` must make the same calls."""

    def __init__(self, meeting: _Meeting, rank: int, num_workers: int) -> None:
        self._meeting, self.rank, self.num_workers = meeting, rank, num_workers

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        assert tensor.is_contiguous()
        parts = self._meeting.exchange(self.rank, tensor)
        assert len({(part.shape, part.dtype) for part in parts}) == 1, "ranks gather different shapes"
        return [part.clone() for part in parts]

    def start_all_reduce(self, tensor: Tensor) -> Any:
        parts = self._meeting.exchange(self.rank, tensor.clone())
        tensor.copy_(torch.stack(parts).sum(0))
        return None

    def finish(self, work: Any, operation: str) -> None:
        pass


class _Meeting:
    def __init__(self, num_workers: int) -> None:
        self._barrier = threading.Barrier(num_workers)
        self._brought: list[Any] = [None] * num_workers

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self._brought[rank] = tensor
        self._barrier.wait(10.0)
        parts = list(self._brought)
        self._barrier.wait(10.0)
        return parts

    def leave(self) -> None:
        self._barrier.abort()


def with_ranks(num_workers: int, run: Callable[[Any], T]) -> list[T]:
    """`run` on every rank at once; raises what a rank raised first."""
    meeting = _Meeting(num_workers)
    results: list[Any] = [None] * num_workers
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = run(Lockstep(meeting, rank, num_workers))
        except threading.BrokenBarrierError:
            pass  # another rank failed
        except BaseException as error:
            failures.append(error)
            meeting.leave()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
