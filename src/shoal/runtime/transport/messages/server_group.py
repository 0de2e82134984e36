"""The sentences about the group of servers and about leases: to and from the coordinator.

A server has one line to the coordinator. On it nothing is asked and answered
in turn: it says JoinServer first and SlotsFilled as it happens, and hears
ServerView, RankJoined, RankDead and PingServer as they happen.
"""

from __future__ import annotations

import msgspec

from shoal.runtime.transport.messages.message import Count, Message, Seconds

# ---- servers -------------------------------------------------------------------------------------


class JoinServer(Message, frozen=True, tag="join-server"):
    """Server to coordinator: "I am this server", the first sentence of its line.

    Answered by JoinedServer, then RankJoined for every rank that is in, and
    ServerView as soon as there is one; or by JoinRefused, and the line ends.
    Repeating it on a new line is safe, and what a server does when the
    coordinator was killed. One that was being filled is then told of a new
    view: what it said on the old line may have reached nobody.
    """

    number: Count
    incarnation: Count
    pid: Count


class JoinedServer(Message, frozen=True, tag="joined-server"):
    """Coordinator to server: "you are in"; the newest view there is, 0 where there is none."""

    view: Count


class PingServer(Message, frozen=True, tag="ping-server"):
    """Coordinator to server: "are you at work?" Answered by ServerAlive, between two turns."""

    number: Count


class ServerAlive(Message, frozen=True, tag="server-alive"):
    """Server to coordinator: "I am". Any other sentence says so too."""

    number: Count


class RankJoined(Message, frozen=True, tag="rank-joined"):
    """Coordinator to server: "this incarnation of the rank is in". Repeating it is safe."""

    rank: Count
    incarnation: Count


class RankDead(Message, frozen=True, tag="rank-dead"):
    """Coordinator to server: "this incarnation of the rank is dead, and its successor is on its way". Repeating is safe."""

    rank: Count
    incarnation: Count


class AskServers(Message, frozen=True, tag="ask-servers"):
    """Worker to coordinator: "tell me of the view after this one". Answered by ServerView, when there is a newer one, or
    by WaitExpired. Repeating it is safe. It may take long: ask on a connection of its own.
    """

    after_view: Count
    timeout_s: Seconds


# ---- the supervisor and the servers ----------------------------------------------------------------


class ReapedServer(Message, frozen=True, tag="reaped-server"):
    """Supervisor to coordinator: "this server is dead". Never answered; repeating it is safe."""

    number: Count
    incarnation: Count
    code: int  # minus the signal that killed it


class SuspectServer(Message, frozen=True, tag="suspect-server"):
    """Coordinator to supervisor: "this server says nothing; it must be killed". Said again as long as that is so."""

    number: Count
    incarnation: Count
    why: str
    waited_s: float


class SlotsLost(Message, frozen=True, tag="slots-lost"):
    """Coordinator to supervisor: "nobody holds these slots any more": only a checkpoint brings them back.

    All workers and servers must be started anew; the group forms again when
    all of its servers have. `number` counts such losses, from 1.
    """

    number: Count
    view: Count  # in which they were held
    num_slots: Count
    servers: list[Count]  # which held them
    rank: Count | None = None  # where they live and only a step is lost: whose part in it


class ScaleServers(Message, frozen=True, tag="scale-servers"):
    """Supervisor to coordinator, and before that `shoal scale` to supervisor: "there shall be so many servers".

    The coordinator answers by ScaleRefused, or by ServersScaled when the last slot has moved.
    """

    num_servers: Count


class ScaleRefused(Message, frozen=True, tag="scale-refused"):
    """Coordinator to supervisor, and on to `shoal scale`: "that cannot be"; nothing was changed."""

    reason: str


class ScaleBegun(Message, frozen=True, tag="scale-begun"):
    """Coordinator to supervisor, and on to `shoal scale`: "so it shall be"; slots move from now on."""

    num_servers: Count


class ServersScaled(Message, frozen=True, tag="servers-scaled"):
    """Coordinator to supervisor, and on to `shoal scale`: "every slot is where it belongs"; others may leave.

    Said to whoever watches, whenever slots have come to where they belong.
    """

    view: Count
    num_servers: Count


# ---- leases --------------------------------------------------------------------------------------


class AskLease(Message, frozen=True, tag="ask-lease"):
    """Worker to coordinator: "these leases are finished, all pushes acknowledged; give me more".

    How the epochs are cut is told with every question; all must say the same.
    `first_epoch` and `done` are where a checkpoint begins. Answered by Leases,
    NoMoreLeases, LeaseRefused or, where nothing came back in time,
    WaitExpired. Repeating it is safe.
    """

    call: Count
    rank: Count
    incarnation: Count
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
    busy_s: list[Seconds] = msgspec.field(
        default_factory=list
    )  # how long each of the finished took, without waits
    num_workers: Count = 0
    backup: bool = False  # hand out an epoch's last leases twice where their holder is slow
    drain_slower_than: float = 0.0  # than the median of the others; 0: nobody is drained
    probe_every_s: Seconds = 10.0  # of a worker that is
    shares: list[Count] = msgspec.field(default_factory=list)  # by rank, where leases are not for anybody
    from_epoch: Count = 0  # the Trainer's number of the call's first epoch
    trainer: Count = 0
    data: str = ""  # which data it is, for the ledger
    batch_size: Count = 0
    near: list[Count] = msgspec.field(
        default_factory=list
    )  # leases of any epoch whose data this worker's host has
    num_left_out: Count = 0  # of an epoch: of a last batch that is not full; not among num_samples
    counted: list[tuple[Count, Count]] = msgspec.field(
        default_factory=list
    )  # (lease, batches) that count already, says the checkpoint


class Leases(Message, frozen=True, tag="leases"):
    """Coordinator to worker: all that you hold, (number, epoch, start, stop) each; every lease below `done_below` is done.

    Nothing, where others hold all of an epoch of which the worker has not heard that it began.
    """

    leases: list[tuple[Count, Count, Count, Count]]
    done_below: Count
    is_ending: bool = False  # others may finish what you hold before you do, so look now and then


class NoMoreLeases(Message, frozen=True, tag="no-more-leases"):
    """Coordinator to worker: "the last epoch of this call is over"."""

    done_below: Count


class LeaseRefused(Message, frozen=True, tag="lease-refused"):
    """Coordinator to worker: "that cannot be", and why; nothing was changed."""

    reason: str


class LeaseCounts(Message, frozen=True, tag="lease-counts"):
    """Coordinator to supervisor: what each rank has done so far, (leases, samples); for `shoal status`."""

    by_rank: dict[int, tuple[Count, Count]]


GROUP_MESSAGES: tuple[type[Message], ...] = (
    JoinServer, JoinedServer, PingServer, ServerAlive, RankJoined, RankDead, AskServers,
    ReapedServer, SuspectServer, SlotsLost, ScaleServers, ScaleRefused, ScaleBegun, ServersScaled,
    AskLease, Leases, NoMoreLeases, LeaseRefused, LeaseCounts,
)  # fmt: skip
"""All of them; `messages.py` adds them to what a decoder accepts."""
