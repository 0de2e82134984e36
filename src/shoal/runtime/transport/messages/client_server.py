"""Messages to a parameter server and its answers: clients (workers, `shoal.ps.connect`) and other servers.

Every request has a ticket, given by the transport, under which its answer
comes back; requests of one connection are heard in the order in which they
were sent, answers may overtake each other. "Frames" are the raw bytes of a
message; "into" are buffers of the asker's, where the answer's frames go.
Wherever those bytes lie (shared memory, the socket) is the transport's
business.

Who names a push: (stream, seq). In exact strategies the stream is the rank
and seq the step; in relaxed ones the stream is the lease and seq the batch
within it, both counted from 1. What is pushed under a name is only staged;
StepEnd with the same name makes it count, all of it at once. So a server's
mark per (slot, stream) says all there is to know about a repeat.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from shoal.config.row_policy import RowPolicy
from shoal.runtime.transport.messages.message import (
    Count,
    Incarnation,
    Integer,
    Message,
    NumProcesses,
    Rank,
    Slot,
    Text,
)

Settings: TypeAlias = dict[str, bool | int | float | str | list[float | None] | None]
"""Hyper-parameters of a parameter group, by name."""

PeerName = Annotated[
    str,
    msgspec.Meta(max_length=128, pattern=r"\A((worker|server)-(0|[1-9][0-9]{0,4})|kv-[\x21-\x7e]+)\Z"),
]
"""A worker, a server, or a low-level client: "worker-3", "server-0", "kv-..."."""


# ---- connecting ---------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="ps-hello"):
    """Client or server to server: who I am, the first sentence of a connection.

    Answered by Welcome or PsRefused. A newer incarnation of the same name
    closes the connections of the older, whose staged pushes are forgotten.
    """

    name: PeerName
    incarnation: Incarnation


class Welcome(Message, frozen=True, tag="ps-welcome"):
    """Server to client: "you are heard", and the view I stand in; 0 where I know of none yet."""

    name: str
    incarnation: Incarnation
    view: Count


class Stripe(Message, frozen=True, tag="ps-stripe"):
    """Client to a server on another host: "this is connection `number` of `count` of my link `link`".

    First said on the first connection (number 0), after Hello, then as the
    first sentence of each further one. Answered by Striped. Saying it twice
    closes the connection.
    """

    link: Count  # drawn by the client
    number: Annotated[int, msgspec.Meta(ge=0, le=15)]
    count: Annotated[int, msgspec.Meta(ge=2, le=16)]


class Striped(Message, frozen=True, tag="ps-striped"):
    """Server to client: "it belongs to your link"; and where else I listen, one address for each further interface."""

    addresses: list[str]


class PsRefused(Message, frozen=True, tag="ps-refused"):
    """Server to asker, instead of any answer: "that cannot be", and what was expected; nothing was changed."""

    reason: str


class ViewOver(Message, frozen=True, tag="ps-view-over"):
    """Server to asker, instead of any answer: "you speak of a view that is over, or not yet mine, or of slots that
    are not mine in it". Learn of the newest view from the coordinator and ask again.
    """

    view: Count


# ---- declarations -------------------------------------------------------------------------------


class TableSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of rows."""

    number: Count
    name: str
    dim: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    dtype: Literal["float32", "float64"]
    rule: str  # name of an update rule of ps/rules.py
    settings: dict[str, float]  # its hyper-parameters at the start
    num_rows: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)] | None = (
        None  # ids are 0..num_rows-1; None: any int64 id, rows come to be on first use
    )
    init: Literal["zeros", "normal", "uniform"] = "zeros"  # of a row nobody wrote: hash(seed, id)
    scale: float = 1.0  # standard deviation, or half the width
    seed: Integer = 0
    policy: RowPolicy | None = None  # admission and eviction; None: every id gets a row, and keeps it


class DeclareTable(Message, frozen=True, tag="ps-declare-table"):
    """Client to server: "there is this table". Answered by Declared. Repeating it is safe; differing is refused."""

    table: TableSpec


class DensePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of elements of one parameter inside a chunk."""

    parameter: str
    # Of this part, as the optimizer sees it: flat, or the parameter's own where it is not cut.
    shape: list[Count]
    offset: Count  # of its first element in the flattened parameter
    group: Count


class ChunkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dense parameters that lie side by side in one slot: unit of push, pull and update."""

    number: Count
    slot: Slot
    dtype: str
    parts: list[DensePart]


class DeclareDense(Message, frozen=True, tag="ps-declare-dense"):
    """Client to server: "these dense parameters are trained so". Answered by Declared.

    All servers hear of all chunks; each keeps those of its slots. Repeating it
    is safe; differing is refused.
    """

    chunks: list[ChunkSpec]
    optimizer: str  # name in torch.optim
    groups: list[Settings]  # settings of each parameter group, plain values
    model: Count = 0


