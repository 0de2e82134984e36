"""Reads and writes of whole tables and chunks with their optimizer state, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

_ASKED_AT_ONCE = 16  # slots


@dataclass(slots=True)
class RowStamps:
    """Stamps up to which tables were read, by table and slot: the server's tracker name, and its count."""

    since: dict[str, list[tuple[str, int]]]
    """Stamps up to which the checkpoint before was read; a table that is not here is read whole."""

    read_to: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Set by a read: the stamps for the next one."""

    num_table_bytes: int = 0
    """Set too: of all rows of all tables."""

    def note(self, name: str, slot: SlotRows) -> None:
        """Record the table's next slot, of which rows were read."""
        self.read_to.setdefault(name, []).append(slot.stamp)
        row_bytes = 8 + (slot.values.shape[1] + slot.state.shape[1]) * slot.values.itemsize
        self.num_table_bytes += row_bytes * slot.num_rows


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows of one slot, or those that changed: keys in increasing order, values, optimizer state."""

    keys: NDArray[np.int64]
    values: NDArray[Any]
    state: NDArray[Any]
    step: int  # of the rule
    num_evicted: int  # rows that the table's policy dropped so far
    num_rows: int  # of the slot
    stamp: tuple[str, int]  # the server's name for its stamps, and how far they were


def read_rows(
    group: Group,
    table: msg.TableSpec,
    *,
    is_tracked: bool = False,
    since: Sequence[tuple[str, int]] = (("", 0),) * NUM_SLOTS,
) -> Iterator[SlotRows]:
    """One slot after the other. Where it is tracked, rows that changed since these stamps, as far as they are the server's."""
    asked = [
        AskOwner(slot, _asks(table.number, slot, is_tracked, tracker, stamp))
        for slot, (tracker, stamp) in enumerate(since)
    ]
    for slot, asking in enumerate(asked):
        if slot % _ASKED_AT_ONCE == 0:  # each alone would be a wake-up of the server and one of this process
            for each in asked[slot : slot + _ASKED_AT_ONCE]:
                group.start(each)
        group.finish(asking)
        answer = asking.answer
        assert isinstance(answer, msg.RowsRead)
        keys, values, state = (bytearray(frame) for frame in asking.frames)  # arrays that may be written
        num_rows = len(keys) // 8
        yield SlotRows(
            np.frombuffer(keys, np.int64),
            np.frombuffer(values, table.dtype).reshape(num_rows, table.dim),
            np.frombuffer(state, table.dtype).reshape(num_rows, answer.state_dim),
            answer.step,
            answer.num_evicted,
            answer.num_rows,
            (answer.tracker, answer.clock),
        )
        asking.frames = []  # read: not all slots are in memory at once


def _asks(table: int, slot: int, is_tracked: bool, tracker: str, since: int) -> Callable[[int], msg.ReadRows]:
    return lambda view: msg.ReadRows(view, table, slot, is_tracked=is_tracked, tracker=tracker, since=since)


def read_table(
    group: Group, table: msg.TableSpec
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any], int, int]:
    """(keys, values, state, step of the rule, rows evicted so far) of all slots, by increasing key."""
    return together(list(read_rows(group, table)))


def together(
    slots: Sequence[SlotRows],
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any], int, int]:
    """Slots as one table."""
    keys, values, state = (
        np.concatenate([getattr(each, column) for each in slots]) for column in ("keys", "values", "state")
    )
    order = np.argsort(keys)
    num_evicted = sum(each.num_evicted for each in slots)
    return keys[order], values[order], state[order], max(each.step for each in slots), num_evicted


def read_changes(
    group: Group, table: msg.TableSpec, name: str, changes: RowStamps | None
) -> tuple[tuple[NDArray[np.int64], NDArray[Any], NDArray[Any], int, int], bool]:
    """A table as `read_table` gives it, and whether it is complete: else only rows that changed since
    `changes.since[name]`.
    """
    if changes is None:
        return read_table(group, table), True
    slots = changed_slots(group, table, name, changes)
    if slots is not None:
        return together(slots), False
    slots = list(read_rows(group, table, is_tracked=True))
    for slot in slots:
        changes.note(name, slot)
    return together(slots), True


def changed_slots(group: Group, table: msg.TableSpec, name: str, changes: RowStamps) -> list[SlotRows] | None:
    """Rows that changed since `changes.since[name]`; None if the table must be read whole.

    Whole, too, if a slot has another server's stamps by now: that server cannot tell which rows
    were deleted.
    """
    since = changes.since.get(name)
    slots = list(read_rows(group, table, is_tracked=True, since=since)) if since is not None else []
    if since is None or any(
        slot.stamp[0] != tracker for slot, (tracker, _) in zip(slots, since, strict=True)
    ):
        return None
    for slot in slots:
        changes.note(name, slot)
    return slots


class _Writing:
    """Rows in transfer to the servers that hold their slots."""

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


def write_evicted(group: Group, table: msg.TableSpec, num_evicted: int, step: int) -> None:
    """Set how many rows the table's policy has dropped so far."""
    told = lambda view: msg.WriteRows(view, table.number, step, num_evicted)  # noqa: E731
    group.run(AskOwner(0, told, [b"", b"", b""]))


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


def read_applied_seqs(group: Group) -> NDArray[np.int64]:
    """(slot, stream, seq) of all slots: the newest push of each stream that counts there."""
    asking = AskAll(msg.ReadAppliedSeqs)
    group.run(asking)
    parts = [np.frombuffer(bytes(frames[0]), np.int64).reshape(-1, 3) for _, frames in asking.answers]
    return np.concatenate(parts).copy()


def write_applied_seqs(group: Group, seqs: NDArray[np.int64]) -> None:
    raw = np.ascontiguousarray(seqs, np.int64).tobytes()
    group.run(AskAll(msg.WriteAppliedSeqs, [raw]))
