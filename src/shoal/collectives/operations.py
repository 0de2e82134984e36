"""The collectives that a script may call, over any Reducer.

Every result is the same on all ranks, bit by bit: what is a rank's own part
of it is cut out by the caller. So a replaced worker can be given it.
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import torch
from torch import Tensor

from shoal.collectives.gather import gather_any
from shoal.collectives.reducer import Reducer
from shoal.errors import CallsDiffer

HEADER_BYTES = 192
"""What a rank says of its call: longer shapes are compared by their beginning."""

_CHECK_BYTES = 4

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
    mine = call.encode()[: HEADER_BYTES - _CHECK_BYTES]
    header = crc32(mine).to_bytes(_CHECK_BYTES, "little") + mine
    headers = torch.zeros(reducer.num_workers, HEADER_BYTES, dtype=torch.uint8)
    headers[reducer.rank, : len(header)] = torch.tensor(list(header), dtype=torch.uint8)
    reducer.finish(reducer.start_all_reduce(headers), call)
    calls = [_heard(bytes(row.tolist())) for row in headers]
    calls[reducer.rank] = f"called {mine.decode(errors='replace')}"
    if any(said != calls[reducer.rank] for said in calls):
        raise CallsDiffer(number=number, calls=dict(enumerate(calls)))


def _heard(row: bytes) -> str:
    """What a rank said; one that is in another exchange has sent something else, and may have spoilt others' words."""
    said = row[_CHECK_BYTES:].rstrip(b"\0")
    if not said or crc32(said) != int.from_bytes(row[:_CHECK_BYTES], "little"):
        return "is at another place (a step of training, or another call)"
    return f"called {said.decode(errors='replace')}"


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
