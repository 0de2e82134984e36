"""Messages between stages: values unchanged, and of DTensors this rank's shard alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.parallel.pipeline import p2p

CPU = torch.device("cpu")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which the other is nobody."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())  # type: ignore[no-untyped-call]
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def test_values_are_as_they_were() -> None:
    value = {"x": [torch.ones(2), (3, None, "a")], "y": torch.float64, "z": CPU}
    tensors, description = p2p.pack(value)
    again = p2p.unpack(tensors, description, CPU)
    assert again["x"][0] is tensors[0]
    assert (again["x"][1], again["y"], again["z"]) == ((3, None, "a"), torch.float64, CPU)
    assert p2p.why_not([object()]) == "a object"


@pytest.mark.parametrize(
    ("placement", "length", "sent", "dim"),
    [(Shard(1), 6, [2, 3, 4], 1), (Replicate(), 6, [2, 6, 4], None), (Shard(1), 5, [2, 5, 4], None)],
)
def test_of_a_tensor_in_parts_the_own_part_is_sent(
    mesh: DeviceMesh, placement: Placement, length: int, sent: list[int], dim: int | None
) -> None:
    own = torch.ones(2, -(-length // 2) if placement == Shard(1) else length, 4, requires_grad=True)
    shape = torch.Size((2, length, 4))
    whole = DTensor.from_local(
        own, mesh, [placement], run_check=False, shape=shape, stride=torch.empty(shape).stride()
    )
    [tensor], description = p2p.pack([whole])
    assert p2p.metas(description) == [(torch.float32, tuple(sent))]
    received = tensor.detach().requires_grad_()
    [again] = p2p.unpack([received], description, CPU, mesh)
    assert again.shape == shape
    assert again.placements == (Replicate() if dim is None else placement,)
    again.sum().to_local().backward()
    gradient: Any = received.grad
    assert not isinstance(gradient, DTensor)
    assert gradient.shape == received.shape
