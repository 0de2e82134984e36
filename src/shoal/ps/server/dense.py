"""Dense parameters on a server: its chunks, what is summed for them, and how they are read and written.

How parameters are cut is in dense_plan.py; one chunk and its optimizer in
dense_chunk.py.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from shoal.errors import ConfigError
from shoal.ps.dense_plan import optimizer_class, torch_dtype
from shoal.ps.server.dense_chunk import Chunk
from shoal.ps.server.dense_memory import DenseMemory
from shoal.runtime.transport.messages.client_server import ChunkSpec, Settings

StateEntry: TypeAlias = tuple[int, str, str, list[int]]
"""(part, key, dtype, shape) of one tensor of optimizer state."""

Elements: TypeAlias = torch.Tensor | np.ndarray[Any, Any] | memoryview | bytes
"""A chunk's elements, flat: a tensor, or the bytes of one."""


class DenseStore:
    """The chunks of one server.

    Nobody else writes into a chunk; `pull` copies. Gradients are only read.
    """

    def __init__(self) -> None:
        self._chunks: dict[int, Chunk] = {}
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
                self._chunks[spec.number] = Chunk(spec, kind, list(groups), self.memory)

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
        renewed = Chunk(spec, kept.kind, kept.groups, (kept.flat, kept.place))
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
