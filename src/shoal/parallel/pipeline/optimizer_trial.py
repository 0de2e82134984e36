"""Optimizers of a script's own over a pipeline, where each worker steps the parameters of its own stages.

An update that reads other parameters (a norm over all of them, say) would be another one. It is found by a trial on a copy
with small parameters.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import ConfigError
from shoal.parallel.batch_dependence import numbers_of_all_sizes
from shoal.parallel.pipeline.state import Ownership

_NUM_STEPS = 3
_LONGEST = 8
"""Largest dimension of a parameter of the trial."""


def refuse_mixed_parameters(
    optimizer: Optimizer, model: nn.Module, ownership: Ownership, num_ranks: int, strategy: str
) -> None:
    """Refuse an optimizer whose step of one stage differs from what its step of all parameters does there.

    torch's own treat each parameter by itself. One that draws random numbers, or cannot be tried, is not judged.
    """
    if type(optimizer).__module__.startswith("torch.optim."):
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owners = [ownership.ranks.get(names.get(id(parameter), ""), ()) for parameter in parameters]
    everything = range(len(parameters))
    with _random_state_kept():
        try:
            whole, again = (_stepped(optimizer, parameters, everything) for _ in range(2))
        except Exception:  # the script's own: it takes a closure, or layers of their real sizes
            return
        if not all(map(_is_equal, whole, again)):
            return
        for rank in range(num_ranks):
            own = [number for number in everything if rank in owners[number]]
            try:
                found = _stepped(optimizer, parameters, own) if len(own) < len(parameters) else whole
            except Exception as error:
                raise _refusal(optimizer, strategy, f"{type(error).__name__}: {error}") from None
            for number in own:
                if not _is_equal(whole[number], found[number]):
                    name = names.get(id(parameters[number]), "")
                    raise _refusal(optimizer, strategy, f"'{name}' gets other values")


def _refusal(optimizer: Optimizer, strategy: str, why: str) -> ConfigError:
    return ConfigError(
        f"the update of {type(optimizer).__name__} mixes parameters, and under '{strategy}' each worker updates those of its own stages "
        f"alone (a trial of one stage without the others: {why}). Nothing was trained; let it update each parameter by itself, with "
        "clip_norm= (in a loop of your own shoal.clip_grad_norm_) for a norm of the whole gradient, or use --strategy ddp or fsdp."
    )


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Up to rounding: parameters that are updated as one tensor may be summed in another order."""
    slack = 16 * torch.finfo(one.dtype).eps * torch.maximum(one.abs(), other.abs())
    return bool(((one - other).abs() <= slack)[one.isfinite()].all())


def _stepped(optimizer: Optimizer, parameters: list[Tensor], own: Collection[int]) -> list[Tensor]:
    """Small parameters after some steps of a copy of the optimizer; those not in `own` are as another stage's: without data."""
    draw, small = torch.Generator().manual_seed(0), list[Tensor]()
    device = next((each.device for each in parameters if not each.is_meta), torch.device("cpu"))
    for number, parameter in enumerate(parameters):
        shape = [min(size, _LONGEST) for size in parameter.shape]
        values = numbers_of_all_sizes(torch.empty(shape, dtype=parameter.dtype, device=device), draw)
        values = values if number in own else values.to("meta")
        small.append(nn.Parameter(values, requires_grad=parameter.requires_grad))
    memo: dict[int, Any] = {id(before): after for before, after in zip(parameters, small, strict=True)}
    for before, after in zip(parameters, small, strict=True):
        for value in optimizer.state.get(before, {}).values():
            if isinstance(value, Tensor) and value.shape == before.shape:
                first = 0.0 if value.is_meta or not value.numel() else float(value.detach().flatten()[0])
                memo[id(value)] = torch.full_like(after.detach(), first)
    tried = _copy(optimizer, memo)
    for _ in range(_NUM_STEPS):
        for number, each in enumerate(small):
            gradient = numbers_of_all_sizes(torch.empty(each.shape, dtype=each.dtype, device=device), draw)
            each.grad = gradient if number in own and each.requires_grad else None
        type(tried).step(tried)
    return [each.detach() for each in small]


def _copy(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A copy on other parameters, without hooks and what others have made of its `step`. torch's own leaves attributes out."""
    copied = memo[id(optimizer)] = type(optimizer).__new__(type(optimizer))
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and id(value) not in memo:
            _copy(value, memo)
    for key, value in vars(optimizer).items():
        if key != "step":
            is_hooks = key.startswith("_optimizer_") and key.endswith("_hooks")
            copied.__dict__[key] = OrderedDict() if is_hooks else copy.deepcopy(value, memo)
    return copied


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    of_host = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(of_host[0])
        np.random.set_state(of_host[1])
