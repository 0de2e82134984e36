"""A worker's session: numbered calls, progress reports, events, and the request to stop.

The Trainer uses it with or without a job: in a plain process calls are only counted, no stop is
requested, and progress goes to the sink given to `listen`, if any. Nothing here blocks training:
progress that does not fit into the socket is dropped, since only the newest counts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.cluster.ledger import entries as ledger_entries
from shoal.cluster.ledger.entries import LedgerFact
from shoal.cluster.worker.coordinator_client import CoordinatorClient, Regrouping
from shoal.config import job as jobs
from shoal.runtime import events
from shoal.runtime.failpoints import failpoint
from shoal.runtime.transport import framing
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.supervisor import (
    Activity,
    Failed,
    Finished,
    Happened,
    Live,
    Noted,
    Progress,
    Saved,
)
from shoal.runtime.transport.messages.worker_coordinator import ViewFormed

REPORT_EVERY_S = 0.1
"""Minimum interval of progress reports, except where a phase or an epoch begins or ends."""

SEND_TIMEOUT_S = 10.0
"""Time-out of messages that must arrive. The supervisor reads all the time; after this long without reading it is gone."""


@dataclass(slots=True)
class _Session:
    rank: int = 0
    status: socket.socket | None = None
    client: CoordinatorClient | None = None
    regroup: Callable[[], None] | None = None
    has_own_group: bool = False
    runs_collectives: bool = False
    is_live: bool = True
    live_output: tuple[int, int] | None = None
    notes: list[str] = field(default_factory=list)  # shown once the output of a replacement is
    sink: Callable[[Progress], object] | None = None
    num_calls: int = 0
    num_begun: int = 0  # calls begun by every rank; one less than num_calls while it waits for the others
    is_waiting: bool = False  # for the other ranks, at a call or at the script's end
    stop: str | None = None
    report_at: float = 0.0
    reported: tuple[str, int, int] = ("", -1, 0)
    progress: dict[str, Any] = field(default_factory=dict)  # last report, for the activity record
    samples: int = 0
    seconds: float = 0.0
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    row_cache: Counter[str] = field(default_factory=Counter)
    row_cache_told: Counter[str] = field(default_factory=Counter)  # already in the activity record
    fan_in: Counter[str] = field(default_factory=Counter)
    num_late: int = 0
    num_missed: int = 0
    exchange_bytes: int = 0
    key_bytes_saved: int = 0
    at_end: list[Callable[[], None]] = field(default_factory=list)
    sending: threading.Lock = field(default_factory=threading.Lock)
    pid: int = field(default_factory=os.getpid)


_session = _Session()


def attach(*, rank: int, status: socket.socket, live_output: tuple[int, int] | None = None) -> None:
    """Send to the supervisor through `status` from now on. Called once, by the launcher.

    `live_output` is given to a replacement: the targets of its stdout and stderr once it has caught
    up.
    """
    global _session
    _session = _Session(
        rank=rank,
        status=status,
        is_live=live_output is None,
        live_output=live_output,
        sink=lambda progress: _send(progress, wait=False),
    )
    events.set_sink(_write_down)


def agree_through(client: CoordinatorClient) -> None:
    """Compare every numbered call with the other ranks' through `client`. Called once, by the launcher."""
    _session.client = client


def regroup_through(regroup: Callable[[], None] | None) -> None:
    """Call `regroup` when a wait for the others is interrupted because a view is being formed.

    It leaves this process's group, enters the next view (`enter_view`), and returns when that view
    is set up; the wait then begins again.
    """
    _session.regroup = regroup


def listen(sink: Callable[[Progress], None] | None) -> None:
    """Report the progress of a process that was not launched to `sink`, or to nobody (None). A launched worker keeps its supervisor."""
    if _session.status is None:
        _session.sink = sink


def begin_call(kind: str, detail: str) -> int:
    """Count a call into shoal, and wait until every rank makes the same one. Calls count from 1."""
    failpoint("worker: a call begins")
    jobs.share()
    _session.num_calls += 1
    if (client := _session.client) is not None:
        _through_regroups(lambda: client.begin_call(_session.num_calls, kind, detail))
    _session.num_begun = _session.num_calls
    return _session.num_calls


