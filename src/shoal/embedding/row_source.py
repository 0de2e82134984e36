"""Sources of an embedding's rows: the protocol that forward and backward use, and rows in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.embedding.kernels import unique
from shoal.embedding.row_table import RowTable
from shoal.errors import TrainingError
from shoal.runtime.transport.messages.client_server import TableSpec


class RowSource(Protocol):
    """Rows by key: from this process (`LocalRows`) or from servers.

    `pull` is called once per forward of the module, `push` once per backward
    of that forward, with the keys that got a gradient, each once, increasing.
    Whoever provides it decides what becomes of the gradients, and when.
    """

    def uniques(self, ids: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The distinct ids in increasing order, and the place among them of every id."""
        ...

    def pull(self, keys: NDArray[np.int64]) -> Tensor:
        """A row per key, on the CPU. It stays as it is until the backward that belongs to it is over."""
        ...

    def push(self, keys: NDArray[np.int64], gradients: NDArray[Any]) -> None:
        """Gradients of these keys, one row each."""
        ...

    def everything(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """All rows that there are, by increasing key: copies."""
        ...


def uniques_of(ids: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """`uniques` without a prefetch."""
    return unique(ids.detach().reshape(-1).cpu().numpy())


def merged(
    gradients: list[tuple[NDArray[np.int64], NDArray[Any]]],
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Several pushes as one, rows of one key added in the order of the pushes. At least one is given."""
    if len(gradients) == 1:
        return gradients[0]
    keys, inverse = unique(np.concatenate([keys for keys, _ in gradients]))
    rows = np.zeros((len(keys), gradients[0][1].shape[1]), gradients[0][1].dtype)
    start = 0
    for part, values in gradients:
        rows[inverse[start : start + len(part)]] += values  # no key twice within one push
        start += len(part)
    return keys, rows


class LocalRows:
    """A table, and the gradients that wait for the next update of it.

    Gradients add up until `apply` or `drop_gradients`, as a parameter's
    `grad` does. Rows come to be with their first update.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.table = RowTable(spec)
        self._gradients: list[tuple[NDArray[np.int64], NDArray[Any]]] = []
        self.has_rule = False

    def uniques(self, ids: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The distinct ids in increasing order, and the place among them of every id."""
        return uniques_of(ids)

    def pull(self, keys: NDArray[np.int64]) -> Tensor:
        """A row per key: a copy."""
        out = np.empty((len(keys), self.table.dim), self.table.dtype)
        self.table.pull(keys, out, create=False)
        return torch.from_numpy(out)

    def push(self, keys: NDArray[np.int64], gradients: NDArray[Any]) -> None:
        """Keep them for the next update."""
        if not self.has_rule:
            raise TrainingError(
                f"the rows of '{self.table.spec.name}' got gradients, but nobody updates them: they are no parameters, so "
                "no optimizer knows them. Nothing was changed; train with shoal.Trainer, or call "
                "`embedding.follow(optimizer)` once before the first step."
            )
        self._gradients.append((keys, gradients))

    def everything(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """All rows that there are, by increasing key: copies."""
        return self.table.read_rows(np.arange(self.table.num_rows))[:2]

    # ---- for whoever trains them ----

    def train_by(self, rule: str, settings: Mapping[str, float]) -> None:
        """Update rows by this rule from now on. With another rule than before, its state begins anew."""
        self.has_rule = True
        if rule == self.table.spec.rule:
            self.table.settings = dict(settings)
            return
        keys, values, _ = self.table.read_rows(np.arange(self.table.num_rows))
        self.table = RowTable(msgspec.structs.replace(self.table.spec, rule=rule, settings=dict(settings)))
        self.table.set(keys, values, None, 0)

    def replace(
        self, keys: NDArray[np.int64], values: NDArray[Any], state: NDArray[Any] | None, step: int
    ) -> None:
        """These rows and no others, after `step` updates; without state they have that of new rows."""
        settings = self.table.settings
        self.table = RowTable(self.table.spec)
        self.table.settings = settings
        self.table.set(keys, values, state, step)

    def replace_values(self, keys: NDArray[np.int64], values: NDArray[Any]) -> None:
        """These rows and no others; the state of those that were there before stays, and so does the number of updates."""
        had, _, state = self.table.read_rows(np.arange(self.table.num_rows))
        step = self.table.step
        self.replace(keys, values, None, step)
        both, new, old = np.intersect1d(keys, had, assume_unique=True, return_indices=True)
        self.table.set(both, values[new], state[old], step)

    def gradients(self) -> tuple[NDArray[np.int64], NDArray[Any]] | None:
        """Gradients of the next update, each key once; None where backward never came here."""
        if not self._gradients:
            return None
        self._gradients = [merged(self._gradients)]
        return self._gradients[0]

    def sum_of_squares(self) -> float:
        """Of the gradients that wait."""
        waiting = self.gradients()
        return 0.0 if waiting is None else float(np.sum(np.square(waiting[1], dtype=np.float64)))

    def apply(self, factor: float = 1.0) -> None:
        """One update with the gradients that wait, times `factor`; none where nothing waits, as with `grad=None`."""
        waiting = self.gradients()
        self._gradients = []
        if waiting is not None:
            self.table.apply(waiting[0], np.ascontiguousarray(waiting[1], self.table.dtype), factor)

    def drop_gradients(self) -> None:
        """Forget them: a step that is left out."""
        self._gradients = []

    def to(self, dtype: Literal["float32", "float64"]) -> LocalRows:
        """The same rows in another precision, without gradients."""
        copied = LocalRows(msgspec.structs.replace(self.table.spec, dtype=dtype))
        copied.table.settings, copied.has_rule = self.table.settings, self.has_rule
        keys, values, state = self.table.read_rows(np.arange(self.table.num_rows))
        copied.table.set(keys, values.astype(dtype), state.astype(dtype), self.table.step)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalRows:
        copied = LocalRows(self.table.spec)
        copied.table.settings = self.table.settings
        copied.table.set(*self.table.read_rows(np.arange(self.table.num_rows)), self.table.step)
        copied.has_rule = self.has_rule
        return copied
