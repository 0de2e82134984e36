"""Python values as JSON and back, exactly: what of a state is not a tensor.

JSON has no tuple, no infinity and no integer keys, yet the states of
optimizers, schedulers and callbacks do. They are written as one-entry objects
whose key starts with "$"; everything else stands as it is, so that a manifest
stays readable. What cannot be given back exactly is refused by name.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from shoal.errors import ConfigError


def to_plain(value: Any, where: str) -> Any:
    """`value` as something JSON holds; `where` names it in the refusal."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)  # an IntEnum is its number
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [to_plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [to_plain(item, f"{where}[{number}]") for number, item in enumerate(value)]}
    if isinstance(value, dict):
        return _dict_to_plain(value, where)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor) and value.dim() == 0:
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$tensor": [dtype, to_plain(value.detach().item(), where)]}
    if numpy is not None and isinstance(value, numpy.generic):
        return to_plain(value.item(), where)
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: it is read without running code, so a "
        "state may be made of numbers, strings, None, lists, tuples, dicts and tensors of one number. Nothing was "
        "saved; leave that value out of state_dict(), or turn it into one of these."
    )


def from_plain(value: Any) -> Any:
    """What `to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, inner), *_ = value.items()
        if tag.startswith("$"):
            return _FROM_TAG[tag](inner)
    return {key: from_plain(item) for key, item in value.items()}


def _dict_to_plain(value: dict[Any, Any], where: str) -> Any:
    if isinstance(value, Counter):
        return {"$counter": _pairs(value, where)}
    if all(type(key) is str for key in value) and not any(key.startswith("$") for key in value):
        return {key: to_plain(item, f"{where}.{key}") for key, item in value.items()}
    return {"$dict": _pairs(value, where)}


def _pairs(value: dict[Any, Any], where: str) -> list[Any]:
    return [
        [to_plain(key, f"a key of {where}"), to_plain(item, f"{where}[{key!r}]")]
        for key, item in value.items()
    ]


def _tensor(inner: list[Any]) -> Any:
    import torch

    dtype, number = inner
    return torch.tensor(from_plain(number), dtype=getattr(torch, dtype))


_FROM_TAG: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda inner: tuple(from_plain(inner)),
    "$dict": lambda inner: {from_plain(key): from_plain(item) for key, item in inner},
    "$counter": lambda inner: Counter({from_plain(key): from_plain(item) for key, item in inner}),
    "$tensor": _tensor,
}
