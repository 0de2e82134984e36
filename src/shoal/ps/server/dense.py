"""Dense parameters on a server: their memory, one torch.optim object per chunk, sums, reads and writes.

How parameters are cut into chunks is in ps/layout.py.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch

from shoal import system
from shoal.errors import ConfigError
from shoal.ps.layout import dtype_name, is_element_wise, num_elements, optimizer_class, torch_dtype
from shoal.runtime.transport import memfd
from shoal.runtime.transport.messages.client_server import ChunkSpec, Settings

# ---- memory --------------------------------------------------------------------------------------


MEMORY_BYTES = 64 << 20  # of one piece of shared memory, unless a chunk is larger

ALIGNMENT = 64


class DenseMemory:
    """Dense memory of one server: shared with clients of its host, or private on a device."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self._memories: list[tuple[int, int, mmap.mmap]] = []  # read-only descriptor, bytes, mapping
        self._used = 0  # of the last one
        self._free: dict[int, list[tuple[int, int]]] = {}

    @property
    def sizes(self) -> list[int]:
        return [size for _, size, _ in self._memories]

    @property
    def descriptors(self) -> list[int]:
        """Descriptors to read each of them; they stay open."""
        return [fd for fd, _, _ in self._memories]

    def alloc(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, tuple[int, int]]:
        """Zeros, and where they are: (memory, offset)."""
        if self.device is not None:
            return torch.zeros(numel, dtype=dtype, device=self.device), (0, 0)
        nbytes = _rounded(max(numel, 1) * dtype.itemsize)
        found = self._free.get(nbytes)
        is_used = bool(found)
        place = found.pop() if found else self._place(nbytes)
        memory, offset = place
        mapping = self._memories[memory][2]
        flat = torch.frombuffer(mapping, dtype=dtype, count=max(numel, 1), offset=offset)[:numel]
        if is_used:
            flat.zero_()  # fresh memory is, and backed only as it fills
        return flat, place

    def free(self, place: tuple[int, int], numel: int, dtype: torch.dtype) -> None:
        if self.device is None:
            self._free.setdefault(_rounded(max(numel, 1) * dtype.itemsize), []).append(place)

    def _place(self, nbytes: int) -> tuple[int, int]:
        if not self._memories or self._used + nbytes > self._memories[-1][1]:
            size = max(MEMORY_BYTES, nbytes)
            fd = memfd.create(size, "shoal-dense")
            try:
                mapping = memfd.map_shared(fd, size)
                # The descriptors passed on are read-only.
                readable = system.read_only(fd)
            finally:
                os.close(fd)
            weakref.finalize(self, os.close, readable)
            self._memories.append((readable, size, mapping))
            self._used = 0
        place = (len(self._memories) - 1, self._used)
        self._used += nbytes
        return place


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# ---- one chunk -----------------------------------------------------------------------------------


State = Mapping[int, Mapping[str, torch.Tensor]]  # by part, then by key

_OF_CONSTRUCTOR = ("initial_accumulator_value",)
"""Settings that an optimizer of torch reads where it is built, and not from its groups."""


@dataclass(slots=True)
class _Run:
    """Parts that are one parameter to the optimizer."""

    numbers: list[int]
    tensor: torch.Tensor
    start: int  # its first element in the chunk


