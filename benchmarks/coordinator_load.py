"""Coordinator under many workers: the product's own process over real sockets, and its state machine without any.

Workers are simulated: each is a connection that says what a worker says, and
computes nothing. One run: all join, form the first view, leave a key each for
the others, make calls, and replace a rank that died. `state` feeds the same
sentences to `Coordination`, every client with a process id of its own, and a
turn of the clock after every event. Times of the state machine are CPU time; of
the process both are given, since the clients share its machine.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.harness import Report
from shoal.cluster.coordinator.actions import Answer
from shoal.cluster.coordinator.journal import Journal, begin_launch
from shoal.cluster.coordinator.process import Coordinator
from shoal.cluster.coordinator.state import Coordination, CoordinationConfig
from shoal.config.liveness import LivenessConfig
from shoal.runtime.transport.framing import Decoder, encode
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.supervisor import Reaped, Watch, Watching
from shoal.runtime.transport.messages.worker_coordinator import (
    BeginCall,
    CallGranted,
    EnterView,
    Join,
    Joined,
    StoreDone,
    StoreGet,
    StoreSet,
    StoreValues,
    ViewFormed,
)

WORKERS = (1_000, 10_000)
CALLS = 20
TIMEOUT_S = 600.0

Asked = Iterable[tuple[int, Message]]
"""Client and what it says; 0 is the supervisor, rank + 1 a worker."""


def config(num_workers: int) -> CoordinationConfig:
    liveness = LivenessConfig(step_timeout_s=TIMEOUT_S, join_timeout_s=TIMEOUT_S)
    return CoordinationConfig(num_workers=num_workers, liveness=liveness, can_recover=True)


def joins(num_workers: int, incarnation: int = 0) -> Asked:
    return ((rank + 1, Join(rank, incarnation, rank + 2, num_workers)) for rank in range(num_workers))


def enters(num_workers: int, view: int, finished: int, without: int = -1) -> Asked:
    return (
        (rank + 1, EnterView(rank, 0, view, finished, 1)) for rank in range(num_workers) if rank != without
    )


def rendezvous(num_workers: int, view: int) -> tuple[Asked, Asked]:
    """All but one rank ask for the key of that one and wait; then it comes. A barrier over the store."""
    key = f"view-{view}/here"
    last = num_workers - 1
    asks = ((rank + 1, StoreGet([f"{key}-{last}"], TIMEOUT_S)) for rank in range(last))
    own = ((rank + 1, StoreSet({f"{key}-{rank}": b"10.0.0.1:29500"})) for rank in range(last))
    return own, [*asks, (num_workers, StoreSet({f"{key}-{last}": b"10.0.0.1:29500"}))]


def check(answer: Message) -> None:
    """What is refused is quick, and no figure."""
    if not isinstance(answer, Joined | ViewFormed | CallGranted | StoreValues | StoreDone | Watching):
        raise SystemExit(f"the coordinator said {answer}")


# ---- the state machine alone --------------------------------------------------------------------


class State:
    """`Coordination` with simulated clients."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        before = psutil.Process().memory_info().rss
        self._state = Coordination(config(num_workers))
        self._now = 0.0
        self._state.connected(0, is_supervisor=True, pid=1)
        self.tell([(0, Watch())])
        for client in range(1, num_workers + 1):
            self._state.connected(client, pid=client + 1)
        self.join_s = self.tell(joins(num_workers))
        self.bytes_per_worker = (psutil.Process().memory_info().rss - before) // num_workers

    def tell(self, asked: Asked) -> float:
        """CPU seconds until all of it is heard. Every event is a turn: the deadline is asked for, and the clock ticks."""
        began = time.process_time()
        for client, message in asked:
            self._now += 1e-6
            for action in self._state.hear(client, message, self._now):
                if isinstance(action, Answer):
                    check(action.message)
            self._state.deadline  # noqa: B018
            self._state.tick(self._now)
        return time.process_time() - began

    def replace(self, rank: int, others: Asked) -> float:
        """CPU seconds from the death of a rank to the view with its replacement."""
        client = self.num_workers + 2
        spent_s = self.tell([(0, Reaped(rank, 0, -9))])
        self._state.connected(client, pid=client)
        entered = [(client, Join(rank, 1, client, self.num_workers)), (client, EnterView(rank, 1, 0, -1, 0))]
        return spent_s + self.tell(entered) + self.tell(others)


# ---- the process --------------------------------------------------------------------------------


