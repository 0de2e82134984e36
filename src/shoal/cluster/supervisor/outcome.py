"""Outcome of a job for its user: one error paragraph, notes on recoveries, and the figures of summary.json.

Pure: `supervisor.py` fills a JobOutcome while it watches; nothing here looks at
a process or a disk.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.cluster.supervisor import failure
from shoal.cluster.supervisor.job_lifecycle import (
    CoordinatorDeath,
    HostMissing,
    JobLifecycle,
    LeftOnRequest,
    ServerDeath,
    StateLost,
    StuckAtExit,
    WorkerDeath,
)
from shoal.config.choices import COMPRESSORS
from shoal.errors import ClusterError, Interrupted, ShoalError, StageCannotRun, WaitTimedOut, WorkerDied
from shoal.runtime.signal_names import signal_name
from shoal.runtime.transport.messages.server_coordinator import ServerView
from shoal.runtime.transport.messages.supervisor import Failed, Finished, Progress, Saved


@dataclass(slots=True)
class JobOutcome:
    """Observations of the supervisor about a job."""

    lifecycle: JobLifecycle
    progress: dict[int, Progress] = field(default_factory=dict)
    """The newest of each rank."""

    checkpoint: Saved | None = None
    """Newest complete one, including snapshots that are deleted with the job."""

    lasting: Saved | None = None
    """Newest complete one that is kept."""

    last_lines: dict[int, list[str]] = field(default_factory=dict)
    """Of each rank's log, once it is gone."""

    server_last_lines: dict[int, list[str]] = field(default_factory=dict)
    """Of each server's log, once it is gone."""

    num_servers: int = 0
    """How many there are; `shoal scale` changes it."""

    num_went_back: int = 0
    """Restarts of all processes from a checkpoint, because servers were lost."""

    leases: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Leases and samples that each rank has finished. Empty where the strategy hands out none."""

    sharding: dict[str, Any] = field(default_factory=dict)
    """Evenness of the newest fit's batches, where they are balanced by sample cost."""

    exchange: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    """Gradient traffic of the newest fit."""

    has_own_loop: bool = False
    """The script trains by shoal.setup."""

    coordinator_last_lines: list[str] = field(default_factory=list)
    """Last lines of its log, once it is gone."""


def error_of(outcome: JobOutcome, *, num_workers: int, run: str) -> ShoalError | None:
    """Error that ended the job, as its user should read it; `run` is the argument of `shoal resume`."""
    cause = outcome.lifecycle.cause
    checkpoint = outcome.lasting.path if outcome.lasting else None
    match cause:
        case None:
            return None
        case Failed():
            error = failure.to_error(cause, num_workers=num_workers)
            if isinstance(error, StageCannotRun):
                error.args = (f"{error} {_go_on(checkpoint, run)}",)
            return _with_logs(error, outcome.last_lines)
        case WorkerDeath(rank, code, finished, why, num_times):
            again = f" {num_times} times without the job getting ahead" if num_times > 1 else ""
            return WorkerDied(
                rank=rank,
                how=("had finished its script, then " if finished else "")
                + (
                    f"was lost: {cause.lost_with}"
                    if cause.lost_with
                    else how_it_ended(code, finished=finished)
                )
                + again
                + (
                    f" ({why}; if it is only slow, raise --step-timeout, or join_timeout_s of shoal.run)"
                    if why
                    else ""
                )
                + failure.why_gloo_ended_it(outcome.last_lines.get(rank, [])),
                step=outcome.progress[rank].step if rank in outcome.progress else None,
                checkpoint=checkpoint,
                log=outcome.last_lines.get(rank, []),
                run=run,
            )
        case HostMissing(ranks, waited_s, lost_with, servers) if servers:
            missing = [*(f"worker {rank}" for rank in ranks), *(f"server {number}" for number in servers)]
            return ClusterError(
                f"{' and '.join(missing)} had no service for {waited_s:.0f} s: {lost_with or 'none has joined'}; so the job was "
                f"stopped. {_go_on(checkpoint, run)} To wait longer for a service that comes back, raise --join-timeout."
            )
        case HostMissing(ranks, waited_s, lost_with):
            return ClusterError(
                f"{_workers(ranks)} had no host for {waited_s:.0f} s: {lost_with}, and no other host has room; so the job was "
                f"stopped. {_go_on(checkpoint, run)} To wait longer for a host that comes back, raise --join-timeout; to "
                "have its workers start on hosts without a core to spare, add --oversubscribe."
            )
        case ServerDeath(number, code, why, num_times, lost_with):
            again = f" {num_times} times without the job getting ahead" if num_times > 1 else ""
            because = f" ({why}; if it is only slow, raise --step-timeout)" if why else ""
            last_lines = outcome.server_last_lines.get(number, [])
            return ClusterError(
                f"server {number} {_server_end(code, lost_with)}{again}{because}, so the job was stopped. "
                f"{_go_on(checkpoint, run)}"
                + "\n  ".join([f"\nLast lines of server {number}:", *last_lines] if last_lines else [])
            )
        case StateLost(servers, num_times, rank) as lost:
            again = ", the second time without the job getting ahead" if num_times > 1 else ""
            return ClusterError(
                f"{lost_state(lost)}{again}, so the job was stopped. {_go_on(checkpoint, run)}"
                + (
                    f" To survive this, run with --replicas {len(servers) + 1} or more."
                    if rank is None
                    else ""
                )
            )
        case CoordinatorDeath(code):
            said = " ".join(outcome.coordinator_last_lines)
            return ClusterError(
                f"the coordinator {how_it_ended(code, finished=True)}, so the workers were stopped; its last words"
                + (f": {said} " if said else f", if any, are in {run}/logs/coordinator.log. ")
                + _go_on(checkpoint, run)
            )
        case LeftOnRequest(signum, late):
            return _interrupted(outcome, signum, late, run)
        case StuckAtExit(ranks):
            return ClusterError(
                f"the script ended on every rank, but {_workers(ranks)} did not exit and had to be killed: a thread of the "
                "script that is not a daemon, or an exit handler, goes on. What the script wrote is there; let it end its "
                "threads."
            )


