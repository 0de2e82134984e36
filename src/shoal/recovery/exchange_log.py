"""Exchange log: numbered exchanges of a rank, and the results it can replay.

Pure: no group, no socket, no tensor arithmetic. `elastic_group.py` runs exchanges
and feeds this; the simulator runs it by the thousand. Numbers count from 0
and never start again within a job.

    anchor ──▶ exchange ──▶ exchange ──▶ ... ──▶ anchor
      │           │ its result is kept until the next anchor; the last one until the next exchange
      └ from here a replacement can run forward
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
        """A place from which a replacement could start. What came before is needed only by who is one behind."""
        self.anchored_at = self.num_finished
        last = self.num_finished - 1
        # Another survivor may still wait for this one: we finished it and went on, it did not.
        self.results = {last: self.results[last]} if last in self.results else {}

    def recall(self) -> tuple[bool, Any]:
        """Whether the next exchange is already known, and its result. A known one counts as finished by this."""
        if self.num_finished not in self._inherited:
            return False, None
        result = self._inherited.pop(self.num_finished)
        self.finish(result)
        return True, result

    def finish(self, result: Any) -> None:
        """The next exchange is done, with this result."""
        self.results[self.num_finished] = result
        self.num_finished += 1

    @property
    def num_known(self) -> int:
        """Exchanges whose outcome this rank holds: finished, or inherited and not run through yet.

        This is what a rank tells when its view is over. Its weights stand
        after all of them, so a rank that was behind never runs one again.
        """
        return self.num_finished + len(self._inherited)

    def results_since(self) -> dict[int, Any]:
        """Every result since the anchor, and the last before it: what a follower needs to run forward."""
        return {**self.results, **self._inherited}

    def inherit(self, results: dict[int, Any], *, starts_at: int | None = None) -> None:
        """Take over a donor's results; a replacement also starts at the donor's anchor."""
        if starts_at is not None:
            self.num_finished = self.anchored_at = starts_at
            self._inherited.clear()
            # Not for itself: it may be the donor of the next view, and another may be still one behind.
            self.results = {number: result for number, result in results.items() if number < starts_at}
        # On top of what is still to be recalled: a second donor may come before the first one's results are used.
        self._inherited |= {
            number: result for number, result in results.items() if number >= self.num_finished
        }

    @property
    def is_catching_up(self) -> bool:
        """True while exchanges are answered from what was inherited."""
        return bool(self._inherited)