class DenseChunk:
    """Elements in one piece, parts as views of it, and an optimizer over runs of them.

    A run is split into its parts for good once they differ in more than their elements: in having a
    gradient, or in the step counts of their state.
    """

    def __init__(
        self,
        spec: ChunkSpec,
        kind: type[torch.optim.Optimizer],
        groups: Sequence[Settings],
        memory: DenseMemory | tuple[torch.Tensor, tuple[int, int]],
    ) -> None:
        """A chunk in new memory, or in that of the chunk it replaces."""
        self.spec, self.kind, self.groups = spec, kind, groups
        sizes = [num_elements(part) for part in spec.parts]
        self.flat, self.place = (
            memory.alloc(sum(sizes), torch_dtype(spec.dtype)) if isinstance(memory, DenseMemory) else memory
        )
        views = torch.split(self.flat, sizes)
        self.parts = [view.view(part.shape) for view, part in zip(views, spec.parts, strict=True)]
        self._sum: torch.Tensor | None = None
        # Groups without a part in this chunk are left out, so the optimizer's own list is shorter.
        self._numbers = sorted({part.group for part in spec.parts})
        self._run_over(self._group() if is_element_wise(kind.__name__) else self._apart())

    def sum_memory(self) -> torch.Tensor:
        if self._sum is None:
            self._sum = torch.empty_like(self.flat)
        return self._sum

    def update(self, grad: torch.Tensor, unused: Sequence[int], settings: Sequence[Settings]) -> None:
        """One step of the optimizer; parts that are `unused` have no gradient."""
        for number, group in zip(self._numbers, self.optimizer.param_groups, strict=True):
            if settings:
                group.update(_plain(settings[number]))
        without = frozenset(unused)
        if any(0 < len(without.intersection(run.numbers)) < len(run.numbers) for run in self._runs):
            self._cut()
        for run in self._runs:
            piece = grad[run.start : run.start + run.tensor.numel()]
            run.tensor.grad = None if run.numbers[0] in without else piece.view(run.tensor.shape)
        try:
            self.optimizer.step()
        finally:
            for run in self._runs:
                run.tensor.grad = None

    def state(self) -> list[tuple[int, str, torch.Tensor]]:
        found: list[tuple[int, str, torch.Tensor]] = []
        for run in self._runs:
            held = [
                (key, value)
                for key, value in sorted(self.optimizer.state.get(run.tensor, {}).items())
                if isinstance(value, torch.Tensor)
            ]
            at = 0
            for number in run.numbers:
                part = self.parts[number]
                for key, value in held:
                    is_whole = len(run.numbers) > 1 and value.dim() > 0
                    mine = value[at : at + part.numel()].view(part.shape) if is_whole else value
                    found.append((number, key, mine))
                at += part.numel()
        return found

    def set_state(self, state: State) -> None:
        if not all(self._is_alike(run, state) for run in self._runs):
            self._cut()
        for run in self._runs:
            given = [state[number] for number in run.numbers if number in state]
            if len(run.numbers) == 1:
                together = [dict(each) for each in given]
            else:
                together = (
                    [{key: _joined([each[key] for each in given]) for key in given[0]}] if given else []
                )
            if together:
                self.optimizer.state[run.tensor] = {
                    key: self._placed(key, value) for key, value in together[0].items()
                }

    def _placed(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """On the elements' device; but step counts where torch keeps them: on the CPU by default."""
        settings = self.optimizer.param_groups[0]
        if key == "step" and not (settings.get("capturable") or settings.get("fused")):
            return value
        return value.to(self.flat.device)

    def copy_state(self, state: State) -> bool:
        """Set the state in the tensors that hold it; False, and nothing was set, where it has another form."""
        held = self.state()
        if len(held) != sum(map(len, state.values())):
            return False
        given = [state.get(number, {}).get(key) for number, key, _ in held]
        for (_, _, mine), value in zip(held, given, strict=True):
            if value is None or mine.shape != value.shape or mine.dtype != value.dtype:
                return False
        if not all(self._is_alike(run, state) for run in self._runs):
            return False
        for (_, _, mine), value in zip(held, given, strict=True):
            assert value is not None
            mine.copy_(value)
        return True

    def take_settings(self, other: DenseChunk) -> None:
        for mine, theirs in zip(self.optimizer.param_groups, other.optimizer.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    # ---- parts that are one parameter -----------------------------------------------------------

    def _apart(self) -> list[list[int]]:
        return [[number] for number in range(len(self.parts))]

    def _group(self) -> list[list[int]]:
        """Neighbours of one group. Not those of no dimension: their state could not be told from a count of steps."""

        def of(number: int) -> tuple[int, int]:
            part = self.spec.parts[number]
            return part.group, -1 if part.shape else number

        return [list(numbers) for _, numbers in groupby(range(len(self.parts)), of)]

    def _run_over(self, runs: list[list[int]]) -> None:
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + part.numel())
        self._runs = [
            _Run(
                numbers,
                self.parts[numbers[0]]
                if len(numbers) == 1
                else self.flat[starts[numbers[0]] : starts[numbers[-1] + 1]],
                starts[numbers[0]],
            )
            for numbers in runs
        ]
        by_group: dict[int, list[torch.Tensor]] = {}
        for run in self._runs:
            by_group.setdefault(self.spec.parts[run.numbers[0]].group, []).append(run.tensor)
        make: Any = self.kind  # every class of torch.optim has defaults for the rest
        groups = [{"params": by_group[number], **_plain(self.groups[number])} for number in self._numbers]
        # Adagrad makes its first state by the argument, whatever its groups say.
        first = {key: group[key] for group in groups[:1] for key in _OF_CONSTRUCTOR if key in group}
        self.optimizer: torch.optim.Optimizer = make(groups, **first)

    def _cut(self) -> None:
        """From now on every part is a parameter of its own."""
        if all(len(run.numbers) == 1 for run in self._runs):
            return
        before: dict[int, dict[str, torch.Tensor]] = {}
        for number, key, value in self.state():
            before.setdefault(number, {})[key] = value.clone()
        settings = [
            {k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups
        ]
        self._run_over(self._apart())
        for group, same in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(same)
        self.set_state(before)

    def _is_alike(self, run: _Run, state: State) -> bool:
        """True where the state of its parts can be one: all have it or none, and equal numbers where it is not by element."""
        if len(run.numbers) == 1 or not any(number in state for number in run.numbers):
            return True
        if not all(number in state for number in run.numbers):
            return False
        first, *others = (state[number] for number in run.numbers)
        return all(
            each.keys() == first.keys()
            and all(value.dim() or torch.equal(value, first[key]) for key, value in each.items())
            for each in others
        )


def check_settings(optimizer: str, groups: Sequence[Settings]) -> None:
    """Refuse hyper-parameters with which the optimizer cannot step: it is tried on one element."""
    make: Any = optimizer_class(optimizer)
    for number, group in enumerate(groups):
        if "params" in group:
            raise ConfigError(f"parameter group {number} brings its own parameters. It was not declared.")
        tried = torch.zeros(1, 1, requires_grad=True)
        tried.grad = torch.ones_like(tried)
        try:
            tried_with = make([{"params": [tried], **_plain(group)}])
            tried_with.step()
            tried_with.step()  # the first one makes what the next ones read
        except Exception as error:
            raise ConfigError(
                f"{optimizer} cannot make a step with the settings of parameter group {number} ({error}). They were not "
                "declared."
            ) from None


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in values]) if values[0].dim() else values[0]


