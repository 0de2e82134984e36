"""Values sent between the stages of a pipeline: tensors behind a JSON description of them, no pickle.

Values that are no tensors (a size, a flag) are in the description itself. Of a
DTensor, each rank of tp sends its shard to the rank of the next stage that has
the same place.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shoal.errors import StageCannotRun

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip

Sends = list[tuple[dist.Work, Tensor]]
"""Sends under way, and the tensors that must live until they are done."""


class _CannotTravel(Exception):
    """A value that cannot be sent to another stage."""


def why_not(value: Any) -> str | None:
    """The part of a value that cannot be sent; None where all of it can."""
    try:
        _pack(value)
    except _CannotTravel as error:
        return str(error)
    return None


def pack(value: Any) -> tuple[list[Tensor], Any]:
    """The tensors of a value, and a description from which `unpack` makes it again."""
    try:
        return _pack(value)
    except _CannotTravel as error:
        raise StageCannotRun(
            f"{error} would have to go from one stage to another, and stages hand on tensors, numbers, and tuples, lists and "
            "dicts of them. The step was not applied; cut the model elsewhere with pipeline_cut=, or use fsdp or tp."
        ) from None


def _pack(value: Any) -> tuple[list[Tensor], Any]:
    found: list[Tensor] = []

    def describe(each: Any) -> Any:
        if isinstance(each, DTensor):
            dim, own = _part(each)
            return ["part", *describe(own)[1:], dim, list(each.shape)]
        if isinstance(each, Tensor):
            name = str(each.dtype).removeprefix("torch.")
            if name not in _DTYPES or each.layout is not torch.strided:
                raise _CannotTravel(f"a tensor of {each.dtype} laid out as {each.layout}")
            found.append(each)
            return ["tensor", name, list(each.shape)]
        if each is None or isinstance(each, (bool, int, float, str)):
            return ["plain", each]
        if isinstance(each, dict):
            if not all(isinstance(key, str) for key in each):
                raise _CannotTravel("a dict whose keys are no strings")
            return ["dict", [[key, describe(inner)] for key, inner in each.items()]]
        if isinstance(each, (tuple, list)):
            return ["list" if isinstance(each, list) else "tuple", [describe(inner) for inner in each]]
        if isinstance(each, torch.dtype):
            return ["dtype", str(each).removeprefix("torch.")]
        if isinstance(each, torch.device):
            return ["device"]
        raise _CannotTravel(f"a {type(each).__name__}")

    return found, describe(value)


def _part(tensor: DTensor) -> tuple[int | None, Tensor]:
    """The sharded dim and this rank's shard; None and the whole tensor where shards are uneven."""
    [placement] = tensor.placements
    if type(placement) is Shard and tensor.shape[placement.dim] % tensor.device_mesh.size() == 0:
        return placement.dim, tensor.to_local()
    return None, whole(tensor)


def whole(tensor: DTensor) -> Tensor:
    """The whole tensor, plain; gradients go back the same way."""
    return tensor.redistribute(placements=[Replicate()]).to_local()


def unpack(
    tensors: list[Tensor], description: Any, device: torch.device, mesh: DeviceMesh | None = None
) -> Any:
    """The value that was packed; devices are this rank's own. `mesh`: the ranks of tp."""
    rest = iter(tensors)

    def build(told: Any) -> Any:
        match told:
            case ["tensor", _, _]:
                return next(rest)
            case ["part", _, _, dim, shape]:
                assert mesh is not None, "there are no DTensors without tp"
                stride = torch.empty(shape, device="meta").stride()
                placement = Replicate() if dim is None else Shard(dim)
                return DTensor.from_local(
                    next(rest), mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
                )
            case ["plain", value]:
                return value
            case ["dict", items]:
                return {key: build(inner) for key, inner in items}
            case ["list", items]:
                return [build(inner) for inner in items]
            case ["tuple", items]:
                return tuple(build(inner) for inner in items)
            case ["dtype", name]:
                return getattr(torch, name)
            case _:
                return device

    return build(description)


def metas(description: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of the described tensors, in their order."""
    match description:
        case ["tensor", name, shape] | ["part", name, shape, _, _]:
            return [(_DTYPES[name], tuple(shape))]
        case ["dict", items]:
            return [meta for _, inner in items for meta in metas(inner)]
        case ["list" | "tuple", items]:
            return [meta for inner in items for meta in metas(inner)]
        case _:
            return []


def send(value: Any, to: int, group: dist.ProcessGroup, device: torch.device) -> Sends:
    """Start sending; wait for the result."""
    tensors, description = pack(value)
    told = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8).to(device)
    sends: Sends = []
    for tensor in [
        torch.tensor([len(told)], device=device),
        told,
        *(t.detach().contiguous() for t in tensors),
    ]:
        work = dist.isend(tensor, to, group=group)
        assert work is not None
        sends.append((work, tensor))
    return sends


def receive(
    source: int, group: dist.ProcessGroup, device: torch.device, mesh: DeviceMesh | None = None
) -> Any:
    """Receive the next value from a stage."""
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, source, group=group)
    told = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(told, source, group=group)
    description, tensors = _empty_tensors(told, device)
    for tensor in tensors:
        dist.recv(tensor, source, group=group)
    return unpack(tensors, description, device, mesh)


def share(value: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Broadcast the value of rank `source`."""
    is_source = dist.get_rank() == source
    length = torch.zeros(1, dtype=torch.int64, device=device)
    told, tensors, description = torch.empty(0, dtype=torch.uint8), list[Tensor](), None
    if is_source:
        tensors, description = pack(value)
        told = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8).to(device)
        length.fill_(len(told))
    dist.broadcast(length, source, group=group)
    if not is_source:
        told = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(told, source, group=group)
    if not is_source:
        description, tensors = _empty_tensors(told, device)
    tensors = [tensor.contiguous() for tensor in tensors]
    for tensor in tensors:
        dist.broadcast(tensor, source, group=group)
    return value if is_source else unpack(tensors, description, device)


def _empty_tensors(told: Tensor, device: torch.device) -> tuple[Any, list[Tensor]]:
    description = json.loads(bytes(told.tolist()))
    return description, [
        torch.empty(shape, dtype=dtype, device=device) for dtype, shape in metas(description)
    ]
