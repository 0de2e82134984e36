"""A matrix product cut over the ranks: by row and column blocks of the result, or along the inner dimension.

Every rank holds both factors and computes its part of the work:

    blocks   rank (i, j) of a mesh multiplies row block i of `a` by column block j of `b`
    inner    rank k multiplies columns k of `a` by rows k of `b`; the partial products are summed
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.collectives.gather import gather_any
from shoal.collectives.p2p import part_bounds
from shoal.collectives.reducer import Reducer


def best_mesh(num_ranks: int, num_rows: int, num_columns: int) -> tuple[int, int]:
    """Ranks along rows and along columns: those for which a rank reads the least of the factors."""
    meshes = [(rows, num_ranks // rows) for rows in range(1, num_ranks + 1) if num_ranks % rows == 0]
    return min(meshes, key=lambda mesh: num_rows / mesh[0] + num_columns / mesh[1])


def block_of(rank: int, mesh: tuple[int, int], shape: tuple[int, int]) -> tuple[slice, slice]:
    """The rows and columns of the result that a rank computes; some are empty where there are more ranks than rows."""
    i, j = divmod(rank, mesh[1])
    return slice(*part_bounds(shape[0], i, mesh[0])), slice(*part_bounds(shape[1], j, mesh[1]))


def own_block(rank: int, a: Tensor, b: Tensor, mesh: tuple[int, int]) -> Tensor:
    """What this rank computes of the product."""
    rows, columns = block_of(rank, mesh, (len(a), b.shape[1]))
    return a[rows] @ b[:, columns]


def by_blocks(ranks: Reducer, a: Tensor, b: Tensor, mesh: tuple[int, int]) -> Tensor:
    """The whole product, put together from every rank's block."""
    shape = (len(a), b.shape[1])
    whole = torch.empty(shape, dtype=a.dtype)
    for rank, block in enumerate(gather_any(ranks, own_block(ranks.rank, a, b, mesh))):
        whole[block_of(rank, mesh, shape)] = block
    return whole


def by_inner(ranks: Reducer, a: Tensor, b: Tensor, operation: str) -> Tensor:
    """The whole product: the sum of every rank's partial one."""
    inner = slice(*part_bounds(len(b), ranks.rank, ranks.num_workers))
    partial = (a[:, inner] @ b[inner]).contiguous()
    ranks.finish(ranks.start_all_reduce(partial), operation)
    return partial
