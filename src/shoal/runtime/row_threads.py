"""Threads of loops over rows: a range of rows each.

For loops whose result for one row does not depend on another's, so bits do not
depend on how many threads there are. Kernels release the GIL. Threads start at
the first use, so a process forks without them, and sleep between uses: a
parameter server and its workers share the cores.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

MIN_ROWS = 2048
"""Rows of a range, at least: waking a thread takes as long as a loop over about a thousand."""

MOST = 4
"""Threads of one process: beyond it memory is the limit."""

_num_threads = 1
_pool: ThreadPoolExecutor | None = None


def use(num_threads: int) -> None:
    """Set the number of threads of this process, the calling one among them; 1 ends those there are."""
    global _num_threads  # as torch.set_num_threads: cores belong to the process
    _num_threads = max(1, min(num_threads, MOST))
    if _num_threads == 1 and _pool is not None:
        _pool.shutdown()
        _forget()


def ranges(num_rows: int) -> list[tuple[int, int]]:
    """Ranges of rows, one for each thread that pays; one range where there are few rows."""
    num_ranges = max(1, min(_num_threads, num_rows // MIN_ROWS))
    ends = [num_rows * number // num_ranges for number in range(num_ranges + 1)]
    return list(itertools.pairwise(ends))


def each(work: Callable[[int, int], Result], parts: list[tuple[int, int]]) -> list[Result]:
    """`work(begin, end)` of every range, the first one in this thread; their results in order."""
    if len(parts) == 1:
        return [work(*parts[0])]
    pool = _started()
    others = [pool.submit(work, *part) for part in parts[1:]]
    try:
        first = work(*parts[0])
    finally:
        results = [other.result() for other in others]  # nobody writes to an array after this returned
    return [first, *results]


def over(num_rows: int, work: Callable[[int, int], Result]) -> list[Result]:
    """`work(begin, end)` over all rows, in ranges."""
    return each(work, ranges(num_rows))


def _started() -> ThreadPoolExecutor:
    global _pool  # of the process, as its threads are
    if _pool is None:
        _pool = ThreadPoolExecutor(MOST - 1, "shoal-rows")
    return _pool


def _forget() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget)  # threads are not forked with their pool
