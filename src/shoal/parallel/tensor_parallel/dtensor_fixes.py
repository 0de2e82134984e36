"""Corrections of DTensor where torch 2.13 computes wrong results silently.

Sharding rules: some misread a dim that is counted from the end, rules derived
from a decomposition divide a mean by the size of the shard, a few are wrong.
Here dims are counted from the start, and the others gather before they compute.

Random numbers: DTensor draws the same numbers for all shards. Here every rank
draws the whole tensor, as one process does, and keeps its shard.

In-place writes: a view is a copy where its dims are sharded in another way, and
writes into it are lost. Here `x[...] = value` is carried out on the whole
tensor, and any other write into such a copy is refused.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.overrides import TorchFunctionMode

from shoal.errors import ConfigError
from shoal.parallel.state import local_part

try:
    from torch.distributed.tensor._ops.utils import replicate_op_strategy

    HAS_RULES = True
except ImportError:  # an older torch, without the rule that gathers
    HAS_RULES = False

_aten: Any = torch.ops.aten

_GATHERED = (
    _aten.amax.default,  # the gradient compares with the largest of the part
    _aten.amin.default,
    _aten.nll_loss_forward.default,  # with weights, or targets to ignore, parts count differently
    _aten.nll_loss2d_forward.default,
    _aten.nll_loss_backward.default,
    _aten.nll_loss2d_backward.default,
    _aten._adaptive_avg_pool2d_backward.default,  # takes rows for channels where there is no batch
    _aten.convolution.default,  # talks to neighbours whatever is cut
    _aten.convolution_backward.default,
)
"""torch's own rules for these are wrong."""

_DIMS = ("dim", "dims", "dim0", "dim1", "dim2")

_OVER_ALL = tuple(f"aten::{name}" for name in ("sum", "mean", "nansum", "var", "std", "var_mean", "std_mean"))
"""No dims mean all dims to these."""

_UNSUPPORTED = re.compile(
    r"[Oo]perator (?P<unknown>\S+) does not have a sharding strategy registered"
    r"|Sharding propagation failed for (?P<failed>[\w.]+)"
    r"|(?P<written>[\w.]+): in-place operations that require placement changes are not supported"
)


def refuse_old_torch() -> None:
    if not HAS_RULES:
        raise ConfigError(
            f"tp corrects sharding rules of DTensor as torch 2.11 has them, and this is torch {torch.__version__}, where results would be "
            "wrong. Nothing was trained; use --strategy ddp, fsdp or ps, or install torch 2.13."
        )


@functools.cache
def patch_sharding_rules() -> None:
    dispatcher: Any = DTensor._op_dispatcher
    rules = dispatcher.sharding_propagator
    for operation, rule in list(rules.op_strategy_funcs.items()):
        if _dim_arguments(operation):
            rules.op_strategy_funcs[operation] = functools.partial(_with_dims_from_the_start, rule)
    for operation in _GATHERED:
        dispatcher._custom_op_handlers.pop(operation, None)
        getattr(rules, "op_single_dim_strategy_funcs", {}).pop(operation, None)
        rules.register_op_strategy(operation, _gathered)
    dispatcher._custom_op_handlers[_aten._local_scalar_dense.default] = _number
    decompositions = getattr(rules, "decomp_strategy", None)
    if decompositions is not None:  # an older torch derives no rules, and refuses what has none
        derived = decompositions.propagate_strategy
        decompositions.propagate_strategy = functools.partial(_without_a_rule, rules, derived)
    rules.propagate_op_sharding.cache_clear()


def unsupported_operation(error: RuntimeError) -> str | None:
    """The operation that DTensor does not support, where that is what the error says."""
    found = _UNSUPPORTED.search(str(error))
    return None if found is None else next(each for each in found.groups() if each)


# ---- dims -------------------------------------------------------------------------------------------


