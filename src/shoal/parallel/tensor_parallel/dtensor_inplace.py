"""In-place writes into DTensors, by `x[:, 0] = 0` and into views.

A view of a DTensor is a copy where its dims are sharded in another way, as
that of some positions of a sharded sequence is; torch loses writes into it
silently. Here `x[...] = value` is carried out on the whole tensor, and any
other write into such a copy is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode


class InplaceWriteMode(TorchFunctionMode):
    """Keeps in-place writes into DTensors, or refuses them; everything else passes through."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__setitem__:
            return _set(*args)
        if args and isinstance(args[0], DTensor):
            name = getattr(func, "__name__", "")
            _refuse_copy(args[0], name)
            if name == "index_select":
                # Its gradient is written into zeros with the placements of what comes back: whole on both sides.
                return _whole(func(_whole(args[0]), *args[1:], **(kwargs or {})))
            if name == "dropout" and _is_sum(args[0]):
                args = _whole(args[0]), *args[1:]  # each rank would drop other elements of its partial sum
        return func(*args, **(kwargs or {}))


def _set(tensor: Tensor, index: Any, value: Any) -> None:
    if not isinstance(tensor, DTensor):
        # The same on every rank, so it is given the same everywhere, and gives back the same.
        Tensor.__setitem__(tensor, index, _plain(value))
        if isinstance(value, DTensor) and tensor.requires_grad:
            tensor.register_hook(_plain)  # type: ignore[no-untyped-call]  # torch says nothing of its type
        return
    whole = _whole(tensor)
    if tensor.placements == whole.placements:
        Tensor.__setitem__(tensor, index, value)
        return
    _refuse_copy(tensor, "copy_")
    changed: Any = whole.clone()
    Tensor.__setitem__(changed, index, value)
    tensor.copy_(changed.redistribute(placements=tensor.placements))


def _plain(value: Any) -> Any:
    return _whole(value).to_local() if isinstance(value, DTensor) else value


def _is_sum(tensor: DTensor) -> bool:
    return any(each.is_partial() for each in tensor.placements)


def _whole(tensor: DTensor) -> DTensor:
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def _refuse_copy(tensor: DTensor, name: str) -> None:
    if not name.endswith("_") or name.endswith("__") or not tensor._is_view():
        return
    base = tensor._base
    if isinstance(base, DTensor) and _memory(base) != _memory(tensor):
        raise RuntimeError(f"Operator {name} does not have a sharding strategy registered")


def _memory(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage().data_ptr()
