"""Run directories on disk: the runs and the state of each.

Reads only, and never fails on a file that is missing, torn or half written:
a run may be writing it at this moment, or have died while it did.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from shoal.cli.verb import did_you_mean
from shoal.errors import RunDirectoryError

TAIL_BYTES = 256 * 1024
"""How much of the end of a file is looked through for its last lines."""


class RunState(StrEnum):
    """State of a run."""

    ALIVE = "alive"  # a supervisor holds its lock
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # asked to leave, and left
    DEAD = "dead"  # no supervisor, and no summary: it was killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, as its directory tells it. None: not known, or not yet."""

    name: str
    state: RunState
    strategy: str | None = None
    workers: int | None = None
    step: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    started: float | None = None
    path: str

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def names(run_dir: Path) -> list[str]:
    """The runs of a directory, by name."""
    return sorted(path.parent.name for path in run_dir.glob("*/config.json"))


def find(run: str, run_dir: Path) -> Path:
    """The directory of a run given by name or path."""
    for path in (run_dir / run, Path(run)):
        if (path / "config.json").is_file():
            return path
    known = names(run_dir)
    there = (
        f"{run_dir} has {', '.join(known[:8])}{' ...' if len(known) > 8 else ''}"
        if known
        else f"{run_dir} has no runs; --run-dir says where they are"
    )
    raise RunDirectoryError(
        f"there is no run '{run}'.{did_you_mean(run, known)} {there}.", path=str(run_dir / run)
    )


def read(path: Path) -> Run:
    config, summary = read_json(path / "config.json"), read_json(path / "summary.json")
    metrics = last_lines(path / "metrics.jsonl", 200)
    last = last_step(metrics, summary)
    return Run(
        name=path.name,
        state=state(path, summary),
        strategy=config.get("strategy"),
        workers=config.get("workers"),
        step=last.get("step"),
        loss=last.get("loss"),
        samples_per_s=summary.get("samples_per_s") or recent_rate(metrics),
        started=config.get("started"),
        path=str(path),
    )


def last_step(metrics: list[dict[str, Any]], summary: dict[str, Any]) -> dict[str, Any]:
    """The last line of metrics; the lines are rank 0's, and where batches are leased others may have done the last steps."""
    last = metrics[-1] if metrics else {}
    if isinstance(last.get("step"), int) and summary.get("leases") and isinstance(summary.get("steps"), int):
        last = last | {"step": max(last["step"], summary["steps"])}
    return last


def state(path: Path, summary: dict[str, Any]) -> RunState:
    """Alive by its lock; otherwise what its summary says, if it lived to write one."""
    from shoal.cluster.launch.run_directory import is_alive

    if is_alive(path):
        return RunState.ALIVE
    # Read again: it may have ended, and written it, between the caller's look and ours.
    summary = summary or read_json(path / "summary.json")
    match summary.get("exit"):
        case None:
            return RunState.DEAD
        case 0:
            return RunState.FINISHED
        case 130 | 143:
            return RunState.INTERRUPTED
        case _:
            return RunState.FAILED


def recent_rate(metrics: list[dict[str, Any]]) -> float | None:
    """Samples per second over the last steps, where the lines carry their time."""
    timed = [line for line in metrics if isinstance(line.get("time"), float)]
    if len(timed) < 2 or timed[-1]["time"] <= timed[0]["time"]:
        return None
    samples = sum(line.get("samples", 0) for line in timed[1:])
    return float(samples / (timed[-1]["time"] - timed[0]["time"]))


def processes(
    events: list[dict[str, Any]], state: RunState, *, num_workers: int | None
) -> list[dict[str, Any]]:
    """Workers of the run, each as the newest event describes it.

    Resumed with fewer workers, its events still tell of the others: they are
    no part of it any more.
    """
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        rank = event.get("rank")
        if not isinstance(rank, int) or (num_workers is not None and rank >= num_workers):
            continue
        if event.get("event") in ("worker-started", "worker-replaced"):
            found[rank] = {
                "rank": rank,
                "pid": event.get("pid"),
                "restarts": event.get("incarnation", 0),
                "state": "running",
                "code": None,
            }
        elif event.get("event") == "worker-exited" and rank in found:
            found[rank] |= {"state": "exited", "code": event.get("code")}
    for process in found.values():
        # Nobody was left to write down how it ended; but no worker outlives its supervisor.
        if process["state"] == "running" and state is not RunState.ALIVE:
            process["state"] = "gone"
    return [found[rank] for rank in sorted(found)]


def servers(events: list[dict[str, Any]], state: RunState) -> list[dict[str, Any]]:
    """The servers of the newest view: what each holds, and how its process stands."""
    views = [event for event in events if event.get("event") == "server-view"]
    held = views[-1].get("servers", {}) if views else {}
    processes: dict[int, dict[str, Any]] = {}
    for event in events:
        number = event.get("server")
        if not isinstance(number, int):
            continue
        if event.get("event") in ("server-started", "server-replaced"):
            processes[number] = {
                "pid": event.get("pid"),
                "restarts": event.get("incarnation", 0),
                "state": "running",
            }
        elif event.get("event") == "server-exited" and number in processes:
            processes[number] |= {"state": "exited", "code": event.get("code")}
    found = []
    for number, process in sorted(processes.items()):
        if state is not RunState.ALIVE:
            process["state"] = "gone"  # servers are ended with the job
        slots = held.get(str(number), {})
        if slots or process["state"] == "running":
            kinds = {kind: slots.get(kind, 0) for kind in ("primary", "replica", "filling")}
            found.append({"server": number, **process, **kinds})
    return found


def leases(events: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Leases and samples that each rank has finished; empty where none were handed out."""
    noted = [event for event in events if event.get("event") == "leases"]
    by_rank = noted[-1].get("by_rank") if noted else None
    return by_rank if isinstance(by_rank, dict) else {}


def newest_checkpoint(path: Path) -> str | None:
    """The newest checkpoint that was finished; its name holds its step."""
    finished = sorted(manifest.parent for manifest in path.glob("checkpoints/step-*/manifest.json"))
    return str(finished[-1]) if finished else None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def last_lines(path: Path, count: int | None = None) -> list[dict[str, Any]]:
    """The last whole lines of a file of JSON lines, as many as its tail holds. A line torn by a kill, or just being written, is left out."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
    except OSError:
        return []
    found = []
    for line in tail.splitlines():
        try:
            fact = json.loads(line)
        except ValueError:
            continue
        if isinstance(fact, dict):
            found.append(fact)
    return found if count is None else found[-count:]
