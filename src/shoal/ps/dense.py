"""Dense parameters on a server: chunks, and the user's own torch.optim class over their parts.

Every chunk has an optimizer object of its own, so slots come, go and are
restored alone. What torch does with groups, steps and parameters without
gradient is what happens here. How parameters are cut is in dense_plan.py.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from shoal.core.errors import ConfigError
from shoal.ps.dense_memory import DenseMemory
from shoal.ps.dense_plan import num_elements, optimizer_class, torch_dtype
from shoal.wire.ps_messages import ChunkSpec, Settings

StateEntry: TypeAlias = tuple[int, str, str, list[int]]
"""(part, key, dtype, shape) of one tensor of optimizer state."""

Elements: TypeAlias = torch.Tensor | np.ndarray[Any, Any] | memoryview | bytes
"""A chunk's elements, flat: a tensor, or the bytes of one."""


class DenseStore:
    """The chunks of one server.

    Nobody else writes into a chunk; `pull` copies. Gradients are only read.
    """

    def __init__(self) -> None:
        self._chunks: dict[int, _Chunk] = {}
        self.memory = DenseMemory()

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
                self._chunks[spec.number] = _Chunk(spec, kind, list(groups), self.memory)

    def drop(self, chunk: int) -> None:
        """Forget a chunk and its state."""
        dropped = self._chunks.pop(chunk, None)
        if dropped is not None:
            self.memory.free(dropped.place, dropped.flat.numel(), dropped.flat.dtype)

    def place(self, chunk: int) -> tuple[int, int]:
        """Where its elements are, for as long as it is kept: (memory, offset)."""
        return self._chunks[chunk].place

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def num_bytes(self, chunk: int) -> int:
        """Of the chunk's elements."""
        flat = self._chunks[chunk].flat
        return flat.numel() * flat.element_size()

    def num_state_bytes(self, chunk: int) -> int:
        """Of its optimizer's state."""
        return sum(tensor.numel() * tensor.element_size() for _, _, tensor in self._chunks[chunk].state())

    def pull(self, chunk: int, out: Elements) -> None:
        """Write the elements to `out`."""
        self._as_tensor(chunk, out).copy_(self._chunks[chunk].flat)

    def summed(self, chunk: int, contributions: Sequence[Elements]) -> torch.Tensor:
        """The sum of the ranks' gradients, given in rank order: good until the next one. A single one is not copied."""
        total = self._as_tensor(chunk, contributions[0])
        for one in contributions[1:]:
            # Into memory of its own, and the same at every step: fresh pages cost as much as the sum.
            total = torch.add(total, self._as_tensor(chunk, one), out=self._chunks[chunk].sum_memory())
        return total

    def sum_of_squares(self, chunk: int, grad: Elements) -> float:
        """Of all elements, in float64."""
        flat = self._as_tensor(chunk, grad)
        return float(torch.dot(flat.double(), flat.double()))

    def update(
        self,
        chunk: int,
        grad: Elements,
        unused: Sequence[int] = (),
        settings: Sequence[Settings] | Mapping[int, Settings] = (),
        *,
        factor: float = 1.0,
    ) -> None:
        """One step of the optimizer with the gradient times `factor`; parts that are `unused` have none.

        `settings` are those of parameter groups, all in their order or some by their number; they stay.
        """
        flat = self._as_tensor(chunk, grad)
        by_group = settings if isinstance(settings, Mapping) else dict(enumerate(settings))
        self._chunks[chunk].update(flat if factor == 1.0 else flat * factor, unused, by_group)

    def read(self, chunk: int) -> tuple[torch.Tensor, list[StateEntry], list[torch.Tensor]]:
        """The elements (not a copy: until the next update), then what the state is and its tensors."""
        kept = self._chunks[chunk]
        found = kept.state()
        entries = [(part, key, _name(tensor.dtype), list(tensor.shape)) for part, key, tensor in found]
        return kept.flat, entries, [tensor for _, _, tensor in found]

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
            state.setdefault(part, {})[key] = as_flat(given, torch_dtype(dtype)).reshape(shape).clone()
        flat = self._as_tensor(chunk, elements)
        renewed = _Chunk(spec, kept.kind, kept.groups, (kept.flat, kept.place))
        renewed.flat.copy_(flat)
        renewed.take_settings(kept)
        renewed.set_state(state)
        self._chunks[chunk] = renewed

    def digest(self, chunk: int) -> int:
        """64 bits that are equal where elements and state are."""
        flat, entries, tensors = self.read(chunk)
        hashed = hashlib.blake2b(digest_size=8)
        hashed.update(_bytes(flat))
        for entry, tensor in sorted(zip(entries, tensors, strict=True), key=lambda pair: pair[0][:2]):
            hashed.update(repr(entry).encode())
            hashed.update(_bytes(tensor))
        return int.from_bytes(hashed.digest(), "little")

    def _as_tensor(self, chunk: int, elements: Elements) -> torch.Tensor:
        kept = self._chunks[chunk].flat
        flat = as_flat(elements, kept.dtype)
        if flat.numel() != kept.numel():
            raise ConfigError(
                f"chunk {chunk} has {kept.numel()} elements of {_name(kept.dtype)}, but {flat.numel()} came. Nothing was "
                "changed."
            )
        return flat


