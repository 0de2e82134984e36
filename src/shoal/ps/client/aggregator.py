"""Aggregator: pushes of the workers of one host, merged into one before the servers.

It acts as a server to workers (pushes, StepEnd, Committed), and as a client to the servers. It
holds no state that must survive: a worker keeps its push until it is acknowledged, and pushes it
itself if the aggregator is gone or the merged push did not count. A merged push carries the names
of all pushes in it, so servers count each of them once, whichever way it comes. `Combiner` decides
and is pure; `Aggregator` is the thread around it, in the first worker of every group.
"""

from __future__ import annotations

import contextlib
import hashlib
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal import system
from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.cluster.worker.coordinator_client import LeaseClient
from shoal.config.job import Job
from shoal.embedding.lookup import merged
from shoal.errors import LinkLost, ShoalError, WaitTimedOut
from shoal.ps.client.server_group import Group, ViewChanged
from shoal.ps.client.step import PushStep
from shoal.ps.codecs import Compression
from shoal.ps.server.steps import LOSSES, Staged, Staging, read_vector
from shoal.runtime.transport.messages import client_server as msg
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import ServerView
from shoal.runtime.transport.shared_client import Link
from shoal.runtime.transport.shared_server import Listener, Request

RETRY_S = 1.0
"""Pause before an unreachable aggregator is retried; pushes go to the servers meanwhile."""

FIRST_NUMBER = 900_000_000
"""Of aggregators among a worker's low-level clients, whose names servers of other hosts take: no script opens so many."""

CONNECT_S = 2.0
TICK_S = 1.0

Rows: TypeAlias = tuple[NDArray[np.int64], NDArray[Any]]


# ---- decisions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerPush:
    """One worker's push: its StepEnd and what was staged for it. Gradients are multiplied with its factor."""

    end: msg.StepEnd
    staged: Staged


@dataclass(frozen=True, slots=True)
class Forward:
    """Push all of these to the servers, as one. Answered by `Combiner.answered`."""

    pushes: tuple[WorkerPush, ...]


@dataclass(frozen=True, slots=True)
class PushAnswer:
    """Tell a worker that its push counts, or that it has to push it itself."""

    member: int
    push: WorkerPush
    counts: bool


class Combiner:
    """Pushes on their way to the servers: one merged push at a time, of whatever has arrived by then.

    It waits for nobody, so a slow or dead worker delays no other.
    """

    def __init__(self, fan_in: int) -> None:
        self._fan_in = fan_in
        self._waiting: dict[int, WorkerPush] = {}  # by member, in the order in which they came
        self._sent: dict[int, WorkerPush] = {}

    def offer(self, member: int, push: WorkerPush) -> list[Forward | PushAnswer]:
        """Add a worker's complete push. It has at most one in progress; a newer one replaces it."""
        self._waiting.pop(member, None)
        self._waiting[member] = push
        return self._forward()

    def answered(self, *, counts: bool) -> list[Forward | PushAnswer]:
        """The servers have answered the merged push; `counts` if all of it is applied in every slot."""
        sent, self._sent = self._sent, {}
        return [*(PushAnswer(member, push, counts) for member, push in sent.items()), *self._forward()]

    def lost(self, member: int) -> None:
        """A connection is over. Pushes not sent yet are left to their worker, or to the next holder of its lease."""
        self._waiting.pop(member, None)
        self._sent.pop(member, None)

    def _forward(self) -> list[Forward | PushAnswer]:
        if self._sent or not self._waiting:
            return []
        model = next(iter(self._waiting.values())).end.model
        chosen = [each for each, push in self._waiting.items() if push.end.model == model][: self._fan_in]
        self._sent = {member: self._waiting.pop(member) for member in chosen}
        return [Forward(tuple(self._sent.values()))]


@dataclass(slots=True)
class Merged:
    """Several pushes as one: sums, and the StepEnd with the names of all."""

    end: msg.StepEnd
    rows: dict[int, Rows] = field(default_factory=dict)
    dense: dict[int, tuple[Tensor, list[int]]] = field(default_factory=dict)


