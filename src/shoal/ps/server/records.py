"""What travels between servers, in `Replicate.record` and `CopySlot.record`, and how it is read back.

One class per kind of change; each says which frames come with it. A record
is written once by the primary and applied by every other holder.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.ps.server.applied_seqs import Slots
from shoal.runtime.transport.messages.client_server import DeclareDense, DeclareMode, Settings, TableSpec
from shoal.runtime.transport.messages.message import Count

Notes: TypeAlias = list[tuple[int, int]]
"""(rank, anchored_at); the notes themselves are frames."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class BoardState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a board: (exchange, is it a commit) of its log, and its notes. Frames: results, then notes."""

    log: list[tuple[int, bool]]
    notes: Notes


class LastStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest step that a server committed, so that it can be told again to who asks again."""

    seq: Count
    vector: list[float]
    ranks: list[int]
    applied: bool
    norm: float


class StepRecord(_Record, frozen=True, tag="step"):
    """A step, or a push, that counts now.

    Frames: keys and values per table; a gradient per chunk; the vectors' sum;
    sums of squares by slot; a note per entry of `notes`.
    """

    slots: bytes  # where it counts, a bit per slot
    stream: Count
    seq: Count
    is_step: bool  # all ranks are in it: `seq` is a version; else a push of one stream
    applies: bool  # else it was left out: nothing changes but the marks
    tables: list[Count]
    chunks: list[tuple[int, list[int]]]  # number, parts without gradient
    factor: float
    factors: list[float]
    step: Count
    settings: list[Settings]
    model: Count
    table_settings: dict[int, dict[str, float]]
    ranks: list[int]  # whose contributions are in it
    seqs: list[int]  # and of which of their steps, where that may differ
    applied_norm: float  # of Commit
    exchange: Count
    notes: Notes
    clocks: list[tuple[int, int, dict[int, int]]]
    updates: Count
    done_below: Count


class RowsRecord(_Record, frozen=True, tag="rows"):
    """Rows were set. Frames: keys, values, state."""

    table: Count
    step: Count


class ChunkRecord(_Record, frozen=True, tag="chunk"):
    """A chunk was set. Frames and `state` as in WriteChunk."""

    chunk: Count
    state: list[tuple[int, str, str, list[int]]]


class ClockRecord(_Record, frozen=True, tag="clock"):
    """So many steps were committed, says a checkpoint."""

    updates: Count


class MarksRecord(_Record, frozen=True, tag="marks"):
    """Marks of a checkpoint. Frame: triples."""


class FollowingRecord(_Record, frozen=True, tag="following"):
    """The receiver has these slots and follows their updates, in this view too."""

    slots: bytes


class PostRecord(_Record, frozen=True, tag="post"):
    """An exchange is over (None: only notes came). Frames: its result; a note per entry."""

    exchange: Count | None
    notes: Notes


class DeclareRecord(_Record, frozen=True, tag="declare"):
    """What there is: the first record on any connection, and after every declaration."""

    tables: list[TableSpec]
    dense: list[DeclareDense]
    mode: DeclareMode | None


class SlotRecord(_Record, frozen=True, tag="slot"):
    """All of one slot.

    Frames: keys, values and state per table; elements and state tensors per
    chunk; then, of slot 0, the board's.
    """

    version: Count
    steps: dict[int, Count]  # by counter
    marks: list[tuple[int, int]]
    done_below: Count
    tables: list[Count]
    chunks: list[tuple[int, list[tuple[int, str, str, list[int]]]]]
    square: float
    last: LastStep | None
    board: BoardState | None
    clocks: list[tuple[int, int, dict[int, int]]]
    updates: Count


Record: TypeAlias = (
    StepRecord
    | RowsRecord
    | ChunkRecord
    | ClockRecord
    | MarksRecord
    | FollowingRecord
    | PostRecord
    | DeclareRecord
    | SlotRecord
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    """As bytes."""
    return _encoder.encode(record)


def decode(record: bytes) -> Record:
    """What `encode` was given; msgspec.MsgspecError where it is no record of this version."""
    return _decoder.decode(record)


def to_bits(slots: Slots) -> bytes:
    """A flag per slot as bits."""
    return np.packbits(slots).tobytes()


def from_bits(bits: bytes) -> Slots:
    """Back again."""
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=NUM_SLOTS).astype(np.bool_)
