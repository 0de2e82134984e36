"""Functions of samples: `map`, one by one or batched, `augment`, `with_weights`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shoal.data.collate import to_tensors, uncollate, with_string_arrays
from shoal.data.order.order import Indices, integers
from shoal.data.order.select import checked_weights
from shoal.data.skipping import SkipSamples
from shoal.data.slice import Weighted, keep_weights, split_target
from shoal.data.sources.source import DerivedSource, Source, bad_sample, blame, call_user, name_of
from shoal.data.tree import Tree, map_leaves
from shoal.data.values import Values, find_column, label_of
from shoal.errors import BadSample, ConfigError, DataError
from shoal.runtime.seeds import mix


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


class _Applied(DerivedSource):
    """Common part of `map` in both kinds: a function, and what to do when it raises."""

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


_AUGMENT = 0x4155474D454E54  # keeps augment(seed=0) and shuffle(seed=0) apart

Augment = Callable[[Any, torch.Generator], Any]


class Augmented(DerivedSource):
    """Another source with a function of (sample, generator) applied to each sample."""

    name = "augment"

    def __init__(self, source: Source, fn: Augment, seed: int) -> None:
        super().__init__(source)
        self._fn, self._seed = fn, seed
        self.runs_user_code = self.uses_epoch = True

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """`fn` of each sample, with a generator that is seeded for it."""
        generator = torch.Generator()
        changed = []
        for index, sample in zip(indices, self._source.samples(indices, epoch), strict=True):
            generator.manual_seed(augment_seed(self._seed, epoch, int(index)))
            try:
                changed.append(keep_weights(sample, self._fn(sample, generator)))
            except Exception as error:
                blame("augment", self._fn, error, index, epoch)
                raise
        return changed

    def describe(self) -> list[dict[str, Any]]:
        return [*self._source.describe(), {"stage": "augment", "fn": name_of(self._fn), "seed": self._seed}]


def augment_seed(seed: int, epoch: int, index: int) -> int:
    """Seed of the generator for one sample."""
    return mix(_AUGMENT, seed, epoch, index)


WeightBy = str | Callable[[Any], Any] | Values


class WeightedSource(DerivedSource):
    """Another source whose samples (inputs, target) get a weight.

    A column that is the weight is no input any more.
    """

    name = "with_weights"

    def __init__(self, source: Source, by: WeightBy) -> None:
        super().__init__(source)
        self._by, self._label = by, label_of(source)
        self._array: torch.Tensor | None = None
        if callable(by):
            self.runs_user_code = True

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        samples = self._source.samples(indices, epoch)
        if isinstance(self._by, Values):
            weights: list[Any] = list(self._weights_at(indices))
        elif isinstance(self._by, str):
            weights = [find_column(sample, self._by, self._label, "with_weights") for sample in samples]
        else:
            weights = [
                call_user("with_weights", self._by, index, epoch, sample)
                for index, sample in zip(indices, samples, strict=True)
            ]
        made = [
            self._weighted(sample, checked_weight(weight, index))
            for index, sample, weight in zip(indices, samples, weights, strict=True)
        ]
        return made

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        if callable(self._by):
            return super().batch(indices, epoch)
        batch = self._source.batch(indices, epoch)
        if isinstance(self._by, Values):
            return self._weighted(batch, self._weights_at(indices))
        weights = find_column(batch, self._by, self._label, "with_weights")
        return self._weighted(batch, checked_weight(weights, indices))

    def describe(self) -> list[dict[str, Any]]:
        by = self._by.describe() if isinstance(self._by, Values) else self._by
        return [
            *self._source.describe(),
            {"stage": "with_weights", "weights": by if isinstance(by, str) else name_of(by)},
        ]

    def _weights_at(self, indices: Indices) -> torch.Tensor:
        assert isinstance(self._by, Values)
        if self._array is None:
            self._array = torch.from_numpy(checked_weights(self._by).astype(np.float32))
        return self._array[torch.from_numpy(integers(indices))]

    def _weighted(self, sample: Any, weight: torch.Tensor) -> Weighted:
        return weighted(sample, weight, column=self._by if isinstance(self._by, str) else None)


def weighted(sample: Any, weight: torch.Tensor, *, column: str | None) -> Weighted:
    """A sample or batch (inputs, target) with its weight, which is no input any more where it was a column."""
    if isinstance(sample, Weighted):
        raise ConfigError("with_weights was called twice; multiply the weights and call it once")
    if not isinstance(sample, (tuple, list)) or len(sample) < 2:
        raise DataError(
            f"with_weights needs samples of (inputs, target), and these are a {type(sample).__name__}: without a target "
            "there is no loss to weight. Name the target with label=, or make pairs with map."
        )
    inputs, target = split_target(sample)
    if column is not None and isinstance(inputs, dict):
        inputs = {name: values for name, values in inputs.items() if name != column}
    return Weighted(inputs, target, weight)


def checked_weight(weight: Any, where: Any) -> torch.Tensor:
    """Weights as floats: finite, none below 0."""
    found = torch.as_tensor(weight).detach()
    if not found.is_floating_point():
        found = found.to(torch.float32)
    is_fine = torch.isfinite(found) & (found >= 0)
    if not bool(is_fine.all()):
        wrong = int(torch.nonzero(~is_fine.reshape(-1))[0])
        index = integers(where)[wrong] if not isinstance(where, (int, np.integer)) else where
        value = found.reshape(-1)[wrong].item()
        raise DataError(
            f"the weight of the sample with index {index} is {value}. A weight is a finite number of 0 or more; nothing was "
            "trained with it. Mend the column or the function."
        )
    return found
