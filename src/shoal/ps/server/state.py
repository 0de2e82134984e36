"""State of a server and every change of it: the same code on a primary and on its replicas.

A committed step or push is first recorded as a `Counted`; the primary applies it and ships it, a
replica decodes it and applies it. Independent of connections, tickets and views.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.ps.layout import counter_of, counter_of_update, slot_of
from shoal.ps.server.actions import Frame, Request
from shoal.ps.server.contents import Contents, Keys, Refusal, ServerTable, Update, as_array, restrict
from shoal.ps.server.dense import StateEntry
from shoal.ps.server.progress import AppliedSeqs, Clocks, Slots, Vector, some_slots
from shoal.ps.server.replication import (
    AppliedSeqsRecord,
    Change,
    ChunkRecord,
    DeclareRecord,
    LastStep,
    Notes,
    PostRecord,
    Pushes,
    PushesRecord,
    Record,
    RowsRecord,
    SlotRecord,
    StepRecord,
    Written,
    from_bits,
    to_bits,
)
from shoal.ps.server.steps import Mailbox, Result, Steps
from shoal.runtime.serialization import raw_bytes
from shoal.runtime.transport.messages import client_server as msg
from shoal.runtime.transport.messages.message import Message


@dataclass(slots=True)
class Counted:
    """A step, or a push, that counts: what changes, and what is remembered of it."""

    update: Update
    stream: int
    seq: int
    is_step: bool
    applies: bool
    vector: Vector
    norm: float = 0.0
    squares: Vector = field(default_factory=lambda: np.zeros(NUM_SLOTS))
    ranks: tuple[int, ...] = ()
    # Of their contributions, where not all ranks need be in a step, nor in the same.
    seqs: tuple[int, ...] = ()
    exchange: int = 0
    notes: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    done_below: int = 0
    merged: tuple[msg.MergedPart, ...] = ()  # pushes of other workers that are in it
    evicted: dict[int, Keys] = field(default_factory=dict)  # once it is applied: rows that went, by table

    @property
    def names(self) -> list[tuple[int, int]]:
        """(stream, seq) of a push and of those merged into it."""
        return [(self.stream, self.seq), *((part.stream, part.seq) for part in self.merged)]


_SHIPPED = ("seq", "applies", "norm", "ranks", "seqs", "exchange")
_SHIPPED_OF_UPDATE = ("factor", "step", "settings", "table_settings", "model", "whole_after")
"""Fields that a StepRecord has of a Counted, and of its Update."""


class ServerState:
    """Contents, applied seqs, clocks, mailbox and steps of one server."""

    steps_class = Steps

    def __init__(self) -> None:
        self.contents, self.applied = Contents(), AppliedSeqs()
        self.clocks, self.mailbox = Clocks(), Mailbox()
        self.steps: Steps | None = None
        self.updates = 0  # updates in all; relaxed strategies
        self._heard_updates = 0  # of other servers, which count the same pushes for their own slots

    @property
    def mode(self) -> msg.DeclareMode | None:
        return self.steps.mode if self.steps is not None else None

    @property
    def num_workers(self) -> int:
        return self.steps.mode.num_workers if self.steps is not None else 0

    def take_over(self) -> None:
        """Take over slots of another server: its counts are valid here."""
        self.clocks.take_over()
        self.updates = max(self.updates, self._heard_updates)

    def declare_mode(self, mode: msg.DeclareMode) -> bool:
        """Set how contributions count; whether that is new."""
        if self.steps is None:
            if mode.num_workers < 1:
                raise Refusal("a job has at least one worker, got num_workers=0")
            self.steps = self.steps_class(mode)
            self.clocks.expect(mode.num_workers)
            return True
        known = self.steps.mode
        # One model of a script may want norms and another not: all have what one of them needs.
        merged = msgspec.structs.replace(
            known, two_phase=known.two_phase or mode.two_phase, wants_norm=known.wants_norm or mode.wants_norm
        )
        if (known.num_workers, known.kind, known.bound) != (mode.num_workers, mode.kind, mode.bound):
            raise Refusal(f"contributions were declared to count as {known}, now as {mode}")
        self.steps.mode = merged
        return merged != known

    # ---- steps and pushes -----------------------------------------------------------------------

    def missing(self, counted: Counted) -> Slots:
        """The slots in which a step does not count yet."""
        return self.applied.version < counted.seq

    def count(self, counted: Counted) -> None:
        """Apply it; everything about it changes in this one turn."""
        update = counted.update
        if counted.applies:
            counted.evicted = self.contents.apply(update)
            steps = self.applied.steps(counter_of_update(update.rows, update.model))
            after = update.whole_after
            steps[update.slots] = steps[update.slots] + 1 if after is None else after
        if counted.is_step:
            self.applied.version[update.slots] = counted.seq
            for rank, seq in zip(counted.ranks, counted.seqs, strict=False):
                self.applied.count(rank, seq, update.slots)
            assert self.steps is not None
            self.steps.squares[update.slots] = counted.squares[update.slots]
            if self.steps.last is None or counted.seq >= self.steps.last.seq:
                self.steps.last = LastStep(
                    counted.seq, counted.vector.tolist(), list(counted.ranks), counted.applies, counted.norm
                )
        else:
            for stream, seq in counted.names:
                self.applied.count(stream, seq, update.slots)
            self.applied.forget_below(counted.done_below)
        if update.slots[0]:
            outcome = np.append(counted.vector, [float(counted.applies), counted.norm]).tobytes()
            exchange, result = (counted.exchange, Result(True, outcome)) if counted.is_step else (None, None)
            self.mailbox.finish(exchange, result, counted.notes, self.num_workers)

    def last_frame(self) -> bytes:
        last = self.steps.last if self.steps is not None else None
        return np.array([*last.vector, float(last.applied), last.norm]).tobytes() if last else b""

    def write_counted(self, counted: Counted, slots: Slots) -> Written:
        """A record of it, for servers that hold these slots."""
        update = restrict(counted.update, slots, self.contents.chunks)
        notes = sorted(counted.notes.items()) if update.slots[0] else []
        frames: list[Frame] = []
        applies = counted.applies
        tables = sorted(update.rows) if applies else []
        chunks = sorted(update.dense) if applies else []
        for table in tables:
            keys, values = update.rows[table]
            frames += [raw_bytes(keys), raw_bytes(values)]
        frames += [raw_bytes(update.dense[chunk][0]) for chunk in chunks]
        whole = update.whole if applies else []
        frames += [raw_bytes(array) for _, keys, values in whole for array in (keys, values)]
        frames += [counted.vector.tobytes(), counted.squares.tobytes()]
        frames += [note for _, (_, note) in notes]
        record = StepRecord(
            slots=to_bits(update.slots),
            tables=tables,
            whole=[number for number, _, _ in whole],
            chunks=[(chunk, list(update.dense[chunk][1])) for chunk in chunks],
            notes=[(rank, anchored_at) for rank, (anchored_at, _) in notes],
            **{name: getattr(counted, name) for name in _SHIPPED},
            **{name: getattr(update, name) for name in _SHIPPED_OF_UPDATE},
        )
        return record, frames

    def _read_counted(self, record: StepRecord, frames: Sequence[Frame]) -> Counted:
        contents, given = self.contents, list(frames)
        settings = {name: getattr(record, name) for name in _SHIPPED_OF_UPDATE}
        update = Update(from_bits(record.slots), **settings)
        for number in record.tables:
            keys = as_array(given.pop(0), np.int64, "keys")
            update.rows[number] = (keys, contents.values(contents.table(number), given.pop(0), len(keys)))
        for number, unused in record.chunks:
            gradient = contents.gradient(contents.chunk(number), given.pop(0))
            update.dense[number] = (gradient, tuple(unused))
        for number in record.whole:
            keys = as_array(given.pop(0), np.int64, "keys")
            rows = contents.values(contents.table(number), given.pop(0), len(keys), is_whole=True)
            update.whole.append((number, keys, rows))
        vector, squares = (as_array(given.pop(0), np.float64, "numbers") for _ in range(2))
        return Counted(
            update,
            stream=0,
            is_step=True,
            vector=vector,
            squares=squares,
            notes=_notes(record.notes, given),
            **{name: getattr(record, name) for name in _SHIPPED},
        )

    def note_push(self, counted: Counted, rank: int, pushes: Pushes) -> None:
        """One more push to be shipped with others."""
        update, bits = counted.update, to_bits(counted.update.slots)
        pushes.slots |= update.slots
        for stream, seq in counted.names:
            pushes.seqs[stream, bits] = max(seq, pushes.seqs.get((stream, bits), 0))
        pushes.notes |= counted.notes
        pushes.ranks |= {rank, *(part.rank for part in counted.merged)}
        if counted.applies:
            pushes.counters.add(counter_of_update(update.rows, update.model))
            pushes.chunks |= update.dense.keys()
            for table, (keys, _) in update.rows.items():
                pushes.keys.setdefault(table, []).append(keys)
            for table, keys in counted.evicted.items():
                pushes.keys.setdefault(table, []).append(keys)

    def write_pushes(self, pushes: Pushes, slots: Slots) -> Written:
        """A record of what they changed, for servers that hold these slots: rows and chunks as they are now."""
        contents, some, frames = self.contents, pushes.slots & slots, list[Frame]()
        tables = sorted(pushes.keys)
        for number in tables:
            keys, slot_of_key = pushes.merged(number)
            inside = some[slot_of_key]
            keys = keys if inside.all() else keys[inside]
            frames += [raw_bytes(keys), raw_bytes(contents.tables[number].read_whole(keys))]
        chunks, chunk_frames = self._write_chunks(
            sorted(number for number in pushes.chunks if some[contents.chunks[number].slot])
        )
        frames += chunk_frames
        counters = sorted(pushes.counters)
        frames += [self.applied.steps(counter).tobytes() for counter in counters]
        notes = sorted(pushes.notes.items()) if some[0] else []
        frames += [note for _, (_, note) in notes]
        record = PushesRecord(
            slots=to_bits(some),
            seqs=[(stream, seq, bits) for (stream, bits), seq in pushes.seqs.items()],
            tables=tables,
            chunks=chunks,
            counters=counters,
            notes=[(rank, anchored_at) for rank, (anchored_at, _) in notes],
            clocks=[each for rank in sorted(pushes.ranks) for each in self.clocks.state(rank)],
            updates=self.updates,
            done_below=self.applied.done_below,
        )
        return record, frames

    def _write_chunks(self, numbers: Iterable[int]) -> tuple[list[tuple[int, list[StateEntry]]], list[Frame]]:
        """Entries and frames of chunks."""
        chunks, frames = [], list[Frame]()
        for number in numbers:
            elements, entries, tensors = self.contents.dense.read(number)
            chunks.append((number, entries))
            # Copies: queued data must not change with the next update.
            frames += [raw_bytes(tensor.clone()) for tensor in (elements, *tensors)]
        return chunks, frames

    def _set_chunks(self, chunks: list[tuple[int, list[StateEntry]]], frames: list[Frame]) -> None:
        """Chunks as `_write_chunks` gave them; their frames are taken off."""
        for number, entries in chunks:
            pieces = [frames.pop(0) for _ in range(1 + len(entries))]
            self.contents.dense.write(number, pieces[0], entries, pieces[1:])

    # ---- as a replica ---------------------------------------------------------------------------

    def follow(self, record: Record, frames: Sequence[Frame], slots: Slots) -> None:
        """Apply a change of these slots' primary. Updates already applied are not applied twice."""
        match record:
            case StepRecord():
                counted = self._read_counted(record, frames)
                new = self.missing(counted) & counted.update.slots & slots
                if new.any():
                    self.count(replace(counted, update=restrict(counted.update, new, self.contents.chunks)))
            case PushesRecord():
                self._follow_pushes(record, list(frames), slots)
            case RowsRecord(number, step, num_evicted):
                self.set_rows(number, step, frames, num_evicted)
            case ChunkRecord(number, state):
                self.set_chunk(number, state, frames)
            case AppliedSeqsRecord():
                self.set_applied_seqs(frames[0], slots)
            case PostRecord(exchange, notes):
                result = Result(False, bytes(frames[0]))
                self.mailbox.finish(exchange, result, _notes(notes, frames[1:]), self.num_workers)
            case DeclareRecord():
                self._take_declarations(record)
            case _:
                raise Refusal(f"a {type(record).__name__} is no update")

    def _follow_pushes(self, record: PushesRecord, frames: list[Frame], slots: Slots) -> None:
        some = from_bits(record.slots) & slots
        for number in record.tables:
            table = self.contents.table(number)
            keys = as_array(frames.pop(0), np.int64, "keys")
            whole = as_array(frames.pop(0), table.dtype, "rows")
            if len(keys):
                table.set_whole(keys, whole.reshape(len(keys), -1))
        self._set_chunks(record.chunks, frames)
        for counter in record.counters:
            self.applied.steps(counter)[some] = as_array(frames.pop(0), np.int64, "updates")[some]
        for stream, seq, bits in record.seqs:
            self.applied.count(stream, seq, from_bits(bits) & some)
        self.applied.forget_below(record.done_below)
        self.clocks.heard(record.clocks)
        self._heard_updates = max(self._heard_updates, record.updates)
        if some[0]:
            self.mailbox.finish(None, None, _notes(record.notes, frames), self.num_workers)

    @property
    def num_declared(self) -> int:
        contents = self.contents
        return len(contents.tables) + len(contents.declared_dense) + (self.steps is not None)

    def declarations(self) -> DeclareRecord:
        """All declarations, for a server that may have heard none."""
        contents = self.contents
        return DeclareRecord(
            tables=[table.spec for table in contents.tables.values()],
            dense=list(contents.declared_dense.values()),
            mode=self.mode,
        )

    def _take_declarations(self, record: DeclareRecord) -> None:
        for spec in record.tables:
            self.contents.declare_table(spec)
        for dense in record.dense:
            self.contents.declare_dense(dense)
        if record.mode is not None:
            self.declare_mode(record.mode)

    # ---- state as a whole -----------------------------------------------------------------------

    def set_rows(self, number: int, step: int, frames: Sequence[Frame], num_evicted: int = 0) -> None:
        """Set rows; their slots count their updates from `step`."""
        if num_evicted:
            self.contents.table(number).evicted[0] = num_evicted
        keys = self._set(self.contents.table(number), frames[0], frames[1], frames[2], step)
        slots = np.unique(slot_of(number, keys))
        steps = self.applied.steps(counter_of(number))
        steps[slots] = np.maximum(steps[slots], step)

    def _set(self, table: ServerTable, keys: Frame, values: Frame, state: Frame, step: int) -> Keys:
        numbers = as_array(keys, np.int64, "keys")
        rows = self.contents.values(table, values, len(numbers))
        given = as_array(state, table.dtype, "state")
        if len(numbers):
            table.set(numbers, rows, given.reshape(len(numbers), -1) if len(given) else None, step)
        return numbers

    def set_chunk(
        self, number: int, state: list[tuple[int, str, str, list[int]]], frames: Sequence[Frame]
    ) -> None:
        self.contents.dense.write(number, frames[0], state, list(frames[1:]))

    def set_applied_seqs(self, frame: Frame, slots: Slots) -> None:
        triples = as_array(frame, np.int64, "applied seqs").reshape(-1, 3)
        for slot, stream, seq in triples.tolist():
            if slots[slot]:
                self.applied.count(stream, seq, some_slots([slot]))

    def write_slot(self, slot: int) -> Written:
        contents, frames = self.contents, list[Frame]()
        tables = sorted(contents.tables)
        for number in tables:
            frames += [raw_bytes(array) for array in contents.tables[number].read(slot)]
        chunks, chunk_frames = self._write_chunks(contents.chunks_of(some_slots([slot])))
        frames += chunk_frames
        mailbox = None
        if slot == 0:
            mailbox, mailbox_frames = self.mailbox.state()
            frames += mailbox_frames
        steps = self.steps
        record = SlotRecord(
            version=int(self.applied.version[slot]),
            steps=self.applied.steps_of_slot(slot),
            marks=self.applied.of_slot(slot),
            done_below=self.applied.done_below,
            tables=tables,
            chunks=chunks,
            square=float(steps.squares[slot]) if steps is not None else 0.0,
            last=steps.last if steps is not None else None,
            mailbox=mailbox,
            clocks=self.clocks.state(),
            updates=self.updates,
            evicted={number: int(contents.tables[number].evicted[slot]) for number in tables},
        )
        return record, frames

    def take_slot(self, slot: int, record: SlotRecord, frames: Sequence[Frame]) -> None:
        """The slot as another server has it, instead of whatever was here."""
        contents, given, one = self.contents, list(frames), some_slots([slot])
        contents.empty(one)
        for number in record.tables:
            table = contents.table(number)
            keys, values, state = (given.pop(0) for _ in range(3))
            self._set(table, keys, values, state, record.steps.get(counter_of(number), 0))
            table.evicted[slot] = record.evicted.get(number, 0)
        self._set_chunks(record.chunks, given)
        if record.mailbox is not None:
            self.mailbox.restore(record.mailbox, given)
        self.applied.version[slot] = record.version
        self.applied.set_steps(slot, record.steps)
        self.applied.forget_below(record.done_below)
        self.applied.set_slot(slot, record.marks)
        self.clocks.heard(record.clocks)
        self._heard_updates = max(self._heard_updates, record.updates)
        if self.steps is not None and record.last is not None:
            self.steps.squares[slot] = record.square
            if self.steps.last is None or record.last.seq >= self.steps.last.seq:
                self.steps.last = record.last

    def drop(self, slots: Slots) -> None:
        self.applied.drop(slots)
        if slots[0]:
            self.mailbox = Mailbox()


