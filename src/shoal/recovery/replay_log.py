"""Replay log of one process: calls, anchors, numbered exchanges, and the results a replacement replays.

See docs/adr/0007-recovery.md. Independent of the transport: `elastic_group.py`
runs exchanges over a process group and takes state from a donor,
`parallel/ps/session.py` runs them through servers and finds state there.
`ExchangeLog` is pure, and the simulator runs it by the thousand.

    anchor ──▶ exchange ──▶ exchange ──▶ ... ──▶ anchor
      │           │ its result is kept until the next anchor; the last one until the next exchange
      └ from here a replacement can run forward
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.cluster.worker import session
from shoal.config import job as jobs
from shoal.recovery.state_transfer import Part, RecoveryState, num_bytes
from shoal.runtime import events
from shoal.runtime.events import RESULTS_LET_GO
from shoal.runtime.failpoints import failpoint


@dataclass(slots=True)
class ExchangeLog:
    """Counts exchanges and keeps the results since the last anchor.

    A rank that follows a donor gets `inherit`; from then on `recall` answers
    the exchanges that the donor had finished already.
    """

    num_finished: int = 0
    anchored_at: int = 0
    results: dict[int, Any] = field(default_factory=dict)
    _inherited: dict[int, Any] = field(default_factory=dict)

    def anchor(self) -> None:
        """Mark a place from which a replacement could start. Only a rank that is one exchange behind
        needs earlier results.
        """
        self.anchored_at = self.num_finished
        last = self.num_finished - 1
        # Another survivor may still wait for this result: this rank finished the exchange, and it did not.
        self.results = {last: self.results[last]} if last in self.results else {}

    def recall(self) -> tuple[bool, Any]:
        """Whether the next exchange's result is already known, and the result. A known exchange counts
        as finished by this call.
        """
        if self.num_finished not in self._inherited:
            return False, None
        result = self._inherited.pop(self.num_finished)
        self.finish(result)
        return True, result

    def knows(self, kind: type) -> bool:
        """Whether a result of this kind is known and not replayed yet."""
        return any(isinstance(known, kind) for known in self._inherited.values())

    def pass_up_to(self, kind: type) -> bool:
        """Replay all results before the first known one of this kind; False if none is known."""
        if not self._inherited:
            return False
        at = min(
            (number for number, known in self._inherited.items() if isinstance(known, kind)), default=None
        )
        while at is not None and self.num_finished < at:
            self.recall()
        return at is not None

    def finish(self, result: Any) -> None:
        """Record the result of the next exchange."""
        self.results[self.num_finished] = result
        self.num_finished += 1

    @property
    def num_known(self) -> int:
        """Exchanges whose result this rank holds: finished, or inherited and not run through yet.

        A rank reports this number when its view is over. Its weights include all of them, so a rank
        that was behind never runs one again.
        """
        return self.num_finished + len(self._inherited)

    def results_since(self) -> dict[int, Any]:
        """Every result since the anchor, and the last one before it: what a follower needs to run forward."""
        return {**self.results, **self._inherited}

    def inherit(self, results: dict[int, Any], *, starts_at: int | None = None) -> None:
        """Take over a donor's results; a replacement also starts at the donor's anchor."""
        if starts_at is not None:
            self.num_finished = self.anchored_at = starts_at
            self._inherited.clear()
            # Kept for others: this rank may be the donor of the next view, and another rank may be one
            # behind.
            self.results = {number: result for number, result in results.items() if number < starts_at}
        # Added to results not recalled yet: a second donor may come before the first one's results are
        # used.
        self._inherited |= {
            number: result for number, result in results.items() if number >= self.num_finished
        }

    @property
    def is_catching_up(self) -> bool:
        return bool(self._inherited)


KEPT_BYTES = 512 << 20
"""Limit for results that a worker keeps for a replacement: results of calls, and of the script's own exchanges."""


class Holder(Protocol):
    """Owner of state that a replacement needs: a strategy with its model and optimizer."""

    step: int
    """Steps committed so far."""

    def export_state(self) -> Part:
        """The state as of the last commit."""

    def import_state(self, part: Part) -> None:
        """Load the donor's state."""

    def pull_weights(self) -> None:
        """At the end of a call: bring the trained weights into this process's model, wherever they are kept."""