class Process:
    """`Coordinator` in a process of its own with a journal, and one connection for each worker."""

    def __init__(self, num_workers: int, folder: Path) -> None:
        self.num_workers = num_workers
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(folder / "coordinator"))
        listener.listen(4096)
        launch = begin_launch(folder / "journal.sqlite", num_workers=num_workers)
        command = [sys.executable, "-m", "benchmarks.coordinator_load"]
        self._child = subprocess.Popen(
            [*command, str(listener.fileno()), str(folder / "journal.sqlite"), str(launch), str(num_workers)],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
        )
        listener.close()
        self._process = psutil.Process(self._child.pid)
        self.new_view_cpu_s = 0.0
        self._path = str(folder / "coordinator")
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[int, socket.socket] = {}
        self._decoders: dict[int, Decoder] = {}
        self._connect(0)
        self.tell([(0, Watch())])
        before = self._process.memory_info().rss
        began = time.perf_counter()
        for client in range(1, num_workers + 1):
            self._connect(client)
        self.tell(joins(num_workers))
        self.join_s = time.perf_counter() - began
        self.bytes_per_worker = (self._process.memory_info().rss - before) // num_workers

    def _connect(self, client: int) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(self._path)
        sock.setblocking(False)
        self._sockets[client], self._decoders[client] = sock, Decoder()
        self._selector.register(sock, selectors.EVENT_READ, client)

    def cpu_s(self) -> float:
        used = self._process.cpu_times()
        return float(used.user + used.system)

    def say(self, asked: Asked) -> int:
        count = 0
        for client, message in asked:
            self._sockets[client].sendall(b"".join(encode(message)))
            count += 1
        return count

    def tell(self, asked: Asked) -> float:
        """Seconds until every one of these is answered."""
        began = time.perf_counter()
        self.hear(self.say(asked))
        return time.perf_counter() - began

    def hear(self, num_answers: int) -> None:
        while num_answers > 0:
            for key, _ in self._selector.select(TIMEOUT_S):
                data = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
                if not data:
                    self._selector.unregister(key.fileobj)
                    continue
                answers = self._decoders[key.data].feed(data)
                news = (
                    (ViewFormed,) if key.data == 0 else ()
                )  # told to the supervisor, and asked for by nobody
                for message, _ in answers:
                    check(message)
                    num_answers -= not isinstance(message, news)

    def replace(self, rank: int, others: Asked) -> float:
        """Seconds from the death of a rank to the view with its replacement, told to all."""
        before_s, began, client = self.cpu_s(), time.perf_counter(), self.num_workers + 2
        self.say([(0, Reaped(rank, 0, -9))])
        self._connect(client)
        self.tell([(client, Join(rank, 1, os.getpid(), self.num_workers))])
        self.hear(self.say([(client, EnterView(rank, 1, 0, -1, 0)), *others]))
        self.new_view_cpu_s = self.cpu_s() - before_s
        return time.perf_counter() - began

    def close(self) -> None:
        self._child.communicate()
        self._selector.close()
        for sock in self._sockets.values():
            sock.close()


@contextmanager
def process(num_workers: int) -> Iterator[Process]:
    with tempfile.TemporaryDirectory() as folder:
        made = Process(num_workers, Path(folder))
        try:
            yield made
        finally:
            made.close()


def serve(listener: str, journal: str, launch: str, num_workers: str) -> None:
    """The child: serves until its stdin ends."""
    kept = Journal(Path(journal), launch=int(launch))
    ours, theirs = socket.socketpair()
    coordinator = Coordinator(
        socket.socket(fileno=int(listener)),
        config(int(num_workers)),
        write=kept.write,
        supervisor=os.getppid(),
    )

    def end() -> None:
        sys.stdin.read()
        theirs.close()

    threading.Thread(target=end, daemon=True).start()
    coordinator.serve(until_readable=ours)
    coordinator.close()
    kept.close()


# ---- figures ------------------------------------------------------------------------------------


def measure(made: State | Process) -> dict[str, float]:
    num_workers, rank = made.num_workers, made.num_workers // 2
    view_s = made.tell(enters(num_workers, 0, -1))
    store_s = sum(made.tell(asked) for asked in rendezvous(num_workers, 1))
    calls_s = sum(
        made.tell((rank + 1, BeginCall(rank, number, "fit", "")) for rank in range(num_workers))
        for number in range(1, CALLS + 1)
    )
    new_view_s = made.replace(rank, enters(num_workers, 1, 5, without=rank))
    return {
        "events_per_s": round(num_workers * (4 + CALLS) / (made.join_s + view_s + store_s + calls_s)),
        "join_s": round(made.join_s, 3),
        "first_view_s": round(view_s, 3),
        "rendezvous_s": round(store_s, 3),
        "call_s": round(calls_s / CALLS, 4),
        "new_view_after_death_s": round(new_view_s, 3),
        "bytes_per_worker": made.bytes_per_worker,
    }


def main(*, quick: bool = False) -> None:
    report = Report("coordinator_load")
    for num_workers in (100,) if quick else WORKERS:
        report.add("state machine", measure(State(num_workers)), workers=num_workers, calls=CALLS, time="cpu")
        with process(num_workers) as made:
            figures = measure(made)
            figures["coordinator_cpu_s"] = round(made.cpu_s(), 3)
            figures["events_per_cpu_s"] = round(num_workers * (5 + CALLS) / made.cpu_s())
            figures["new_view_cpu_s"] = round(made.new_view_cpu_s, 3)
        report.add(
            "process",
            figures,
            workers=num_workers,
            calls=CALLS,
            time="wall",
            transport="unix",
            journal="sqlite",
            load_average=os.getloadavg()[0],
        )
    if not quick:
        report.save()


if __name__ == "__main__":
    serve(*sys.argv[1:])