def merge(pushes: Sequence[WorkerPush]) -> Merged:
    """Add them up, in their order. The first gives the hyper-parameters."""
    first, *others = (push.end for push in pushes)
    parts = [msg.MergedPart(end.stream, end.seq, end.num_batches, end.rank) for end in others]
    done_below = max(end.done_below for end in (first, *others))
    is_applied = any(push.end.factor for push in pushes)
    end = msgspec.structs.replace(
        first, merged=parts, done_below=done_below, factor=1.0 if is_applied else 0.0
    )
    found = Merged(end)
    rows: dict[int, list[Rows]] = {}
    for push in pushes:
        factor = push.end.factor
        for table, (keys, values) in push.staged.rows.items():
            rows.setdefault(table, []).append((keys, values if factor == 1.0 else values * factor))
        for chunk, (gradient, unused) in push.staged.dense.items():
            if chunk in found.dense:
                total, without = found.dense[chunk]
                total.add_(gradient, alpha=factor)
                found.dense[chunk] = total, [each for each in without if each in unused]
            else:
                found.dense[chunk] = gradient * factor, list(unused)
    found.rows = {table: merged(given) for table, given in rows.items()}
    return found


# ---- the workers' end -----------------------------------------------------------------------------


def leader_of(job: Job, fan_in: int) -> int:
    """The first rank of this worker's group: so many at most, of one host."""
    hosts = job.rank_hosts or (0,) * job.num_workers
    there = [rank for rank in range(job.num_workers) if hosts[rank] == hosts[job.rank]]
    return there[there.index(job.rank) // fan_in * fan_in]


def name_of(job: Job, leader: int, model: int) -> str:
    """Name of a Unix socket for each model; see `system.address_of`."""
    run = hashlib.blake2b(f"{job.run_dir}\0{job.launch}".encode(), digest_size=12).hexdigest()
    return f"shoal-aggregator-{run}-{leader}-{model}"


class AggregatorGroup(Group):
    """A worker's connection to its aggregator, in the role of servers: one server, with all slots, in one fixed view."""

    def __init__(self, job: Job, address: str) -> None:
        view = ServerView(1, [[0]] * NUM_SLOTS, {0: 0})
        super().__init__(
            name=f"worker-{job.rank}",
            incarnation=job.incarnation,
            ways_in=[address],
            ask_view=lambda after, timeout_s: view,
            timeout_s=job.liveness.step_timeout_s,
        )
        self._not_before = 0.0
        self.renew()

    def link(self, server: int) -> Link:
        known = self._links.get(server)
        if known is not None:
            return known[1]
        if time.monotonic() < self._not_before:
            raise LinkLost(peer="the aggregator", reason="it was not there a moment ago")
        self._not_before = time.monotonic() + RETRY_S
        try:
            link = Link.connect(self._addresses[0], self._hello, timeout_s=CONNECT_S, peer="the aggregator")
            for message in self._declared:
                self._answer(link, link.send(message))
        except (WaitTimedOut, OSError, ShoalError) as error:
            raise LinkLost(peer="the aggregator", reason=str(error)) from None
        self._links[0] = (0, link)
        return link

    def declare(self, message: Any) -> bool:
        """Told to it once there is a connection."""
        self._declared.append(message)
        self.close()
        return False

    def finish_or_hand_over(self, step: PushStep, servers: Group) -> None:
        """Complete a push; directly to the servers if the aggregator is gone, or could not have it counted."""
        try:
            step.receive(self)
            is_over = not step.is_late
        except (LinkLost, ViewChanged, ShoalError):
            self.close()  # its later messages are ignored
            is_over = False
        if not is_over:
            step.group, step.sent_in = servers, 0
            servers.finish(step)


# ---- the thread -----------------------------------------------------------------------------------


class Aggregator:
    """Merges the pushes of one group of workers. Runs in a thread of the group's first worker."""

    def __init__(self, job: Job, fan_in: int, compression: Compression, model: int) -> None:
        self._job, self._lines = job, LeaseClient(job)
        self._group = Group(
            name=f"kv-{job.rank}-{FIRST_NUMBER + model}",
            incarnation=job.incarnation,
            ways_in=job.servers,
            own_host=job.host_address,
            ask_view=self._lines.ask_servers,
            timeout_s=job.liveness.step_timeout_s,
        )
        self._group.compression = compression
        self._combiner, self._staging = Combiner(fan_in), Staging()
        self._tables: dict[int, msg.TableSpec] = {}
        self._chunks: dict[int, msg.ChunkSpec] = {}
        self._tickets: dict[int, int] = {}
        self._actions: list[Forward | PushAnswer] = []
        self.num_pushes = self.num_sent = 0
        self._selector = selectors.DefaultSelector()
        self._name = name_of(job, job.rank, model)
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="aggregator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over = True
        self._thread.join()

    def _listen(self) -> socket.socket:
        """Processes forked by a killed predecessor may hold its socket for some seconds: workers push
        directly until then.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        while not self._is_over:
            try:
                system.bind_name(sock, self._name)
                sock.listen(128)
                break
            except OSError:
                time.sleep(RETRY_S)
        return sock

    def _run(self) -> None:
        self._listener = Listener(self._listen(), self._selector, hear=self._handle_request, gone=self._gone)
        ticked_at = time.monotonic()
        while not self._is_over:
            for key, mask in self._selector.select(TICK_S):
                self._listener.attend(key, mask)
            while self._actions:
                self._carry_out(self._actions.pop(0))
                self._listener.flush()
            if time.monotonic() - ticked_at > TICK_S:
                self._listener.tick()
                ticked_at = time.monotonic()
        self._listener.close()
        self._selector.close()
        self._group.close()
        self._lines.close()

    def _handle_request(self, request: Request) -> None:
        answer: Message | None = None
        try:
            answer = self._answer_to(request)
        except (ShoalError, ValueError, KeyError, msgspec.MsgspecError) as error:
            answer = msg.PsRefused(str(error))
        if answer is not None:
            self._listener.reply(request.peer, request.ticket, answer)
            self._listener.flush()

    def _answer_to(self, request: Request) -> Message | None:
        match request.message:
            case msg.Hello():
                return msg.Welcome("server-0", 0, 1)
            case msg.DeclareTable(table):
                self._tables[table.number] = table
            case msg.DeclareDense(chunks):
                self._chunks |= {chunk.number: chunk for chunk in chunks}
            case msg.PushRows() as message:
                keys, values = request.frames
                table = self._tables[message.table]
                rows = np.frombuffer(values, table.dtype).reshape(-1, table.dim)
                self._staging.rows(request.peer, message, np.frombuffer(keys, np.int64), rows)
                return None
            case msg.PushDense() as message:
                chunk = self._chunks[message.chunk]
                gradient = torch.frombuffer(request.frames[0], dtype=getattr(torch, chunk.dtype))
                self._staging.dense(request.peer, message, gradient)
                return None
            case msg.StepEnd() as message:
                read_vector(request.frames[0], at_least=LOSSES)
                push = WorkerPush(message, self._staging.take(request.peer, message))
                self._tickets[request.peer] = request.ticket
                self._actions += self._combiner.offer(request.peer, push)
                return None
            case msg.AskMissing():
                return msg.Missing([])
        return msg.Declared(False)

    def _gone(self, peer: int) -> None:
        self._staging.forget(peer)
        self._combiner.lost(peer)
        self._tickets.pop(peer, None)

    def _carry_out(self, action: Forward | PushAnswer) -> None:
        if isinstance(action, Forward):
            self._committed = self._push(action.pushes)
            self._actions += self._combiner.answered(counts=self._committed is not None)
            return
        end, committed = action.push.end, self._committed if action.counts else None
        answer = (
            msgspec.structs.replace(committed, seq=end.seq)
            if committed is not None
            else msg.Committed(end.seq, 0, 0, late=True)
        )
        self._listener.reply(action.member, self._tickets.get(action.member, 0), answer)

    _committed: msg.Committed | None = None

    def _push(self, pushes: tuple[WorkerPush, ...]) -> msg.Committed | None:
        """Push to the servers; None if they did not, or may not, count all of it."""
        found = merge(pushes)
        step = PushStep(self._group, found.end.stream, found.end.seq)
        try:
            if not self._group.view:
                self._group.renew()
            for chunk, (total, unused) in found.dense.items():
                spec = self._chunks[chunk]
                flat = total.numpy().reshape(-1)
                memory = step.chunk_memory(chunk, spec.slot, flat.nbytes)
                np.frombuffer(memory, flat.dtype)[:] = flat
                step.push_dense(chunk, unused, spec.dtype if spec.dtype in ("float32", "float64") else "")
            for table, rows in found.rows.items():
                if len(rows[0]):
                    step.push_rows(table, *rows)
            others = msgspec.structs.asdict(found.end)
            for name in ("view", "stream", "seq", "rank", "num_pushes"):
                del others[name]
            step.end(np.zeros(LOSSES + 1), b"", rank=found.end.rank, **others)
            self._group.finish(step)
        except (LinkLost, ViewChanged, ShoalError):
            return None
        finally:
            with contextlib.suppress(LinkLost):
                step.release()
        self.num_pushes += len(pushes)
        self.num_sent += 1
        if step.is_late or step.committed is None:
            return None
        return msgspec.structs.replace(step.committed, updates=step.num_updates, is_new=step.is_new)
