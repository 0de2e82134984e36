"""Headship of a job over several hosts: claimed in etcd, renewed by a thread, released at the end.

The supervisor calls `check` in every turn, and ends when another host may have taken over. While
the supervisor hangs, the lease is not renewed; when the lease has expired the process is killed.
`seek` is the other side: a host that lost its head joins the next one, or becomes it.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from shoal.cluster.hosts.etcd import Etcd, JobJournal
from shoal.cluster.hosts.takeover import (
    LOOK_EVERY_S,
    Campaign,
    ClaimHead,
    GiveUp,
    Head,
    HeadLease,
    JobRecord,
    JoinHead,
    LookAgain,
    Seen,
    knows_all,
)
from shoal.config.hosts import JournalConfig
from shoal.config.liveness import LivenessConfig
from shoal.errors import ConfigError, HeadFenced, JournalUnreachable

RENEWALS_PER_LEASE = 8
"""Also the number of failed attempts at a member within one lease."""

HUNG_AFTER_RENEWALS = 2
"""Renewal intervals without a turn of the supervisor after which the lease is no longer renewed."""

STDERR = 2


def _now() -> float:
    """Clock of leases: unlike `time.monotonic`, it includes time suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Headship:
    """This process as the head of a job, while its lease lasts."""

    def __init__(
        self,
        journal: JobJournal,
        lease: int,
        token: int,
        head: Head,
        record: JobRecord,
        kept: HeadLease,
        lease_s: float,
    ) -> None:
        """`token` is the fencing token of writes."""
        self._journal, self._lease, self._token, self._kept = journal, lease, token, kept
        self._renew_every_s = lease_s / RENEWALS_PER_LEASE
        self._head, self._record = head, record
        self._written = (head, record)
        self._problem, self._is_told, self._has_raised, self._is_over = "", False, False, False
        self._checked_at: float | None = None  # while there is a supervisor
        self._changed = threading.Event()
        threading.Thread(target=self._end_hung, name="watch of the supervisor", daemon=True).start()
        self._thread = threading.Thread(target=self._renew, name="lease of the head", daemon=True)
        self._thread.start()

    @classmethod
    def claim(
        cls, journal: JobJournal, seen: Seen, *, job: str, launches: Sequence[float], lease_s: float
    ) -> Headship | None:
        """Become the head of a job that has none; None where another was faster."""
        before = seen.record or JobRecord(0, [])
        generation = before.generation + 1
        head = Head(job, platform.node(), "", generation)
        record = JobRecord(generation, list(launches), before.step)
        kept = HeadLease(lease_s, sent_at=_now())
        lease = journal.grant(math.ceil(lease_s))
        token = None
        try:
            token = journal.claim(lease, head, record, revision=seen.revision)
        finally:
            if token is None:
                with contextlib.suppress(JournalUnreachable):
                    journal.revoke(lease)
        return cls(journal, lease, token, head, record, kept, lease_s) if token is not None else None

    @property
    def generation(self) -> int:
        return self._head.generation

    def listens(self, address: str) -> None:
        """Tell other hosts where to join."""
        self._head = msgspec.structs.replace(self._head, address=address)
        self._changed.set()

    def launched(self, launches: Sequence[float]) -> None:
        self._record = msgspec.structs.replace(self._record, launches=list(launches))
        self._changed.set()

    def wait_until_written(self) -> None:
        """Wait until etcd has all records so far; HeadFenced if it cannot."""
        wanted = (self._head, self._record)
        while self._written != wanted:
            self._refuse_fenced()
            time.sleep(0.01)

    def saved(self, step: int) -> None:
        self._record = msgspec.structs.replace(self._record, step=step)
        self._changed.set()

    @property
    def is_fenced(self) -> bool:
        return bool(self._kept.fenced(_now()))

    def check(self) -> None:
        """Raise HeadFenced, once, when another host may be the head. To be called in every turn until `rest`."""
        self._refuse_fenced()
        self._checked_at = _now()

    def rest(self) -> None:
        """Stop monitoring the supervisor's turns until the next `check`: none is running."""
        self._checked_at = None

    def _refuse_fenced(self) -> None:
        why = self._kept.fenced(_now())
        if why and not self._has_raised and not self._is_over:
            self._has_raised = True
            raise self._fenced(why)

    def _fenced(self, why: str) -> HeadFenced:
        problem = self._hung() or self._problem
        why += f" ({problem})" if problem else ""
        return HeadFenced(
            job=self._head.job, why=why, journal=self._journal.shown, record=f"{self._journal.prefix}head"
        )

    def _hung(self) -> str:
        """Description of a hanging supervisor with its duration; empty while it runs."""
        checked_at = self._checked_at
        hung_s = _now() - checked_at if checked_at is not None else 0.0
        is_hung = hung_s > HUNG_AFTER_RENEWALS * self._renew_every_s
        return f"the supervisor has hung for {hung_s:.1f} s" if is_hung else ""

    def news(self) -> str:
        """Messages for the user: etcd became unreachable, or answers again."""
        now = _now()
        is_silent = self._kept.silent_s(now) > 3 * self._renew_every_s and bool(self._problem)
        if is_silent == self._is_told or self._kept.fenced(now):
            return ""
        self._is_told = is_silent
        if not is_silent:
            return "etcd answers again; this host is still the head"
        return (
            f"etcd has not answered for {self._kept.silent_s(now):.1f} s ({self._problem}); the job goes on, and ends here in "
            f"{max(0.0, self._kept.left_s(now)):.1f} s unless it does: by then another host may take over"
        )

    def close(self, exit_code: int | None) -> None:
        """Release the headship.

        The job has ended with this code, and its record is removed if nothing can be resumed; None:
        it was not begun here, and another host may take over.
        """
        was_head = not self.is_fenced
        self._is_over = True
        self._changed.set()
        self._thread.join()
        if was_head:
            last = (
                msgspec.structs.replace(self._record, is_ended=exit_code is not None)
                if exit_code != 0
                else None
            )
            with contextlib.suppress(JournalUnreachable):
                self._journal.end(self._token, last)
                self._journal.revoke(self._lease)

    def _renew(self) -> None:
        while not self._is_over:
            if not self._hung():
                self._renew_once()
            if self.is_fenced:
                return
            self._changed.wait(self._renew_every_s)
            self._changed.clear()

    def _renew_once(self) -> None:
        sent_at = _now()
        try:
            if not self._journal.renew(self._lease):
                self._kept.refused("its lease in etcd has ended")
            wanted = (self._head, self._record)
            if wanted != self._written:
                if self._journal.write(self._token, self._lease, *wanted):
                    self._written = wanted
                else:
                    self._kept.refused("etcd has another head, or none")
            self._kept.renewed(sent_at)
            self._problem = ""
        except JournalUnreachable as error:
            self._problem = error.told

    def _end_hung(self) -> None:
        """Kill this process, and its children with it, if a fenced supervisor does not exit.

        Runs in its own thread: the renewing one may be waiting for etcd.
        """
        fenced_at: float | None = None
        while not self._is_over and not self._has_raised:
            time.sleep(self._renew_every_s / 4)
            why, now = self._kept.fenced(_now()), _now()
            fenced_at = (fenced_at or now) if why else None
            is_late = fenced_at is not None and now > fenced_at + self._renew_every_s
            if is_late and self._checked_at is not None and not self._is_over and not self._has_raised:
                said = f"{self._fenced(why)}\n".encode()
                with contextlib.suppress(OSError, ValueError):
                    if select.select([], [STDERR], [], 0)[1]:  # the supervisor may be blocked on stderr
                        os.write(STDERR, said)
                os._exit(HeadFenced.exit_code)


