"""Clients of simulated servers: one operation at a time, sent again whole in a new view or on a new connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shoal.ps.layout import slot_of
from shoal.runtime.transport.messages.client_server import (
    AskNote,
    Commit,
    Committed,
    Hello,
    Note,
    Post,
    Posted,
    PsRefused,
    PullDense,
    Pulled,
    PullRows,
    PushDense,
    PushRows,
    Rest,
    StepEnd,
    Summed,
    ViewOver,
    WriteChunk,
)
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import ServerView
from simulation.ps_net import Connection
from simulation.world import Process, Violated

if TYPE_CHECKING:
    from simulation.ps_jobs import Exact, Job, Relaxed


class Client(Process):
    """Connections to the servers of a view, and the operation under way."""

    def __init__(self, job: Job, rank: int, incarnation: int) -> None:
        super().__init__(job.world, f"worker-{rank}.{incarnation}")
        self.job, self.rank, self.incarnation, self.process = job, rank, incarnation, self
        self.present: ServerView | None = None
        self.links: dict[int, Connection] = {}
        self.is_done = False
        self.unpushed = 0  # batches whose gradients it keeps
        self._expected: dict[tuple[int, int], Any] = {}
        self._answers: dict[Any, tuple[Message, list[bytes]]] = {}
        self._send: Callable[[], None] | None = None
        self._then: Callable[[dict[Any, tuple[Message, list[bytes]]]], None] | None = None
        self._is_waiting = False

    # ---- operations -----------------------------------------------------------------------------

    def operate(
        self, send: Callable[[], None], then: Callable[[dict[Any, tuple[Message, list[bytes]]]], None]
    ) -> None:
        """`send` asks all it has to ask by `ask`; `then` gets every answer, of one view."""
        self._send, self._then = send, then
        self._again()

    def ask(
        self, key: Any, server: int, message: Message, frames: Sequence[Any] = (), into: Any = ()
    ) -> None:
        connection = self.links.get(server)
        if connection is None:
            connection = self._connect(server)
        ticket = connection.ask(message, frames, into)
        if key is not None:
            self._expected[connection.peer, ticket] = key

    reads_replicas = False

    def owner(self, slot: int) -> int:
        assert self.present is not None
        return self.present.holders[slot][0]

    def readers(self) -> Any:
        """A holder of each slot, for pulls: the first of an order of the servers that this worker has."""
        assert self.present is not None
        order = sorted(self.present.incarnations, key=lambda server: (server + self.rank) % 3)
        holders = self.present.holders
        if not self.reads_replicas:
            return np.array([held[0] for held in holders])
        return np.array([min(held, key=order.index) for held in holders])

    @property
    def servers(self) -> list[int]:
        assert self.present is not None
        return sorted({holders[0] for holders in self.present.holders})

    def _again(self) -> None:
        self._is_waiting = False
        if self._send is None or self.present is None:
            return
        self._expected.clear()
        self._answers.clear()
        for server in self.servers:
            found = self.job.servers[server]
            if not found.is_alive or found.incarnation != self.present.incarnations.get(server):
                self._wait_and_again()
                return
        self._send()
        self._finish_if_all()

    def _wait_and_again(self) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self.later(self.world.between(0.004, 0.02), self._again)

    def _connect(self, server: int) -> Connection:
        connection = self.links[server] = Connection(self.job, self, self.job.servers[server])
        connection.ask(Hello(f"worker-{self.rank}", self.incarnation))
        for message in self.job.declarations:
            connection.ask(message)
        return connection

    def answered(self, connection: Connection, ticket: int, message: Message, frames: list[bytes]) -> None:
        key = self._expected.pop((connection.peer, ticket), None)
        match message:
            case PsRefused(reason):
                self.refused(reason)
            case ViewOver(view) if key is not None:
                assert self.present is not None
                self._expected.clear()
                if view < self.present.view:
                    self._wait_and_again()
            case _ if key is not None:
                self._answers[key] = (message, frames)
                self._finish_if_all()

    def _finish_if_all(self) -> None:
        if not self._expected and self._then is not None and not self._is_waiting:
            then, answers = self._then, dict(self._answers)
            self._send = self._then = None
            then(answers)

    def refused(self, reason: str) -> None:
        raise Violated(f"{self.name} was refused: {reason}")

    def lost(self, connection: Connection) -> None:
        if self.links.get(connection.server.number) is connection:
            del self.links[connection.server.number]
            self._wait_and_again()

    def core_view(self) -> int:
        return self.present.view if self.present is not None else 0

    def view(self, view: ServerView) -> None:
        is_first = self.present is None
        self.present = view
        for number, link in list(self.links.items()):
            if view.incarnations.get(number) != link.server.incarnation:
                del self.links[number]
                link.close()
        if is_first and self._send is None:
            self.begin()
        else:
            self._again()

    def begin(self) -> None:
        raise NotImplementedError

    def die(self) -> None:
        super().die()
        # What it wrote into its sockets before may still be read, also after its replacement has come.
        for link in list(self.links.values()):
            self.world.schedule(self.world.random.choice((0.0, 0.0, 0.2)), link.close)

    # ---- parts of a step ------------------------------------------------------------------------

    def pull(self, keys: Any, clock: int, then: Callable[[Any, dict[int, Any], int, int], None]) -> None:
        """Rows of `keys` and all chunks: then(rows, chunks, most updates, slowest)."""
        job = self.job
        rows = np.zeros((len(keys), job.spec.dim), job.spec.dtype)
        chunks: dict[int, bytearray] = {}
        parts: dict[int, tuple[Any, bytearray]] = {}

        def send() -> None:
            assert self.present is not None
            view = self.present.view
            reader_of = self.readers()
            readers = reader_of[slot_of(0, keys)]
            nearby = {int(reader_of[slot]) for slot in range(256) if reader_of[slot] != self.owner(slot)}
            self.job.counts["pull from a replica"] += bool(nearby)
            parts.clear()
            for server in sorted({*self.servers, *nearby}):
                at = np.flatnonzero(readers == server)
                parts[server] = (at, bytearray(len(at) * job.spec.dim * rows.itemsize))
                self.ask(
                    ("rows", server),
                    server,
                    PullRows(view, clock, 0, unpushed=self.unpushed, is_nearby=server in nearby),
                    [keys[at].tobytes()],
                    [parts[server][1]],
                )
            for chunk in job.chunks:
                chunks[chunk.number] = bytearray(job.chunk_bytes(chunk))
                reader = int(reader_of[chunk.slot])
                self.ask(
                    ("chunk", chunk.number),
                    reader,
                    PullDense(
                        view, clock, [chunk.number], unpushed=self.unpushed, is_nearby=reader in nearby
                    ),
                    [],
                    [chunks[chunk.number]],
                )

        def received(answers: dict[Any, tuple[Message, list[bytes]]]) -> None:
            for at, buffer in parts.values():
                rows[at] = np.frombuffer(buffer, rows.dtype).reshape(-1, job.spec.dim)
            pulled = [message for message, _ in answers.values() if isinstance(message, Pulled)]
            assert len(pulled) == len(answers), answers
            dense = {number: np.frombuffer(buffer, job.chunk_dtype) for number, buffer in chunks.items()}
            then(rows, dense, max(each.updates for each in pulled), min(each.slowest for each in pulled))

        self.operate(send, received)

    def push(
        self, end: StepEnd, keys: Any, grads: Any, dense: dict[int, Any], vector: Any, note: bytes
    ) -> None:
        """Everything of a step, to whoever holds it now; asks ("end", server)."""
        assert self.present is not None
        view, job = self.present.view, self.job
        owners = np.array([self.owner(slot) for slot in range(256)])[slot_of(0, keys)]
        num_pushes = dict.fromkeys(self.servers, 0)
        for server in self.servers:
            at = np.flatnonzero(owners == server)
            if len(at):
                frames = [bytearray(keys[at].tobytes()), bytearray(np.ascontiguousarray(grads[at]).tobytes())]
                self.memory += frames
                self.ask(None, server, PushRows(view, end.stream, end.seq, 0), frames)
                num_pushes[server] += 1
        for chunk in job.chunks:
            owner = self.owner(chunk.slot)
            frame = bytearray(dense[chunk.number].tobytes())
            self.memory.append(frame)
            self.ask(None, owner, PushDense(view, end.stream, end.seq, chunk.number), [frame])
            num_pushes[owner] += 1
        for server in self.servers:
            message = msgspec.structs.replace(end, view=view, num_pushes=num_pushes[server])
            mine = note if server == self.owner(0) else b""
            self.ask(("end", server), server, message, [vector.tobytes(), mine])

    memory: list[bytearray]

    def release(self) -> None:
        """It is acknowledged, so its memory may become anything."""
        for frame in self.memory:
            frame[:] = b"\xff" * len(frame)
        self.memory = []


class ExactWorker(Client):
    """Runs the script of an exact job: a barrier, steps, gathers; a replacement from its predecessor's note."""

    job: Exact
    reads_replicas = True

    def __init__(self, job: Exact, rank: int, incarnation: int) -> None:
        super().__init__(job, rank, incarnation)
        self.index = 0
        self.memory = []

    def begin(self) -> None:
        if self.incarnation:
            self.operate(
                lambda: self.ask("note", self.owner(0), AskNote(self.core_view(), self.rank)), self._take_note
            )
        else:
            self._first()

    def _take_note(self, answers: dict[Any, tuple[Message, list[bytes]]]) -> None:
        note, frames = answers["note"]
        assert isinstance(note, Note)
        self.index = int(frames[0] or b"0")
        log = dict(zip(note.log, zip(note.is_commit, frames[1:], strict=True), strict=True))
        self.tell("goes on from", self.index, "log", sorted(log))
        while self.index + 1 in log:
            self.job.counts["result recalled"] += 1
            is_commit, frame = log[self.index + 1]
            self.job.check_result(self, self.index, is_commit, frame)
            self.index += 1
            if is_commit and self.job.mode.two_phase and self.index + 1 not in log:
                self._recommit(self.job.script[self.index - 1], np.frombuffer(frame))
                return
        self._first() if self.index == 0 else self._go_on()

    def _recommit(self, step: int, result: Any) -> None:
        """Whoever said Commit may have died between two servers, and nobody else may be left to say it to the others."""
        factor = self.job.factor(result[:-2], float(result[-1]))

        def send() -> None:
            for server in self.servers:
                message = Commit(self.core_view(), step, factor, bool(result[-2]), float(result[-1]))
                self.ask(server, server, message)

        def then(answers: dict[Any, tuple[Message, list[bytes]]]) -> None:
            if any(not isinstance(message, Committed) for message, _ in answers.values()):
                raise Violated(f"{self.name} said again how step {step} was decided, and heard {answers}")
            self._go_on()

        self.operate(send, then)

    def _first(self) -> None:
        if self.rank:
            self._go_on()
            return

        def send() -> None:
            for chunk in self.job.chunks:
                value = self.job.first_dense(chunk.number)
                self.ask(
                    chunk.number,
                    self.owner(chunk.slot),
                    WriteChunk(self.core_view(), chunk.number, []),
                    [value.tobytes()],
                )

        self.operate(send, lambda _: self._go_on())

    def _go_on(self) -> None:
        self.later(self.world.between(0.0005, 0.01), self._next)

    def _next(self) -> None:
        if self.index == len(self.job.script):
            self.is_done = True
            return
        step = self.job.script[self.index]
        if step == 0:
            self._gather()
        else:
            self.pull(self.job.keys(self.rank, step), step - 1, self._pulled)

    def _gather(self) -> None:
        exchange = self.index + 1
        frame = self.job.posted(self.rank, self.index)

        def send() -> None:
            message = Post(self.core_view(), exchange, self.rank, exchange)
            self.ask("post", self.owner(0), message, [frame, b""])  # no anchor: a replacement recalls it

        def then(answers: dict[Any, tuple[Message, list[bytes]]]) -> None:
            message, frames = answers["post"]
            assert isinstance(message, Posted)
            if frames != [self.job.posted(rank, self.index) for rank in range(self.job.num_workers)]:
                raise Violated(f"{self.name} was given {frames} in exchange {exchange}")
            self.index += 1
            self._go_on()

        self.operate(send, then)

    def _pulled(self, rows: Any, dense: dict[int, Any], updates: int, slowest: int) -> None:
        step = self.job.script[self.index]
        is_spoilt = updates > step - 1
        if is_spoilt:
            self.tell("pulled for step", step, "but the weights have", updates)
            self.job.counts["ran a step on weights that have it"] += 1
        else:
            self.job.check_pull(self, step, rows, dense)
        self.tell("computes step", step)
        self.later(self.world.between(0.0005, 0.01), self._computed, rows, dense, is_spoilt)

    def _computed(self, rows: Any, dense: dict[int, Any], is_spoilt: bool) -> None:
        job, step, exchange = self.job, self.job.script[self.index], self.index + 1
        keys, grads, chunks, vector = job.contribution(self.rank, step, rows, dense)
        groups, tables = job.settings(step)
        end = StepEnd(
            0,
            self.rank,
            step,
            self.rank,
            0,
            exchange,
            exchange,
            groups,
            table_settings=tables,
            factor=job.num_global,
            is_spoilt=is_spoilt,
        )
        note = str(self.index).encode()

        def send() -> None:
            self.push(end, keys, grads, chunks, vector, note)
            if not job.mode.two_phase:
                self._pull_ahead(step)

        self.operate(send, self._ended)

    def _pull_ahead(self, step: int) -> None:
        """The next step's rows, asked for before this one counts: they come when it does."""
        keys = self.job.keys(self.rank, step + 1)
        self.ahead = bytearray(len(keys) * self.job.spec.dim * 4)
        message = PullRows(self.core_view(), step, 0)
        self.ask("ahead", self.servers[0], message, [keys.tobytes()], [self.ahead])

    def _ended(self, answers: dict[Any, tuple[Message, list[bytes]]]) -> None:
        step = self.job.script[self.index]
        if answers.pop("ahead", None) is not None:
            self.job.check_ahead(self, step + 1, bytes(self.ahead))
        messages = [message for message, _ in answers.values()]
        if not self.job.mode.two_phase:
            self._committed(answers)
            return
        if not all(isinstance(message, Summed) and message.seq == step for message in messages):
            raise Violated(f"{self.name} ended step {step} and heard {messages}")
        frames = [frames for _, frames in answers.values()]
        squares = (
            sum(np.frombuffer(each[1]) for each in frames) if self.job.mode.wants_norm else np.zeros(256)
        )
        vector = np.frombuffer(frames[0][0])
        factor, applies, norm = self.job.decide(vector, squares)
        step_sent = self._sent(step)
        then = self._committed

        def send() -> None:
            if self.core_view() != step_sent[0]:
                # Another view: the whole step once more.
                self._again_whole()
                return
            for server in self.servers:
                self.ask(server, server, Commit(self.core_view(), step, factor, applies, norm), [])

        self.operate(send, then)

    def _sent(self, step: int) -> tuple[int, int]:
        return self.core_view(), step

    def _again_whole(self) -> None:
        """The step's pushes once more, from memory that was kept."""
        assert self._whole is not None
        self.later(0.0, self.operate, *self._whole)
        self._send = self._then = None

    _whole: tuple[Any, Any] | None = None

    def operate(self, send: Any, then: Any) -> None:
        if then == self._ended:
            self._whole = (send, then)
        super().operate(send, then)

    def _committed(self, answers: dict[Any, tuple[Message, list[bytes]]]) -> None:
        step = self.job.script[self.index]
        for message, frames in answers.values():
            if not isinstance(message, Committed) or message.seq != step or message.updates != step:
                raise Violated(f"{self.name} committed step {step} and heard {message}")
            self.job.check_result(self, self.index, True, frames[0])
        self.tell("committed step", step)
        self.job.committed_at.setdefault(step, self.world.now)
        self.release()
        self.index += 1
        self._go_on()


