"""State as a whole: what is read for a checkpoint, and set from one."""

from __future__ import annotations

import numpy as np

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.ps.numbering import counter_of
from shoal.ps.server.actions import Frame, Request
from shoal.ps.server.applied_seqs import Slots, some_slots
from shoal.ps.server.contents import Refusal, as_array, bytes_of
from shoal.ps.server.records import ChunkRecord, ClockRecord, MarksRecord, RowsRecord
from shoal.ps.server.replication import Change, Written
from shoal.ps.server.state import State
from shoal.ps.slots import slot_of
from shoal.runtime.transport.messages.client_server import (
    Chunk,
    Declared,
    Marks,
    ReadChunk,
    ReadMarks,
    ReadRows,
    Rows,
    SetClock,
    WriteChunk,
    WriteMarks,
    WriteRows,
)
from shoal.runtime.transport.messages.message import Message


def answer_whole(state: State, mine: Slots, request: Request) -> tuple[Message, list[Frame], Change | None]:
    """Read or set; the answer, its frames, and what other holders must hear of it."""
    frames = request.frames
    match request.message:
        case ReadRows(_, number, slot):
            table = state.contents.table(number)
            _require(slot < NUM_SLOTS and bool(mine[slot]), f"slot {slot} has another primary")
            read = [bytes_of(array) for array in table.read(slot)]
            return Rows(table.state_dim, int(state.marks.steps(counter_of(number))[slot])), [*read], None
        case WriteRows() as message:
            return Declared(False), [], _write_rows(state, mine, message, request)
        case ReadChunk(_, number):
            _require(bool(mine[state.contents.chunk(number).slot]), f"chunk {number} has another primary")
            elements, entries, tensors = state.contents.dense.read(number)
            return Chunk(entries), [bytes_of(each) for each in (elements, *tensors)], None
        case WriteChunk(_, number, entries):
            chunk = state.contents.chunk(number)
            _require(bool(mine[chunk.slot]), f"chunk {number} has another primary")
            _require(len(frames) == 1 + len(entries), f"{len(entries)} state tensors, {len(frames)} frames")
            state.contents.gradient(chunk, frames[0])
            state.set_chunk(number, entries, frames)
            kept: list[Frame] = [bytes(frame) for frame in frames]
            return Declared(False), [], _fixed([chunk.slot], (ChunkRecord(number, entries), kept))
        case SetClock(_, updates):
            state.set_clock(updates, mine)
            return Declared(False), [], Change(mine.copy(), lambda _: (ClockRecord(updates), []))
        case ReadMarks():
            return Marks(), [bytes_of(state.marks.triples(mine))], None
        case WriteMarks():
            _require(len(frames) == 1 and len(frames[0]) % 24 == 0, "marks are triples of int64 in one frame")
            kept_marks = bytes(frames[0])  # before they are looked at: the client can write to them
            triples = as_array(kept_marks, np.int64, "marks").reshape(-1, 3)
            inside = bool(
                ((triples >= 0).all() and (triples[:, 0] < NUM_SLOTS).all()) if len(triples) else True
            )
            _require(inside, "marks are of slots 0..255, and never negative")
            state.set_marks(kept_marks, mine)
            return Declared(False), [], Change(mine.copy(), lambda _: (MarksRecord(), [kept_marks]))
    raise Refusal(f"a server is not asked {type(request.message).__name__}")


def _write_rows(state: State, mine: Slots, message: WriteRows, request: Request) -> Change:
    # Copies: the client can write to the frames at any time, and they may be gone before all holders have them.
    arrays = [np.frombuffer(frame, np.uint8).copy() for frame in request.frames]
    frames = [bytes_of(array) for array in arrays]
    _require(len(frames) == 3, f"WriteRows comes with keys, values and state, got {len(frames)} frames")
    table = state.contents.table(message.table)
    keys = state.contents.keys(table, frames[0], mine)
    state.contents.values(table, frames[1], len(keys))
    given = as_array(frames[2], table.spec.dtype, "state")
    _require(
        len(given) in (0, len(keys) * table.state_dim),
        f"{len(keys)} rows of table {message.table} have {table.state_dim} numbers of state each, got {len(given)} numbers",
    )
    state.set_rows(message.table, message.step, frames)
    held_keys = arrays[0].view(np.int64)
    slots = slot_of(message.table, held_keys)

    def write(some: Slots) -> Written:
        inside = some[slots]
        cut = [array.reshape(len(held_keys), -1)[inside] if len(array) else array for array in arrays]
        return RowsRecord(message.table, message.step), [bytes_of(array) for array in cut]

    return Change(some_slots(np.unique(slots).tolist()), write)


def _fixed(slots: list[int], written: Written) -> Change:
    return Change(some_slots(slots), lambda _: written)


def _require(is_so: bool, problem: str) -> None:
    if not is_so:
        raise Refusal(problem)
