"""Buffer synchronisation under ps: statistics and changed buffers travel in the step's vector.

BatchNorm's running statistics always; buffers of the user's own once they
have been seen to change. In the first step all small ones travel, with a flag
each: what all ranks read from the summed flags is what travels from then on.
Constants (masks, tables of positions) do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.parallel.buffers import ChangingBuffers
from shoal.parallel.statistics import RunningStatistics

MAX_NUMEL = 1 << 16
"""Elements of a buffer that travels."""


class BufferSync:
    """Statistics and buffers of one model, as part of a step's vector."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._statistics = RunningStatistics(model)
        self._changing = ChangingBuffers(model)
        self._numbers = [n for n in range(len(self._changing)) if self._changing.numel(n) <= MAX_NUMEL]
        self._is_known = False
        self._is_elsewhere = False
        self._before: dict[str, Tensor] = {}
        self._counts_after: list[int] = []  # in a replacement: BatchNorm's, as of the forward before its note

    def __bool__(self) -> bool:
        """Whether anything besides the parameters changes."""
        return bool(self._statistics) or bool(self._numbers)

    # ---- around a forward -----------------------------------------------------------------------

    def look(self) -> None:
        """A forward is about to run, and writes into them: keep them as they are."""
        names = self._names()
        self._before = {name: buffer.clone() for name, buffer in self._model.named_buffers() if name in names}
        self._changing.look()

    def restore(self) -> None:
        """As if that forward had not been."""
        for name, buffer in self._model.named_buffers():
            if name in self._before:
                buffer.copy_(self._before[name])

    def forget(self) -> None:
        """The step is committed: they are as they shall be."""
        self._before = {}

    # ---- in the vector --------------------------------------------------------------------------

    def contribution(self, *, share: float, rank: int) -> list[Tensor]:
        """What this rank adds to the vector, in the host's memory; the same length on every rank."""
        parts = [self._statistics.flat().cpu() * share] if self._statistics else []
        if self._changing:
            flags = self._changing.flags()
            for number, flag in enumerate(flags):
                if flag and self._changing.numel(number) > MAX_NUMEL:
                    raise ConfigError(
                        f"forward changes a buffer of {self._changing.numel(number):,} elements, and at most {MAX_NUMEL:,} "
                        "travel with a step of the parameter server. Nothing was updated; use --strategy ddp."
                    )
            if self._numbers:
                parts.append(self._changing.contribution(self._numbers, share=share, rank=rank).cpu())
            parts.append(torch.tensor(flags, dtype=torch.float64))
        return parts

    def conclude(
        self,
        flat: Tensor,
        late: Callable[[Tensor], Tensor],
        *,
        share: float,
        rank: int,
        total_share: float = 1.0,
        has_first: bool = True,
    ) -> None:
        """Write what the ranks agreed on. `late` sums a tensor over the ranks: for buffers that changed for the first time.

        Where not all ranks are in the sum: `total_share` of those that are, and whether the first one is.
        """
        at = 0
        counts, self._counts_after = self._counts_after, []
        is_elsewhere, self._is_elsewhere = self._is_elsewhere, False
        if is_elsewhere and counts:
            self._statistics.write_counts([torch.tensor(count) for count in counts])
        if self._statistics:
            size = self._statistics.flat().numel()
            self._statistics.write(flat[:size] / total_share)
            at = size
        if not self._changing:
            return
        flags = flat[len(flat) - len(self._changing) :].tolist()
        changed = [number for number, flag in enumerate(flags) if flag]
        if changed and self._numbers:
            agreed = flat[at : len(flat) - len(self._changing)]
            self._changing.write(self._numbers, agreed, total_share=total_share, has_first=has_first)
        new = [number for number in changed if number not in self._numbers]
        if new:
            mine = self._changing.contribution(new, share=share, rank=rank)
            self._changing.write(new, late(mine))
        known = set(self._numbers) if self._is_known else set()
        self._numbers, self._is_known = sorted(known | set(changed)), True

    def average(self, mean: Callable[[Tensor], Tensor]) -> None:
        """Where each worker trains batches of its own: have the mean of their statistics."""
        if self._statistics:
            self._statistics.write(mean(self._statistics.flat()))

    # ---- for a replacement ----------------------------------------------------------------------

    def export_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Which ones travel, and their values as of the last commit."""
        names = self._names()
        buffers = {
            name: self._before.get(name, buffer)
            for name, buffer in self._model.named_buffers()
            if name in names
        }
        counts = [int(count) for count in self._statistics.counts()]
        return {"numbers": self._numbers, "is_known": self._is_known, "counts": counts}, buffers

    @torch.no_grad()
    def import_state(self, plain: dict[str, Any], buffers: dict[str, Tensor]) -> None:
        """Stand where the giver stood."""
        self._numbers, self._is_known = list(plain["numbers"]), plain["is_known"]
        for name, buffer in self._model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
        self._before, self._counts_after = {}, list(plain["counts"])

    def was_computed_elsewhere(self) -> None:
        """The step that is concluded next was computed by the process that this one replaces, and BatchNorm counted it."""
        self._is_elsewhere = True

    def _names(self) -> set[str]:
        """Buffers that travel, and BatchNorm's."""
        constant = {self._changing.identity(n) for n in range(len(self._changing)) if n not in self._numbers}
        return {name for name, buffer in self._model.named_buffers() if id(buffer) not in constant}
