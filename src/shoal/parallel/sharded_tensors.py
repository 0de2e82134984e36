"""Tensors of which each rank holds a part (DTensors), as whole ones and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shoal.parallel.protocol import Piece
from shoal.parallel.tensor_parallel.packing import Packing


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank. Collective where it is in parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The norm of all of them together. Collective where some are in parts: one sum for all that are cut alike."""
    cut_alike: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}
    alone: list[Tensor] = []
    for tensor in tensors:
        if not isinstance(tensor, DTensor) or any(placement.is_partial() for placement in tensor.placements):
            alone.append(whole(tensor))
            continue
        axes = tuple(axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate())
        cut_alike.setdefault((tensor.device_mesh, axes), []).append(tensor.to_local())
    squares = float(nn.utils.get_total_norm(alone)) ** 2 if alone else 0.0
    for (mesh, axes), parts in cut_alike.items():
        held = nn.utils.get_total_norm(parts).double() ** 2
        for axis in axes:
            dist.all_reduce(held, group=mesh.get_group(axis))
        squares += float(held)
    return math.sqrt(squares)


def ties_of(model: nn.Module, prefix: str) -> dict[str, str]:
    """Names under which a parameter is found again -> the first name of it."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[prefix + name] = prefix + first[id(parameter)]
    return ties


def whole_pieces(
    pieces: Iterable[Piece], *, keep: bool, packing: Packing, ties: Mapping[str, str] | None = None
) -> Iterator[Piece]:
    """The pieces with whole tensors, gathered one at a time; without `keep` they are let go of at once.

    Collective: every rank goes through all of them, and only who writes needs them. What is tied is gathered once, and
    is one memory under both names, as in one process.
    """
    ties = ties or {}
    gathered: dict[str, Tensor] = {}
    for piece in pieces:
        tensor = gathered.get(ties.get(piece.name, ""))
        if tensor is None:
            tensor = packing.to_user_layout(piece.name, whole(piece.tensor))
        shape = tuple(piece.tensor.shape)
        if not keep:
            tensor = torch.empty(0, dtype=tensor.dtype)
        if piece.name in ties.values():
            gathered[piece.name] = tensor
        yield Piece(piece.name, tensor, shape, (0,) * len(shape))


def local_part(value: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of one cut like `like`; whole where that is not cut."""
    if not isinstance(like, DTensor):
        return value
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    part = value
    for dim, (begin, length) in enumerate(zip(offset, shape, strict=True)):
        part = part.narrow(dim, begin if length else 0, length)
    return part


def cut_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor cut as `like` is, without a word to the other ranks: they have it too."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    part = local_part(value, like).to(like.device).contiguous()
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=torch.empty(like.shape, device="meta").stride(),
    )


class CutReader(Mapping[str, Tensor]):
    """Whole tensors by name, each read as this rank's part of the tensor it is for."""

    def __init__(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
        self._tensors, self._like = tensors, like

    def __getitem__(self, name: str) -> Tensor:
        value = self._tensors[name]
        return cut_like(value, self._like[name]) if name in self._like else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