class ReplayLog:
    """Recovery history and position of one process. Subclasses call `_ensure_joined` before anything counts."""

    def __init__(self) -> None:
        self._log = ExchangeLog()
        self._holders: dict[int, Holder] = {}
        self._call, self._call_is_over = 0, True
        self._anchor: Callable[[], dict[str, Any]] = dict
        self._results: dict[str, Any] = {}
        self._num_kept_bytes, self._counted = 0, set[str]()
        self._has_dropped_results = False
        self._moments: Counter[str] = Counter()
        self.was_given_state = False
        self._unclaimed: dict[int, Part] = {}  # received state whose holder the script has not created yet
        self._recovery_state: RecoveryState | None = None  # until the anchor is reached

    def _ensure_joined(self) -> None:
        """Join the job's workers; a replacement receives its state here."""
        raise NotImplementedError

    @property
    def next_is_known(self) -> bool:
        return self._log.is_catching_up

    def pass_up_to(self, kind: type) -> bool:
        """Whether a result of this kind is known. If so, replay the exchanges before it within the same step."""
        return self._log.pass_up_to(kind)

    @property
    def holders(self) -> list[Holder]:
        return list(self._holders.values())

    @property
    def is_inside_call(self) -> bool:
        """Whether the script is inside a call; a replacement starts from the anchors of calls."""
        return not self._call_is_over

    def remembered(self, moment: str, run: Callable[[], Any]) -> Any:
        """Run the script's own operation between steps once and log its result for replacements.

        The same operation may occur several times; each occurrence is logged separately.
        """
        self._ensure_joined()
        if self._recovery_state is not None and self._recovery_state.call == 0:
            self._stand_at_anchor()  # there was no call yet: the anchor is the beginning of the script
        moment = f"call {session.num_calls()}, {moment}"
        self._moments[moment] += 1
        key = f"{moment} #{self._moments[moment]}"
        if self._recovery_state is not None and key in self._recovery_state.results:
            return self._recovery_state.results[key]
        result = run()
        self._keep(key, result)
        return result

    # ---- anchors and calls ----------------------------------------------------------------------

    def begin_call(self, number: int) -> tuple[bool, Any]:
        """Begin a call: whether it is finished already, and its result."""
        self._ensure_joined()
        if self._recovery_state is not None:
            given = self._recovery_state
            finished = number < given.call or (number == given.call and given.call_is_over)
            if finished:
                if number == given.call and not given.anchor:
                    self._stand_at_anchor()
                return True, given.results.get(f"call/{number}")
            if not given.anchor:  # anchored at the beginning of this call
                self._stand_at_anchor()
            return False, None
        self._call, self._call_is_over = number, False
        self._note(dict)
        return False, None

    def end_call(self, number: int, result: Any) -> None:
        """End a call: models hold the trained weights, and the result is kept for replacements."""
        for holder in self._holders.values():
            holder.pull_weights()
        self._call, self._call_is_over = number, True
        self._keep(f"call/{number}", result)
        self._note(dict)
        failpoint("worker: a call ended")

    def anchor(self, state: Callable[[], dict[str, Any]]) -> None:
        """Mark a place from which a replacement can run the present call forward, given the value of `state` then."""
        if self._recovery_state is None:
            self._note(state)

    @property
    def anchored_at(self) -> int:
        """Number of the first exchange after the anchor."""
        return self._log.anchored_at

    @property
    def num_finished(self) -> int:
        return self._log.num_finished

    def take_anchor(self) -> dict[str, Any] | None:
        """State recorded at the anchor from which a replacement runs on; given once."""
        if self._recovery_state is None:
            return None
        state = self._recovery_state.anchor
        self._stand_at_anchor()
        return state

    def pending_anchor(self) -> dict[str, Any] | None:
        """State recorded at the anchor that a replacement has not reached yet."""
        return self._recovery_state.anchor if self._recovery_state is not None else None

    def pending_state(self, number: int) -> Part | None:
        """State that this holder of a replacement will receive."""
        return self._unclaimed.get(number)

    def hold(self, number: int, holder: Holder) -> None:
        """Register a holder for state transfer, and load the state that was received for it."""
        self._holders[number] = holder
        if number in self._unclaimed:
            holder.import_state(self._unclaimed.pop(number))

    def _keep(self, key: str, result: Any) -> None:
        """Log a result for replay, within the size limit of the log."""
        if not self._has_dropped_results:
            self._results[key] = result
            if key not in self._counted:  # a replacement replays some that it was given
                self._counted.add(key)
                self._num_kept_bytes += num_bytes(result)
            if self._num_kept_bytes > KEPT_BYTES:
                self.drop_results(
                    f"note: what the script exchanged so far takes {self._num_kept_bytes / 2**20:,.0f} MiB, too much to keep it for a "
                    "worker that is replaced: from here on one that dies takes all of them back to the script's begin, or to the "
                    "newest checkpoint of a Trainer"
                )
        if self._has_dropped_results and self._call_is_over:
            self._log.anchor()  # no replacement will run up to here

    def drop_results(self, note: str) -> None:
        """Drop the logged results: from here on a death restarts all ranks, because a replacement could not replay."""
        if self._has_dropped_results:
            return
        events.emit(RESULTS_LET_GO, num_bytes=self._num_kept_bytes)  # before anything is dropped
        self._has_dropped_results = True
        self._results.clear()
        self._counted.clear()
        if jobs.rank() == 0:
            print(note, file=sys.stderr, flush=True)

    def _note(self, state: Callable[[], dict[str, Any]]) -> None:
        self._log.anchor()
        self._anchor = state

    def _stand_at_anchor(self) -> None:
        given, self._recovery_state = self._recovery_state, None
        assert given is not None
        self._call, self._call_is_over = given.call, given.call_is_over
        self._anchor, self._results = lambda: given.anchor, given.results
        self._num_kept_bytes = sum(map(num_bytes, given.results.values()))
        self._counted = set(given.results)
        self._caught_up()

    def _caught_up(self) -> None:
        if self._recovery_state is None and not self._log.is_catching_up:
            session.live()
