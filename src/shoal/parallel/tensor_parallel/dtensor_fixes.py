"""Corrections of DTensor's sharding rules where torch 2.13 computes wrong results silently.

DTensor has a sharding rule for each operation, which says whether every rank
can compute on its shard alone. Some rules misread a dim that is counted from
the end. Where there is no rule, one is derived from the operation's
decomposition, and then the operation itself runs on each shard: a mean is
divided by the size of the shard. And a few rules are wrong. With dims counted
from the start and "gather, then compute" for the others, all give what one
process computes. `dtensor_inplace.py` corrects in-place writes,
`dtensor_rng.py` random numbers.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._ops.utils import replicate_op_strategy

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


@functools.cache
def patch_sharding_rules() -> None:
    """Correct the rules for all DTensors of this process."""
    dispatcher: Any = DTensor._op_dispatcher
    rules = dispatcher.sharding_propagator
    for operation, rule in list(rules.op_strategy_funcs.items()):
        if _dim_arguments(operation):
            rules.op_strategy_funcs[operation] = functools.partial(_with_dims_from_the_start, rule)
    for operation in _GATHERED:
        dispatcher._custom_op_handlers.pop(operation, None)
        rules.op_single_dim_strategy_funcs.pop(operation, None)
        rules.register_op_strategy(operation, _gathered)
    dispatcher._custom_op_handlers[_aten._local_scalar_dense.default] = _number
    derived = rules.decomp_strategy.propagate_strategy
    rules.decomp_strategy.propagate_strategy = functools.partial(_without_a_rule, rules, derived)
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
        return derived(schema)  # elementwise: a shard knows no less than the whole
    if schema.op._can_decompose():
        # Where nothing is recorded for gradients. torch then runs what it is composed of, operation by operation.
        raise NotImplementedError(f"Operator {schema.op} does not have a sharding strategy registered")
    return _gathered(rules._wrap_with_op_strategy(schema))


def _number(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`item()` of the whole tensor; torch would give that of this rank's shard."""
    (tensor,) = args
    whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return operation(whole._local_tensor)
