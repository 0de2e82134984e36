"""Embeddings whose rows are on servers: what a module's forward calls instead of its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.embedding import HashEmbedding
from shoal.embedding.lookup import embedding_bag_forward, embedding_forward
from shoal.embedding.row_source import LocalRows, merged, uniques_of
from shoal.errors import TrainingError
from shoal.parallel.ps.embedding_placement import PlacedEmbedding
from shoal.ps.client.bulk_transfer import read_table
from shoal.ps.client.pulls import RowsPull
from shoal.ps.client.server_group import Group
from shoal.runtime.transport.messages.client_server import TableSpec

_KINDS = (nn.Embedding, nn.EmbeddingBag)
_DTYPES = {torch.float32: "float32", torch.float64: "float64"}


class RowModule:
    """One taken-over module: pulls rows for its forward and keeps their gradients for the step.

    `clock` and `is_training` are set by the strategy before the model runs.
    Outside of training what is pulled is a copy, and gradients are nobody's.
    """

    def __init__(
        self, taken: PlacedEmbedding, number: int, group: Group, *, dtype: torch.dtype, seed: int
    ) -> None:
        self.taken, self.module = taken, taken.module
        self.clock, self.is_training = 0, True
        self.weight = 1.0
        """Of gradients that backward leaves, where a loop of the script's own calls it."""
        self.staleness: list[int] = []
        self.newest = 0
        """The most updates that any row pulled so far had behind it."""
        module = taken.module
        settings: dict[str, Any] = {"num_rows": None}
        if isinstance(module, HashEmbedding):
            settings |= {"init": module.init, "scale": module.scale, "seed": module.seed}
            self.dim = module.embedding_dim
        else:
            settings |= {"num_rows": module.num_embeddings, "seed": seed}
            self.dim = int(module.embedding_dim)  # type: ignore[arg-type]
        self.spec = TableSpec(
            number=number,
            name=taken.name,
            dim=self.dim,
            dtype=_DTYPES[dtype],  # type: ignore[arg-type]
            rule=taken.rule.name,
            settings=taken.rule.settings,
            **settings,
        )
        self.np_dtype = np.dtype(self.spec.dtype)
        self._group = group
        self._ahead: RowsPull | None = None
        self._seen: tuple[Tensor, NDArray[np.int64], NDArray[Any]] | None = None
        self._pulls: list[RowsPull] = []
        self._gradients: list[tuple[NDArray[np.int64], NDArray[Any]]] = []
        self._forward: Callable[..., Any] | None = None

    # ---- in the place of the weight -------------------------------------------------------------

    def install(self) -> None:
        """From now on the module's forward looks its rows up here."""
        module = self.module
        if isinstance(module, _KINDS):
            module.weight.grad = None
        if isinstance(module, HashEmbedding):
            module.use(self)
        elif isinstance(module, nn.EmbeddingBag):
            bag = module
            module.forward = lambda input, offsets=None, per_sample_weights=None: embedding_bag_forward(  # type: ignore[method-assign]
                self,
                input,
                offsets,
                mode=bag.mode,
                per_sample_weights=per_sample_weights,
                include_last_offset=bag.include_last_offset,
                padding_idx=bag.padding_idx,
            )
        else:
            assert isinstance(module, nn.Embedding)
            padding_idx = module.padding_idx
            module.forward = lambda input: embedding_forward(self, input, padding_idx=padding_idx)  # type: ignore[method-assign]

    def uniques(self, ids: Tensor) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """The distinct ids in increasing order, and where each id is among them."""
        if self._seen is not None and self._seen[0] is ids:
            return self._seen[1:]
        return uniques_of(ids)

    def pull(self, keys: NDArray[np.int64]) -> Tensor:
        """Rows for these keys, as of the clock."""
        wrong = self._out_of_range(keys)
        if wrong is not None:  # as torch says it where the weight is here
            raise IndexError(
                f"id {wrong} is out of range: the embedding of '{self.taken.name}' has {self.spec.num_rows} rows"
            )
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (ahead.keys is keys or np.array_equal(ahead.keys, keys)):
            pull = ahead
        else:
            if ahead is not None:
                self._pulls.append(ahead)
            pull = self._new_pull(keys, self.clock)
            self._group.start(pull)
        self._group.finish(pull)
        self.newest = max(self.newest, pull.updates)
        if not self.is_training or not torch.is_grad_enabled():  # there may be no step that would release it
            rows = torch.from_numpy(pull.rows).clone()
            pull.release()
            return rows
        self.staleness.append(pull.staleness)
        self._pulls.append(pull)
        return torch.from_numpy(pull.rows)

    def push(self, keys: NDArray[np.int64], gradients: NDArray[Any]) -> None:
        """The gradients of rows that were pulled; kept for the step."""
        if self.is_training and self.weight:  # a borrowed sample gives nothing
            self._gradients.append((keys, gradients if self.weight == 1.0 else gradients * self.weight))

    def everything(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """All rows that the servers hold, by increasing key."""
        return read_table(self._group, self.spec)[:2]

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalRows:
        """Rows of a copied model: those on the servers now, in this process."""
        copied = LocalRows(self.spec)
        copied.replace(*self.everything(), None, 0)
        return copied

    # ---- what the strategy asks -----------------------------------------------------------------

    def pull_ahead(self, ids: Tensor, clock: int) -> None:
        """Ask for the rows of a batch that comes next."""
        keys, inverse = uniques_of(ids)
        if self._out_of_range(keys) is not None:
            return  # it is said where they are used
        self._seen = (ids, keys, inverse)
        if self._ahead is not None:
            self._pulls.append(self._ahead)
        self._ahead = self._new_pull(keys, clock)
        self._group.start(self._ahead)

    def _out_of_range(self, keys: NDArray[np.int64]) -> int | None:
        if self.spec.num_rows is None or not len(keys) or (keys[0] >= 0 and keys[-1] < self.spec.num_rows):
            return None
        return int(keys[0] if keys[0] < 0 else keys[-1])

    def merge_gradients(self) -> None:
        """Have what backward left in one piece, each key once."""
        held = self.take_gradients()
        self._gradients = [held] if held is not None else []

    @property
    def gradients(self) -> tuple[NDArray[np.int64], NDArray[Any]] | None:
        """Result of `merge_gradients`; None where the module was not used."""
        return self._gradients[0] if self._gradients else None

    def take_gradients(self) -> tuple[NDArray[np.int64], NDArray[Any]] | None:
        """Take the gradients of backward, merged; None where the module was not used."""
        weight = getattr(self.module, "weight", None)
        if weight is not None and weight.grad is not None:
            raise TrainingError(
                f"'{self.taken.name}' got a gradient of its own: something besides its module's forward used it, which the "
                "first batch did not show, and its rows are on the servers. Nothing of this step was updated; call the "
                "module instead of using its weight, or use --strategy ddp."
            )
        gradients, self._gradients = self._gradients, []
        return merged(gradients) if gradients else None

    def scale(self, share: float) -> None:
        """Weight what backward left; nothing is left where this worker has no share."""
        self._gradients = [(keys, values * share) for keys, values in self._gradients] if share else []

    def release(self) -> None:
        """The step is over: nobody reads its rows any more."""
        for pull in self._pulls:
            pull.release()
        self._pulls = []

    def forget(self) -> None:
        """Gradients of a step that is not going to be."""
        self._gradients = []
        self.release()

    def _new_pull(self, keys: NDArray[np.int64], clock: int) -> RowsPull:
        return RowsPull(self.spec.number, keys, self.dim, self.np_dtype, clock=clock, create=False)
