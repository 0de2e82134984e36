"""Workers that are asked to leave in the midst of a round meet at one step, or finish the round; never some of each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.parallel.local_sgd import agree


class Board:
    """A store in one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.values[key].encode() for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            return self.values.setdefault(key, desired).encode()


def says(board: Board, rank: int, num_steps: int, *, of: int, gives_up: bool = False) -> int:
    return agree(
        board,
        where="leaving",
        rank=rank,
        num_workers=of,
        num_steps=num_steps,
        last_step=100,
        is_over=lambda waited_s: gives_up,
    )


@pytest.mark.parametrize("steps", [(7, 7, 7), (3, 9, 5, 4), (100, 2, 1)])
def test_all_meet_where_the_furthest_stands(steps: tuple[int, ...]) -> None:
    board = Board()
    with ThreadPoolExecutor(len(steps)) as pool:
        found = pool.map(lambda rank: says(board, rank, steps[rank], of=len(steps)), range(len(steps)))
        assert list(found) == [max(steps)] * len(steps)


def test_where_one_has_given_up_waiting_for_another_all_finish_the_round() -> None:
    board = Board()
    assert says(board, 0, 4, of=3, gives_up=True) == 100
    assert says(board, 1, 5, of=3) == 100
    assert says(board, 2, 6, of=3, gives_up=True) == 100  # the last one, though all have spoken now