@dataclass(frozen=True, slots=True)
class Successor:
    """State of a host that takes over from a lost head."""

    headship: Headship
    key: str = field(repr=False)
    """Join key of the job, by which its other hosts know the new head."""


def open_journal(config: JournalConfig, liveness: LivenessConfig) -> Etcd:
    """A client of the etcd; ConfigError where no member of it answers."""
    etcd = Etcd(config, timeout_s=liveness.head_lease_s / RENEWALS_PER_LEASE)
    try:
        JobJournal(etcd, "any").read()
    except JournalUnreachable as error:
        if error.is_refused:
            raise ConfigError(f"--journal {config.shown}: {error} Nothing was started.") from None
        raise ConfigError(
            f"--journal {config.shown}: no member of this etcd answers; tried were {error.told}. Nothing was started; without "
            "--journal (`--journal none` for `shoal resume`) no host takes over by itself when the head is lost."
        ) from None
    return etcd


def job_id(launches: Sequence[float]) -> str:
    """Name of a run in etcd: its first launch time, which tells runs of one name apart and survives copying."""
    return datetime.fromtimestamp(launches[0], UTC).strftime("%Y%m%dT%H%M%S.%f")


def become_head(etcd: Etcd, *, job: str, launches: Sequence[float], lease_s: float) -> Headship:
    """Headship of a job that starts or is resumed here. ConfigError if it runs, or continued, elsewhere.

    `launches` are those of the run directory.
    """
    journal = JobJournal(etcd, job_id(launches))
    try:
        seen = journal.read()
        if seen.head is not None:
            where = f" ({seen.head.address})" if seen.head.address else ""
            raise ConfigError(
                f"{job} is running: {seen.head.host}{where} is its head, by {etcd.shown}. Nothing was started; `shoal join` "
                "makes this host part of it, and a head that was lost is forgotten after a few seconds."
            )
        if seen.record is not None and not knows_all(launches, seen.record):
            began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.record.launches[-1]))
            raise ConfigError(
                f"{job} went on elsewhere: its launch {len(seen.record.launches)} began at {began}, by {etcd.shown}, and the "
                f"run directory here has not seen it. Nothing was started; go on with `shoal resume` on a host that has it, or "
                f"give this copy precedence with `etcdctl del --prefix {journal.prefix}`."
            )
        headship = Headship.claim(journal, seen, job=job, launches=launches, lease_s=lease_s)
    except JournalUnreachable as error:
        raise ConfigError(f"--journal {etcd.shown}: {error} Nothing was started.") from None
    if headship is None:
        raise ConfigError(
            f"{job} was started on another host at this moment. Nothing was started here; `shoal join` makes this host part of it."
        )
    return headship


