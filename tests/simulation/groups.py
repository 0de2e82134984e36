"""Gloo as it was measured: groups whose members finish alone, and hear of a death late, by chance, or not at all.

- A collective finishes at each rank by itself, once all have begun it.
- The ring neighbours of a killed peer get an error within 60 ms, whether or
  not they had all they needed; so some finish and others do not.
- Others hear only when their own neighbours drop the group. Only while a group
  is formed everybody talks to everybody.
- A stopped peer is noticed by nobody before the time-out.
- There are no numbers: the k-th collective of one rank meets the k-th of
  another. That they mean the same is for the protocol to ensure, and is
  checked here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulation.world import Violated

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.worker import Worker

Done = Callable[[list[Any]], None]


class _Round:
    """One collective: what each rank brought, and what it does when it has everybody's."""

    __slots__ = ("dones", "is_complete", "label", "parts")

    def __init__(self, label: object) -> None:
        self.label = label
        self.parts: dict[int, Any] = {}
        self.dones: dict[int, Done] = {}
        self.is_complete = False


class Group:
    """The members of one view, connected to each other. A rank that left it never comes back."""

    def __init__(self, cluster: Cluster, view: int, incarnations: list[int]) -> None:
        self.view, self.incarnations = view, incarnations
        self._cluster, self._world = cluster, cluster.world
        self._size = len(incarnations)
        self._members: dict[int, Worker] = {}
        self._gone: set[int] = set()  # dead, or dropped the group
        self._alarmed: set[int] = set()  # will get an error at whatever it does next
        self._rounds: list[_Round] = []
        self._num_begun: dict[int, int] = {}
        self._given: dict[int, Any] = {}  # by the donor
        self._takers: dict[int, tuple[int, Callable[[Any], None]]] = {}  # rank -> from whom, and what then

    def enter(self, worker: Worker) -> None:
        """`worker` is there and looks for the others."""
        if self.incarnations[worker.rank] != worker.incarnation or worker.rank in self._gone:
            raise Violated(f"{worker.name} is in the group of view {self.view}, which is not its own")
        self._members[worker.rank] = worker
        self._num_begun[worker.rank] = 0
        if self._gone:
            self._alarm(worker.rank)

    def run(self, worker: Worker, label: object, part: Any, done: Done) -> None:
        """Begin the next collective. `done` gets all parts in rank order; or the worker hears `broken`."""
        rank = worker.rank
        number = self._num_begun[rank]
        self._num_begun[rank] = number + 1
        if number == len(self._rounds):
            self._rounds.append(_Round(label))
        this = self._rounds[number]
        if this.label != label:
            raise Violated(
                f"{worker.name} is at {label} where others are at {this.label}, in one exchange of view {self.view}"
            )
        this.parts[rank], this.dones[rank] = part, done
        self._wait(worker)
        if len(this.parts) == self._size and not self._gone:
            this.is_complete = True
            for other, member in self._members.items():
                member.later(self._world.between(0.0005, 0.01), self._finish, this, other)

    def export_state(self, donor: Worker, state: Any) -> None:
        """From one to another, outside of the collectives: whoever asks `donor` gets this."""
        self._given[donor.rank] = state
        for rank, (giver, _) in list(self._takers.items()):
            if giver == donor.rank:
                self._members[rank].later(self._world.between(0.0005, 0.01), self._took, rank)

    def import_state(self, worker: Worker, donor: int, done: Callable[[Any], None]) -> None:
        """Wait for what `donor` gives."""
        self._takers[worker.rank] = (donor, done)
        self._wait(worker)
        if donor in self._gone:
            self._alarm(worker.rank)
        elif donor in self._given:
            worker.later(self._world.between(0.0005, 0.01), self._took, worker.rank)

    def given_by(self, rank: int) -> Any:
        """What `rank` gives; None if nothing yet."""
        return self._given.get(rank)

    def leave(self, worker: Worker) -> None:
        """`worker` died, or dropped every reference to the group."""
        rank = worker.rank
        if rank in self._gone:
            return
        self._gone.add(rank)
        if not (self._rounds and self._rounds[0].is_complete):
            # They are still connecting, each to all: nobody overlooks that one is not there.
            for other in sorted(self._members.keys() - self._gone):
                self._alarm(other)
            return
        self._takers.pop(rank, None)
        for this in self._rounds[-2:]:
            this.dones.pop(rank, None)
        takers = {taker for taker, (giver, _) in self._takers.items() if giver == rank}
        for other in sorted({(rank - 1) % self._size, (rank + 1) % self._size} | takers):
            if other not in self._gone:
                self._alarm(other)

    def _alarm(self, rank: int) -> None:
        self._alarmed.add(rank)
        member = self._members.get(rank)
        if member is not None:
            member.later(self._world.between(0.001, 0.06), self._break, member)

    def _wait(self, worker: Worker) -> None:
        worker.waits_since = self._world.now
        if not worker.has_watchdog:
            worker.has_watchdog = True
            worker.later(self._cluster.settings.step_timeout_s, self._watch, worker)
        if worker.rank in self._alarmed:
            self._alarm(worker.rank)

    def _took(self, rank: int) -> None:
        if rank not in self._takers:
            return
        donor, done = self._takers[rank]
        if donor in self._gone and self._world.random.random() < 0.5:
            return  # half of it was under way when the donor died
        del self._takers[rank]
        self._members[rank].waits_since = None
        done(self._given[donor])

    def _finish(self, this: _Round, rank: int) -> None:
        if rank in self._gone or rank not in this.dones:
            return
        others = [
            member for other, member in self._members.items() if other != rank and other not in self._gone
        ]
        if any(member.is_stopped for member in others) and self._world.random.random() < 0.7:
            # It needs something of a peer that stands still: until that goes on, or the time is over.
            self._members[rank].later(0.05, self._finish, this, rank)
        elif not self._gone or self._world.random.random() < 0.5:
            self._members[rank].waits_since = None
            this.dones.pop(rank)([this.parts[each] for each in range(self._size)])

    def _break(self, member: Worker) -> None:
        """The error arrives, if it still waits for something of this group."""
        if member.group is self and member.waits_since is not None:
            member.broken(self, "a peer is gone")

    def _watch(self, member: Worker) -> None:
        member.has_watchdog = False
        if member.waits_since is None or member.group is None:
            return
        left_s = member.waits_since + self._cluster.settings.step_timeout_s - self._world.now
        if left_s <= 1e-9:
            member.broken(member.group, "the time is over")
        else:
            member.has_watchdog = True
            member.later(left_s, self._watch, member)