def lost_state(lost: StateLost) -> str:
    """Description of the lost state and of its holders."""
    how = "died" if lost.died is None else how_it_ended(lost.died.code)
    if lost.died is not None and lost.died.lost_with:
        how = "was lost with its host"
    if lost.died is not None and lost.died.why:
        how += f" ({lost.died.why})"
    if lost.has_own_group:
        return f"worker {lost.rank} {how}, and the script's own process group cannot go on without it"
    if lost.holds_parts:
        return f"worker {lost.rank} {how}, and nobody else held its part of the model"
    if lost.has_dropped_results:
        return f"worker {lost.rank} {how}, and the others did not keep what its replacement would need"
    if lost.rank is not None:
        return f"worker {lost.rank} and a server died in the same step, and what it had pushed to that server is lost"
    who = ("server " if len(lost.servers) == 1 else "servers ") + ", ".join(map(str, lost.servers))
    return f"{who} died, and nobody else held what they held of the weights"


def _with_logs(error: ShoalError, last_lines: dict[int, list[str]]) -> ShoalError:
    """Append the last log lines of the missing ranks to a time-out."""
    if isinstance(error, WaitTimedOut):
        missing = [int(found[1]) for each in error.missing if (found := re.match(r"rank (\d+)\b", str(each)))]
        for rank in missing:
            if last_lines.get(rank):
                said = "\n  ".join(last_lines[rank])
                error.args = (f"{error}\nLast lines of rank {rank}:\n  {said}",)
    return error


def how_it_ended(code: int, *, finished: bool = False) -> str:
    """Exit code or signal in words: "was killed by SIGKILL"."""
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"ended with exit code {code}" + ("" if finished else " before the end of its script")


def summary_of(outcome: JobOutcome, *, started: float, ended: float, **facts: Any) -> dict[str, Any]:
    """The figures of summary.json: totals as rank 0 reported them, or its last progress."""
    # Rank 0's report; or another's, if rank 0 was killed after its script's end and its replacement did
    # nothing.
    finished = sorted(outcome.lifecycle.finished.values(), key=lambda each: (-each.steps, each.rank))
    done, last = finished[0] if finished else None, outcome.progress.get(0)
    if done is not None:
        samples, seconds, steps, metrics = done.samples, done.seconds, done.steps, done.metrics
    elif last is not None:
        samples, steps, metrics = last.samples, last.step, dict(last.metrics)
        seconds = samples / last.samples_per_s if last.samples_per_s else 0.0
        if last.loss is not None:
            metrics.setdefault("loss", last.loss)
    else:
        samples, seconds, steps, metrics = 0, 0.0, 0, {}
    return {
        **facts,
        "samples": samples,
        "seconds": seconds,
        "samples_per_s": samples / seconds if seconds else 0.0,
        "steps": steps,
        "metrics": metrics,
        **_bent(finished),
        "restarts": outcome.lifecycle.num_restarts,
        **({"went_back": outcome.num_went_back} if outcome.num_servers else {}),
        **(
            {"leases": {str(rank): list(done) for rank, done in sorted(outcome.leases.items())}}
            if outcome.leases
            else {}
        ),
        **({"sharding": outcome.sharding} if outcome.sharding else {}),
        **({"exchange": outcome.exchange} if outcome.exchange else {}),
        **({"tables": outcome.tables} if outcome.tables else {}),
        "checkpoint": outcome.lasting.path if outcome.lasting else None,
        "started": started,
        "ended": ended,
    }


def _bent(finished: Sequence[Finished]) -> dict[str, Any]:
    """Counts of a strategy with servers, over all workers; empty where there are none."""
    staleness: Counter[int] = Counter()
    for each in finished:
        staleness.update(each.staleness)
    counted: dict[str, Any] = {}
    if staleness:
        counted["staleness"] = {str(ahead): staleness[ahead] for ahead in sorted(staleness)}
    cached: Counter[str] = Counter()
    for each in finished:
        cached.update(each.row_cache)
    if cached:
        hit_rate = cached["hits"] / max(1, cached["hits"] + cached["misses"])
        counted["row_cache"] = {**dict(sorted(cached.items())), "hit_rate": round(hit_rate, 4)}
    fan_in: Counter[str] = Counter()
    for each in finished:
        fan_in.update(each.fan_in)
    if fan_in:
        counted["fan_in"] = dict(sorted(fan_in.items()))
    for name in ("num_late", "num_missed", "exchange_bytes", "key_bytes_saved"):
        total = sum(getattr(each, name) for each in finished)
        if total:
            counted[name.removeprefix("num_")] = total
    return counted


