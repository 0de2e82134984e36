"""Scheduler of the job queue: which job starts where, by cores, GPUs, memory, priority and quota.

Pure: no clock, no process, no file. `runner.py` feeds it events and carries out the actions it
returns. Jobs start by priority, then in the order of their submission. The first that does not fit
blocks all behind it: smaller jobs that overtake it could starve it. A job that waits for its user's
quota blocks nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Cores, GPUs and memory: of a host, a job or a user."""

    cores: int = 0
    gpus: int = 0
    memory: int = 0
    """Bytes."""

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            cores=self.cores + other.cores, gpus=self.gpus + other.gpus, memory=self.memory + other.memory
        )

    def __mul__(self, count: int) -> Amount:
        return Amount(cores=self.cores * count, gpus=self.gpus * count, memory=self.memory * count)

    def fits(self, room: Amount) -> bool:
        return self.cores <= room.cores and self.gpus <= room.gpus and self.memory <= room.memory

    def __str__(self) -> str:
        said = [f"{self.cores} core{'s' * (self.cores != 1)}"]
        said += [f"{self.gpus} GPU{'s' * (self.gpus != 1)}"] if self.gpus else []
        said += [f"{self.memory / (1 << 30):.4g} GB of memory"] if self.memory else []
        return ", ".join(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job as the scheduler knows it."""

    id: int
    """Number in the order of submission."""

    need: Amount
    """On each of its hosts."""

    hosts: int = 1
    user: str = ""
    priority: int = 0
    """The higher starts first."""

    @property
    def total(self) -> Amount:
        return self.need * self.hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Capacity to share out."""

    hosts: Mapping[str, Amount]
    """The first is the runner's machine: every job has its head and some of its workers there."""

    quotas: Mapping[str, Amount] = field(default_factory=dict)
    """Limit for a user's running jobs together; user "" is for each user not named."""

    def quota(self, user: str) -> Amount | None:
        return self.quotas.get(user, self.quotas.get(""))

    def refusal(self, request: JobRequest) -> str:
        """Reason why a job could never run: its request, and the capacity. Empty if it could."""
        quota = self.quota(request.user)
        first, *_ = self.hosts.values()
        num_fitting = sum(request.need.fits(amount) for amount in self.hosts.values())
        if num_fitting < request.hosts or not request.need.fits(first):
            there = "; ".join(
                f"{name}: {amount}" if name else f"{amount}" for name, amount in self.hosts.items()
            )
            where = (
                f"{request.hosts} hosts with {request.need} each" if request.hosts > 1 else f"{request.need}"
            )
            return f"it asks for {where}, and the queue has {there}"
        if quota is not None and not request.total.fits(quota):
            return f"it asks for {request.total}, and the quota of {request.user or 'each user'} is {quota}"
        return ""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job came into the queue."""

    request: JobRequest


@dataclass(frozen=True, slots=True)
class Found:
    """A job already runs on these hosts: the runner was restarted."""

    request: JobRequest
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """A running job is over, however it ended."""

    id: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A user cancelled a job."""

    id: int


Event = Submitted | Found | Ended | Cancelled


@dataclass(frozen=True, slots=True)
class Start:
    """Start a job on these hosts."""

    id: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask a running job to save and leave; its resources are free once it has ended."""

    id: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Take a job that could never run out of the queue."""

    id: int
    reason: str


Action = Start | Stop | Refuse


class Scheduler:
    """Events in, actions out. Running jobs never exceed a host's capacity or a user's quota."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: dict[int, JobRequest] = {}
        self._running: dict[int, tuple[JobRequest, tuple[str, ...]]] = {}

    def handle(self, event: Event) -> list[Action]:
        """Apply one event; return what must now be done, in order."""
        match event:
            case Submitted(request):
                if reason := self._pool.refusal(request):
                    return [Refuse(request.id, reason)]
                self._waiting[request.id] = request
            case Found(request, hosts):
                self._running[request.id] = request, hosts
                return []
            case Ended(id):
                self._running.pop(id, None)
            case Cancelled(id):
                self._waiting.pop(id, None)
                if id in self._running:
                    return [Stop(id)]
        return list(self._start())

    def waits_for(self, id: int) -> str:
        """Reason why a job of the queue does not run yet; empty if it does."""
        if id not in self._waiting:
            return ""
        request = self._waiting[id]
        if self._is_over_quota(request):
            return f"the quota of {request.user or 'its user'}"
        ahead = [each.id for each in self._in_order() if each.id != id and not self._is_over_quota(each)]
        first = next(iter(ahead), None)
        before = first is not None and self._rank(self._waiting[first]) < self._rank(request)
        return f"job {first}, which is before it" if before else f"{request.need} to be free"

    def _start(self) -> list[Action]:
        started: list[Action] = []
        for request in self._in_order():
            if self._is_over_quota(request):
                continue
            hosts = self._place(request)
            if hosts is None:
                break
            del self._waiting[request.id]
            self._running[request.id] = request, hosts
            started.append(Start(request.id, hosts))
        return started

    def _in_order(self) -> list[JobRequest]:
        return sorted(self._waiting.values(), key=self._rank)

    @staticmethod
    def _rank(request: JobRequest) -> tuple[int, int]:
        return -request.priority, request.id

    def _is_over_quota(self, request: JobRequest) -> bool:
        quota = self._pool.quota(request.user)
        if quota is None:
            return False
        # The default quota applies to each unnamed user separately.
        used = sum((each.total for each, _ in self._running.values() if each.user == request.user), Amount())
        return not (used + request.total).fits(quota)

    def _place(self, request: JobRequest) -> tuple[str, ...] | None:
        """The first host, and the fullest others that fit, so that large free capacity stays in one
        piece; None if too few fit.
        """
        found = []
        for number, (name, amount) in enumerate(self._pool.hosts.items()):
            used = sum((each.need for each, hosts in self._running.values() if name in hosts), Amount())
            if (used + request.need).fits(amount):
                found.append((number > 0, amount.cores - used.cores, name))
        chosen = tuple(name for *_, name in sorted(found)[: request.hosts])
        return chosen if len(chosen) == request.hosts and next(iter(self._pool.hosts)) in chosen else None