def _with_dims_from_the_start(rule: Callable[[Any], Any], schema: Any) -> Any:
    """Call a rule with dims that are not negative."""
    args = list(schema.args_schema)
    named = dict(zip((each.name for each in schema.op._schema.arguments), args, strict=False))
    num_dims = _num_dims(schema.op, args[0], named.get("input_sizes"))
    for number in _dim_arguments(schema.op):
        if number < len(args):
            args[number] = _from_the_start(args[number], num_dims)
            if args[number] == [] and schema.op._schema.name in _OVER_ALL:
                args[number] = list(range(num_dims))
    asked = copy.copy(schema)
    asked.args_schema = tuple(args)
    if "keepdim" in named:  # one looks for it only where it was given by its name
        asked.kwargs_schema = {**schema.kwargs_schema, "keepdim": named["keepdim"]}
    return rule(asked)


@functools.cache
def _dim_arguments(operation: Any) -> tuple[int, ...]:
    arguments = operation._schema.arguments
    return tuple(
        number for number, each in enumerate(arguments) if each.name in _DIMS and not each.kwarg_only
    )


def _num_dims(operation: Any, first: Any, sizes: Any) -> int:
    if sizes is not None:  # a gradient, of what took a dim away
        return len(sizes)
    num_dims: int = first.children[0].ndim if hasattr(first, "children") else first.ndim
    return num_dims + (operation in (_aten.unsqueeze.default, _aten.stack.default))


def _from_the_start(dim: Any, num_dims: int) -> Any:
    if isinstance(dim, (tuple, list)):
        return type(dim)(_from_the_start(each, num_dims) for each in dim)
    return dim + num_dims if isinstance(dim, int) and dim < 0 else dim


# ---- whole tensors ----------------------------------------------------------------------------------


def _gathered(schema: Any) -> Any:
    """Rule: gather, and compute everything on every rank."""
    is_written = schema.is_inplace_op() or schema.is_out_variant_op()
    if is_written and not all(_is_whole(each) for each in (*schema.args_strategy, *schema.kwargs_strategy)):
        raise NotImplementedError(f"Operator {schema.op} does not have a sharding strategy registered")
    return replicate_op_strategy(schema)


def _is_whole(given: Any) -> bool:
    return all(isinstance(each, Replicate) for each in given.strategies[0].output_spec.placements)


def _without_a_rule(rules: Any, derived: Callable[[Any], Any], schema: Any) -> Any:
    if torch.Tag.pointwise in schema.op.tags:
        return derived(schema)  # elementwise: a shard has all it needs
    if schema.op._can_decompose():
        # Where nothing is recorded for gradients. torch then runs what it is composed of, operation by operation.
        raise NotImplementedError(f"Operator {schema.op} does not have a sharding strategy registered")
    return _gathered(rules._wrap_with_op_strategy(schema))


