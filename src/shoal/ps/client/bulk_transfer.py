"""Reads and writes of whole tables and chunks with their optimizer state, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.ps.client.server_group import AskAll, AskOwner, Group
from shoal.ps.client.step import by_server
from shoal.ps.layout import dtype_name
from shoal.runtime.serialization import raw_bytes
from shoal.runtime.transport.arena import Buffer
from shoal.runtime.transport.messages import client_server as msg
from shoal.runtime.transport.shared_client import Link


def read_rows(
    group: Group, table: msg.TableSpec
) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], NDArray[Any], int]]:
    """(keys, values, state, step of the rule) of one slot after the other."""
    for slot in range(NUM_SLOTS):
        asking = AskOwner(slot, lambda view, slot=slot: msg.ReadRows(view, table.number, slot))  # type: ignore[misc]
        group.run(asking)
        assert isinstance(asking.answer, msg.RowsRead)
        keys, values, state = (bytearray(frame) for frame in asking.frames)  # arrays that may be written
        num_rows = len(keys) // 8
        yield (
            np.frombuffer(keys, np.int64),
            np.frombuffer(values, table.dtype).reshape(num_rows, table.dim),
            np.frombuffer(state, table.dtype).reshape(num_rows, asking.answer.state_dim),
            asking.answer.step,
        )


def read_table(
    group: Group, table: msg.TableSpec
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any], int]:
    """(keys, values, state, step of the rule) of all slots, by increasing key."""
    parts = list(read_rows(group, table))
    keys, values, state = (np.concatenate([part[column] for part in parts]) for column in range(3))
    order = np.argsort(keys)
    return keys[order], values[order], state[order], max(part[3] for part in parts)


class _Writing:
    """Rows on their way to whoever holds them."""

    def __init__(self, table: msg.TableSpec, arrays: Sequence[NDArray[Any]], step: int) -> None:
        """`arrays`: keys, values and, unless they are as new, state."""
        self._table, self._arrays, self._step = table, arrays, step
        self.sent_in = 0
        self._asked: list[tuple[int, int]] = []
        self._held: list[tuple[Link, Buffer]] = []

    def send(self, group: Group) -> None:
        self._asked = []
        for server, places in by_server(self._table.number, self._arrays[0], group):
            link = group.link(server)
            frames: list[Buffer | bytes] = []
            for array in self._arrays:
                part = array if places is None else array[places]
                buffer = link.alloc(part.nbytes)
                buffer.view[:] = raw_bytes(part)
                self._held.append((link, buffer))
                frames.append(buffer)
            frames += [b""] * (3 - len(frames))
            message = msg.WriteRows(group.view, self._table.number, self._step)
            self._asked.append((server, group.send(server, message, frames)))

    def receive(self, group: Group) -> None:
        for server, ticket in self._asked:
            group.wait(server, ticket)
        for link, buffer in self._held:
            link.free(buffer)
        self._held = []


def write_rows(
    group: Group,
    table: msg.TableSpec,
    keys: NDArray[np.int64],
    values: NDArray[Any],
    state: NDArray[Any] | None,
    step: int,
) -> None:
    group.run(_Writing(table, [keys, values] if state is None else [keys, values, state], step))


def read_chunk(group: Group, chunk: msg.ChunkSpec) -> tuple[Tensor, dict[tuple[int, str], Tensor]]:
    """A chunk's elements, and its optimizer state by (part, key)."""
    asking = AskOwner(chunk.slot, lambda view: msg.ReadChunk(view, chunk.number))
    group.run(asking)
    assert isinstance(asking.answer, msg.Chunk)
    elements = torch.frombuffer(bytearray(asking.frames[0]), dtype=getattr(torch, chunk.dtype))
    state = {}
    for (part, key, dtype, shape), frame in zip(asking.answer.state, asking.frames[1:], strict=True):
        kind, raw = getattr(torch, dtype), bytearray(frame)
        state[part, key] = (
            torch.frombuffer(raw, dtype=kind).reshape(shape) if raw else torch.empty(shape, dtype=kind)
        )
    return elements, state


def write_chunk(
    group: Group, chunk: msg.ChunkSpec, elements: Tensor, state: Mapping[tuple[int, str], Tensor]
) -> None:
    described = [
        (part, key, dtype_name(tensor.dtype), list(tensor.shape)) for (part, key), tensor in state.items()
    ]
    frames = [raw_bytes(elements), *(raw_bytes(tensor) for tensor in state.values())]
    group.run(AskOwner(chunk.slot, lambda view: msg.WriteChunk(view, chunk.number, described), frames))


def read_marks(group: Group) -> NDArray[np.int64]:
    """(slot, stream, seq) of all slots: the newest push of each stream that counts there."""
    asking = AskAll(msg.ReadMarks)
    group.run(asking)
    parts = [np.frombuffer(bytes(frames[0]), np.int64).reshape(-1, 3) for _, frames in asking.answers]
    return np.concatenate(parts).copy()


def write_marks(group: Group, marks: NDArray[np.int64]) -> None:
    raw = np.ascontiguousarray(marks, np.int64).tobytes()
    group.run(AskAll(msg.WriteMarks, [raw]))
