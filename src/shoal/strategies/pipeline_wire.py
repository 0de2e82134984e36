"""Values between the stages of a pipeline: tensors with a header of fixed size before them, never pickles."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.core.errors import TrainingError

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_HEADER_NUMBERS = 64

Value = Tensor | tuple[Tensor, ...]
"""What one layer hands to the next."""


def tensors_of(value: object, layer: str) -> tuple[Tensor, ...]:
    """The tensors of a value; refuses one that is made of anything else."""
    parts = value if isinstance(value, tuple) else (value,)
    for part in parts:
        if not isinstance(part, Tensor) or part.dtype not in _DTYPES:
            what = f"a tensor of {part.dtype}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise TrainingError(
                f"the layer '{layer}', the last of a stage, gives {what}, and stages hand on tensors or tuples of them. "
                "Nothing was trained; cut the model elsewhere with pipeline_cut=, or let the layer give tensors."
            )
    if sum(2 + part.dim() for part in parts) > _HEADER_NUMBERS - 2:
        raise TrainingError(
            f"the layer '{layer}', the last of a stage, gives {len(parts)} tensors, more than a stage can hand on. Nothing was "
            "trained; cut the model elsewhere with pipeline_cut=."
        )
    return parts


def header(value: Value, device: torch.device) -> Tensor:
    """Numbers from which `blank` makes room for the value."""
    parts = value if isinstance(value, tuple) else (value,)
    numbers = [int(isinstance(value, tuple)), len(parts)]
    for part in parts:
        numbers += [_DTYPES.index(part.dtype), part.dim(), *part.shape]
    return torch.tensor(numbers + [0] * (_HEADER_NUMBERS - len(numbers)), device=device)


def blank(told: Tensor, device: torch.device) -> Value:
    """Room for the value that a header tells of."""
    is_tuple, num_parts, *numbers = told.tolist()
    parts = []
    for _ in range(num_parts):
        dtype, num_dims, *numbers = numbers
        parts.append(torch.empty(numbers[:num_dims], dtype=_DTYPES[dtype], device=device))
        numbers = numbers[num_dims:]
    return tuple(parts) if is_tuple else parts[0]


def send(
    value: Value, to: int, group: dist.ProcessGroup, device: torch.device
) -> list[tuple[dist.Work, Tensor]]:
    """Start sending; what comes back is to be waited for, and holds what is sent until then."""
    parts = value if isinstance(value, tuple) else (value,)
    under_way = []
    for tensor in [header(value, device), *(part.detach().contiguous() for part in parts)]:
        work = dist.isend(tensor, to, group=group)
        assert work is not None
        under_way.append((work, tensor))
    return under_way


def receive(source: int, group: dist.ProcessGroup, device: torch.device) -> Value:
    """The next value from a stage."""
    told = torch.zeros(_HEADER_NUMBERS, dtype=torch.int64, device=device)
    dist.recv(told, source, group=group)
    value = blank(told, device)
    for part in value if isinstance(value, tuple) else (value,):
        dist.recv(part, source, group=group)
    return value


def share(value: Value | None, source: int, group: dist.ProcessGroup, device: torch.device) -> Value:
    """What the rank `source` has, on every rank of the group."""
    told = (
        header(value, device)
        if value is not None
        else torch.zeros(_HEADER_NUMBERS, dtype=torch.int64, device=device)
    )
    dist.broadcast(told, source, group=group)
    if value is None:
        value = blank(told, device)
    parts = [part.contiguous() for part in (value if isinstance(value, tuple) else (value,))]
    for part in parts:
        dist.broadcast(part, source, group=group)
    return value