def _number(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`item()` of the whole tensor; torch would give that of this rank's shard."""
    (tensor,) = args
    return operation(replicated(tensor)._local_tensor)


aten = torch.ops.aten

_IN_PLACE = (
    aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default, aten.exponential_.default, aten.random_.default,
    getattr(aten.random_, "from"), aten.random_.to, aten.cauchy_.default, aten.log_normal_.default, aten.geometric_.default,
)  # fmt: skip
_LIKE = (
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype, aten.bernoulli.p,
)  # fmt: skip


def patch_random_ops() -> None:
    """Replace the random operations of all DTensors of this process; refuse those without a replacement."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for operation in _everything_that_draws():
        handlers.setdefault(operation, _refuse)
    handlers.update(dict.fromkeys(_IN_PLACE, _draw_in_place))
    handlers.update(dict.fromkeys(_LIKE, _draw_like))
    handlers[aten.bernoulli.default] = _draw_by_chances
    handlers[aten.native_dropout.default] = _dropout


def _everything_that_draws() -> list[Any]:
    packets = (getattr(aten, name, None) for name in dir(aten) if not name.startswith("__"))
    operations = (
        getattr(packet, overload)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for overload in packet.overloads()  # type: ignore[no-untyped-call]  # torch says nothing of its type
    )
    # Attention kernels may draw, and seldom do: DTensor has rules for them (see also attention.py).
    return [
        each
        for each in operations
        if torch.Tag.nondeterministic_seeded in each.tags and "attention" not in each.name()
    ]


def _draw_in_place(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """In-place draws, among them dropout on a CPU."""
    tensor = args[0]
    tensor._local_tensor.copy_(_part(operation(_undrawn(tensor), *args[1:], **kwargs), tensor))
    drawn: Tensor = tensor
    return drawn


def _draw_like(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = args[0]
    return _with_placements_of(tensor, _part(operation(_undrawn(tensor), *args[1:], **kwargs), tensor))


def _draw_by_chances(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = args[0]
    chances = tensor.full_tensor()
    return _with_placements_of(tensor, _part(operation(chances, *args[1:], **kwargs), tensor))


def _dropout(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Dropout on a GPU: one kernel that draws and multiplies; its draws depend on the whole shape."""
    given = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
    tensor, chance, is_training = given["input"], given["p"], given["train"]
    _, mask = operation(_undrawn(tensor), chance, is_training)
    mask = local_part(mask, tensor)
    scale = 1.0 if is_training is False else (0.0 if chance == 1 else 1 / (1 - chance))
    # A partial sum times the mask is a partial sum; the mask itself is not partial.
    placements = [Replicate() if isinstance(each, Partial) else each for each in tensor.placements]
    kept = tensor._local_tensor * mask * scale
    return _with_placements_of(tensor, kept), _with_placements_of(tensor, mask, placements)


def _refuse(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise RuntimeError(
        f"Operator {operation} does not have a sharding strategy registered: it draws random numbers"
    )


def _undrawn(tensor: DTensor) -> Tensor:
    here = tensor._local_tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=here.dtype, device=here.device)


def _part(drawn: Tensor, tensor: DTensor) -> Tensor:
    """This rank's shard of the draw; of a partial sum, one rank has all of it."""
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial) and tensor.device_mesh.get_local_rank(axis):
            drawn = torch.zeros_like(drawn)
    return local_part(drawn, tensor)


def _with_placements_of(tensor: DTensor, own: Tensor, placements: Any = None) -> DTensor:
    return DTensor.from_local(
        own,
        tensor.device_mesh,
        placements or tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class InplaceWriteMode(TorchFunctionMode):
    """Keeps in-place writes into DTensors, or refuses them; everything else passes through."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # The trial of the compiled model detects what this would keep or refuse.
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        if func is Tensor.__setitem__:
            return _set(*args)
        if args and isinstance(args[0], DTensor):
            name = getattr(func, "__name__", "")
            _refuse_copy(args[0], name)
            if name == "index_select":
                # Its gradient is written into zeros with the placements of what comes back: whole on both sides.
                return replicated(func(replicated(args[0]), *args[1:], **(kwargs or {})))
            if name == "dropout" and any(each.is_partial() for each in args[0].placements):
                # Each rank would drop other elements of its partial sum.
                args = (replicated(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _set(tensor: Tensor, index: Any, value: Any) -> None:
    if not isinstance(tensor, DTensor):
        # Equal on every rank, so it gets and returns the same everywhere.
        Tensor.__setitem__(tensor, index, plain(value))
        if isinstance(value, DTensor) and tensor.requires_grad:
            tensor.register_hook(plain)  # type: ignore[no-untyped-call]  # torch says nothing of its type
        return
    whole = replicated(tensor)
    if tensor.placements == whole.placements:
        Tensor.__setitem__(tensor, index, value)
        return
    _refuse_copy(tensor, "copy_")
    changed: Any = whole.clone()
    Tensor.__setitem__(changed, index, value)
    tensor.copy_(changed.redistribute(placements=tensor.placements))


def plain(value: Any) -> Any:
    return replicated(value).to_local() if isinstance(value, DTensor) else value


def replicated(tensor: DTensor) -> DTensor:
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def _refuse_copy(tensor: DTensor, name: str) -> None:
    if not name.endswith("_") or name.endswith("__") or not tensor._is_view():
        return
    base = tensor._base
    if isinstance(base, DTensor) and _memory(base) != _memory(tensor):
        raise RuntimeError(f"Operator {name} does not have a sharding strategy registered")


def _memory(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage().data_ptr()