class _Chunk:
    """Elements in one piece, parts as views of it, and an optimizer over them."""

    def __init__(
        self,
        spec: ChunkSpec,
        kind: type[torch.optim.Optimizer],
        groups: Sequence[Settings],
        memory: DenseMemory | tuple[torch.Tensor, tuple[int, int]],
    ) -> None:
        """In new memory, or in that of the chunk it stands for from now on."""
        self.spec, self.kind, self.groups = spec, kind, groups
        sizes = [num_elements(part) for part in spec.parts]
        self.flat, self.place = (
            memory.alloc(sum(sizes), torch_dtype(spec.dtype)) if isinstance(memory, DenseMemory) else memory
        )
        views = torch.split(self.flat, sizes)
        self.parts = [view.view(part.shape) for view, part in zip(views, spec.parts, strict=True)]
        self._sizes = sizes
        self._sum: torch.Tensor | None = None
        # Groups without a part in this chunk are left out, so the optimizer's own list is shorter.
        self._numbers = sorted({part.group for part in spec.parts})
        make: Any = kind  # every class of torch.optim has defaults for the rest
        self.optimizer: torch.optim.Optimizer = make(
            [
                {
                    "params": [
                        view
                        for view, part in zip(self.parts, spec.parts, strict=True)
                        if part.group == number
                    ],
                    **_plain(groups[number]),
                }
                for number in self._numbers
            ]
        )

    def sum_memory(self) -> torch.Tensor:
        """Where gradients are added."""
        if self._sum is None:
            self._sum = torch.empty_like(self.flat)
        return self._sum

    def update(self, grad: torch.Tensor, unused: Sequence[int], settings: Mapping[int, Settings]) -> None:
        for number, group in zip(self._numbers, self.optimizer.param_groups, strict=True):
            if number in settings:
                group.update(_plain(settings[number]))
        without = frozenset(unused)
        pieces = torch.split(grad, self._sizes)
        for number, (part, piece) in enumerate(zip(self.parts, pieces, strict=True)):
            part.grad = None if number in without else piece.view(part.shape)
        try:
            self.optimizer.step()
        finally:
            for part in self.parts:
                part.grad = None

    def state(self) -> list[tuple[int, str, torch.Tensor]]:
        """(part, key, tensor), by part and key."""
        return [
            (number, key, value)
            for number, part in enumerate(self.parts)
            for key, value in sorted(self.optimizer.state.get(part, {}).items())
            if isinstance(value, torch.Tensor)
        ]

    def set_state(self, state: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        for number, tensors in state.items():
            self.optimizer.state[self.parts[number]] = dict(tensors)

    def take_settings(self, other: _Chunk) -> None:
        for mine, theirs in zip(self.optimizer.param_groups, other.optimizer.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})


def as_flat(elements: Elements, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over the same memory. What cannot be written must not be: torch does not look."""
    if isinstance(elements, torch.Tensor):
        return elements.reshape(-1)
    raw = (
        np.frombuffer(elements, np.uint8)
        if not isinstance(elements, np.ndarray)
        else elements.reshape(-1).view(np.uint8)
    )
    if not len(raw):
        return torch.empty(0, dtype=dtype)
    if len(raw) % dtype.itemsize:
        raise ConfigError(
            f"{len(raw)} bytes are no whole number of elements of {_name(dtype)}. Nothing was changed."
        )
    if raw.flags.writeable:
        return torch.from_numpy(raw).view(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it must not be written: it is not
        return torch.from_numpy(raw).view(dtype)


def _plain(settings: Settings) -> dict[str, Any]:
    # Pairs such as betas travel as lists; optimizers unpack either, but compare and save tuples.
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
