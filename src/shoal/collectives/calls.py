"""Collective calls for scripts: the same call on every rank, the same result at any number of workers.

    total = shoal.collectives.all_reduce(gradient, timeout_s=30)

In a plain process each returns its argument. A rank that dies on its way is replaced, and catches
up: its script runs from the top, and finished calls return their logged results. Two ranks that
make different calls, or with different shapes, get an error; with `timeout_s` a missing rank is
named together with the operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from shoal.collectives import _run_over_deaths, operations
from shoal.collectives.operations import described
from shoal.collectives.reducer import Reducer, gather_any
from shoal.collectives.schemes import part_bounds
from shoal.config import job as jobs
from shoal.errors import ConfigError

T = TypeVar("T")

_numbers = itertools.count(1)


def all_reduce(tensor: Tensor, op: str = "sum", *, timeout_s: float | None = None) -> Tensor:
    """The `op` ("sum", "mean", "max" or "min") of every rank's tensor, the same bits on every rank."""
    _check(tensor, "all_reduce", op)
    call = f"all_reduce({described(tensor)}, op={op})"
    result = collectively(
        call, lambda ranks: operations.all_reduce(ranks, _sent(tensor), op, call), timeout_s
    )
    return result.to(tensor.device, copy=True)  # the kept result must not change


def reduce_scatter(tensor: Tensor, op: str = "sum", *, timeout_s: float | None = None) -> Tensor:
    """This rank's part, along the first dimension, of what `all_reduce` gives; parts differ by one row at most."""
    _check(tensor, "reduce_scatter", op)
    if tensor.dim() == 0:
        raise ConfigError(
            "reduce_scatter cuts along the first dimension, and was given a tensor without one. Nothing was sent; "
            "use all_reduce for a single value."
        )
    call = f"reduce_scatter({described(tensor)}, op={op})"
    result = collectively(
        call, lambda ranks: operations.all_reduce(ranks, _sent(tensor), op, call), timeout_s
    )
    begin, end = part_bounds(len(tensor), jobs.rank(), jobs.num_workers())
    return result[begin:end].to(tensor.device, copy=True)


def all_gather(tensor: Tensor, *, timeout_s: float | None = None) -> list[Tensor]:
    """Every rank's tensor, in rank order. Shapes may differ, dtypes may not."""
    _check(tensor, "all_gather")
    call = f"all_gather({str(tensor.dtype).removeprefix('torch.')})"
    parts = collectively(call, lambda ranks: gather_any(ranks, _sent(tensor)), timeout_s)
    return [part.to(tensor.device, copy=True) for part in parts]


def broadcast(tensor: Tensor, root: int = 0, *, timeout_s: float | None = None) -> Tensor:
    """The tensor of rank `root`; the others give one of its shape and dtype, to say what they expect."""
    _check(tensor, "broadcast")
    if not 0 <= root < jobs.num_workers():
        raise ConfigError(
            f"broadcast was asked for the tensor of rank {root}, and there are {jobs.num_workers()} workers, counted from 0. "
            "Nothing was sent."
        )
    call = f"broadcast({described(tensor)}, root={root})"
    given = collectively(
        call, lambda ranks: operations.broadcast(ranks, _sent(tensor), root, call), timeout_s
    )
    return given.to(tensor.device, copy=True)


def barrier(*, timeout_s: float | None = None) -> None:
    """Return once every rank is here."""
    collectively("barrier()", lambda ranks: torch.empty(0), timeout_s)


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    cut: str = "blocks",
    mesh: tuple[int, int] | None = None,
    gather: bool = True,
    timeout_s: float | None = None,
) -> Tensor:
    """`a @ b`, each rank computing a part; both are given whole on every rank.

    `cut="blocks"`: row blocks by column blocks over `mesh` (ranks along rows, along columns; chosen
    if not given). `cut="inner"`: partial products along the inner dimension, summed. With
    `gather=False` the result stays sharded: a rank gets its block, or for "inner" its rows.
    """
    _check(a, "matmul")
    _check(b, "matmul")
    num_workers = jobs.num_workers()
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        raise ConfigError(
            f"matmul multiplies two matrices of one dtype, [m, k] by [k, n], and was given {described(a)} and "
            f"{described(b)}. Nothing was sent."
        )
    if cut not in ("blocks", "inner"):
        raise ConfigError(f"matmul cuts by blocks or inner, and was asked for '{cut}'. Nothing was sent.")
    grid = mesh or operations.matmul_mesh(num_workers, len(a), b.shape[1])
    if grid[0] * grid[1] != num_workers or min(grid) < 1:
        raise ConfigError(
            f"matmul was given a mesh of {grid[0]} x {grid[1]}, and there are {num_workers} workers. Nothing was sent; "
            "leave mesh out to have one found."
        )
    call = f"matmul({described(a)}, {described(b)}, cut={cut}, mesh={grid}, gather={gather})"
    left, right = _sent(a), _sent(b)
    if cut == "inner":
        product = collectively(
            call, lambda ranks: operations.matmul_by_inner(ranks, left, right, call), timeout_s
        )
        begin, end = part_bounds(len(a), jobs.rank(), num_workers)
        return (product if gather else product[begin:end]).to(a.device, copy=True)
    if not gather:
        collectively(call, lambda ranks: torch.empty(0), timeout_s)
        return operations.matmul_own_block(jobs.rank(), a.detach(), b.detach(), grid)
    product = collectively(
        call, lambda ranks: operations.matmul_by_blocks(ranks, left, right, grid), timeout_s
    )
    return product.to(a.device, copy=True)


def collectively(call: str, run: Callable[[Reducer], T], timeout_s: float | None = None) -> T:
    """Run an operation over all ranks, once they agree on it; its result must be equal on every rank."""
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(f"{call} was given timeout_s={timeout_s}: it must be above 0 s. Nothing was sent.")
    number = next(_numbers)

    def alike(ranks: Reducer) -> T:
        operations.refuse_different(ranks, call, number)
        return run(ranks)

    return _run_over_deaths(call, number, alike, timeout_s)


def _check(tensor: Tensor, what: str, op: str | None = None) -> None:
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"{what} takes a tensor, and was given a {type(tensor).__name__}. Nothing was sent."
        )
    if tensor.layout is not torch.strided:
        raise ConfigError(
            f"{what} takes dense tensors, and was given a {tensor.layout} one. Nothing was sent."
        )
    if op is None:
        return
    if op not in operations.COMBINE:
        known = ", ".join(operations.COMBINE)
        raise ConfigError(f"{what} knows {known}, and was asked for '{op}'. Nothing was sent.")
    if op == "mean" and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        raise ConfigError(
            f"{what} was asked for the mean of {tensor.dtype} values. Nothing was sent; cast them first."
        )
    if op in ("sum", "mean") and tensor.dtype is torch.bool:
        raise ConfigError(
            f"{what} was asked for the sum of booleans. Nothing was sent; cast them, or ask for the max."
        )


def _sent(tensor: Tensor) -> Tensor:
    # Kept for a replacement, so in host memory; a CPU-only group could not send another.
    return tensor.detach().cpu()