def end_script() -> None:
    """Wait until every rank has reached the end of its script."""
    failpoint("worker: script ended")
    for act in _session.at_end:
        act()
    # The last work of a script with its own group is often one rank's alone, and may take any time.
    if (client := _session.client) is not None and not _session.has_own_group:
        _through_regroups(lambda: client.end_script(_session.num_calls))
    live()


def at_end(act: Callable[[], None]) -> None:
    """Call `act` when the script has ended, before waiting for the other ranks."""
    _session.at_end.append(act)


def own_group() -> None:
    """Record that the script forms its own process group: ranks meet there and not at calls into shoal."""
    _session.has_own_group = True
    live()


def has_own_group() -> bool:
    """Whether the script has formed a process group of its own."""
    return _session.has_own_group


def runs_collectives() -> None:
    """Record that the script itself runs collectives, within a partitioned model: one may break when a peer dies."""
    _session.runs_collectives = True


def meets_peers() -> bool:
    """Whether a backend's error in the script may be caused by a peer's death."""
    return _session.has_own_group or _session.runs_collectives


def enter_view(*, view_left: int, finished: int, waited_s: float = 0.0, waited_in: str = "") -> ViewFormed:
    """Wait for all ranks at the next view. In a plain process there is one view and no wait.

    `waited_s` is the time this rank waited for the others in the exchange that broke (`waited_in`):
    the missing rank has used up that much of its time-out.
    """
    jobs.share()
    if (client := _session.client) is None:
        return ViewFormed(view=view_left + 1, donor=-1, finished=-1, call=0, incarnations=[0])
    return client.enter_view(
        view_left=view_left,
        finished=finished,
        call=_session.num_begun,
        waited_s=waited_s,
        waited_in=waited_in,
    )


def is_live() -> bool:
    """False in a replacement that has not caught up: it replays work that was done before."""
    return _session.is_live


def live() -> None:
    """A replacement has caught up: show its output from here on. Calling it twice is safe."""
    if _session.is_live:
        return
    _session.is_live = True
    if _session.live_output is not None:
        for stream, fd, live_fd in zip((sys.stdout, sys.stderr), (1, 2), _session.live_output, strict=True):
            stream.flush()  # output so far is replayed work
            os.dup2(live_fd, fd, inheritable=True)
            os.close(live_fd)
    _send(Live(rank=_session.rank))
    for note in _session.notes:
        print(note, file=sys.stderr, flush=True)
    _session.notes.clear()


def say_when_live(note: str) -> None:
    """Print to stderr; in a replacement whose output is still muted, when it has caught up."""
    if _session.is_live:
        print(note, file=sys.stderr, flush=True)
    else:
        _session.notes.append(note)


def _through_regroups(wait: Callable[[], None]) -> None:
    _session.is_waiting = True
    # Before the check, so that no signal falls between: a rank that was asked to leave waits for nobody,
    # and the others need not come.
    if _session.stop is not None:
        raise KeyboardInterrupt
    while True:
        try:
            wait()
            _session.is_waiting = False
            return
        except Regrouping:
            if _session.regroup is None:
                raise
            regroup = _session.regroup
        # Outside the handler: the exception's frames may refer to the old group, and must be released
        # first.
        regroup()


def is_inside_call() -> bool:
    """True where `stop_requested` will be read: not before the first call, nor while waiting for other ranks."""
    return _session.num_begun > 0 and not _session.is_waiting


def num_calls() -> int:
    return _session.num_calls


def report(
    *,
    phase: str,
    epoch: int,
    num_epochs: int | None,
    step: int,
    num_steps: int | None,
    loss: float | None,
    metrics: Mapping[str, float],
    samples: int,
    samples_per_s: float,
    eta_s: float | None,
    metrics_epoch: int = 0,
) -> None:
    """Report progress, at most every REPORT_EVERY_S."""
    sink = _session.sink
    if sink is None or not _session.is_live:
        return
    now = time.monotonic()
    if now < _session.report_at and (phase, epoch, metrics_epoch) == _session.reported and step != num_steps:
        return
    _session.report_at, _session.reported = now + REPORT_EVERY_S, (phase, epoch, metrics_epoch)
    _session.progress = {
        "phase": phase,
        "epoch": epoch,
        "num_epochs": num_epochs,
        "num_steps": num_steps,
        "loss": loss,
        "eta_s": eta_s,
    }
    sink(
        Progress(
            rank=_session.rank,
            call=_session.num_calls,
            phase=phase,
            epoch=epoch,
            num_epochs=num_epochs,
            step=step,
            num_steps=num_steps,
            loss=loss,
            metrics=dict(metrics),
            samples=samples,
            samples_per_s=samples_per_s,
            eta_s=eta_s,
            metrics_epoch=metrics_epoch,
        )
    )