class DeclareMode(Message, frozen=True, tag="ps-declare-mode"):
    """Client to server: how contributions count. Answered by Declared. Repeating it is safe; differing is refused."""

    num_workers: NumProcesses
    kind: Literal["exact", "ssp", "async", "drop", "stale"]
    bound: Count = 0  # ssp: staleness; drop, stale: how many stragglers are not waited for
    two_phase: bool = (
        False  # exact: an update waits for Commit (several servers, or a norm to be known first)
    )
    wants_norm: bool = False


class Declared(Message, frozen=True, tag="ps-declared"):
    """Server to client: "I know of it"; `is_new`: nobody has told me before."""

    is_new: bool


# ---- a step -------------------------------------------------------------------------------------


class PushRows(Message, frozen=True, tag="ps-push-rows"):
    """Client to server: stage these gradients of these rows; with `is_whole`, these rows as they shall be.

    Frames: int64 keys, strictly increasing, all of slots whose primary the
    server is in `view`; then one row of values per key, or of values and
    optimizer state. Answered only where refused. Repeating it is safe: the
    first counts.
    """

    view: Count
    stream: Count
    seq: Count
    table: Count
    codec: Text = ""  # of the values: see shoal.ps.codecs
    keys: Count = 0  # name of the key list; with an empty frame, one sent before on this connection: see shoal.ps.key_lists
    is_whole: bool = (
        False  # exact: the only worker updates rows itself; may be said several times for a table
    )


class PushDense(Message, frozen=True, tag="ps-push-dense"):
    """Client to server: stage the gradient of this chunk. Frame: its elements. As PushRows otherwise."""

    view: Count
    stream: Count
    seq: Count
    chunk: Count
    unused: list[Count] = msgspec.field(default_factory=list)
    codec: Text = ""


class MergedPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another worker's push inside a merged one: batches seq - num_batches + 1 to seq of its stream."""

    stream: Count
    seq: Count
    num_batches: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    rank: Rank


class StepEnd(Message, frozen=True, tag="ps-step-end"):
    """Client to server: "this is all of this step" for you; every server gets one.

    Frames: a vector of float64 (count, losses, control flags, statistics), and, to
    the holder of slot 0, the note from which a replacement can go on (may be
    empty). Answered by Committed; in a two-phase step by Summed first.
    Repeating it is safe.
    """

    view: Count
    stream: Count
    seq: Count
    rank: Rank
    num_pushes: Count  # staged before it under this name, on this server
    exchange: Count  # number of the exchange that this commit is; exact strategies only
    anchored_at: Count  # number of the first exchange after the note
    # Of the optimizer's groups for this update, in their order; empty: as declared.
    settings: list[Settings] = msgspec.field(default_factory=list)
    model: Count = 0  # whose they are
    table_settings: dict[Count, dict[str, float]] = msgspec.field(default_factory=dict)  # the same, by table
    factor: float = 1.0  # what gradients are multiplied with; relaxed strategies and one-phase steps
    done_below: Count = 0  # every lease below this is done: their applied seqs may be forgotten
    is_spoilt: bool = (
        False  # exact: computed on weights that have this step already; refused where it would count
    )
    # Relaxed: batches of the stream in it, the last being `seq`; 0 for what is left of batches that counted.
    num_batches: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 1
    merged: list[MergedPart] = msgspec.field(default_factory=list)  # pushes of other workers in it
    # Exact: it ends whole rows, as they are after so many updates. A replacement may come to another point under the same name:
    # of two that do not count yet the newer one does.
    whole_after: Count | None = None


class Summed(Message, frozen=True, tag="ps-summed"):
    """Server to client: "all ranks' contributions to the step are here". Frames: the vectors' sum, and, where a
    norm is wanted, 256 sums of squares by slot (zero for slots of others).
    """

    seq: Count


class Commit(Message, frozen=True, tag="ps-commit"):
    """Client to server: "update with the gradient times `factor`" or leave the step out. Answered by Committed.

    Every rank says it, the first counts: all come to the same from what
    Summed told them. Repeating it is safe. Said by a replacement of a step
    that it knows to count elsewhere, it waits for the others to end it here
    again; where what its own rank had contributed is gone, the coordinator
    is told StepLost.
    """

    view: Count
    seq: Count
    factor: float
    apply: bool
    norm: float = 0.0