class RelaxedWorker(Client):
    """Takes leases, and pushes their batches; at most one is under way."""

    job: Relaxed

    def __init__(self, job: Relaxed, rank: int, incarnation: int) -> None:
        super().__init__(job, rank, incarnation)
        self.memory = []
        self.lease, self.seq, self.clock = 0, 0, 0
        self.is_new = True
        self.is_resting = False

    def begin(self) -> None:
        self._take()

    def view(self, view: ServerView) -> None:
        self.is_resting = False  # who takes over may not know
        super().view(view)

    def lost(self, connection: Connection) -> None:
        self.is_resting = False
        super().lost(connection)

    def _take(self) -> None:
        if self.job.all_done:
            self.is_done = True
            return
        if not self.job.leases:
            if self.is_resting:
                self.later(0.005, self._take)
            else:
                self.operate(self._rest, lambda _: self._rested())
            return
        self.is_resting = False
        self.lease, self.seq = self.job.leases.pop(0), 1
        self.job.held[self.rank] = self.lease
        self._batch()

    def _rest(self) -> None:
        for server in self.servers:
            self.ask(server, server, Rest(self.core_view(), self.rank))

    def _rested(self) -> None:
        self.is_resting = True
        self._take()

    def _batch(self) -> None:
        clock = 0 if self.is_new else self.clock
        self.pull(self.job.keys(self.lease, self.seq), clock, self._pulled)

    def _pulled(self, rows: Any, dense: dict[int, Any], updates: int, slowest: int) -> None:
        if self.is_new:
            self.clock, self.is_new = slowest, False
        self.later(self.world.between(0.0005, 0.01), self._computed)

    def _computed(self) -> None:
        job = self.job
        keys, grads, chunks = job.gradient(self.lease, self.seq)
        vector = np.array([1.0, 0.0, 0.0, 0.0, 1.0])
        end = StepEnd(0, self.lease, self.seq, self.rank, 0, 0, 0, done_below=job.done_below)
        note = f"{self.lease}/{self.seq}".encode()
        self.operate(lambda: self.push(end, keys, grads, chunks, vector, note), self._ended)

    def _ended(self, answers: dict[Any, tuple[Message, list[bytes]]]) -> None:
        for message, _ in answers.values():
            if not isinstance(message, Committed) or message.seq != self.seq:
                raise Violated(f"{self.name} ended batch {self.lease}/{self.seq} and heard {message}")
        self.release()
        self.clock += 1
        self.job.acknowledged(self, self.lease, self.seq)
        self.pull(self.job.keys(self.lease, self.seq), 0, self._checked)

    def _checked(self, rows: Any, dense: dict[int, Any], updates: int, slowest: int) -> None:
        self.job.check_own(self, self.lease, self.seq, rows)
        if self.seq == self.job.num_batches:
            self.job.finished(self.rank, self.lease)
            self.later(0.001, self._take)
        else:
            self.seq += 1
            self.later(self.world.between(0.0005, 0.005), self._batch)
