"""The servers of a job as one client sees them: owners of slots, connections, and retries in a new view.

Handles views and connections, independent of the requests: an `Operation` is sent once per view and
finished in whichever view it succeeds. Every message of the parameter server may be repeated, so
recovery from a server's death is a retry of everything that was not acknowledged.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.errors import LinkLost, ServerRefused, WaitTimedOut
from shoal.ps.client.rows_in_place import RowsInPlace
from shoal.ps.codecs import Compression
from shoal.ps.key_lists import KeyLists
from shoal.runtime.transport import endpoint, memfd, tls
from shoal.runtime.transport.arena import ArenaConfig, Buffer
from shoal.runtime.transport.framing import Bytes
from shoal.runtime.transport.messages import client_server as msg
from shoal.runtime.transport.messages.client_server import TableSpec
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import ServerView
from shoal.runtime.transport.shared_client import Link

BEHIND_S = 0.005  # pause before a server that has not heard of the newest view is asked again

CONNECT_TIMEOUT_S = 10.0

LOST_S = 2.0
"""Wait for a view without a server whose connection broke, before the connection is retried.

No liveness time-out: nothing is given up after it. The death of a server on a live host is seen at once and brings a new view
much sooner; without one the server most likely lives.
"""

ANSWER_S = 2.0  # time-out of AskMissing: a server answers it without waiting


class ViewChanged(Exception):
    """Internal: the operation has to be sent again, in a newer view or once the server knows this one."""

    def __init__(self, view: int) -> None:
        self.view = view
        super().__init__(f"the server stands in view {view}")


class Operation(Protocol):
    """A request to the servers that can be repeated."""

    sent_in: int  # the view in which it was sent; 0: not yet, or not wholly

    def send(self, group: Group) -> None:
        """Ask, in the group's present view."""

    def receive(self, group: Group) -> None:
        """Take the answers; raises ViewChanged or LinkLost where there will be none."""