class Committed(Message, frozen=True, tag="ps-committed"):
    """Server to client: "the step counts here and on the replicas"; what was pushed may be forgotten.

    Frame: the vectors' sum in exact strategies, and two numbers more: whether
    it was applied (1 or 0), and the norm of Commit. `updates` is how many
    updates there were in all, `slowest` the smallest clock; `late` where the
    contribution came too late to count (drop), or some of the batches in it
    count in a slot already and the others do not: there nothing of it was applied.
    """

    seq: Count
    updates: Count
    slowest: Count
    late: bool = False
    # Or-ed over all workers: 1 stop, 2 checkpoint, 4 leave; relaxed strategies.
    control_flags: Count = msgspec.field(default=0, name="wishes")
    is_new: bool = (
        True  # relaxed strategies, the holder of slot 0: it counts there by this push, and not by one before
    )


class Rest(Message, frozen=True, tag="ps-rest"):
    """Worker to every server: "I have no lease, do not wait for me". Answered by Declared; relaxed strategies.

    Its next pull or StepEnd brings it back, at the slowest clock of the others.
    """

    view: Count
    rank: Rank


# ---- weights ------------------------------------------------------------------------------------


class PullRows(Message, frozen=True, tag="ps-pull-rows"):
    """Client to server: these rows, as of the moment `clock` allows. Answered by Pulled.

    Frame: int64 keys, strictly increasing. Into: one row per key. In exact
    strategies the answer waits until step `clock` is committed; with bounded
    staleness until the slowest worker has reached `clock` minus the bound.
    A replica answers `is_nearby` in exact strategies, once it has followed its
    primaries to that step.
    """

    view: Count
    clock: Count
    table: Count
    codec: Text = ""  # of the answer
    unpushed: Count = 0  # batches of `clock` whose gradients the asker still keeps; relaxed strategies
    keys: Count = 0  # as in PushRows
    is_nearby: bool = False  # also of slots that the server holds as a replica
    is_whole: bool = False  # values and optimizer state, also of rows that are not there yet


class PullDense(Message, frozen=True, tag="ps-pull-dense"):
    """Client to server: these chunks. Into: one buffer per chunk. As PullRows otherwise."""

    view: Count
    clock: Count
    chunks: list[Count]
    codec: Text = ""
    unpushed: Count = 0
    is_nearby: bool = False


class Pulled(Message, frozen=True, tag="ps-pulled"):
    """Server to client: "it is where you wanted it"; `updates` there were by then, `slowest` is the smallest clock."""

    updates: Count
    slowest: Count


class AskDense(Message, frozen=True, tag="ps-ask-dense"):
    """Client to server: "where are your chunks?" Answered by DenseAt.

    What is read there is of one version only while the server cannot update:
    in exact steps, between a pull's answer and the reader's next StepEnd.
    """

    view: Count


class DenseAt(Message, frozen=True, tag="ps-dense-at"):
    """Server to client: (chunk, memory, offset in bytes) of every chunk it answers for, and the bytes of each memory,
    whose descriptors come with this sentence; they can only be read.
    """

    places: list[tuple[Count, Count, Count]]
    memories: list[Count]


class AskRows(Message, frozen=True, tag="ps-ask-rows"):
    """Client to server: "where are your rows of this table?" Answered by RowsAt.

    As AskDense otherwise.
    """

    view: Count
    table: Count


class RowsAt(Message, frozen=True, tag="ps-rows-at"):
    """Server to client: bytes of a table's memory, whose descriptor comes with this sentence and can only be read; 0, without
    one, where it shares none. What was read counts if the memory has this `edition` before and after.
    """

    num_bytes: Count
    edition: Count


# ---- exchanges between workers ------------------------------------------------------------------


class Post(Message, frozen=True, tag="ps-post"):
    """Worker to the holder of slot 0: my contribution to this numbered exchange. Frames: it, and a note (may be empty).

    Answered by Posted once all ranks have posted. Repeating it is safe: the
    first counts.
    """

    view: Count
    exchange: Count
    rank: Rank
    anchored_at: Count


class Posted(Message, frozen=True, tag="ps-posted"):
    """Holder of slot 0 to worker. Frames: every rank's contribution, in rank order."""

    exchange: Count


class AskNote(Message, frozen=True, tag="ps-ask-note"):
    """A replacement to the holder of slot 0: from where do I go on? Answered by Note."""

    view: Count
    rank: Rank


class Note(Message, frozen=True, tag="ps-note"):
    """Holder of slot 0 to a replacement. Frames: the rank's newest note, then one frame per entry of `log`: what each of
    these exchanges gave (all contributions, packed) or, for a commit, what Committed carries.
    """

    anchored_at: Count
    log: list[Count]
    is_commit: list[bool]
    updates: Count


# ---- stragglers ---------------------------------------------------------------------------------