def _plain(settings: Settings) -> dict[str, Any]:
    # Pairs such as betas are sent as lists; optimizers unpack either, but compare and save tuples.
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


# ---- all chunks ----------------------------------------------------------------------------------


StateEntry: TypeAlias = tuple[int, str, str, list[int]]
"""(part, key, dtype, shape) of one tensor of optimizer state."""

Elements: TypeAlias = torch.Tensor | memoryview | bytes
"""A chunk's elements, flat: a tensor, or the bytes of one."""


class DenseStore:
    """The chunks of one server.

    Nothing else writes into a chunk; `pull` copies. Gradients are only read.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """With a device elements and optimizer state are there, and what comes and goes is copied."""
        self._chunks: dict[int, DenseChunk] = {}
        self.memory = DenseMemory(device)

    def declare(self, chunks: Sequence[ChunkSpec], optimizer: str, groups: Sequence[Settings]) -> None:
        """Begin to keep these chunks, as zeros, besides those that are kept already."""
        kind = optimizer_class(optimizer)
        for spec in chunks:
            missing = {part.group for part in spec.parts} - set(range(len(groups)))
            if missing:
                raise ConfigError(
                    f"chunk {spec.number} has parts of parameter group {min(missing)}, but there are {len(groups)} groups. "
                    "It was not declared."
                )
            if spec.number not in self._chunks:
                self._chunks[spec.number] = DenseChunk(spec, kind, list(groups), self.memory)

    def drop(self, chunk: int) -> None:
        dropped = self._chunks.pop(chunk, None)
        if dropped is not None:
            self.memory.free(dropped.place, dropped.flat.numel(), dropped.flat.dtype)

    def place(self, chunk: int) -> tuple[int, int]:
        """(memory, offset) of its elements, for as long as it is kept."""
        return self._chunks[chunk].place

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def num_bytes(self, chunk: int) -> int:
        flat = self._chunks[chunk].flat
        return flat.numel() * flat.element_size()

    def pull(self, chunk: int, out: Elements) -> None:
        self._whole(chunk, out).copy_(self._chunks[chunk].flat)

    def summed(self, chunk: int, contributions: Sequence[Elements]) -> torch.Tensor:
        """Sum of the ranks' gradients, given in rank order: valid until the next one. A single one is not copied."""
        total = self._as_tensor(chunk, contributions[0])
        for one in contributions[1:]:
            # Into memory of its own, reused at every step: fresh pages cost as much as the sum.
            total = torch.add(total, self._as_tensor(chunk, one), out=self._chunks[chunk].sum_memory())
        return total

    def sum_of_squares(self, chunk: int, grad: Elements) -> float:
        flat = self._as_tensor(chunk, grad)
        return float(torch.dot(flat.double(), flat.double()))

    def update(
        self,
        chunk: int,
        grad: Elements,
        unused: Sequence[int] = (),
        settings: Sequence[Settings] = (),
        *,
        factor: float = 1.0,
    ) -> None:
        """One step of the optimizer with the gradient times `factor`; parts that are `unused` have none.

        `settings` are those of all parameter groups, and stay; without, they are as they were.
        """
        flat = self._as_tensor(chunk, grad)
        self._chunks[chunk].update(flat if factor == 1.0 else flat * factor, unused, settings)

    def read(self, chunk: int) -> tuple[torch.Tensor, list[StateEntry], list[torch.Tensor]]:
        """The elements (not a copy: until the next update), then what the state is and its tensors."""
        kept = self._chunks[chunk]
        found = kept.state()
        entries = [(part, key, dtype_name(tensor.dtype), list(tensor.shape)) for part, key, tensor in found]
        return kept.flat.cpu(), entries, [tensor.cpu() for _, _, tensor in found]

    def write(
        self,
        chunk: int,
        elements: Elements,
        entries: Sequence[StateEntry] = (),
        tensors: Sequence[Elements] = (),
    ) -> None:
        """Set elements and state, as `read` gave them; without state the optimizer begins anew."""
        kept = self._chunks[chunk]
        spec = kept.spec
        state: dict[int, dict[str, torch.Tensor]] = {}
        for (part, key, dtype, shape), given in zip(entries, tensors, strict=True):
            if not 0 <= part < len(spec.parts):
                raise ConfigError(
                    f"chunk {chunk} has {len(spec.parts)} parts, but state came for part {part}. Nothing was changed."
                )
            state.setdefault(part, {})[key] = as_flat(given, torch_dtype(dtype)).reshape(shape)
        flat = self._whole(chunk, elements)
        if kept.copy_state(state):  # of a replica, that has what an earlier update left
            kept.flat.copy_(flat)
            return
        state = {part: {key: value.clone() for key, value in each.items()} for part, each in state.items()}
        renewed = DenseChunk(spec, kept.kind, kept.groups, (kept.flat, kept.place))
        renewed.flat.copy_(flat)
        renewed.take_settings(kept)
        renewed.set_state(state)
        self._chunks[chunk] = renewed

    def _as_tensor(self, chunk: int, elements: Elements) -> torch.Tensor:
        """Where the chunk is: a copy, if that is on a device."""
        return self._whole(chunk, elements).to(self._chunks[chunk].flat.device)

    def _whole(self, chunk: int, elements: Elements) -> torch.Tensor:
        kept = self._chunks[chunk].flat
        flat = as_flat(elements, kept.dtype)
        if flat.numel() != kept.numel():
            raise ConfigError(
                f"chunk {chunk} has {kept.numel()} elements of {dtype_name(kept.dtype)}, but {flat.numel()} came. Nothing was "
                "changed."
            )
        return flat


def as_flat(elements: Elements, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over the same memory. What cannot be written must not be: torch does not look."""
    if isinstance(elements, torch.Tensor):
        return elements.reshape(-1)
    raw = np.frombuffer(elements, np.uint8)
    if not len(raw):
        return torch.empty(0, dtype=dtype)
    if len(raw) % dtype.itemsize:
        raise ConfigError(
            f"{len(raw)} bytes are no whole number of elements of {dtype_name(dtype)}. Nothing was changed."
        )
    if raw.flags.writeable:
        return torch.from_numpy(raw).view(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it must not be written: it is not
        return torch.from_numpy(raw).view(dtype)
