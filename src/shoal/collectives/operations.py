"""The collectives that a script may call, over any Reducer.

Every result is the same on all ranks, bit by bit: what is a rank's own part
of it is cut out by the caller. So a replaced worker can be given it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.collectives.gather import gather_any
from shoal.collectives.reducer import Reducer
from shoal.core.errors import CallsDiffer

HEADER_BYTES = 192
"""What a rank says of its call: longer shapes are compared by their beginning."""

_SUMMED_IN_PLACE = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64}

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""What becomes of two ranks' values; a mean is divided at the end."""


def described(tensor: Tensor) -> str:
    """Dtype and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def refuse_different(reducer: Reducer, call: str, number: int) -> None:
    """Compare what every rank is about to do; everybody hears who does something else."""
    mine = torch.tensor(list(call.encode()[:HEADER_BYTES]), dtype=torch.uint8)
    headers = torch.zeros(reducer.num_workers, HEADER_BYTES, dtype=torch.uint8)
    headers[reducer.rank, : len(mine)] = mine
    reducer.finish(reducer.start_all_reduce(headers), call)
    calls = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in headers]
    if len(set(calls)) > 1:
        raise CallsDiffer(number=number, calls={rank: f"called {what}" for rank, what in enumerate(calls)})


def all_reduce(reducer: Reducer, tensor: Tensor, op: str, operation: str) -> Tensor:
    """The ranks' values, combined."""
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
    """The value of rank `root`: the others add zeros, byte by byte."""
    given = tensor.detach().clone(memory_format=torch.contiguous_format)
    flat = given.reshape(-1).view(torch.uint8)
    if reducer.rank != root:
        flat.zero_()
    reducer.finish(reducer.start_all_reduce(flat), operation)
    return given
