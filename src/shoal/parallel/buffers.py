"""Buffers that a forward changes: BatchNorm's running statistics, and the user's own (a centre, a counter, a queue).

Each worker's forward changes its own copy. The commit makes them equal: floating buffers become the
average over the workers weighted by their samples, all others rank 0's. Constants (masks, tables of
positions) are never sent.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.collectives.sync_batchnorm import SyncedBatchNorm
from shoal.errors import ConfigError
from shoal.parallel.tensor_parallel.local import own_channels


class RunningStatistics:
    """The running statistics of a model, as one flat vector."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[_BatchNorm] = []
        self._buffers: list[Tensor] = []
        self._counters: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, SyncedBatchNorm) and own_channels(module) is None:
                continue  # every rank computes the same
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                assert module.running_var is not None
                self._modules.append(module)
                self._buffers += [module.running_mean, module.running_var]
                if module.num_batches_tracked is not None:
                    self._counters.append(module.num_batches_tracked)

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def flat(self) -> Tensor:
        here = device_of(self._model)
        return torch.cat(
            [
                # Another stage of a pipeline holds it, and contributes it.
                torch.zeros(buffer.numel(), dtype=torch.float64, device=here)
                if buffer.is_meta
                else buffer.detach().reshape(-1).to(torch.float64)
                for buffer in self._buffers
            ]
        )

    def contribution(self, share: float, *, counts: bool) -> Tensor:
        """Contribution of this rank to the new values: all if it counts, else only the channels that
        no other rank of tp computes.
        """
        flat, at = self.flat(), 0
        for number, buffer in enumerate(self._buffers):
            channels, end = own_channels(self._modules[number // 2]), at + buffer.numel()
            if channels is not None:
                flat[at : at + channels.start] = 0
                flat[at + channels.stop : end] = 0
            elif not counts:
                flat[at:end] = 0
            at = end
        return flat * share

    def write(self, flat: Tensor) -> None:
        """Write values in the order of `flat`. A frozen layer keeps its own: an average would round them."""
        at = 0
        for number, buffer in enumerate(self._buffers):
            if self._modules[number // 2].training:
                buffer.copy_(flat[at : at + buffer.numel()].view(buffer.shape))
            at += buffer.numel()

    def keep(self) -> tuple[Tensor, list[Tensor]]:
        """Copy all values before a forward whose step may be skipped."""
        return self.flat(), self.counts()

    def take_back(self, kept: tuple[Tensor, list[Tensor]]) -> None:
        """Restore the values of `keep`."""
        self.write(kept[0])
        self.write_counts(kept[1])

    def counts(self) -> list[Tensor]:
        """Copies of the batch counters of all layers. Every worker counts alike, so these need no average."""
        return [counter.clone() for counter in self._counters]

    def write_counts(self, counts: list[Tensor]) -> None:
        """Restore the counters, for the next slice of the same batch."""
        for counter, count in zip(self._counters, counts, strict=True):
            counter.copy_(count)


_BUFFERS = operator.attrgetter("_buffers")


def have_buffers(modules: Sequence[nn.Module]) -> bool:
    """Whether one has any: else their names, which cost a tenth of a short step's Python time, need not be found."""
    return any(map(_BUFFERS, modules))


def device_of(model: nn.Module) -> torch.device | None:
    """Device of the part of a model that this rank holds."""
    held = (*model.parameters(), *model.buffers())
    return next((tensor.device for tensor in held if not tensor.is_meta), None)


# Elements up to which a buffer is copied before it is known to change, and sent under ps.
SMALL_NUMEL = 1 << 16


class ChangingBuffers:
    """Watches a model's buffers from one commit to the next, without reading them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = [
            (module, key)
            for module in model.modules()
            if not isinstance(module, _BatchNorm)
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._seen: list[tuple[int, int]] = []
        self._have_changed: set[int] = set()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Tensor:
        module, key = self._places[number]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer

    def look(self) -> None:
        """Start watching for changes."""
        self._seen = [_standing(self[number]) for number in range(len(self))]

    def flags(self) -> list[float]:
        """1 for each buffer that was changed since `look`, 0 for the others."""
        if not self._seen:
            return [0.0] * len(self)
        return [float(_standing(self[number]) != seen) for number, seen in enumerate(self._seen)]

    def contribution(self, numbers: Sequence[int], *, share: float, rank: int) -> Tensor:
        """Contribution of this rank to the new values of these buffers."""
        here = device_of(self._model)
        parts = []
        for buffer in (self[number].detach() for number in numbers):
            if buffer.is_meta:  # another stage of a pipeline holds it
                parts.append(torch.zeros(buffer.numel(), dtype=torch.float64, device=here))
                continue
            weight = share if buffer.is_floating_point() else float(rank == 0)
            parts.append(buffer.reshape(-1).to(torch.float64) * weight)
        return torch.cat(parts)

    def write(
        self, numbers: Sequence[int], flat: Tensor, *, total_share: float = 1.0, has_first: bool = True
    ) -> None:
        """Write the values all ranks agreed on. If rank 0 is not in the sum, buffers that only it determines stay."""
        at = 0
        for number in numbers:
            buffer = self[number]
            value = flat[at : at + buffer.numel()].view(buffer.shape)
            if buffer.is_floating_point():
                buffer.copy_(value / total_share)
            elif has_first:
                buffer.copy_(value)
            at += buffer.numel()
        self._have_changed.update(numbers)

    def constants(self) -> set[int]:
        """Ids of large buffers that never changed, which need no copy before a forward."""
        return {
            id(self[number])
            for number in range(len(self))
            if number not in self._have_changed and self[number].numel() > SMALL_NUMEL
        }


def _standing(buffer: Tensor) -> tuple[int, int]:
    """Identity that changes with every in-place write, and with a new tensor in its place."""
    return id(buffer), buffer._version


class BufferSync:
    """Statistics and buffers of one model, as part of a step's vector."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._modules = model, list(model.modules())
        self._statistics = RunningStatistics(model)
        self._changing = ChangingBuffers(model)
        self._numbers = [n for n in range(len(self._changing)) if self._changing[n].numel() <= SMALL_NUMEL]
        self._is_known = False
        self._is_elsewhere = False
        self._before: dict[str, Tensor] = {}
        self._counts_after: list[int] = []  # in a replacement: BatchNorm's, as of the forward before its note

    def __bool__(self) -> bool:
        """Whether anything besides the parameters changes."""
        return bool(self._statistics) or bool(self._numbers)

    # ---- around a forward -----------------------------------------------------------------------

    def look(self) -> None:
        """Keep the values before a forward writes into them."""
        if not have_buffers(self._modules):
            return
        names = self._names()
        self._before = {name: buffer.clone() for name, buffer in self._model.named_buffers() if name in names}
        self._changing.look()

    def restore(self) -> None:
        for name, buffer in self._model.named_buffers():
            if name in self._before:
                buffer.copy_(self._before[name])

    def forget(self) -> None:
        """Drop the kept values: the step is committed."""
        self._before = {}

    # ---- in the vector --------------------------------------------------------------------------

    def contribution(self, *, share: float, rank: int) -> list[Tensor]:
        """This rank's contribution to the vector, in host memory; the same length on every rank."""
        parts = [self._statistics.flat().cpu() * share] if self._statistics else []
        if self._changing:
            flags = self._changing.flags()
            for number, flag in enumerate(flags):
                if flag and self._changing[number].numel() > SMALL_NUMEL:
                    raise ConfigError(
                        f"forward changes a buffer of {self._changing[number].numel():,} elements, and at most {SMALL_NUMEL:,} "
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
        """Write the values the ranks agreed on. `late` sums a tensor over the ranks: for buffers that
        changed for the first time.

        If not all ranks are in the sum: `total_share` of those that are, and whether the first rank
        is.
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
        """Where each worker trains batches of its own: average their statistics."""
        if self._statistics:
            self._statistics.write(mean(self._statistics.flat()))

    # ---- for a replacement ----------------------------------------------------------------------

    def export_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Names of the synchronised buffers, and their values as of the last commit."""
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
        self._numbers, self._is_known = list(plain["numbers"]), plain["is_known"]
        for name, buffer in self._model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
        self._before, self._counts_after = {}, list(plain["counts"])

    def was_computed_elsewhere(self) -> None:
        """The next concluded step was computed by the process that this one replaces, and BatchNorm counted it."""
        self._is_elsewhere = True

    def _names(self) -> set[str]:
        """Synchronised buffers, and BatchNorm's."""
        constant = {id(self._changing[n]) for n in range(len(self._changing)) if n not in self._numbers}
        return {name for name, buffer in self._model.named_buffers() if id(buffer) not in constant}
