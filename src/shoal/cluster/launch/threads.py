"""Threads of a worker: its share of the cores, never more.

Computes the number and sets it in torch and the BLAS libraries. The fork server loaded them all
with one thread, so a worker uses its cores only through this.

MKL chooses the code of its vector functions at their first call in a process. If two threads make
that call together, one may get less exact code for it: on an Intel server with two threads, 25 of
3829 fresh processes computed half of their first sqrt, exp, log or tanh with errors of 1e-4, and
so, in 2 of 222 jobs, one rank's first step of Adam differed from the other's. After a call in one
thread it was 0 of 3994. So the fork server makes the first calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Mapping
from pathlib import Path

from shoal import system

_VECTOR_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "exp", "expm1", "log", "log10", "log1p", "log2"),
    *("sin", "sinh", "sqrt", "tan", "tanh"),
)
"""Functions that torch takes from MKL, where it is built with it, and some more."""


def available_cores() -> int:
    """Cores this process may use: its affinity, or the control group's quota where that is less."""
    cores = len(system.cores())
    with contextlib.suppress(OSError, ValueError):
        quota_us, period_us = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota_us != "max":
            cores = min(cores, math.ceil(int(quota_us) / int(period_us)))
    return max(1, cores)


def threads_per_worker(num_workers: int, *, cores: int, env: Mapping[str, str], num_servers: int = 0) -> int:
    """A worker's share of the cores, or fewer where OMP_NUM_THREADS asks for fewer.

    A server takes half a core (measured: 40 to 60 % busy). Threads beyond the
    cores cost more than they bring: 8 workers and 4 servers on 16 cores made
    564 k samples/s with two threads each, and 723 k with one.
    """
    share = max(1, (cores - num_servers // 2) // num_workers)
    asked = env.get("OMP_NUM_THREADS", "")
    return min(share, int(asked)) if asked.isdecimal() and int(asked) > 0 else share


def choose_vector_code() -> None:
    """Make the first call of every vector function, in this thread alone; children inherit MKL's choice."""
    import torch

    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in _VECTOR_FUNCTIONS:
            getattr(torch, name)(one)


def use(num_threads: int) -> None:
    """Set the number of threads of torch, OpenMP and numpy's BLAS in this process and those it starts."""
    import torch

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(num_threads)
    torch.set_num_threads(num_threads)
    _set_openblas_threads(num_threads)


def _set_openblas_threads(num_threads: int) -> None:
    """Set OpenBLAS's threads by its own function: it read its environment when numpy loaded it."""
    import numpy

    # The wheel brings its own copy beside the package. Another BLAS (MKL, a distribution's) is not changed.
    libraries = Path(numpy.__file__).parent.parent / "numpy.libs"
    for path in libraries.glob("libscipy_openblas*.so"):
        library = ctypes.CDLL(os.fspath(path))
        for name in ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(num_threads)
