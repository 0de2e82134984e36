"""Messages of the supervisor: status from its processes, and its connection to the coordinator.

Processes write theirs over the socket pair they were born with; they are never
answered.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shoal.runtime.transport.messages.message import Count, ExitCode, Incarnation, Message, NumProcesses, Rank

# ---- a worker to its supervisor -----------------------------------------------------------------


class Progress(Message, frozen=True, tag="progress"):
    """Worker to supervisor: "this is where I am". Only the newest counts; any may be lost."""

    rank: Rank
    call: Count
    phase: str
    epoch: Count
    num_epochs: Count | None
    step: Count
    num_steps: Count | None
    loss: float | None
    metrics: dict[str, float]
    samples: Count
    samples_per_s: float
    eta_s: float | None
    metrics_epoch: Count = 0  # the epoch, from 1, that the metrics are of; 0 where none is over


class Failed(Message, frozen=True, tag="failed"):
    """Worker to supervisor: "I cannot go on, and this is why", before it exits with `exit_code`.

    `kind` says whose fault: the user's own exception, an error of shoal's, or
    an exchange that broke because another rank went first (reported last).
    """

    rank: Rank
    kind: Literal["script", "shoal", "peer"]
    error: str  # class name
    message: str
    traceback: str
    exit_code: ExitCode
    facts: str = "{}"


class Live(Message, frozen=True, tag="live"):
    """Worker to supervisor: "I have caught up; what I say from now on is news". Repeating it is safe."""

    rank: Rank


class Saved(Message, frozen=True, tag="saved"):
    """Worker to supervisor, and on to the coordinator: "the checkpoint of this step is whole, at this path".

    Repeating it is safe.
    """

    rank: Rank
    path: str
    step: Count


class Happened(Message, frozen=True, tag="happened"):
    """Worker to supervisor: "write this down": a kind of event, and its facts as JSON."""

    rank: Rank
    kind: str
    facts: str


class Activity(Message, frozen=True, tag="activity"):
    """Any process to its supervisor: "this is what I did in the last second", as a line of JSON. Any may be lost."""

    line: str


class Finished(Message, frozen=True, tag="finished"):
    """Worker to supervisor: "my script is done", with the totals of the run. Said once, last."""

    rank: Rank
    samples: Count
    seconds: float
    steps: Count
    metrics: dict[str, float]
    # Pulls by how far they ran ahead; relaxed.
    staleness: dict[Count, Count] = msgspec.field(default_factory=dict)
    num_late: Count = 0  # contributions that came too late to count
    num_missed: Count = 0  # steps that were over before this rank began them
    exchange_bytes: Count = 0
    row_cache: dict[str, Count] = msgspec.field(default_factory=dict)  # lookups: hits and misses
    fan_in: dict[str, Count] = msgspec.field(default_factory=dict)  # pushes, and messages made of them
    key_bytes_saved: Count = 0


class Noted(Message, frozen=True, tag="noted"):
    """Worker to supervisor, and on to the coordinator: "this belongs into the ledger", a fact as JSON.

    Never answered. The supervisor numbers them, from 1, so repeating one to
    the coordinator is safe; how many it has, it says in Watching.
    """

    rank: Rank
    fact: str
    serial: Count = 0


# ---- workers: supervisor and coordinator --------------------------------------------------------


class Watch(Message, frozen=True, tag="watch"):
    """Supervisor to coordinator: "tell me what I must know", the first sentence of its connection.

    Answered by Watching; then Suspect and ViewFormed come as they happen.
    Repeating it is safe, and how the supervisor sees that somebody answers.
    """


class Watching(Message, frozen=True, tag="watching"):
    """Coordinator to supervisor: "I am at work", the view there is, and how many notes for the ledger are written down."""

    view: Count
    num_noted: Count = 0


class Suspect(Message, frozen=True, tag="suspect"):
    """Coordinator to supervisor: "this process keeps the others waiting; it must be killed".

    Repeated while they wait, and sent to every new watcher.
    """

    rank: Rank
    incarnation: Incarnation
    why: str
    waited_s: float
    lenient: bool


class Reaped(Message, frozen=True, tag="reaped"):
    """Supervisor to coordinator: "this process is dead". Never answered; repeating it is safe."""

    rank: Rank
    incarnation: Incarnation
    code: ExitCode


class WorkerDrained(Message, frozen=True, tag="worker-drained"):
    """Coordinator to supervisor: "this worker gets no more leases but for a probe now and then". Said again to a new watcher."""

    rank: Rank
    incarnation: Incarnation
    samples_per_s: float
    others_samples_per_s: float
    slower_than: float


class WorkerReadmitted(Message, frozen=True, tag="worker-readmitted"):
    """Coordinator to supervisor: "this worker has recovered, and gets leases as the others do"."""

    rank: Rank
    samples_per_s: float
    others_samples_per_s: float


class LeaseCounts(Message, frozen=True, tag="lease-counts"):
    """Coordinator to supervisor: what each rank has done so far, (leases, samples); for `shoal status`."""

    by_rank: dict[Rank, tuple[Count, Count]]


# ---- servers: supervisor and coordinator --------------------------------------------------------


class ReapedServer(Message, frozen=True, tag="reaped-server"):
    """Supervisor to coordinator: "this server is dead". Never answered; repeating it is safe."""

    number: Rank
    incarnation: Incarnation
    code: ExitCode


class SuspectServer(Message, frozen=True, tag="suspect-server"):
    """Coordinator to supervisor: "this server says nothing; it must be killed". Said again as long as that is so."""

    number: Rank
    incarnation: Incarnation
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
    servers: list[Rank]  # which held them
    rank: Rank | None = None


class ScaleServers(Message, frozen=True, tag="scale-servers"):
    """Supervisor to coordinator, and before that `shoal scale` to supervisor: "there shall be so many servers".

    The coordinator answers by ScaleRefused, or by ServersScaled when the last slot has moved.
    """

    num_servers: NumProcesses


class ScaleWorkers(Message, frozen=True, tag="scale-workers"):
    """`shoal scale` to supervisor: "there shall be so many workers". Answered by ScaleRefused, or Resizing and Resized."""

    num_workers: Count


class ScaleHosts(Message, frozen=True, tag="scale-hosts"):
    """`shoal scale` to supervisor: "so many hosts may be part of the job". Answered by ScaleRefused, or Resized at once."""

    num_hosts: Count


class LeaveHost(Message, frozen=True, tag="leave-host"):
    """`shoal leave` to supervisor: "this host shall leave the job". Answered as ScaleWorkers is."""

    host: Count


class Resizing(Message, frozen=True, tag="resizing"):
    """Supervisor to `shoal scale` and `shoal leave`: "the workers save and stop"."""

    text: str


class Resized(Message, frozen=True, tag="resized"):
    """Supervisor to `shoal scale` and `shoal leave`: "the workers that go on are started"."""

    text: str


class ScaleRefused(Message, frozen=True, tag="scale-refused"):
    """Coordinator to supervisor, and on to `shoal scale`: "that cannot be"; nothing was changed."""

    reason: str


class ScaleBegun(Message, frozen=True, tag="scale-begun"):
    """Coordinator to supervisor, and on to `shoal scale`: "so it shall be"; slots move from now on."""

    num_servers: NumProcesses


class ServersScaled(Message, frozen=True, tag="servers-scaled"):
    """Coordinator to supervisor, and on to `shoal scale`: "every slot is where it belongs"; others may leave.

    Sent to watchers whenever slots have reached their target.
    """

    view: Count
    num_servers: NumProcesses
