"""A server as a process: its event loop around the core, and its start and end.

One thread, one selector, sockets that never block. The loop decides only what
comes first: requests, then a piece of the filling of new replicas. The process
listens on a socket that the supervisor made and keeps, so clients may connect
before it runs, and a restarted server goes on at the same address with
nothing in memory.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol

from shoal.cluster.launch import threads
from shoal.cluster.launch.roles import ServerSpec, decode_spec
from shoal.config.liveness import LivenessConfig
from shoal.errors import CoordinatorLost
from shoal.ps.server.actions import Action, DropPeer, Reply, Request, Send, Tell
from shoal.ps.server.connections import CoordinatorLine, ServerLinks
from shoal.ps.server.memory_limit import MemoryGuard
from shoal.runtime import failpoints
from shoal.runtime.transport import shared_server
from shoal.runtime.transport.messages.client_server import Hello, PsRefused
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import (
    JoinedServer,
    PingServer,
    RankDead,
    RankJoined,
    ServerAlive,
    ServerView,
)
from shoal.runtime.transport.messages.worker_coordinator import JoinRefused, Leave
from shoal.runtime.transport.shared_server import Listener, ListenerConfig

TICK_S = 0.1
WORK_EVERY_S = 0.004
"""A busy server works on new replicas at least so often."""


class Core(Protocol):
    """The state machine that the loop runs: `core.ServerCore`, or a test's."""

    def hear(self, request: Request, now: float) -> Iterable[Action]:
        """A request of a client or another server."""

    def gone(self, peer: int) -> Iterable[Action]:
        """A connection that others made to this server is over."""

    def answered(self, server: int, message: Message) -> Iterable[Action]:
        """Another server answered something that was sent to it."""

    def lost(self, server: int) -> Iterable[Action]:
        """The connection to another server is over; what it did not answer may not have arrived."""

    def view(self, view: ServerView) -> Iterable[Action]:
        """A new view."""

    def rank_joined(self, rank: int, incarnation: int) -> Iterable[Action]:
        """This incarnation of a rank is in."""

    def rank_dead(self, rank: int, incarnation: int) -> Iterable[Action]:
        """This incarnation of a rank is dead."""

    def tick(self, now: float) -> Iterable[Action]:
        """Time has passed."""

    def work(self) -> tuple[Iterable[Action], bool]:
        """Do a piece of what can wait; and whether there is more."""