def _interrupted(outcome: JobOutcome, signum: signal.Signals, late: tuple[int, ...], run: str) -> Interrupted:
    said = [failed for failed in outcome.lifecycle.failures if failed.error == "Interrupted"]
    facts = json.loads(min(said, key=lambda failed: failed.rank).facts) if said else {}
    last = outcome.progress.get(0)
    error = Interrupted(
        signal_name=signum.name,
        step=facts.get("step") or (last.step if last else None),
        checkpoint=facts.get("checkpoint") or (outcome.lasting.path if outcome.lasting else None),
        run=run,
    )
    if outcome.has_own_loop and error.checkpoint is None:
        error.args = (f"{error} Nothing was asked to be saved: the loop calls no shoal.checkpoint.",)
    if late:
        error.args = (f"{error} {_workers(late).capitalize()} did not leave in time and had to be killed.",)
    return error


def _go_on(checkpoint: str | None, run: str) -> str:
    if checkpoint is None:
        return "No checkpoint was written yet; ModelCheckpoint(every_steps=...) keeps one."
    return f"The newest checkpoint is {checkpoint}; go on with `shoal resume {run}`."


def _workers(ranks: tuple[int, ...]) -> str:
    return ("worker " if len(ranks) == 1 else "workers ") + ", ".join(map(str, ranks))


def replacing(died: WorkerDeath, max_restarts: int) -> str:
    """Message that a worker is replaced."""
    why = f": {died.why}" if died.why else ""
    return f"worker {died.rank} {how_it_ended(died.code)}{why}; replacing it ({died.num_times} of {max_restarts} times)"


def begins_anew(checkpoint: Saved | None) -> str:
    """Message that no worker survived."""
    where = (
        f"the checkpoint of step {checkpoint.step:,}, {checkpoint.path}"
        if checkpoint is not None
        else "where this launch began: it has written no checkpoint yet"
    )
    return f"no worker is left that has what was trained; all begin anew from {where}"


def resized(before: int, now: int, checkpoint: Saved | None) -> str:
    """Message that other workers continue, or the same number on other hosts."""
    where = f"from step {checkpoint.step:,} on" if checkpoint is not None else "from the start"
    bits = "still" if now == before else "no longer"
    return f"{now} worker{'s' if now > 1 else ''} {where}: the bits are {bits} those of the undisturbed run"


def slow_compression(compress: str, link: float) -> str:
    """Note for a compressor that made steps slower over links of so many bytes per second; empty where it did not."""
    compressor = COMPRESSORS.parse(compress)[0]
    if link < compressor.slower_from:
        return ""
    return (
        f"the slowest link from the head passed {link / 1e6:,.0f} MB/s when its host joined. Over links of "
        f"{compressor.slower_from / 1e6:,.0f} MB/s and more --compress {compressor.name} made steps of ddp slower: compare with a run "
        "without it"
    )


def replacing_server(died: ServerDeath, max_restarts: int) -> str:
    why = f": {died.why}" if died.why else ""
    count = "" if died.lost_with else f" ({died.num_times} of {max_restarts} times)"
    return f"server {died.number} {_server_end(died.code, died.lost_with)}{why}; replacing it{count}"


def _server_end(code: int, lost_with: str) -> str:
    return f"was lost: {lost_with}" if lost_with else how_it_ended(code, finished=True)


def going_back(lost: StateLost, checkpoint: Saved | None, reached: int, *, max_restarts: int) -> str:
    """Message that all processes restart, with the steps that are repeated."""
    what = lost_state(lost)
    if lost.has_own_group:
        return f"{what}; all workers run the script again from its top ({lost.num_times} of {max_restarts} times)"
    if checkpoint is None:
        return f"{what}. No checkpoint was written by this launch: the job begins anew" + (
            f", and repeats up to {reached} steps" if reached else ""
        )
    steps = (
        f"steps {checkpoint.step + 1} to {reached} are" if reached > checkpoint.step + 1 else "one step is"
    )
    return (
        f"{what}; going back to {checkpoint.path}: "
        f"{steps if reached > checkpoint.step else 'no step is'} repeated"
    )


def slots_by_server(view: ServerView) -> dict[str, dict[str, int]]:
    """Incarnation of each server, and its number of primary, replica and filling slots."""
    counts = {
        number: {"incarnation": incarnation, "primary": 0, "replica": 0, "filling": 0}
        for number, incarnation in view.incarnations.items()
    }
    for holders in view.holders:
        for index, number in enumerate(holders):
            counts[number]["replica" if index else "primary"] += 1
    for joining in view.joining.values():
        for number in joining:
            counts[number]["filling"] += 1
    return {str(number): count for number, count in counts.items()}
