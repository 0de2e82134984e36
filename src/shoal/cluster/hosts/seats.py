"""Seats of a job's hosts: which numbers there are, which machine has one, and which may have it next.

Pure: no clock, no socket, no thread. `joining.Door` calls it under its lock, `hosts.Hosts` waits by
it, and `tests/simulation/joining.py` drives it through losses, repeats and takeovers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import HostNotAdmitted, WireError

SEAT_TIMEOUT_S = 6.0
"""Time a joiner waits for the number of a host that may just have been lost; longer than detecting the loss takes."""

AGENT_TIMEOUT_S = 10.0
"""From a host's admission to its agent's connection, after which the same machine may join anew."""

ADMITTED_TIMEOUT_S = 60.0
"""From a host's admission, or its last file request, to its agent's connection; after that another
host may have its number.
"""

REJOIN_S = 20.0
"""Time that a host which took over waits for the other hosts of the former head."""


class JoiningHost(NamedTuple):
    """A machine that has proven the key, and what it asks for."""

    hostname: str
    address: str
    """As the head sees it."""

    num_cores: int
    machine: bytes
    """Identity of the machine: behind a NAT several share one address, and clones share one name."""

    wants: int = -1
    """Number it was started as; -1: any."""

    role: str = ""
    """Of a service; empty: a host, which has both."""

    named: tuple[int, ...] = ()
    """Numbers of the hosts that have its name."""


@dataclass(slots=True)
class HostSeat:
    """Admitted host, as the head knows it."""

    incarnation: int
    hostname: str
    num_cores: int
    machine: bytes
    agent_awaited_since: float | None
    """None: its agent has connected."""

    sees_run_dir: bool = False


class Seats:
    """Gives each number to one machine at a time, and each machine one number.

        free ──take──▶ admitted ──connect──▶ held
         ▲                │ no agent came     │ lost
         └────────────────┴───────────────────┘

    An admission is a new incarnation of its number. What is said as an older one counts for
    nothing, be it a handshake that ends late or an agent that was given up.
    """

    def __init__(
        self, numbers: Sequence[int], job: str, names: Mapping[int, str], services: Sequence[str] = ()
    ) -> None:
        """`numbers` are the hosts that are to join; the key admits each of them once, and again after it was lost.

        `names` are the hosts' names, where they have any; `services` maps hosts that are services
        to their role.
        """
        self.taken: dict[int, HostSeat] = {}
        self._numbers, self._job, self._names, self._services = sorted(numbers), job, names, services
        self._incarnations: dict[int, int] = {}
        self._last_machines: dict[int, bytes] = {}
        self._is_closed = False

    def open(self, num_hosts: int) -> None:
        """Let the key admit more hosts, up to so many with the head."""
        self._numbers += range(self._numbers[-1] + 1 if self._numbers else 1, num_hosts)

    def close(self) -> None:
        """Admit nobody from here on. A refusal would be final, and the machine may have another head to join."""
        self._is_closed = True

    def take(self, joiner: JoiningHost, asked_at: float, now: float) -> tuple[int, int] | None:
        """Number and incarnation for a machine; None while it has to wait. HostNotAdmitted where there is none for it.

        A host that lost power may be back before the head has noticed its loss, so a joiner waits
        for a number that is taken.
        """
        self._check_open()
        numbers = self._numbers_for(joiner)
        self._release_late(now)
        before = self._number_of(joiner.machine)
        if before is not None and self._is_late(before, AGENT_TIMEOUT_S, now):
            del self.taken[before]  # the machine was lost before its agent connected, and is back
            before = None
        free = [number for number in numbers if number not in self.taken]
        if before is None and free:
            # Its caches and its copy of the run are those of the processes that it had.
            own = [number for number in free if self._last_machines.get(number) == joiner.machine]
            number = (own or free)[0]
            incarnation = self._incarnations[number] = self._incarnations.get(number, -1) + 1
            self._last_machines[number] = joiner.machine
            self.taken[number] = HostSeat(
                incarnation, joiner.hostname, joiner.num_cores, joiner.machine, agent_awaited_since=now
            )
            return number, incarnation
        if now < self.decides_at(joiner, asked_at):
            return None
        raise HostNotAdmitted(self._why_taken(joiner, numbers))

    def decides_at(self, joiner: JoiningHost, asked_at: float) -> float:
        """When a machine that waits for a number gets it or is refused, unless one is freed before.

        A machine whose own seat still waits for an agent was started again: the process that took the
        seat has ended, and nobody frees it earlier, unless it was heard since, copying files.
        """
        number = self._number_of(joiner.machine)
        since = self.taken[number].agent_awaited_since if number is not None else None
        timeout_at = asked_at + SEAT_TIMEOUT_S
        if since is None or since > asked_at:
            return timeout_at
        return max(timeout_at, since + AGENT_TIMEOUT_S)

    def admit(self, number: int, incarnation: int, *, sees_run_dir: bool) -> None:
        """A machine has what the job needs, and may have its certificate."""
        self._awaited(number, incarnation).sees_run_dir = sees_run_dir

    def heard(self, number: int, incarnation: int, now: float) -> None:
        """A host copies files, so its agent comes later."""
        self._check_newest(number, incarnation)
        seat = self.taken.get(number)
        if seat is not None and seat.agent_awaited_since is not None:
            seat.agent_awaited_since = now

    def connect(self, number: int, incarnation: int) -> None:
        """A host's agent has connected."""
        self._awaited(number, incarnation).agent_awaited_since = None

    def release(self, number: int, incarnation: int) -> None:
        """Free the number of a host that was lost, or failed to join."""
        seat = self.taken.get(number)
        if seat is not None and seat.incarnation == incarnation:
            del self.taken[number]

    def _check_open(self) -> None:
        if self._is_closed:
            raise WireError("the job is over")

    def _check_newest(self, number: int, incarnation: int) -> None:
        if self._incarnations.get(number) != incarnation:
            raise HostNotAdmitted(
                f"host {number} has joined anew since; this agent is no longer part of the job"
            )

    def _awaited(self, number: int, incarnation: int) -> HostSeat:
        """Seat of a host whose agent has not connected yet."""
        self._check_open()
        self._check_newest(number, incarnation)
        seat = self.taken.get(number)
        if seat is None or seat.agent_awaited_since is None:
            raise HostNotAdmitted(f"host {number} was given up; this agent is no longer part of the job")
        return seat

    def _is_late(self, number: int, timeout_s: float, now: float) -> bool:
        since = self.taken[number].agent_awaited_since
        return since is not None and now >= since + timeout_s

    def _release_late(self, now: float) -> None:
        for number in [each for each in self.taken if self._is_late(each, ADMITTED_TIMEOUT_S, now)]:
            del self.taken[number]

    def _number_of(self, machine: bytes) -> int | None:
        return next((number for number, seat in self.taken.items() if seat.machine == machine), None)

    def _numbers_for(self, joiner: JoiningHost) -> Sequence[int]:
        """Numbers a host may get: the one it was started as, those of its name where hosts are named, else any."""
        if joiner.wants >= 0:
            if joiner.wants not in self._numbers:
                numbers = ", ".join(map(str, self._numbers))
                raise HostNotAdmitted(
                    f"this job has no host {joiner.wants} that could join; there are {numbers}"
                )
            return [joiner.wants]
        if joiner.role:
            return self._numbers_of_role(joiner.role)
        if not self._names:
            return self._numbers
        added = [number for number in self._numbers if number not in self._names]
        if not joiner.named and not added:
            raise HostNotAdmitted(
                f"{joiner.hostname} ({joiner.address}) is none of the hosts of this job: {', '.join(self._names.values())}"
            )
        return joiner.named or added

    def _numbers_of_role(self, role: str) -> list[int]:
        found = [number for number in self._numbers if self._services and self._services[number] == role]
        if found:
            return found
        if self._services:
            raise HostNotAdmitted(
                f"this job has no {role}s; its strategy and --servers say how many there are"
            )
        raise HostNotAdmitted(
            f"a {role} service is for a job of `shoal coordinator`, and this one was started by `shoal run`, whose hosts have both "
            "workers and servers; join it with `shoal join`"
        )

    def _why_taken(self, joiner: JoiningHost, numbers: Sequence[int]) -> str:
        if (number := self._number_of(joiner.machine)) is not None:
            return f"{joiner.hostname} ({joiner.address}) is host {number} of this job already"
        if joiner.role:
            return f"all {len(numbers)} {joiner.role} services of this job have joined"
        if joiner.wants < 0 and self._names.keys().isdisjoint(numbers):
            return (
                f"every host that this job waits for has joined ({len(self._numbers)}): the key is used up. "
                f"`shoal scale {self._job} --hosts {len(self._numbers) + 2}` on the head lets another one join"
            )
        return f"host {numbers[0]} of this job is another machine, which has joined already"


@dataclass(frozen=True, slots=True)
class JoinWait:
    """The head's wait for its hosts, before the job begins."""

    began_at: float
    is_takeover: bool = False
    """The hosts of a lost head join, and that head's machine may never."""

    def is_over(self, missing: Sequence[int], *, is_coming: bool, now: float) -> bool:
        """Whether the job may begin without the missing hosts; `is_coming`: one has connected and is not ready."""
        if not self.is_takeover:
            return not missing
        return not is_coming and (len(missing) <= 1 or now >= self.began_at + REJOIN_S)

    def left_s(self, timeout_s: float, now: float) -> float:
        return self.began_at + timeout_s - now
