"""Operations on DTensors that torch gets wrong on a shard: gathered, or refused by name.

That the numbers are those of one process is in tests/processes/test_tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.errors import ConfigError
from shoal.parallel.tensor_parallel import dtensor_fixes
from shoal.parallel.tensor_parallel.dtensor_fixes import (
    InplaceWriteMode,
    patch_sharding_rules,
    unsupported_operation,
)

SEQUENCE, WHOLE = Shard(1), Replicate()


@pytest.fixture(scope="module", autouse=True)
def two_ranks() -> Iterator[None]:
    patch_sharding_rules()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())  # type: ignore[no-untyped-call]
    yield
    dist.destroy_process_group()


@pytest.fixture
def part() -> DTensor:
    """(batch, sequence, features), of whose sequence this rank has the first half."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return DTensor.from_local(torch.arange(24.0).view(2, 3, 4), mesh, [SEQUENCE], run_check=False)


@pytest.mark.parametrize("operation", ["cumsum", "cumprod", "logcumsumexp", "softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [-1, -2, -3])
def test_what_goes_along_the_sequence_sees_all_of_it(part: DTensor, operation: str, dim: int) -> None:
    result = getattr(part, operation)(dim)
    assert result.placements == ((WHOLE if dim == -2 else SEQUENCE),)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: F.mse_loss(x, x + 1),
        lambda x: F.huber_loss(x, x + 1),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
        lambda x: F.nll_loss(x.flatten(0, 1), torch.ones_like(x[..., 0]).flatten().long(), ignore_index=0),
        lambda x: x.amax(),
        lambda x: F.conv1d(x.transpose(1, 2), torch.ones_like(x[:, :3].transpose(1, 2)), padding=1),
    ],
    ids=["mse", "huber", "bce", "nll", "amax", "conv"],
)
def test_what_torch_has_no_sound_rule_for_is_computed_whole(
    part: DTensor, compute: Callable[[Tensor], DTensor]
) -> None:
    assert compute(part).placements == (WHOLE,)


def test_a_kept_dim_moves_no_other(part: DTensor) -> None:
    assert part.logsumexp(0, keepdim=True).placements == (SEQUENCE,)
    assert part.logsumexp(0).placements == (Shard(0),)


def test_what_is_written_into_a_copy_is_refused_by_name(part: DTensor) -> None:
    with InplaceWriteMode():
        part[..., 0].zero_()  # features are whole: a view like any other
        assert part.to_local()[..., 0].eq(0).all()
        with pytest.raises(RuntimeError) as refused:
            part[:, 1:].mul_(2)
    assert unsupported_operation(refused.value) == "mul_"


def test_what_is_set_is_set(part: DTensor) -> None:
    with InplaceWriteMode():
        part[:, 1] = 7.0
        assert part.placements == (SEQUENCE,)
        plain = torch.zeros(2, 6, 4)
        plain[:, :3] = part[:, :3]
    assert part.to_local()[:, 1].eq(7).all()


@pytest.mark.parametrize(
    ("says", "operation"),
    [
        ("Operator aten.sort.stable does not have a sharding strategy registered.", "aten.sort.stable"),
        (
            "Cannot unflatten ...\n\nSharding propagation failed for aten.view.default(Spec(...))",
            "aten.view.default",
        ),
        (
            "aten.scatter_.value: in-place operations that require placement changes are not supported.",
            "aten.scatter_.value",
        ),
        ("something else", None),
    ],
)
def test_torchs_refusals_are_known(says: str, operation: str | None) -> None:
    assert unsupported_operation(RuntimeError(says)) == operation


def test_torch_without_what_tp_needs_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    dtensor_fixes.refuse_old_torch()
    monkeypatch.setattr(dtensor_fixes, "HAS_RULES", False)
    with pytest.raises(
        ConfigError, match=f"as torch 2.11 has them, and this is torch {torch.__version__[:4]}"
    ):
        dtensor_fixes.refuse_old_torch()