class Group:
    """One client's connections to the servers of the present view."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        ways_in: Sequence[str],
        ask_view: Callable[[int, float], ServerView],
        timeout_s: float,
        tell_late: Callable[[list[int], float], None] | None = None,
        own_host: str = "",
    ) -> None:
        """`ask_view(after, timeout_s)` waits for a view newer than `after`; `ways_in` lead to servers of this host, by
        number, and `own_host` is its address, by which a view tells them from those of other hosts.

        `tell_late(ranks, waited_s)` reports workers that this one has waited for too long.
        """
        self._tell_late = tell_late
        self._hello = msg.Hello(name, incarnation)
        self._ways_in, self._own_host = dict(enumerate(ways_in)), own_host
        self._addresses = dict(self._ways_in)
        self._ask_view, self.timeout_s = ask_view, timeout_s
        self._links: dict[int, tuple[int, Link]] = {}  # server -> its incarnation, and the connection
        self._declared: list[Message] = []
        # Server -> view, and chunks where they lie.
        self._dense: dict[int, tuple[int, dict[int, memoryview]]] = {}
        self.view = 0
        self.servers: tuple[int, ...] = ()  # those that are primary of something, in order
        self.owner_of_slot: NDArray[np.int16] = np.zeros(0, np.int16)
        self.reads_replicas = False
        """Pulls go to a replica on this host where the primary is on another. Exact strategies only: ADR 43."""
        self.reads_in_place = False
        """Rows are read in the memory of servers of this host. Exact strategies only: ADR 69."""
        # Rows where they lie, by server and table; None where a server shares none.
        self._rows: dict[tuple[int, int], RowsInPlace | None] = {}
        self._committed: dict[int, int] = {}  # server -> step that all of it has, in this view
        self.reader_of_slot: NDArray[np.int16] = np.zeros(0, np.int16)
        self.readers: tuple[int, ...] = ()  # those that answer pulls, in order
        self.replicas: frozenset[int] = frozenset()  # of those, the ones that answer as a replica
        self._incarnations: dict[int, int] = {}
        self.arena: ArenaConfig | None = None  # of connections to come; None: as they are by default
        self._has_held = False  # messages that wait in links to be sent together
        self.compression = Compression()  # none, unless a strategy says so
        self.lock_memory: Callable[[memoryview], Callable[[], None]] | None = None  # for a device's copies
        self._key_lists: dict[int, KeyLists] = {}  # by server of another host: what it was sent in this view
        self.key_bytes_saved = 0

    # ---- operations -----------------------------------------------------------------------------

    def start(self, operation: Operation) -> None:
        """Send without waiting. If that fails, `finish` retries."""
        if not self.view:
            self.renew()
        with contextlib.suppress(LinkLost, ViewChanged):
            operation.sent_in = 0
            operation.send(self)
            self.flush(is_remote=True)  # sent while this process computes
            operation.sent_in = self.view

    def finish(self, operation: Operation) -> None:
        """Complete an operation, through however many views."""
        deadline = math.inf  # waiting for an answer has its own limit; this one is for retries
        while True:
            try:
                if operation.sent_in != self.view or not self.view:
                    if not self.view:
                        self.renew()
                    operation.sent_in = 0
                    operation.send(self)
                    operation.sent_in = self.view
                operation.receive(self)
                return
            except ViewChanged as change:
                is_behind, lost = change.view < self.view, None
            except LinkLost as error:
                is_behind, lost = False, error.peer
            operation.sent_in = 0
            self._key_lists.clear()  # lists that were not received are unknown there
            deadline = min(deadline, time.monotonic() + self.timeout_s)
            if time.monotonic() > deadline:
                raise WaitTimedOut(
                    operation=f"{type(operation).__name__} at the servers",
                    waited_s=self.timeout_s,
                    missing=[lost or "an answer in the present view"],
                    setting=f"step_timeout_s (now {self.timeout_s:g} s)",
                )
            if is_behind:
                time.sleep(BEHIND_S)
            elif lost is None:
                self.renew()
            else:
                # A connection may break though its server lives: then there will be no new view, and the
                # client reconnects.
                with contextlib.suppress(WaitTimedOut):
                    self.renew(LOST_S)

    def run(self, operation: Operation) -> None:
        self.start(operation)
        self.finish(operation)

    def tell(self, say: Callable[[int], Message]) -> None:
        """Send a message, made for the current view, to every server."""
        self.run(AskAll(say))

    def declare(self, message: Message) -> bool:
        """Declare something to every server, present and future; whether it was new to any of them."""
        asking = AskAll(lambda _: message)
        self.run(asking)
        self._declared.append(message)
        return any(isinstance(answer, msg.Declared) and answer.is_new for answer, _ in asking.answers)

    # ---- views and connections ------------------------------------------------------------------

    def renew(self, timeout_s: float | None = None) -> None:
        """Wait for a view newer than the present one, and stand in it."""
        found = self._ask_view(self.view, self.timeout_s if timeout_s is None else timeout_s)
        self.view = found.view
        self._rows.clear()
        self._committed.clear()
        self._key_lists.clear()
        self._incarnations = dict(found.incarnations)
        self._addresses = endpoint.of_servers(self._ways_in, found, self._own_host)
        self.owner_of_slot = np.array([held[0] if held else -1 for held in found.holders], np.int16)
        self.servers = tuple(sorted({int(server) for server in self.owner_of_slot if server >= 0}))
        self.reader_of_slot = np.array([self._nearest(held) for held in found.holders], np.int16)
        self.readers = tuple(sorted({int(server) for server in self.reader_of_slot if server >= 0}))
        is_replica = self.reader_of_slot != self.owner_of_slot
        self.replicas = frozenset(self.reader_of_slot[is_replica].tolist())
        for server, (incarnation, link) in list(self._links.items()):
            if self._incarnations.get(server) != incarnation:
                link.close()
                del self._links[server]

    def owner(self, slot: int) -> int:
        return int(self.owner_of_slot[slot])

    def reader(self, slot: int) -> int:
        """The server that answers pulls of a slot: its primary, or a replica that is nearer."""
        return int(self.reader_of_slot[slot])

    def _nearest(self, holders: Sequence[int]) -> int:
        if not self.reads_replicas:
            return holders[0] if holders else -1
        return min(holders, key=lambda server: tls.is_remote(self._addresses[server]), default=-1)

    def link(self, server: int) -> Link:
        """The connection to a server, made where there is none; LinkLost where it is gone."""
        known = self._links.get(server)
        if known is not None:
            return known[1]
        if server < 0:
            raise LinkLost(peer="every holder of a slot", reason="they died")
        try:
            link = Link.connect(
                self._addresses[server],
                self._hello,
                timeout_s=CONNECT_TIMEOUT_S,
                peer=f"server-{server}",
                arena=self.arena,
            )
        except WaitTimedOut as error:  # its socket is the supervisor's, and outlives it
            raise LinkLost(peer=f"server-{server}", reason=str(error)) from None
        if self.lock_memory is not None:
            link.arena.lock = self.lock_memory
        self._links[server] = (self._incarnations.get(server, 0), link)
        for message in self._declared:  # it may be new, and know of nothing
            self._answer(link, link.send(message))
        return link

    def wait(self, server: int, ticket: int) -> tuple[Message, Sequence[memoryview]]:
        if self._has_held:  # not at every answer: that would walk over all links for each
            self._has_held = False
            self.flush()
        try:
            return self._answer(self.link(server), ticket)
        except LinkLost:
            self._drop(server)
            raise

    def send(
        self,
        server: int,
        message: Message,
        frames: Sequence[Buffer | Bytes] = (),
        into: Sequence[Buffer] = (),
    ) -> int:
        """Say something to a server; the ticket under which it answers."""
        self._has_held = True
        try:
            return self.link(server).send(message, frames=frames, into=into, is_held=True)
        except LinkLost:
            self._drop(server)
            raise

    def push(self, server: int, message: Message, frames: Sequence[Buffer]) -> None:
        """Say something that is answered only where it is refused."""
        self._has_held = True
        try:
            self.link(server).send(message, frames=frames, wants_reply=False, is_held=True)
        except LinkLost:
            self._drop(server)
            raise

    def name_keys(self, server: int, keys: NDArray[np.int64]) -> tuple[int, bool]:
        """A name for keys that are about to be sent, and whether the server has them under it; 0: it shares memory."""
        if not len(keys) or not self.link(server).is_remote:
            return 0, False
        name, is_known = self._key_lists.setdefault(server, KeyLists()).refer(keys)
        self.key_bytes_saved += keys.nbytes if is_known else 0
        return name, is_known

    def chunk_at(self, server: int, chunk: int) -> memoryview:
        """A chunk of dense parameters where the server has it; what it holds is for the protocol to say."""
        known = self._dense.get(server)
        if known is None or known[0] != self.view or chunk not in known[1]:  # of a model declared since
            known = self._dense[server] = (self.view, self._map_dense(server))
        return known[1][chunk]

    def may_share_rows(self, server: int, table: int) -> bool:
        """Whether this worker might read a table's rows in the memory of this server, as far as it knows."""
        if not self.reads_in_place or server in self.replicas or self.link(server).is_remote:
            return False
        return self._rows.get((server, table), True) is not None

    def rows_at(self, server: int, spec: TableSpec) -> RowsInPlace | None:
        """A table's rows where the server has them, as `chunk_at`; None where it shares none."""
        key = (server, spec.number)
        if key not in self._rows:
            self._rows[key] = self._map_rows(server, spec)
        return self._rows[key]

    def forget_rows(self, server: int, table: int) -> None:
        """They were changed since they were looked for: look again."""
        self._rows.pop((server, table), None)

    def _map_rows(self, server: int, spec: TableSpec) -> RowsInPlace | None:
        answer, _ = self.wait(server, self.send(server, msg.AskRows(self.view, spec.number)))
        assert isinstance(answer, msg.RowsAt)
        if not answer.num_bytes:
            return None
        (fd,) = self.link(server).take_fds(1)
        try:
            return RowsInPlace(spec, fd, answer.num_bytes, answer.edition)
        except (OSError, ValueError):
            return None  # a limit on this process's address space
        finally:
            memfd.close([fd])

    def note_committed(self, server: int, seq: int) -> None:
        """All of a server has this step, which is the last that this worker has ended; exact strategies."""
        self._committed[server] = seq

    def has_committed(self, server: int, clock: int) -> bool:
        """Whether the server is known to be at this step, and cannot go on before this worker ends the next."""
        return self._committed.get(server) == clock

    def _map_dense(self, server: int) -> dict[int, memoryview]:
        answer, _ = self.wait(server, self.send(server, msg.AskDense(self.view)))
        assert isinstance(answer, msg.DenseAt)
        fds = self.link(server).take_fds(len(answer.memories))
        try:
            memories = [
                memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
                for fd, size in zip(fds, answer.memories, strict=True)
            ]
        finally:
            memfd.close(fds)
        return {chunk: memories[memory][offset:] for chunk, memory, offset in answer.places}

    @property
    def bytes_shared(self) -> int:
        return sum(link.arena.bytes_reserved for _, link in self._links.values())

    def close(self) -> None:
        self._rows.clear()
        for _, link in self._links.values():
            link.close()
        self._links.clear()

    def _answer(self, link: Link, ticket: int) -> tuple[Message, Sequence[memoryview]]:
        try:
            answer, frames = link.wait(ticket, self.timeout_s)
        except WaitTimedOut:
            answer, frames = self._wait_on(link, ticket)
        check_answer(link, answer)
        return answer, frames

    def _wait_on(self, link: Link, ticket: int) -> tuple[Message, list[memoryview]]:
        """On time-out: report the workers that the server waits for, then wait once more as long."""
        missing = self._missing(link)
        if missing and self._tell_late is not None:
            self._tell_late(missing, self.timeout_s)
        try:
            return link.wait(ticket, self.timeout_s)
        except WaitTimedOut:
            missing = self._missing(link) or missing
            raise WaitTimedOut(
                operation=f"{self._hello.name}'s request to {link.peer}",
                waited_s=2 * self.timeout_s,
                missing=[f"worker-{rank}" for rank in missing] or [link.peer],
                setting=f"step_timeout_s (now {self.timeout_s:g} s)",
            ) from None

    def _missing(self, link: Link) -> list[int]:
        """Ranks that a server waits for on our behalf; none if it does not answer either."""
        try:
            answer, _ = link.wait(link.send(msg.AskMissing()), min(self.timeout_s, ANSWER_S))
        except WaitTimedOut:
            return []
        return list(answer.ranks) if isinstance(answer, msg.Missing) else []

    def flush(self, *, is_remote: bool = False) -> None:
        """Send what is buffered, to all servers at once, or to those of other hosts."""
        for server, (_, link) in list(self._links.items()):
            try:
                if link.is_remote or not is_remote:
                    link.flush()
            except LinkLost:
                self._drop(server)
                raise

    def _drop(self, server: int) -> None:
        self._key_lists.pop(server, None)
        self._committed.pop(server, None)
        known = self._links.pop(server, None)
        if known is not None:
            known[1].close()


