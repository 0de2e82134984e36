"""Mailbox of the workers at the owner of slot 0: exchanges, and the notes from which a replacement resumes.

Exchanges are numbered; one is over when every rank has posted. The newest
note of every rank is kept, and the results of the exchanges since the oldest
of them: that is all a replacement needs. Replicated and copied with slot 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.ps.server.actions import Frame
from shoal.ps.server.contents import Refusal
from shoal.ps.server.replication import MailboxState
from shoal.runtime.transport.framing import pack, unpack


@dataclass(frozen=True, slots=True)
class Result:
    """Result of an exchange: all contributions packed, or for a commit the vectors' sum."""

    is_commit: bool
    frame: bytes


@dataclass(slots=True)
class _Open:
    contributions: dict[int, bytes]
    notes: dict[int, tuple[int, bytes]]


class Mailbox:
    """Exchanges, their results, and notes by rank."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self.log: dict[int, Result] = {}
        self.notes: dict[int, tuple[int, bytes]] = {}
        """By rank: the first exchange after the note, and the note."""

    def post(
        self, exchange: int, rank: int, anchored_at: int, frame: Frame, note: Frame, *, num_workers: int
    ) -> bool:
        """A rank's contribution; of a repeat the first counts. True: all have posted now."""
        if exchange in self.log:
            return False
        if self.log and exchange < max(self.log):
            raise Refusal(
                f"exchange {exchange} is over and forgotten, the newest is {max(self.log)}: rank {rank} has made other "
                "calls than the others"
            )
        entry = self._open.setdefault(exchange, _Open({}, {}))
        entry.contributions.setdefault(rank, bytes(frame))
        entry.notes.setdefault(rank, (anchored_at, bytes(note)))
        return len(entry.contributions) == num_workers

    def close(self, exchange: int) -> tuple[Result, dict[int, tuple[int, bytes]]]:
        """All have posted: the result, and their notes."""
        entry = self._open.pop(exchange)
        frames = [entry.contributions[rank] for rank in sorted(entry.contributions)]
        return Result(False, pack(frames)), entry.notes

    def finish(
        self,
        exchange: int | None,
        result: Result | None,
        notes: dict[int, tuple[int, bytes]],
        num_workers: int,
    ) -> None:
        """An exchange is over (None: only notes came), here or on the primary."""
        self.notes.update({rank: note for rank, note in notes.items() if note[1]})
        if exchange is None or result is None:
            return
        self.log[exchange] = result
        if len(self.notes) == num_workers:
            oldest = min(anchored_at for anchored_at, _ in self.notes.values())
            # One more than is needed: who waits for the last result may ask again after all others went on.
            for number in [number for number in self.log if number < oldest - 1]:
                del self.log[number]

    def contributions(self, exchange: int) -> list[bytes]:
        """Every rank's contribution, in rank order."""
        result = self.log[exchange]
        if result.is_commit:
            raise Refusal(f"exchange {exchange} was the commit of a step, and nothing was posted to it")
        return unpack(result.frame)

    def since(self, rank: int) -> tuple[int, bytes, list[int]]:
        """The note from which a replacement of this rank resumes, and the exchanges to replay after it."""
        anchored_at, note = self.notes.get(rank, (0, b""))
        return anchored_at, note, [number for number in sorted(self.log) if number >= anchored_at]

    def forget_open(self) -> None:
        """The view is over: everybody posts again."""
        self._open.clear()

    def waiting_for(self, exchange: int, num_workers: int) -> list[int]:
        """The ranks that have not posted."""
        entry = self._open.get(exchange)
        return [rank for rank in range(num_workers) if entry is None or rank not in entry.contributions]

    # ---- between servers ------------------------------------------------------------------------

    def state(self) -> tuple[MailboxState, list[bytes]]:
        """All of it; frames: results, then notes."""
        numbers, ranks = sorted(self.log), sorted(self.notes)
        frames = [self.log[number].frame for number in numbers] + [self.notes[rank][1] for rank in ranks]
        return (
            MailboxState(
                log=[(number, self.log[number].is_commit) for number in numbers],
                notes=[(rank, self.notes[rank][0]) for rank in ranks],
            ),
            frames,
        )

    def restore(self, state: MailboxState, frames: list[Frame]) -> None:
        """As it was on the server it came from."""
        texts = [bytes(frame) for frame in frames]
        self.log = {number: Result(is_commit, texts[at]) for at, (number, is_commit) in enumerate(state.log)}
        offset = len(state.log)
        self.notes = {
            rank: (anchored_at, texts[offset + at]) for at, (rank, anchored_at) in enumerate(state.notes)
        }
        self._open.clear()