def saved(path: str, step: int) -> None:
    """Report a complete checkpoint."""
    _send(Saved(rank=_session.rank, path=path, step=step))


def note(fact: LedgerFact) -> None:
    """Write an entry into the journal's ledger."""
    if _session.status is not None:
        _send(Noted(_session.rank, ledger_entries.encode(fact)))


def summary(*, metrics: Mapping[str, float], samples: int, seconds: float, steps: int) -> None:
    """Add to the totals of the run; of metrics the newest value counts."""
    _session.samples += samples
    _session.seconds += seconds
    _session.steps += steps
    _session.metrics.update(metrics)


def bent(*, staleness: Mapping[int, int], num_late: int, num_missed: int) -> None:
    """Add to the counts of a relaxed strategy: pulls by their staleness, contributions late, steps missed."""
    _session.staleness.update(staleness)
    _session.num_late += num_late
    _session.num_missed += num_missed


def cached(*, num_hits: int, num_misses: int) -> None:
    """Add to the lookups of rows that this worker keeps: found there, or pulled."""
    _session.row_cache.update(hits=num_hits, misses=num_misses)


def merged(*, num_pushes: int, num_sent: int) -> None:
    """Add to the counts of an aggregator: pushes received from workers, and merged pushes sent."""
    _session.fan_in.update(pushes=num_pushes, sent=num_sent)


def saved_keys(num_bytes: int) -> None:
    """Add to the bytes of keys not sent, because a server on another host had them cached."""
    _session.key_bytes_saved += num_bytes


def shared(num_bytes: int) -> None:
    """Report memory reserved for exchange with servers; the maximum is in the final report."""
    _session.exchange_bytes = max(_session.exchange_bytes, num_bytes)


def progress_facts() -> dict[str, Any]:
    """Position of the script as last reported, its device, and row cache lookups since the last call."""
    facts = {**_session.progress, **_device_facts()}
    if not _session.row_cache:
        return facts
    counted = Counter(_session.row_cache)
    since, _session.row_cache_told = counted - _session.row_cache_told, counted
    return {**facts, "cache": dict(since)}


def _device_facts() -> dict[str, Any]:
    """The accelerator on which this process allocated most, whoever chose it; nothing is imported or initialized for it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return {}
    peaks = {f"cuda:{number}": cuda.max_memory_allocated(number) for number in range(cuda.device_count())}
    device = max(peaks, key=lambda name: peaks[name])
    return {"device": device, "device_peak_bytes": peaks[device]} if peaks[device] else {}


def activity(line: str) -> bool:
    """Send the activity of the last second; False if it was dropped."""
    return _send(Activity(line), wait=False)


def failed(failure: Failed) -> None:
    _send(failure)


def finished() -> None:
    """Report that the script is done, with the totals."""
    _send(
        Finished(
            rank=_session.rank,
            samples=_session.samples,
            seconds=_session.seconds,
            steps=_session.steps,
            metrics=_session.metrics,
            staleness=dict(_session.staleness),
            num_late=_session.num_late,
            num_missed=_session.num_missed,
            exchange_bytes=_session.exchange_bytes,
            row_cache=dict(_session.row_cache),
            fan_in=dict(_session.fan_in),
            key_bytes_saved=_session.key_bytes_saved,
        )
    )


def request_stop(signal_name: str) -> None:
    _session.stop = signal_name


def stop_requested() -> str | None:
    """Signal that asked this process to finish the step, save, and leave; None if none did."""
    return _session.stop


def _write_down(kind: str, facts: dict[str, Any]) -> None:
    if os.getpid() == _session.pid:  # a process forked by the worker has no connection of its own
        _send(Happened(_session.rank, kind, msgspec.json.encode(facts).decode()))


def _send(message: Message, *, wait: bool = True) -> bool:
    if _session.status is None:
        return False
    # A full socket drops progress; a closed one means the supervisor is gone, and this process soon
    # follows. Locked, because data-reading threads report too.
    with _session.sending, contextlib.suppress(OSError):
        _session.status.settimeout(SEND_TIMEOUT_S if wait else 0.0)
        _session.status.sendall(b"".join(framing.encode(message)))
        return True
    return False
