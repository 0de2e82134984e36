"""A worker's conversation with the coordinator: join, then one question at a time, asked again when the line breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.worker_coordinator import Join, Joined, JoinRefused
from simulation.network import End

if TYPE_CHECKING:
    from simulation.worker import Worker


class Line:
    """One connection at a time. An answer that comes on an old one is never heard: its end is closed."""

    def __init__(
        self, worker: Worker, answered: Callable[[Message], None], broke: Callable[[], None] | None = None
    ) -> None:
        """`broke`: do this when the line breaks, instead of asking again."""
        self._worker, self._answered, self._broke = worker, answered, broke
        self.question: Message | None = None
        self.end: End | None = None
        self._has_joined = False

    def ask(self, question: Message) -> None:
        self.question = question
        if self.end is None:
            self._connect()
        elif self._has_joined:
            self._say()

    def close(self) -> None:
        self.question = None
        if self.end is not None:
            self.end.close()
            self.end = None

    def heard(self, end: End, message: Message) -> None:
        self._worker.do(self._heard, end, message)

    def lost(self, end: End) -> None:
        self._worker.do(self._lost, end)

    def _connect(self) -> None:
        worker = self._worker
        self._has_joined = False
        self.end = worker.cluster.network.connect(self, worker.name)
        self._send(Join(worker.rank, worker.incarnation, worker.pid, worker.cluster.num_workers))

    def _say(self) -> None:
        assert self.question is not None
        self._send(self.question)

    def _send(self, message: Message) -> None:
        worker, end = self._worker, self.end
        assert end is not None
        strands_s = worker.cluster.faults.strands(worker, message)
        if not strands_s:
            end.send(message)
            return
        # It is under way when the line breaks: the answer is lost, or it arrives after it was said again.
        worker.tell("strands", message)
        end.lag_s = strands_s
        end.send(message)
        worker.cluster.network.cut(end, notice_s=0.001, far_notice_s=strands_s + 0.05)

    def _heard(self, end: End, message: Message) -> None:
        if end is not self.end:
            return
        if not self._has_joined and isinstance(message, Joined):
            self._has_joined = True
            if self.question is not None:
                self._say()
        elif isinstance(message, JoinRefused):
            self._worker.refused(message.reason)
        else:
            self.question = None
            self._answered(message)

    def _lost(self, end: End) -> None:
        if end is not self.end:
            return
        self.end = None
        if self._broke is not None:
            self._broke()
        elif self.question is not None:
            self._worker.later(self._worker.cluster.settings.reconnect_s, self._again)

    def _again(self) -> None:
        if self.end is None and self.question is not None:
            self._connect()
