"""Messages between a worker and the coordinator: joining, calls, views, the store, leases, stragglers.

A docstring says who speaks, what answers, and whether a repeat is safe.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.runtime.transport.messages.message import (
    Count,
    Incarnation,
    Integer,
    Message,
    NumProcesses,
    Pid,
    Rank,
    Seconds,
)

# ---- joining ------------------------------------------------------------------------------------


class Join(Message, frozen=True, tag="join"):
    """Worker to coordinator: "I am this rank", the first sentence of every connection.

    Answered by Joined or JoinRefused, or by Leave where a replacement comes
    after all ranks have ended their scripts. Repeating it is safe: a process
    may hold several connections. A newer incarnation closes the connections
    of the older.
    """

    rank: Rank
    incarnation: Incarnation
    pid: Pid
    num_workers: NumProcesses


class Joined(Message, frozen=True, tag="joined"):
    """Coordinator to worker: "you are in", and the view there is; 0 before the first was formed."""

    view: Count


class JoinRefused(Message, frozen=True, tag="join-refused"):
    """Coordinator to worker: "you are not one of us"; the connection ends with it."""

    reason: str


class Leave(Message, frozen=True, tag="leave"):
    """Coordinator to worker: "all ranks reached the end of the script; you may exit"."""


class WaitExpired(Message, frozen=True, tag="wait-expired"):
    """Coordinator to worker, instead of any answer that waits: "your wait is over", with the rank it waited for."""

    operation: str
    waited_s: float
    missing: list[str]


# ---- calls --------------------------------------------------------------------------------------


class BeginCall(Message, frozen=True, tag="begin-call"):
    """Worker to coordinator: "my script calls into shoal"; `number` counts the calls from 1.

    Answered when all ranks have begun the call, by CallGranted; by Regroup
    where somebody waits to enter a view, by CallRefused where ranks differ, by
    WaitExpired where some never come. Repeating it is safe: a call already
    granted is granted again.
    """

    rank: Rank
    number: Count
    kind: str  # fit, evaluate, predict, save, ...
    detail: str


class CallGranted(Message, frozen=True, tag="call-granted"):
    """Coordinator to worker: "all ranks make this call; go on"."""

    number: Count


class CallRefused(Message, frozen=True, tag="call-refused"):
    """Coordinator to worker: "the ranks differ", with what each known rank did instead."""

    number: Count
    calls: dict[Rank, str]


class ScriptEnded(Message, frozen=True, tag="script-ended"):
    """Worker to coordinator: "my script is at its end, after so many calls".

    Answered by Leave once all ranks are, by Regroup where somebody waits to
    enter a view, by CallRefused where another rank calls on, by WaitExpired
    where some never come. Repeating it is safe.
    """

    rank: Rank
    num_calls: Count


# ---- views --------------------------------------------------------------------------------------


class EnterView(Message, frozen=True, tag="enter-view"):
    """Worker to coordinator: "I have left this view, after so many exchanges, and wait for the next".

    Answered by ViewFormed when every rank has come in its newest incarnation,
    by ViewRefused where that cannot be, by WaitExpired where some never come
    and nobody may be replaced. Repeating it is safe: whoever is in the view
    already is told of it again.
    """

    rank: Rank
    incarnation: Incarnation
    view_left: Count  # 0: never was in one
    # Exchanges finished; -1: none, and no state either.
    finished: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
    call: Count  # the newest call this rank has begun; 0: none
    # Time that this rank had waited for the others in the exchange that broke: it is deducted from the next wait for them.
    waited_s: Seconds = 0.0
    waited_in: str = ""


class ViewFormed(Message, frozen=True, tag="view-formed"):
    """Coordinator to worker and to supervisor: "this is the view now, and this is who has the newest state"."""

    view: Count
    donor: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]  # -1: nobody has state
    # Exchanges the donor has finished; -1 without one.
    finished: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
    call: Count  # the newest call the donor has begun
    incarnations: list[Incarnation]


class ViewRefused(Message, frozen=True, tag="view-refused"):
    """Coordinator to worker: "you cannot be in the next view", and why: replaced, or ranks too far apart."""

    reason: str


class Regroup(Message, frozen=True, tag="regroup"):
    """Coordinator to worker, instead of an answer to BeginCall or ScriptEnded: "somebody waits to enter a view".

    The worker leaves `view`, enters the next one, and asks again.
    """

    view: Count


class AskServers(Message, frozen=True, tag="ask-servers"):
    """Worker to coordinator: "tell me of the view after this one". Answered by ServerView, when there is a newer one, or
    by WaitExpired. Repeating it is safe. It may take long: ask on a connection of its own.
    """

    after_view: Count
    timeout_s: Seconds


# ---- stragglers ---------------------------------------------------------------------------------


class Late(Message, frozen=True, tag="late"):
    """Worker to coordinator: "I wait for these ranks, for so long". Answered by LateHeard; repeating it is safe.

    A process of theirs that was stopped is killed and replaced. One that is at work is let be.
    """

    ranks: list[Rank]
    waited_s: Seconds
    operation: str


class LateHeard(Message, frozen=True, tag="late-heard"):
    """Coordinator to worker: "they are looked at"."""


# ---- leases of relaxed strategies ---------------------------------------------------------------


class AskLease(Message, frozen=True, tag="ask-lease"):
    """Worker to coordinator: "these leases are finished, all pushes acknowledged; give me more".

    How the epochs are cut is told with every question; all must say the same.
    `first_epoch` and `done` are where a checkpoint begins. Answered by Leases,
    NoMoreLeases, LeaseRefused or, where nothing came back in time,
    WaitExpired. Repeating it is safe.
    """

    call: Count
    rank: Rank
    incarnation: Incarnation
    view: Count  # of the servers, the newest the worker has heard of: who knows only one that was lost is not heard
    finished: list[Count]
    num_samples: Count
    samples_per_lease: Count
    num_epochs: Count
    num_ahead: Count
    timeout_s: Seconds
    first_epoch: Count = 0
    done: list[Count] = msgspec.field(default_factory=list)  # leases of that epoch
    below: Count = (
        0  # every lease below is done, as far as the worker knows: the end of an epoch is news to it
    )
    is_last: bool = False  # the call ends early: nobody is given any more of it
    # How long each of the finished took, without waits.
    busy_s: list[Seconds] = msgspec.field(default_factory=list)
    num_workers: NumProcesses = 0
    backup: bool = False  # hand out an epoch's last leases twice where their holder is slow
    drain_slower_than: float = 0.0  # than the median of the others; 0: nobody is drained
    probe_every_s: Seconds = 10.0  # of a worker that is
    shares: list[Count] = msgspec.field(default_factory=list)  # by rank, where leases are not for anybody
    from_epoch: Count = 0  # the Trainer's number of the call's first epoch
    trainer: Count = 0
    data: str = ""  # which data it is, for the ledger
    batch_size: Count = 0
    # Leases of any epoch whose data this worker's host has.
    near: list[Count] = msgspec.field(default_factory=list)
    num_left_out: Count = 0  # of an epoch: of a last batch that is not full; not among num_samples
    counted: list[tuple[Count, Count]] = msgspec.field(default_factory=list)


class Leases(Message, frozen=True, tag="leases"):
    """Coordinator to worker: all that you hold, (number, epoch, start, stop) each; every lease below `done_below` is done.

    Nothing, where others hold all of an epoch of which the worker has not heard that it began.
    """

    leases: list[tuple[Count, Count, Count, Count]]
    done_below: Count
    is_ending: bool = False


class NoMoreLeases(Message, frozen=True, tag="no-more-leases"):
    """Coordinator to worker: "the last epoch of this call is over"."""

    done_below: Count


class LeaseRefused(Message, frozen=True, tag="lease-refused"):
    """Coordinator to worker: "that cannot be", and why; nothing was changed."""

    reason: str


# ---- store --------------------------------------------------------------------------------------


class StoreSet(Message, frozen=True, tag="store-set"):
    """Worker to coordinator: "keep these values", all at once. Answered by StoreDone. Repeating it is safe."""

    values: dict[str, bytes]


class StoreGet(Message, frozen=True, tag="store-get"):
    """Worker to coordinator: "tell me these values, once all are there".

    Answered by StoreValues, in the order of the keys, or by WaitExpired.
    Repeating it is safe.
    """

    keys: list[str]
    timeout_s: Seconds


class StoreWait(Message, frozen=True, tag="store-wait"):
    """Worker to coordinator: "tell me when all these keys are there".

    Answered by StoreDone or by WaitExpired. Repeating it is safe.
    """

    keys: list[str]
    timeout_s: Seconds


class StoreAdd(Message, frozen=True, tag="store-add"):
    """Worker to coordinator: "add to this decimal counter". Answered by StoreCount.

    Repeating it is safe with a `client` and its `serial`: the newest answer
    of every client is kept, and given again. Without (0) it counts twice.
    """

    key: str
    amount: Integer
    client: Count = 0
    serial: Count = 0


class StoreAppend(Message, frozen=True, tag="store-append"):
    """Worker to coordinator: "add these bytes to the end". Answered by StoreDone. Repeating it: as with StoreAdd."""

    key: str
    value: bytes
    client: Count = 0
    serial: Count = 0


class StoreCompareSet(Message, frozen=True, tag="store-compare-set"):
    """Worker to coordinator: "replace the value if it is `expected`; an empty `expected` also means absent".

    Answered by StoreValues with the one value there is now (or `expected`,
    where the key is absent and stays so: torch's rule). Repeating it: as with
    StoreAdd; without a `client`, safe as long as nobody sets the value back.
    """

    key: str
    expected: bytes
    desired: bytes
    client: Count = 0
    serial: Count = 0


class StoreCheck(Message, frozen=True, tag="store-check"):
    """Worker to coordinator: "are all these keys there?" Answered by StoreFlag at once. Repeating it is safe."""

    keys: list[str]


class StoreDelete(Message, frozen=True, tag="store-delete"):
    """Worker to coordinator: "forget this key". Answered by StoreFlag: was it there? Repeating it: as with StoreAdd."""

    key: str
    client: Count = 0
    serial: Count = 0


class StoreNumKeys(Message, frozen=True, tag="store-num-keys"):
    """Worker to coordinator: "how many keys are there?" Answered by StoreCount. Repeating it is safe."""


class StoreDone(Message, frozen=True, tag="store-done"):
    """Coordinator to worker: "done"."""


class StoreValues(Message, frozen=True, tag="store-values"):
    """Coordinator to worker: the values, in the order in which they were asked for."""

    values: list[bytes]


class StoreCount(Message, frozen=True, tag="store-count"):
    """Coordinator to worker: a number."""

    value: Integer


class StoreFlag(Message, frozen=True, tag="store-flag"):
    """Coordinator to worker: yes or no."""

    value: bool


class StoreRefused(Message, frozen=True, tag="store-refused"):
    """Coordinator to worker: "that cannot be done"; nothing was changed, and the connection goes on."""

    reason: str