# ---- reads and writes of a checkpoint ------------------------------------------------------------


def answer_whole(
    state: ServerState, mine: Slots, request: Request
) -> tuple[Message, list[Frame], Change | None]:
    """Read or set; the answer, its frames, and what other holders must hear of it."""
    frames = request.frames
    match request.message:
        case msg.ReadRows(_, number, slot, is_tracked, tracker, since):
            table = state.contents.table(number)
            _require(slot < NUM_SLOTS and bool(mine[slot]), f"slot {slot} has another primary")
            step = int(state.applied.steps(counter_of(number))[slot])
            read = table.read(slot, tracker=tracker, since=since)
            answer = msg.RowsRead(table.state_dim, step, num_evicted=int(table.evicted[slot]))
            if is_tracked:
                now, num_rows = table.track(), table.num_rows_of(slot)
                answer = msgspec.structs.replace(answer, num_rows=num_rows, tracker=table.tracker, clock=now)
            return answer, [raw_bytes(each) for each in read], None
        case msg.WriteRows() as message:
            return msg.Declared(False), [], _write_rows(state, mine, message, request)
        case msg.ReadChunk(_, number):
            _require(bool(mine[state.contents.chunk(number).slot]), f"chunk {number} has another primary")
            elements, entries, tensors = state.contents.dense.read(number)
            return msg.Chunk(entries), [raw_bytes(each) for each in (elements, *tensors)], None
        case msg.WriteChunk(_, number, entries):
            chunk = state.contents.chunk(number)
            _require(bool(mine[chunk.slot]), f"chunk {number} has another primary")
            _require(len(frames) == 1 + len(entries), f"{len(entries)} state tensors, {len(frames)} frames")
            state.contents.gradient(chunk, frames[0])
            state.set_chunk(number, entries, frames)
            kept: list[Frame] = [bytes(frame) for frame in frames]
            change = Change(some_slots([chunk.slot]), lambda _: (ChunkRecord(number, entries), kept))
            return msg.Declared(False), [], change
        case msg.ReadAppliedSeqs():
            return msg.AppliedSeqsRead(), [raw_bytes(state.applied.triples(mine))], None
        case msg.WriteAppliedSeqs():
            _require(
                len(frames) == 1 and len(frames[0]) % 24 == 0,
                "applied seqs are triples of int64 in one frame",
            )
            kept_seqs = bytes(frames[0])  # before they are read: the client can write to them
            triples = as_array(kept_seqs, np.int64, "applied seqs").reshape(-1, 3)
            inside = (triples >= 0).all() and (triples[:, 0] < NUM_SLOTS).all()
            _require(bool(inside), "applied seqs are of slots 0..255, and never negative")
            state.set_applied_seqs(kept_seqs, mine)
            return msg.Declared(False), [], Change(mine.copy(), lambda _: (AppliedSeqsRecord(), [kept_seqs]))
    raise Refusal(f"a server is not asked {type(request.message).__name__}")


