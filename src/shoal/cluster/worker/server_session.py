"""What a worker asks the coordinator about servers and leases.

On connections of its own, because both questions may wait long: `session.py`'s
is for calls and views. May be used from several threads; closed by `close`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeVar

from shoal.cluster.worker.coordinator_client import CoordinatorClient
from shoal.config.job import Job
from shoal.errors import ClusterError, WireError
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import ServerView
from shoal.runtime.transport.messages.worker_coordinator import (
    AskLease,
    AskServers,
    Late,
    LeaseRefused,
    Leases,
    NoMoreLeases,
)

A = TypeVar("A", bound=Message)


class ServerSession:
    """A worker's lines to the coordinator, made when they are first used."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._clients: dict[str, CoordinatorClient] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._view = 0

    def ask_servers(self, after_view: int, timeout_s: float) -> ServerView:
        """The newest view of the servers, once there is one after `after_view`.

        Raises WaitTimedOut, naming the servers that have not joined, and CoordinatorLost.
        """
        answer = self._client("servers").request(AskServers(after_view, timeout_s), None)
        view = _expect(answer, ServerView)
        self._view = max(self._view, view.view)
        return view

    def ask_lease(
        self,
        *,
        call: int,
        finished: Sequence[int],
        num_samples: int,
        samples_per_lease: int,
        num_epochs: int,
        num_ahead: int = 2,
        first_epoch: int = 0,
        done: Sequence[int] = (),
        timeout_s: float | None = None,
        below: int = 0,
        is_last: bool = False,
        busy_s: Sequence[float] = (),
        num_workers: int = 0,
        **how: Any,
    ) -> Leases | NoMoreLeases:
        """Tell which leases are finished (all their pushes acknowledged), and get all that this worker holds now.

        Ask for the servers first: who knows only a view that was lost is not heard.

        Waits at the end of an epoch, until others' leases are done or come back.
        `first_epoch` and `done` (leases of that epoch) are where a checkpoint begins; the first worker
        to ask decides them for the call. `below`: all leases below it are done, as far as is known here; where an epoch
        has ended since, there may be an answer without a lease. `is_last` ends the call for all. `timeout_s` is step_timeout_s unless given. Raises WaitTimedOut, naming
        who holds what is left.
        `busy_s` is how long each of the finished took; `how` is what else AskLease says about handing out.
        """
        job = self._job
        question = AskLease(
            call=call,
            rank=job.rank,
            incarnation=job.incarnation,
            view=self._view,
            finished=list(finished),
            num_samples=num_samples,
            samples_per_lease=samples_per_lease,
            num_epochs=num_epochs,
            num_ahead=num_ahead,
            timeout_s=job.step_timeout_s if timeout_s is None else timeout_s,
            first_epoch=first_epoch,
            done=list(done),
            below=below,
            is_last=is_last,
            busy_s=list(busy_s),
            num_workers=num_workers,
            **how,
        )
        # Another thread may be waiting on the line for leases.
        answer = self._client("last lease" if is_last else "leases").request(question, None)
        if isinstance(answer, LeaseRefused):
            raise ClusterError(
                f"the coordinator refused rank {job.rank} a lease: {answer.reason}. Nothing was changed by it."
            )
        return answer if isinstance(answer, NoMoreLeases) else _expect(answer, Leases)

    def tell_late(self, ranks: Sequence[int], waited_s: float) -> None:
        """Have the coordinator look at ranks for whom this worker waits."""
        self._client("late").request(Late(list(ranks), waited_s, "a step or an exchange"), None)

    def close(self) -> None:
        """End both lines; a thread that waits on one is woken. Closing twice is fine."""
        self._is_closed = True
        for client in list(self._clients.values()):
            client.close()

    def _client(self, purpose: str) -> CoordinatorClient:
        if self._is_closed:
            raise ClusterError("the line to the coordinator is closed.")
        with self._lock:
            client = self._clients.get(purpose)
            if client is None:
                job = self._job
                client = self._clients[purpose] = CoordinatorClient(
                    str(job.coordinator),
                    job.rank,
                    job.incarnation,
                    num_workers=job.num_workers,
                    join_timeout_s=job.join_timeout_s,
                )
            return client


def _expect(answer: Message, expected: type[A]) -> A:
    if not isinstance(answer, expected):
        raise WireError(f"a {expected.__name__} was expected, and a {type(answer).__name__} came")
    return answer