def check_answer(link: Link, answer: Message) -> None:
    """Raise ViewChanged or ServerRefused where it is no answer."""
    match answer:
        case msg.ViewOver(view):
            raise ViewChanged(view)
        case msg.PsRefused(reason):
            # Its refusal of a step follows from its refusal of pushes.
            unasked = (each.message for each in link.unasked)
            first = next((each for each in unasked if isinstance(each, msg.PsRefused)), None)
            raise ServerRefused(first.reason if first is not None else reason)


class AskOwner:
    """One question to the owner of a slot; `ask` makes it for the view it is asked in."""

    def __init__(self, slot: int, ask: Callable[[int], Message], frames: Sequence[Bytes] = ()) -> None:
        self._slot, self._ask, self._frames = slot, ask, frames
        self.sent_in = 0
        self._asked = (0, 0)
        self.answer: Message | None = None
        self.frames: list[memoryview] = []

    def send(self, group: Group) -> None:
        server = group.owner(self._slot)
        self._asked = (server, group.send(server, self._ask(group.view), self._frames))

    def receive(self, group: Group) -> None:
        self.answer, frames = group.wait(*self._asked)
        self.frames = list(frames)


class AskAll:
    """One question to every server; `ask` makes it for the view it is asked in."""

    def __init__(
        self, ask: Callable[[int], Message], frames: Sequence[Bytes] = (), *, may_refuse: bool = False
    ) -> None:
        """With `may_refuse` a refusal is an ordinary answer, and left out."""
        self._ask, self._frames, self._may_refuse = ask, frames, may_refuse
        self.sent_in = 0
        self._tickets: dict[int, int] = {}
        self.answers: list[tuple[Message, list[memoryview]]] = []

    def send(self, group: Group) -> None:
        self._tickets = {
            server: group.send(server, self._ask(group.view), self._frames) for server in group.servers
        }

    def receive(self, group: Group) -> None:
        self.answers = []
        for server, ticket in self._tickets.items():
            try:
                answer, frames = group.wait(server, ticket)
            except ServerRefused:
                if not self._may_refuse:
                    raise
            else:
                self.answers.append((answer, list(frames)))