def _write_rows(state: ServerState, mine: Slots, message: msg.WriteRows, request: Request) -> Change:
    # Copies: the client can write to the frames at any time, and they may be gone before all holders have them.
    arrays = [np.frombuffer(frame, np.uint8).copy() for frame in request.frames]
    frames = [raw_bytes(array) for array in arrays]
    _require(len(frames) == 3, f"WriteRows comes with keys, values and state, got {len(frames)} frames")
    table = state.contents.table(message.table)
    keys = state.contents.keys(table, frames[0], mine)
    state.contents.values(table, frames[1], len(keys))
    given = as_array(frames[2], table.spec.dtype, "state")
    _require(
        len(given) in (0, len(keys) * table.state_dim),
        f"{len(keys)} rows of table {message.table} have {table.state_dim} numbers of state each, got {len(given)} numbers",
    )
    state.set_rows(message.table, message.step, frames, message.num_evicted)
    held_keys = arrays[0].view(np.int64)
    slots = slot_of(message.table, held_keys)

    def write(some: Slots) -> Written:
        inside = some[slots]
        cut = [array.reshape(len(held_keys), -1)[inside] if len(array) else array for array in arrays]
        num_evicted = message.num_evicted if some[0] else 0
        return RowsRecord(message.table, message.step, num_evicted), [raw_bytes(array) for array in cut]

    return Change(some_slots([*np.unique(slots).tolist(), *([0] if message.num_evicted else [])]), write)


def _notes(notes: Notes, frames: Sequence[Frame]) -> dict[int, tuple[int, bytes]]:
    return {rank: (at, bytes(note)) for (rank, at), note in zip(notes, frames, strict=True)}


def _require(is_so: bool, problem: str) -> None:
    if not is_so:
        raise Refusal(problem)
