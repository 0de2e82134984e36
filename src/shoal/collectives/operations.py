"""The collectives that a script may call, over any Reducer; and a matrix product divided over the ranks.

Every result is equal on all ranks, bit by bit, so that it can be given to a replaced worker; the
caller takes a rank's own part.

For a product every rank holds both factors and computes its part of the work:

    blocks   rank (i, j) of a mesh multiplies row block i of `a` by column block j of `b`
    inner    rank k multiplies columns k of `a` by rows k of `b`; the partial products are summed
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import torch
from torch import Tensor

from shoal.collectives.reducer import Reducer, gather_any
from shoal.collectives.schemes import part_bounds
from shoal.errors import CallsDiffer

HEADER_BYTES = 192  # length of a call's description: longer shapes are compared by their beginning

_CHECK_BYTES = 4

_SUMMED_IN_PLACE = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64}

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""Combination of two ranks' values; a mean is divided at the end."""


def described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def refuse_different(reducer: Reducer, call: str, number: int) -> None:
    """Compare the calls of all ranks; CallsDiffer on every rank where one makes another call."""
    mine = call.encode()[: HEADER_BYTES - _CHECK_BYTES]
    header = crc32(mine).to_bytes(_CHECK_BYTES, "little") + mine
    headers = torch.zeros(reducer.num_workers, HEADER_BYTES, dtype=torch.uint8)
    headers[reducer.rank, : len(header)] = torch.tensor(list(header), dtype=torch.uint8)
    reducer.finish(reducer.start_all_reduce(headers), call)
    calls = [_call_of(bytes(row.tolist())) for row in headers]
    calls[reducer.rank] = f"called {mine.decode(errors='replace')}"
    if any(said != calls[reducer.rank] for said in calls):
        raise CallsDiffer(number=number, calls=dict(enumerate(calls)))


def _call_of(row: bytes) -> str:
    """Call that a rank described; a rank in another exchange has sent other bytes, and may have spoilt
    others' descriptions.
    """
    said = row[_CHECK_BYTES:].rstrip(b"\0")
    if not said or crc32(said) != int.from_bytes(row[:_CHECK_BYTES], "little"):
        return "is at another place (a step of training, or another call)"
    return f"called {said.decode(errors='replace')}"


def all_reduce(reducer: Reducer, tensor: Tensor, op: str, operation: str) -> Tensor:
    if op in ("sum", "mean") and tensor.dtype in _SUMMED_IN_PLACE:
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        reducer.finish(reducer.start_all_reduce(total), operation)
    else:
        parts = gather_any(reducer, tensor)
        total = parts[0]
        for part in parts[1:]:
            total = COMBINE[op](total, part)
    return total / reducer.num_workers if op == "mean" else total


def broadcast(reducer: Reducer, tensor: Tensor, root: int, operation: str) -> Tensor:
    """Value of rank `root`: the others add zeros, byte by byte."""
    given = tensor.detach().clone(memory_format=torch.contiguous_format)
    flat = given.reshape(-1).view(torch.uint8)
    if reducer.rank != root:
        flat.zero_()
    reducer.finish(reducer.start_all_reduce(flat), operation)
    return given


def matmul_mesh(num_ranks: int, num_rows: int, num_columns: int) -> tuple[int, int]:
    """Ranks along rows and along columns: the mesh for which a rank reads the least of the factors."""
    meshes = [(rows, num_ranks // rows) for rows in range(1, num_ranks + 1) if num_ranks % rows == 0]
    return min(meshes, key=lambda mesh: num_rows / mesh[0] + num_columns / mesh[1])


def block_of(rank: int, mesh: tuple[int, int], shape: tuple[int, int]) -> tuple[slice, slice]:
    """The rows and columns of the result that a rank computes; some are empty where there are more ranks than rows."""
    i, j = divmod(rank, mesh[1])
    return slice(*part_bounds(shape[0], i, mesh[0])), slice(*part_bounds(shape[1], j, mesh[1]))


def matmul_own_block(rank: int, a: Tensor, b: Tensor, mesh: tuple[int, int]) -> Tensor:
    rows, columns = block_of(rank, mesh, (len(a), b.shape[1]))
    return a[rows] @ b[:, columns]


def matmul_by_blocks(ranks: Reducer, a: Tensor, b: Tensor, mesh: tuple[int, int]) -> Tensor:
    """The whole product, put together from every rank's block."""
    shape = (len(a), b.shape[1])
    whole = torch.empty(shape, dtype=a.dtype)
    for rank, block in enumerate(gather_any(ranks, matmul_own_block(ranks.rank, a, b, mesh))):
        whole[block_of(rank, mesh, shape)] = block
    return whole


def matmul_by_inner(ranks: Reducer, a: Tensor, b: Tensor, operation: str) -> Tensor:
    """The whole product: the sum of every rank's partial one."""
    inner = slice(*part_bounds(len(b), ranks.rank, ranks.num_workers))
    partial = (a[:, inner] @ b[inner]).contiguous()
    ranks.finish(ranks.start_all_reduce(partial), operation)
    return partial