class AskMissing(Message, frozen=True, tag="ps-ask-missing"):
    """Client to server: "whose contribution is it that my requests wait for?" Answered by Missing, at once, in any view."""


class Missing(Message, frozen=True, tag="ps-missing"):
    """Server to client: these ranks; none where nothing of the asker waits for a rank."""

    ranks: list[Rank]


class AskTables(Message, frozen=True, tag="ps-ask-tables"):
    """Client to server: "where are your rows?" Answered by TableTiers, at once, in any view."""


class TableTiers(Message, frozen=True, tag="ps-table-tiers"):
    """Server to client: its rows of all tables over memory and disk, replicas' among them, and lookups so far."""

    num_rows: Count
    memory_bytes: Count
    disk_bytes: Count
    num_hits: Count  # lookups that found a row in memory
    num_misses: Count
    num_counted: Count = 0  # ids without a row yet, where rows are admitted after some sightings
    num_evicted: Count = 0  # rows that policies dropped


# ---- state as a whole ---------------------------------------------------------------------------


class ReadRows(Message, frozen=True, tag="ps-read-rows"):
    """Client to server: the rows of this slot with their optimizer state. Answered by RowsRead.

    With `is_tracked` the server stamps rows that change from now on, and where `tracker` is that of its stamps, only
    rows that changed after `since` are in the answer.
    """

    view: Count
    table: Count
    slot: Slot
    is_tracked: bool = False
    tracker: Text = ""
    since: Count = 0


class RowsRead(Message, frozen=True, tag="ps-rows"):
    """Server to client. Frames: int64 keys, increasing; then values; then the state, `state_dim` numbers per row."""

    state_dim: Count
    step: Count
    num_rows: Count = 0  # of the slot; the frames may have fewer
    tracker: Text = ""
    clock: Count = 0  # of the stamps, when it was read
    num_evicted: Count = 0  # rows that the table's policy dropped in this slot so far


class WriteRows(Message, frozen=True, tag="ps-write-rows"):
    """Client to server: set these rows. Frames: keys; values; state (may be empty: as new). Answered by Declared."""

    view: Count
    table: Count
    step: Count
    num_evicted: Count = 0  # rows dropped so far, to be counted in slot 0; to its primary, with no keys


class ReadChunk(Message, frozen=True, tag="ps-read-chunk"):
    """Client to server: a chunk with its optimizer state. Answered by Chunk."""

    view: Count
    chunk: Count


class Chunk(Message, frozen=True, tag="ps-chunk"):
    """Server to client. Frames: the elements; then one tensor per entry of `state`, each (part, key, dtype, shape)."""

    state: list[tuple[Count, str, str, list[Count]]]


class WriteChunk(Message, frozen=True, tag="ps-write-chunk"):
    """Client to server: set a chunk. Frames and `state` as in Chunk; no state: as new. Answered by Declared."""

    view: Count
    chunk: Count
    state: list[tuple[Count, str, str, list[Count]]]


class Hold(Message, frozen=True, tag="ps-hold"):
    """Client to server: let no push of others count until I say so again with `is_on=False`, or leave. Answered by
    Declared. So that what is read in between belongs together, and to its applied seqs. Relaxed strategies.
    """

    view: Count
    is_on: bool


class ReadAppliedSeqs(Message, frozen=True, tag="ps-read-marks"):
    """Client to server: the applied seqs of its primary slots. Answered by AppliedSeqsRead. Relaxed strategies."""

    view: Count


class AppliedSeqsRead(Message, frozen=True, tag="ps-marks"):
    """Server to client; and client to server with WriteAppliedSeqs. Frame: int64 triples (slot, stream, seq)."""


class WriteAppliedSeqs(Message, frozen=True, tag="ps-write-marks"):
    """Client to server: take these applied seqs over. Frame as in AppliedSeqsRead. Answered by Declared."""

    view: Count


# ---- replication: server to server --------------------------------------------------------------


class Replicate(Message, frozen=True, tag="ps-replicate"):
    """Primary to replica: one update of its slots, after aggregation, in the primary's order. Answered by Replicated.

    The replica runs the same rule on it. `record` describes the frames, see
    ps/server/replication.py. Repeating it is safe within one connection: `number` counts.
    """

    view: Count
    number: Count
    record: bytes


class Replicated(Message, frozen=True, tag="ps-replicated"):
    """Replica to primary: "I have all up to this number"."""

    number: Count


class CopySlot(Message, frozen=True, tag="ps-copy-slot"):
    """Primary to a joining replica: all of one slot as it is now; later updates of it follow. Answered by Replicated."""

    view: Count
    number: Count
    slot: Slot
    record: bytes
