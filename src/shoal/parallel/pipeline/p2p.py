"""Values sent between the stages of a pipeline: tensors behind a header that describes them (runtime/serialization.py).

Other values (a size, a flag) are in the header itself. Of a DTensor, each rank of tp sends its
shard to the rank with the same position in the next stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shoal.collectives.reducer import DTYPES
from shoal.errors import StageCannotRun
from shoal.parallel.tensor_parallel.dtensor_fixes import plain
from shoal.runtime import serialization
from shoal.runtime.serialization import NotSerializable

Sends = list[tuple[dist.Work, Tensor]]  # pending sends, and the tensors that must live until they are done


def why_not(value: Any) -> str | None:
    """The part of a value that cannot be sent; None where all of it can."""
    try:
        serialization.pack(value, _hook)
    except NotSerializable as error:
        return error.what
    return None


def pack(value: Any) -> tuple[list[Tensor], bytes]:
    """The tensors of a value, and a header from which `unpack` makes it again."""
    try:
        header, tensors = serialization.pack(value, _hook)
    except NotSerializable as error:
        raise StageCannotRun(
            f"{error.what} would have to go from one stage to another, and stages hand on tensors, numbers, and tuples, lists "
            "and dicts of them. The step was not applied; cut the model elsewhere with pipeline_cut=, or use fsdp or tp."
        ) from None
    return tensors, header


def _hook(value: Any) -> tuple[str, Any] | None:
    if isinstance(value, DTensor):
        dim, own = _part(value)
        return "part", [dim, list(value.shape), own]
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES:
            raise NotSerializable(f"a tensor of {value.dtype}")
        return None
    if isinstance(value, torch.dtype):
        return "dtype", str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return "device", None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "tuple", list(value)
    if not isinstance(value, (bool, int, float, str, tuple, list, dict)):
        raise NotSerializable(f"a {type(value).__name__}")
    return None


def _part(tensor: DTensor) -> tuple[int | None, Tensor]:
    """The sharded dim and this rank's shard; None and the whole tensor where shards are uneven."""
    [placement] = tensor.placements
    if type(placement) is Shard and tensor.shape[placement.dim] % tensor.device_mesh.size() == 0:
        return placement.dim, tensor.to_local()
    return None, plain(tensor)


def unpack(tensors: list[Tensor], header: bytes, device: torch.device, mesh: DeviceMesh | None = None) -> Any:
    """The value that was packed; devices are this rank's own. `mesh`: the ranks of tp."""

    def unhook(tag: str, parts: Any) -> Any:
        if tag == "part":
            dim, shape, own = parts
            assert mesh is not None, "there are no DTensors without tp"
            stride = torch.empty(shape, device="meta").stride()
            placement = Replicate() if dim is None else Shard(dim)
            return DTensor.from_local(
                own, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
            )
        if tag == "dtype":
            return getattr(torch, parts)
        return device if tag == "device" else tuple(parts)

    return serialization.unpack(header, tensors, unhook)


def metas(header: bytes) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of the described tensors, in their order."""
    specs = serialization.leaf_specs(header)
    return [(serialization.dtype_of(spec.dtype), tuple(spec.shape)) for spec in specs]


def send(value: Any, to: int, group: dist.ProcessGroup, device: torch.device) -> Sends:
    tensors, header = pack(value)
    sends: Sends = []
    for tensor in [*_described(header, device), *(tensor.detach().contiguous() for tensor in tensors)]:
        work = dist.isend(tensor, to, group=group)
        assert work is not None
        sends.append((work, tensor))
    return sends


def receive(
    source: int, group: dist.ProcessGroup, device: torch.device, mesh: DeviceMesh | None = None
) -> Any:
    return _receive(lambda tensor: dist.recv(tensor, source, group=group), device, mesh)


def share(value: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Broadcast the value of rank `source`."""
    if dist.get_rank() != source:
        return _receive(lambda tensor: dist.broadcast(tensor, source, group=group), device)
    tensors, header = pack(value)
    for tensor in [*_described(header, device), *(tensor.contiguous() for tensor in tensors)]:
        dist.broadcast(tensor, source, group=group)
    return value


def _described(header: bytes, device: torch.device) -> list[Tensor]:
    raw = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
    return [torch.tensor([len(raw)], device=device), raw]


def _receive(fill: Callable[[Tensor], Any], device: torch.device, mesh: DeviceMesh | None = None) -> Any:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    fill(length)
    raw = torch.empty(int(length), dtype=torch.uint8, device=device)
    fill(raw)
    header = bytes(raw.tolist())
    tensors = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in metas(header)]
    for tensor in tensors:
        fill(tensor)
    return unpack(tensors, header, device, mesh)
