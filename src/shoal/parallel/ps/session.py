"""Session of a worker with the parameter servers: exchanges by number, and notes for its replacement.

The counterpart of the elastic group, through servers: workers are not connected to each other, and
none holds what its replacement would need. See docs/adr/0009-parameter-server.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.cluster.worker import torchrun
from shoal.cluster.worker.coordinator_client import LeaseClient
from shoal.config import job as jobs
from shoal.config import placement
from shoal.config import strategy as strategies
from shoal.embedding.shared_rows import can_share_rows
from shoal.ps.client.server_group import AskAll, AskOwner, Group
from shoal.ps.client.step import Decision, PushStep
from shoal.ps.codecs import Compression
from shoal.recovery import state_transfer
from shoal.recovery.replay_log import ReplayLog
from shoal.recovery.state_transfer import KeptResults, Part, RecoveryState
from shoal.runtime import page_lock, recorder
from shoal.runtime.failpoints import failpoint
from shoal.runtime.transport.framing import unpack
from shoal.runtime.transport.messages.client_server import AskNote, Commit, DeclareMode, Note, Post

Vector: TypeAlias = NDArray[np.float64]


NOTE_EVERY = 16  # steps between two notes, where a replacement can run through those between


class PsSession(ReplayLog):
    """Servers of this process's job, and the exchanges through them."""

    def __init__(self) -> None:
        super().__init__()
        self._job = job = jobs.current()
        name = strategies.parse(job.strategy)
        kind = name.mode if name.mode in ("ssp", "async", "drop", "stale") else "exact"
        if name.mode == "hybrid":
            kind = "async" if name.bound is None else "ssp"
        bound = 1 if kind == "stale" else name.bound or 0
        two_phase = kind == "exact" and job.num_servers > 1
        self.mode = DeclareMode(job.num_workers, kind, bound, two_phase=two_phase)  # type: ignore[arg-type]
        self._session = LeaseClient(job)
        self.group = Group(
            name=f"worker-{job.rank}",
            incarnation=job.incarnation,
            ways_in=job.servers,
            own_host=job.host_address,
            ask_view=self._session.ask_servers,
            timeout_s=job.liveness.step_timeout_s,
            tell_late=self._session.tell_late,
        )
        self.group.compression = Compression(job.compress)
        self.group.reads_replicas = kind == "exact"
        self.group.reads_in_place = kind == "exact" and can_share_rows()
        if placement.of_job(job).devices[job.rank].startswith("cuda"):
            self.group.lock_memory = page_lock.lock
        self.updates = 0  # steps committed so far, of all models of the script: the clock of this worker
        self._updates_at_anchor = 0  # a replacement counts the updates since then again
        self._is_there = False
        self._has_noted, self._steps_since_note = False, 0
        self._results = KeptResults(job.run_dir / "calls", writes=job.rank == 0)  # type: ignore[assignment]

    @property
    def session(self) -> LeaseClient:
        return self._session

    @property
    def is_between_calls(self) -> bool:
        """Whether the others of a replacement are in no call, so that its script may read its model."""
        return self._recovery_state is not None and self._recovery_state.call_is_over

    @property
    def knows_a_commit(self) -> bool:
        """Whether the servers are ahead: a step that this process has yet to replay is applied there."""
        return self._log.knows(np.ndarray)

    # ---- exchanges ------------------------------------------------------------------------------

    def exchange(self, contribution: bytes) -> list[bytes]:
        """Every rank's contribution to the next exchange, in rank order."""
        self._ensure_joined()
        known, result = self._log.recall()
        if known:
            self._caught_up()
            return list(result)
        failpoint("worker: exchange begun")
        name = (self._log.num_finished, self._job.rank, self._log.anchored_at)
        posting = AskOwner(0, lambda view: Post(view, *name), [contribution, self.note()])
        with recorder.WAIT:
            self.group.run(posting)
        failpoint("worker: exchange finished, not committed")
        contributions = [bytes(frame) for frame in posting.frames]
        self._log.finish(contributions)
        return contributions

    def commit(self, step: PushStep | None) -> Vector:
        """Complete an exact step, as the next exchange; returns the sum of its vectors, and the decision."""
        known, vector = self._log.recall()
        if not known:
            assert step is not None
            failpoint("worker: exchange begun")
            self.group.finish(step)
            failpoint("worker: exchange finished, not committed")
            vector = step.vector
            self._log.finish(vector)
        self.updates += 1
        if known:
            self._caught_up()
        return vector  # type: ignore[no-any-return]

    def have_two_phases(self) -> None:
        """Switch to two phases once there are several servers: all must have a step before any updates."""
        if self.mode.kind == "exact" and not self.mode.two_phase and len(self.group.servers) > 1:
            self.mode = msgspec.structs.replace(self.mode, two_phase=True)
            self.group.declare(self.mode)

    def commit_again(self, decision: Decision) -> None:
        """Tell every server the decision on the newest step: one that missed it still waits."""
        what = (self.updates, decision.factor, decision.apply, decision.norm)
        # A server on which it cannot be summed again takes the job back to a checkpoint.
        self.group.run(AskAll(lambda view: Commit(view, *what), may_refuse=True))

    def pass_by(self, vector: Vector) -> None:
        """Count a step that was over before this worker began it."""
        self._log.finish(vector)
        self.updates += 1

    # ---- notes ----------------------------------------------------------------------------------

    def note_of_step(self, *, is_needed: bool) -> bytes:
        """Note to send with a step, if one is due; else None, and the last one stays.

        A replacement that starts some steps earlier is given their results. `is_needed`: it could
        not do without.
        """
        self._steps_since_note += 1
        if not is_needed and self._has_noted and self._steps_since_note < NOTE_EVERY:
            return b""
        return self.note()

    def note(self, *, updates: int | None = None) -> bytes:
        """State that a replacement needs; `updates`: their number once it counts, if it goes with one."""
        self._has_noted, self._steps_since_note = True, 0
        return state_transfer.to_bytes(
            {
                "call": self._call,
                "call_is_over": self._call_is_over,
                "anchor": self._anchor(),
                "updates": self._updates_at_anchor if updates is None else updates,
                "parts": {
                    number: {"plain": part.plain, "tensors": part.tensors}
                    for number, part in (
                        *self._unclaimed.items(),
                        *((number, holder.export_state()) for number, holder in self._holders.items()),
                    )
                },
            }
        )

    def _note(self, state: Callable[[], dict[str, Any]]) -> None:
        super()._note(state)
        self._updates_at_anchor = self.updates
        for holder in self._holders.values():
            holder.anchored()  # type: ignore[attr-defined]

    def _ensure_joined(self) -> None:
        if self._is_there:
            return
        self._is_there = True
        torchrun.close_listener()
        self.group.declare(self.mode)
        if self._job.incarnation:
            asking = AskOwner(0, lambda view: AskNote(view, self._job.rank))
            self.group.run(asking)
            assert isinstance(asking.answer, Note)
            self._take(asking.answer, [bytes(frame) for frame in asking.frames])

    def _take(self, answer: Note, frames: list[bytes]) -> None:
        note, *results = frames
        log: dict[int, Any] = {
            number: np.frombuffer(frame, np.float64) if is_commit else unpack(frame)
            for number, is_commit, frame in zip(answer.log, answer.is_commit, results, strict=True)
        }
        self._log.inherit(log, starts_at=answer.anchored_at)
        if note:
            given = state_transfer.from_bytes(note)
            self.was_given_state = True
            self.updates = self._updates_at_anchor = given["updates"]
            self._recovery_state = RecoveryState(
                anchored_at=answer.anchored_at,
                call=given["call"],
                call_is_over=given["call_is_over"],
                anchor=given["anchor"],
                results=self._results,
            )
            self._unclaimed = {int(number): Part(**part) for number, part in given["parts"].items()}
        else:
            self._caught_up()


_current: PsSession | None = None


def ps_session() -> PsSession:
    global _current
    if _current is None:
        _current = PsSession()
    return _current
