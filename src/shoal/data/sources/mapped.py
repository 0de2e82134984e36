"""A function of the user's applied to samples, one by one or to a batch of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shoal.data.collate import to_tensors, uncollate, with_string_arrays
from shoal.data.order.order import Indices
from shoal.data.skipping import SkipSamples
from shoal.data.sources.source import Derived, Source, name_of
from shoal.data.sources.user_code import bad_sample, blame
from shoal.data.tree import Tree, map_leaves
from shoal.data.weights import keep_weights
from shoal.errors import BadSample, DataError


def mapped(
    source: Source,
    fn: Callable[[Any], Any],
    *,
    batched: bool = False,
    on_error: str = "raise",
    max_skips: int | None = None,
) -> Mapped | BatchMapped:
    """The source with `fn` applied to each sample, or to each batch that is asked for."""
    kind = BatchMapped if batched else Mapped
    return kind(source, fn, on_error=on_error, max_skips=max_skips)


class _Applied(Derived):
    """What both have in common: a function, and what to do when it raises."""

    name = "map"

    def __init__(
        self,
        source: Source,
        fn: Callable[[Any], Any],
        *,
        on_error: str = "raise",
        max_skips: int | None = None,
    ) -> None:
        super().__init__(source)
        self.runs_user_code = True
        self._fn, self._on_error, self._max_skips = fn, on_error, max_skips

    def describe(self) -> list[dict[str, Any]]:
        """The source's own, and the function's name."""
        stage: dict[str, Any] = {"stage": "map", "fn": name_of(self._fn)}
        if isinstance(self, BatchMapped):
            stage["batched"] = True
        if self._on_error != "raise":
            stage["on_error"] = self._on_error
        return [*self._source.describe(), stage]

    def _skip(self, bad: dict[int, BadSample]) -> SkipSamples:
        return SkipSamples(bad, max_skips=self._max_skips, stage=f"map({name_of(self._fn)})")


class Mapped(_Applied):
    """Another source with a function applied to each sample."""

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """`fn` of each of the source's samples."""
        results: list[Any] = []
        bad: dict[int, BadSample] = {}
        for index, sample in zip(indices, self._source.samples(indices, epoch), strict=True):
            try:
                results.append(keep_weights(sample, self._fn(sample)))
            except Exception as error:
                if self._on_error == "raise":
                    blame("map", self._fn, error, index, epoch)
                    raise
                bad[int(index)] = bad_sample("map", self._fn, error, index)
        if bad:
            raise self._skip(bad)
        return results


class BatchMapped(_Applied):
    """Another source with a function applied to the batch of the samples that are asked for."""

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """The rows of one call."""
        return uncollate(self.batch(indices, epoch), len(indices))

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        """`fn` of the source's batch, arrays as tensors, checked to have one row per sample still."""
        given = self._given(indices, epoch)
        try:
            result = keep_weights(given, self._fn(given))
        except Exception as error:
            bad = self._culprits(indices, epoch)
            if bad and self._on_error == "skip":
                raise self._skip(bad) from None
            if bad:
                blame("map", self._fn, error, next(iter(bad)), epoch, f", in a batch of {len(indices)}")
            else:
                error.add_note(
                    f"raised by map({name_of(self._fn)}, batched=True) for a batch of {len(indices)} samples, in epoch "
                    f"{epoch}; for each of them alone it does not raise"
                )
            raise
        return check_rows("map", self._fn, to_tensors(result), len(indices))

    def _given(self, indices: Indices, epoch: int) -> Tree:
        return with_string_arrays(self._source.batch(indices, epoch), len(indices))

    def _culprits(self, indices: Indices, epoch: int) -> dict[int, BadSample]:
        """Samples for which the function raises when it is given them alone."""
        bad: dict[int, BadSample] = {}
        for index in indices:
            alone = self._given([int(index)], epoch)
            try:
                self._fn(alone)
            except Exception as error:
                bad[int(index)] = bad_sample("map", self._fn, error, index)
        return bad


def check_rows(stage: str, fn: Any, tree: Tree, num_rows: int) -> Tree:
    """The tree, or a DataError where a part of it has not one row for each sample."""

    def check(path: str, leaf: Any) -> Any:
        is_array = isinstance(leaf, (torch.Tensor, np.ndarray))
        if not is_array or leaf.ndim == 0 or len(leaf) != num_rows:
            got = f"shape {tuple(leaf.shape)}" if is_array else f"a {type(leaf).__name__}"
            where = f" at {path}" if path else ""
            raise DataError(
                f"the function '{name_of(fn)}' of {stage}(batched=True) was given a batch of {num_rows} samples and gave "
                f"{got}{where}. It must return tensors or arrays with one row per sample, in the same order; to leave "
                "samples out there is filter."
            )
        return leaf

    return map_leaves(check, tree)