class ServerLoop:
    """Moves messages between sockets and the core. One thread, so nothing here takes a lock."""

    def __init__(
        self,
        core: Core,
        listener: socket.socket,
        *,
        number: int,
        incarnation: int,
        coordinator: str,
        servers: Mapping[int, str],
        memory: MemoryGuard,
        liveness: LivenessConfig,
        config: ListenerConfig | None = None,
    ) -> None:
        """`coordinator` and `servers` are paths to connect to."""
        self.refusal: str | None = None
        """Why the coordinator does not want this server, if so."""
        self._core, self._memory = core, memory
        self._is_over = False
        self._due: deque[Action] = deque()
        self._is_at_it = False
        self._selector = selectors.DefaultSelector()
        self._listener = Listener(
            listener,
            self._selector,
            hear=self._hear,
            gone=lambda peer: self._carry_out(core.gone(peer)),
            config=config,
            memory_problem=lambda nbytes: memory.problem(self._listener.bytes_mapped + nbytes),
        )
        self._links = ServerLinks(
            servers,
            Hello(name=f"server-{number}", incarnation=incarnation),
            self._selector,
            answered=lambda server, message: self._carry_out(core.answered(server, message)),
            lost=lambda server: self._carry_out(core.lost(server)),
        )
        self._line = CoordinatorLine(
            coordinator,
            self._selector,
            number=number,
            incarnation=incarnation,
            reconnect_timeout_s=liveness.reconnect_timeout_s,
        )

    def run(self, *, until_readable: socket.socket) -> None:
        """Serve until there is something to read on `until_readable`, or the coordinator lets it go."""
        self._selector.register(until_readable, selectors.EVENT_READ)
        has_more, worked_at, ticked_at = True, 0.0, 0.0
        while not self._is_over:
            ready = self._selector.select(0 if has_more else self._wait_s(ticked_at))
            for key, mask in ready:
                if key.fileobj is until_readable:
                    return
                self._attend(key, mask)
                self._listener.flush()
            now = time.monotonic()
            if not ready or now - worked_at >= WORK_EVERY_S:
                actions, has_more = self._core.work()
                self._carry_out(actions)
                self._listener.flush()
                worked_at = now
            if now - ticked_at >= TICK_S:
                self._tick(now)
                self._listener.flush()
                ticked_at = now

    def close(self) -> None:
        """Close every socket; tell on stderr of those that did not belong there."""
        self._is_at_it = True  # what the core still says to this is not done any more
        self._line.close()
        self._links.close()
        self._listener.close()
        self._selector.close()
        if self._listener.num_refused:
            print(
                f"shoal: this server closed {self._listener.num_refused} connections that broke its rules; the last "
                f"because {self._listener.last_refusal}",
                file=sys.stderr,
            )

    def _wait_s(self, ticked_at: float) -> float:
        wait_s = max(0.0, ticked_at + TICK_S - time.monotonic())
        return wait_s if self._line.wait_s is None else min(wait_s, self._line.wait_s)

    def _attend(self, key: selectors.SelectorKey, mask: int) -> None:
        if self._listener.owns(key):
            self._listener.attend(key, mask)
        elif self._links.owns(key):
            self._links.attend(key)
        elif self._line.owns(key):
            for message in self._line.attend(mask):
                self._hear_coordinator(message)

    def _tick(self, now: float) -> None:
        self._listener.tick()
        self._line.tick()
        self._memory.tick(now)
        self._carry_out(self._core.tick(now))

    # ---- who says what ----------------------------------------------------------------------------

    def _hear(self, asked: shared_server.Request) -> None:
        refusal = self._memory.refusal(asked.message)
        if refusal is not None:
            self._listener.reply(asked.peer, asked.ticket, PsRefused(refusal))
            return
        self._carry_out(self._core.hear(Request(*asked), time.monotonic()))

    def _hear_coordinator(self, message: Message) -> None:
        match message:
            case ServerView():
                self._links.view(message)
                self._carry_out(self._core.view(message))
            case PingServer(number):
                self._line.tell(ServerAlive(number))
            case RankJoined(rank, incarnation):
                self._carry_out(self._core.rank_joined(rank, incarnation))
            case RankDead(rank, incarnation):
                self._carry_out(self._core.rank_dead(rank, incarnation))
            case JoinRefused(reason):
                self.refusal, self._is_over = reason, True
            case Leave():
                self._is_over = True
            case JoinedServer():
                pass  # the view itself follows
            case _:
                print(f"shoal: the coordinator said {type(message).__name__} to a server", file=sys.stderr)

    def _carry_out(self, actions: Iterable[Action]) -> None:
        """Do it after all that was decided before, and never inside of a decision."""
        self._due += actions
        if self._is_at_it:
            return
        self._is_at_it = True
        while self._due:
            match action := self._due.popleft():
                case Reply(peer, ticket, message, frames, fds):
                    self._listener.reply(peer, ticket, message, frames, fds)
                case Send():
                    self._links.send(action)
                case Tell(message):
                    self._line.tell(message)
                case DropPeer(peer, problem):
                    self._listener.flush()  # why it is dropped
                    self._listener.close_peer(peer, problem)
        self._is_at_it = False


# ---- the process ---------------------------------------------------------------------------------


CANNOT_GO_ON = CoordinatorLost.exit_code
"""The exit code that says: nobody wants this server, or nobody is there. Why, is the last thing on stderr."""


def main(spec: bytes, fds: dict[str, int]) -> int:
    """Be a server until SIGTERM, or until the coordinator lets it go."""
    told = decode_spec(spec)
    name = f"server-{told.number}"
    if told.env:
        os.environb.clear()
        os.environb.update(told.env)
    # What it holds is in the host's memory; torch's optimizers would ask for a device at their first step all the same,
    # which takes the driver a while to answer.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    threads.use(told.num_threads)
    failpoints.arm(told.faults, process=name, incarnation=told.incarnation)
    faulthandler.enable()
    # Every segment of a client's holds a descriptor.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    wake, stop = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda signum, frame: None)  # the byte in the wake-up socket is the message
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to act on
    loop = ServerLoop(
        make_core(told),
        socket.socket(fileno=fds["listener"]),
        number=told.number,
        incarnation=told.incarnation,
        coordinator=f"/proc/self/fd/{fds['coordinator']}",
        servers={
            int(way.removeprefix("server-")): f"/proc/self/fd/{fd}"
            for way, fd in fds.items()
            if way.startswith("server-")
        },
        memory=MemoryGuard(name, told.server_memory_bytes),
        liveness=told.liveness,
    )
    try:
        loop.run(until_readable=stop)
    except CoordinatorLost as error:
        print(error, file=sys.stderr)
        return CANNOT_GO_ON
    finally:
        loop.close()
    if loop.refusal is not None:
        print(f"shoal: the coordinator does not want {name}: {loop.refusal}", file=sys.stderr)
        return CANNOT_GO_ON
    return 0


def make_core(told: ServerSpec) -> Core:
    from shoal.ps.server.apply_filters import PushFilters
    from shoal.ps.server.core import ServerCore

    filters = PushFilters(norm_bound=told.push_norm, divides_by_staleness=told.staleness_lr)
    return ServerCore(number=told.number, incarnation=told.incarnation, filters=filters)
