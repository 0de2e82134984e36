"""The Reducer protocol, and gathers over any reducer: tensors of different shapes, sums in rank order."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
from torch import Tensor


class Reducer(Protocol):
    """The collectives of one view's group.

    Everything is started in the same order on every rank. The order in which
    a sum is added is a function of rank and place alone, never of who came
    first. Every failure is a PeerLost.
    """

    rank: int
    num_workers: int

    def start_all_reduce(self, tensor: Tensor) -> Any:
        """Start summing `tensor` over the ranks, in place; do not touch it before `finish`."""

    def finish(self, work: Any, operation: str) -> None:
        """Wait for a started all-reduce; `operation` names it in the PeerLost where it breaks."""

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's values to every rank, in place."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor; all of one shape and dtype."""

    def close(self) -> None:
        """End background work; the view is over."""

    def during(self, operation: str) -> contextlib.AbstractContextManager[None]:
        """Raise whatever breaks inside as a PeerLost that names the operation."""


_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128,
)  # fmt: skip
_MAX_DIMS = 8


def gather_any(group: Reducer, value: Tensor | None) -> list[Tensor]:
    """Every rank's tensor, in rank order. Shapes may differ; a rank without one contributes an empty tensor."""
    # In host memory, whatever device the others compute on: a rank without a tensor does not know it.
    headers = [header.tolist() for header in group.all_gather(_header(value))]
    num_bytes = [_num_bytes(header) for header in headers]
    longest = max(num_bytes)
    mine = torch.zeros(longest, dtype=torch.uint8)
    if value is not None and value.numel():
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        mine[: flat.numel()] = flat
    parts = group.all_gather(mine) if longest else [mine] * len(headers)
    known = next((header for header in headers if header[0]), None)
    device = value.device if value is not None else torch.device("cpu")
    return [
        _decode(header, part[:size], known).to(device)
        for header, part, size in zip(headers, parts, num_bytes, strict=True)
    ]


def sum_in_rank_order(group: Reducer, values: Tensor) -> Tensor:
    """The sum over the ranks, added in rank order: the same bits everywhere, at any time."""
    parts = group.all_gather(values.detach().contiguous())
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _header(value: Tensor | None) -> Tensor:
    header = torch.zeros(3 + _MAX_DIMS, dtype=torch.int64)
    if value is not None:
        header[0], header[1], header[2] = 1, _DTYPES.index(value.dtype), value.dim()
        header[3 : 3 + value.dim()] = torch.tensor(value.shape, dtype=torch.int64)
    return header


def _shape(header: list[int]) -> list[int]:
    return header[3 : 3 + header[2]]


def _num_bytes(header: list[int]) -> int:
    if not header[0]:
        return 0
    count = 1
    for size in _shape(header):
        count *= size
    return count * _DTYPES[header[1]].itemsize


def _decode(header: list[int], raw: Tensor, known: list[int] | None) -> Tensor:
    if header[0]:
        return raw.clone().view(_DTYPES[header[1]]).reshape(_shape(header))
    if known is None:
        return torch.empty(0)
    shape = _shape(known)
    return torch.empty([0, *shape[1:]], dtype=_DTYPES[known[1]])