def seek(
    config: JournalConfig,
    *,
    job: str,
    run_id: str,
    launches: Sequence[float],
    step: int,
    liveness: LivenessConfig,
    try_join: Callable[[Head], bool],
    say: Callable[[str], None],
) -> Headship | GiveUp | None:
    """Join the job's next head or become it; None once `try_join` has succeeded."""
    etcd = Etcd(config, timeout_s=liveness.head_lease_s / RENEWALS_PER_LEASE)
    journal = JobJournal(etcd, run_id)
    campaign = Campaign(
        launches=launches,
        step=step,
        began_at=time.monotonic(),
        yield_s=liveness.host_dead_after_s,
        timeout_s=liveness.takeover_timeout_s,
    )
    told = ""
    while True:
        try:
            seen = journal.read()
        except JournalUnreachable:
            seen = None
        match campaign.decide(seen, time.monotonic()):
            case GiveUp() as given_up:
                return given_up
            case JoinHead(head):
                if try_join(head):
                    return None
            case ClaimHead(revision, record):
                claimed = Seen(None, record, revision)
                with contextlib.suppress(JournalUnreachable):
                    won = Headship.claim(
                        journal, claimed, job=job, launches=launches, lease_s=liveness.head_lease_s
                    )
                    if won is not None:
                        return won
            case LookAgain(why):
                if why != told:
                    say(f"{why}; looking again")
                told = why
        time.sleep(LOOK_EVERY_S)
