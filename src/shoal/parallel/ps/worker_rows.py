"""A table's rows on the worker's device: looked up and updated there, with a record of those the servers lack.

For the only worker of an exact job. A table that fits is the module's own weight; of a larger or
unbounded one, the most recently used rows are here, the others are pulled with their optimizer
state on demand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.embedding.device_rows import ON_DEVICE, DeviceRows, summed
from shoal.embedding.row_table import ArrayIndex, HashedIndex
from shoal.embedding.rules import RULES
from shoal.errors import ConfigError, TrainingError
from shoal.parallel.ps.rows import PlacedEmbedding, RowModule
from shoal.ps.client.server_group import Group
from shoal.ps.client.step import RowsPull

BLOCK_ROWS = 65536
"""Rows read from the servers at a time."""


class WorkerRows(RowModule):
    """One table, at its only writer.

    `write_back` sends all changed rows to the servers, ordered before any later request to these;
    `settle` waits until they have arrived.
    """

    def __init__(
        self,
        taken: PlacedEmbedding,
        number: int,
        group: Group,
        *,
        seed: int,
        capacity: int,
        device: torch.device,
        held: Mapping[str, Tensor],
        write_back: Callable[[], None],
        settle: Callable[[], int],
    ) -> None:
        """`held`: optimizer state already created for the weight, if any. `settle` returns the servers' clock."""
        super().__init__(taken, number, group, seed=seed)
        if self.spec.policy is not None or self.spec.rule not in ON_DEVICE:
            why = "a RowPolicy" if self.spec.policy is not None else f"the rule '{self.spec.rule}'"
            raise ConfigError(
                f"--row-cache {capacity} updates rows at the worker, and '{taken.name}' has {why}, which only servers know to apply. Nothing "
                "was trained; leave --row-cache out."
            )
        self._capacity, self._write_back, self._settle = capacity, write_back, settle
        weight = getattr(taken.module, "weight", None)
        num_rows = self.spec.num_rows
        self.is_resident = isinstance(weight, Tensor) and num_rows is not None and num_rows <= capacity
        dtype = getattr(torch, self.spec.dtype)
        if self.is_resident:
            assert isinstance(weight, Tensor)
            values = weight.detach()
        else:
            values = torch.zeros(capacity, self.dim, dtype=dtype, device=device)
        self.rows = DeviceRows(values, self.spec.rule, self.spec.settings)
        names = RULES[self.spec.rule].state
        if self.is_resident and len(names) == 1 and names[0] in held:
            self.rows.state = held[names[0]]  # reuse the optimizer's existing state
        self._forget_places()
        self._now = 0
        self.is_training = False
        # Keys or places, gradients, and whether each row occurs once. Rows may move until the step ends:
        # keys do not.
        self._pending: list[tuple[NDArray[np.int64] | Tensor, Tensor, bool]] = []

    # ---- lookups --------------------------------------------------------------------------------

    def install(self) -> None:
        module, values = self.module, self.rows.values
        if not (self.is_resident and type(module) is nn.Embedding and values.device.type != "cpu"):
            super().install()
            return
        assert isinstance(module, nn.Embedding)
        padding_idx = module.padding_idx
        module.weight.grad = None

        def forward(input: Tensor) -> Tensor:
            """Ids are places: the host needs no knowledge of them."""
            out = F.embedding(input, values)
            if torch.is_grad_enabled():
                out.requires_grad_()
                out.register_hook(functools.partial(self._push_places, input, padding_idx))  # type: ignore[no-untyped-call]  # torch's
            return out

        module.forward = forward  # type: ignore[method-assign]

    def pull(self, keys: NDArray[np.int64]) -> Tensor:
        wrong = self._out_of_range(keys)
        if wrong is not None:
            raise IndexError(
                f"id {wrong} is out of range: the embedding of '{self.taken.name}' has {self.spec.num_rows} rows"
            )
        if self.is_training or self._index is None:
            return self.rows.values[self._on_device(self._places(keys))]
        # Reads outside of training evict no trained rows.
        places = np.empty(len(keys), np.int32)
        self._index.find(keys, places)
        found, is_new = self.rows.values[self._on_device(np.maximum(places, 0))], places < 0
        if is_new.any():
            pull = RowsPull(self.spec.number, keys[is_new], self.dim, self.np_dtype, clock=self._settle())
            self._group.run(pull)
            found[self._on_device(np.flatnonzero(is_new))] = torch.from_numpy(pull.rows).to(found.device)
            pull.release()
        return found

    def push(self, keys: NDArray[np.int64], gradients: Any) -> None:
        if self.is_training and not self.is_frozen:
            given = torch.from_numpy(gradients) if isinstance(gradients, np.ndarray) else gradients
            self._pending.append((keys, given, True))

    def _push_places(self, ids: Tensor, padding_idx: int | None, grad: Tensor) -> None:
        if not self.is_training or self.is_frozen:
            return
        places, grads = ids.detach().reshape(-1), grad.detach().reshape(-1, self.dim)
        if padding_idx is not None:
            is_used = places != padding_idx
            places, grads = places[is_used], grads[is_used]
        self._pending.append((places.long(), grads, False))

    def everything(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        self._write_back()
        self._settle()
        return super().everything()

    # ---- the step -------------------------------------------------------------------------------

    def next_step(self) -> None:
        self._now += 1
        self.is_training = True
        weight = getattr(self.module, "weight", None)
        if (
            self.is_resident
            and isinstance(weight, Tensor)
            and weight.data_ptr() != self.rows.values.data_ptr()
        ):
            raise TrainingError(
                f"'{self.taken.name}' was moved or replaced since its rows are trained in it (--row-cache {self._capacity}). Nothing of this "
                "step was updated; leave the model where it is, or --row-cache out."
            )

    def end_step(self) -> None:
        self._pending, self.is_training = [], False

    def take_sum(self) -> tuple[Tensor, Tensor] | None:
        """Places, each once, and the sums of their gradients; None if backward did not reach this table."""
        self.merge_gradients()
        pending, self._pending = self._pending, []
        if not pending:
            return None
        places, grads, _ = pending[0]
        assert isinstance(places, Tensor)
        return places, grads

    def merge_gradients(self) -> None:
        if not self._pending:
            return
        parts = [
            (at if isinstance(at, Tensor) else self._on_device(self._places(at)), grads, is_once)
            for at, grads, is_once in self._pending
        ]
        if len(parts) > 1:
            places, grads = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
            parts = [(places, grads, False)]
        if not parts[0][2]:
            parts = [(*summed(*parts[0][:2], len(self.rows.values)), True)]
        self._pending = [*parts]

    def sum_of_squares(self) -> float:
        self.merge_gradients()
        return sum(float(grads.double().square().sum()) for _, grads, _ in self._pending)

    # ---- between here and the servers -----------------------------------------------------------

    def take_changed(self) -> tuple[NDArray[np.int64], Tensor]:
        """Keys of rows that the servers do not have, increasing, and a copy of the rows, values and state side by side."""
        places, rows = self.rows.take_changed()
        keys = places.cpu().numpy()
        if self._index is not None:
            keys = self._index.keys.array[keys]
            order = np.argsort(keys)
            keys, rows = keys[order], rows[self._on_device(order)]
        return keys, rows

    def drop_changes(self) -> None:
        self.rows.is_changed.zero_()
        self.rows.num_changes = 0

    def read_from_servers(self) -> None:
        """Load the servers' rows: all of a table that fits; of another, none yet."""
        if not self.is_resident:
            self._forget_places()
            return
        num_rows = len(self.rows.values)
        for first in range(0, num_rows, BLOCK_ROWS):
            keys = np.arange(first, min(first + BLOCK_ROWS, num_rows), dtype=np.int64)
            self._read(keys, keys)

    def _read(self, keys: NDArray[np.int64], places: NDArray[Any]) -> None:
        width = self.dim + self.rows.state.shape[1]
        pull = RowsPull(self.spec.number, keys, width, self.np_dtype, clock=self._settle(), is_whole=True)
        self._group.run(pull)
        self.rows.fill(self._on_device(places), torch.from_numpy(pull.rows))
        pull.release()

    def _places(self, keys: NDArray[np.int64]) -> NDArray[Any]:
        """Places of these keys; missing rows are read."""
        if self._index is None:
            return keys
        places = np.empty(len(keys), np.int32)
        num_missing = self._index.find(keys, places)
        if num_missing:
            if self._index.num_rows + num_missing > self._capacity:
                self._used[places[places >= 0]] = self._now
                self._make_room(num_missing, len(keys))
                self._index.find(keys, places)
            is_new = places < 0
            self._index.add(keys, places, num_missing)
            self._read(keys[is_new], places[is_new])
        self._used[places] = self._now
        return places

    def _make_room(self, num_new: int, num_keys: int) -> None:
        """Evict the least recently used rows, at least a quarter of all: finding each alone would cost more."""
        assert self._index is not None
        num_here = self._index.num_rows
        used = self._used[:num_here]
        most = min(self._capacity - num_new, max(self._capacity * 3 // 4, int((used == self._now).sum())))
        if int((used == self._now).sum()) > self._capacity - num_new:
            raise TrainingError(
                f"one step uses more than {self._capacity:,} rows of '{self.taken.name}' ({num_keys:,} of them in one lookup), and --row-cache "
                f"keeps {self._capacity:,}. Nothing of this step was updated; give more, or a smaller batch."
            )
        self._write_back()  # evicted rows are on their way
        num_left = min(most, num_here)
        is_dropped = np.zeros(num_here, np.bool_)
        is_dropped[np.argsort(used, kind="stable")[: num_here - num_left]] = True
        keys = self._index.keys.array
        dropped = keys[:num_here][is_dropped]
        holes = np.flatnonzero(is_dropped[:num_left])
        moved = num_left + np.flatnonzero(~is_dropped[num_left:])
        keys[holes], self._used[holes] = keys[moved], self._used[moved]
        self.rows.move(self._on_device(holes), self._on_device(moved))
        self._index.rebuild(dropped, num_left)

    def _forget_places(self) -> None:
        self._index: ArrayIndex | HashedIndex | None = None
        if not self.is_resident:
            num_rows = self.spec.num_rows
            self._index = HashedIndex(self.rows.row_bytes) if num_rows is None else ArrayIndex(num_rows)
            self._used = np.zeros(self._capacity, np.int64)
            self.rows.is_changed.zero_()

    def _on_device(self, places: NDArray[Any]) -> Tensor:
        return torch.from_numpy(places).to(self.rows.values.device, torch.int64)
