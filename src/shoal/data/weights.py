"""How much each sample counts in the loss: the third part of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

from shoal.data.tree import Tree
from shoal.errors import DataError


class Weighted(NamedTuple):
    """A sample or a batch with weights: unpacks as (inputs, target, weight).

    A type of its own, because a plain tuple of three is two inputs and a target.
    """

    inputs: Tree
    target: Tree
    weight: Any


def keep_weights(before: Any, after: Any) -> Any:
    """What a function made of a sample or batch: one with weights keeps them, whatever kind of tuple it is now."""
    if not isinstance(before, Weighted) or isinstance(after, Weighted):
        return after
    if isinstance(after, (tuple, list)) and len(after) == 3:
        return Weighted(*after)
    what = f"a tuple of {len(after)}" if isinstance(after, (tuple, list)) else f"a {type(after).__name__}"
    raise DataError(
        f"a map after with_weights was given (inputs, target, weight) and returned {what}: the weights would be lost. "
        "Let it return all three, or map first and call with_weights last."
    )
