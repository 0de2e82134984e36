"""torch.optim's updates by sparse gradients, with loops over their rows, to the same bits.

torch makes several sparse tensors for each update and looks their rows up again in each. Used only
where the loops are known to be equal: `update` tries each kind of update once per process against
torch itself, and leaves to torch what differs (a processor without fused multiply-add), and every
optimizer, setting or memory it does not know.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from shoal import system
from shoal.runtime import kernel_cache
from shoal.runtime.kernel_cache import ask_ahead, floating_kernel, intrinsic, matrix, types, vector

KERNELS = __name__
"""The module of these loops, as `kernel_cache.is_compiled` takes it."""


@intrinsic
def _fused(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once: as the BLAS under torch adds a row to a row."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return a(a, a, a), generate


_KEYS = vector(types.int64)


@floating_kernel(lambda dtype: (_KEYS, matrix(dtype), matrix(dtype, written=True), dtype))
def _add(keys: Any, rows: Any, table: Any, rate: Any) -> None:
    """table[keys] += rate * rows."""
    for i in range(len(keys)):
        ask_ahead(keys, i, table)
        to, row = table[keys[i]], rows[i]
        for d in range(len(row)):
            to[d] = _fused(rate, row[d], to[d])


@floating_kernel(
    lambda dtype: (_KEYS, matrix(dtype), matrix(dtype, written=True), matrix(dtype, written=True))
)
def _add_squares(keys: Any, rows: Any, table: Any, out: Any) -> None:
    """table[keys] += rows²; out = table[keys]."""
    for i in range(len(keys)):
        ask_ahead(keys, i, table)
        to, row, result = table[keys[i]], rows[i], out[i]
        for d in range(len(row)):
            total = to[d] + row[d] * row[d]
            to[d] = total
            result[d] = total


def update(optimizer: torch.optim.Optimizer) -> None:
    """Update by sparse gradients where a loop exists, and drop those gradients: `optimizer.step()` does the rest."""
    if not _is_plain(optimizer) or not _is_compiled():
        return
    rule = _RULES[type(optimizer)]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.sparse_coo or not gradient.is_coalesced():
                continue
            state = optimizer.state[parameter]
            tables = (parameter.detach(), *(state[name] for name in rule.tables))
            if (
                all(map(_fits, tables))
                and rule.knows(group)
                and rule.is_exact(parameter.dtype, parameter.shape[1])
            ):
                for table in tables:
                    _use_huge_pages(table.data_ptr(), table.nbytes)
                rule.update(parameter, state, group, gradient.indices()[0], gradient.values())
                torch.autograd.graph.increment_version(parameter)
                parameter.grad = None


class _Sgd:
    make: type[torch.optim.Optimizer] = torch.optim.SGD
    tables: tuple[str, ...] = ()  # state as large as the parameter

    def knows(self, group: dict[str, Any]) -> bool:
        return type(group["lr"]) is float and not any(
            group[name] for name in ("momentum", "weight_decay", "maximize", "differentiable", "fused")
        )

    def update(
        self, parameter: Tensor, state: Any, group: dict[str, Any], keys: Tensor, values: Tensor
    ) -> None:
        _add_to(parameter, keys, values, -group["lr"])

    @functools.cache  # noqa: B019  # one for each kind, for the life of the process
    def is_exact(self, dtype: torch.dtype, dim: int) -> bool:
        return _equals_torch(self, dtype, dim)


class _Adagrad(_Sgd):
    make = torch.optim.Adagrad
    tables = ("sum",)

    def knows(self, group: dict[str, Any]) -> bool:
        return type(group["lr"]) is float and not any(
            group[name] for name in ("weight_decay", "maximize", "differentiable", "fused")
        )

    def update(
        self, parameter: Tensor, state: Any, group: dict[str, Any], keys: Tensor, values: Tensor
    ) -> None:
        state["step"] += 1
        rate = group["lr"] / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        # Roots and quotients by torch: those of its vector library are not always rounded as a processor's are.
        roots = torch.empty_like(values)
        _add_squares(keys.numpy(), values.numpy(), state["sum"].numpy(), roots.numpy())
        roots.sqrt_().add_(group["eps"])
        _add_to(parameter, keys, torch.div(values, roots, out=roots), -rate)


def _add_to(parameter: Tensor, keys: Tensor, rows: Tensor, rate: float) -> None:
    table = parameter.detach().numpy()
    _add(keys.numpy(), rows.numpy(), table, table.dtype.type(rate))


_RULES: dict[type[torch.optim.Optimizer], _Sgd] = {rule.make: rule for rule in (_Sgd(), _Adagrad())}


def _equals_torch(rule: _Sgd, dtype: torch.dtype, dim: int) -> bool:
    """Whether a loop leaves the bits that torch does, in three updates of a small table."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, dim, generator=generator, dtype=dtype)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    make: Any = rule.make
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    optimizers = make([ours], lr=0.0213), make([theirs], lr=0.0213)
    for step in range(3):
        keys = torch.randperm(64, generator=generator)[:40].sort().values
        values = torch.randn(40, dim, generator=generator, dtype=dtype) * 10.0**-step
        theirs.grad = torch.sparse_coo_tensor(
            keys[None], values, start.shape, is_coalesced=True, check_invariants=False
        )
        with checks(enable=False):  # else torch warns of its own tensors
            optimizers[1].step()
        rule.update(ours, optimizers[0].state[ours], optimizers[0].param_groups[0], keys, values)
    return bool(torch.equal(ours.detach(), theirs.detach()))


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing observes its steps: a hook may read the gradients."""
    return type(optimizer) in _RULES and not (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def _fits(table: Tensor) -> bool:
    return (
        type(table) is Tensor
        and table.device.type == "cpu"
        and table.dtype in (torch.float32, torch.float64)
        and table.dim() == 2
        and table.is_contiguous()
    )


_SMALL_BYTES = 8 << 20  # whose pages a processor remembers
_MOST_BYTES = 512 << 20  # to be copied at once, at 2 s a GB


@functools.cache  # once for each table
def _use_huge_pages(address: int, num_bytes: int) -> None:
    """Rows lie anywhere in a table: with pages of 4 KB each of them is a walk through the page table too."""
    if _SMALL_BYTES < num_bytes <= _MOST_BYTES:
        system.move_to_huge_pages(address, num_bytes)


@functools.cache
def _is_compiled() -> bool:
    return kernel_cache.is_compiled(KERNELS)
