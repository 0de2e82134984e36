"""Run directories as a job would leave them, without the job: for the dashboard's tests and benchmark."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

START = 1_760_000_000.0


def write_run(
    path: Path,
    *,
    workers: int = 4,
    servers: int = 2,
    steps: int = 400,
    seconds: int = 120,
    straggler: int | None = None,
    killed: int | None = None,
    is_over: bool = True,
    strategy: str = "ps:ssp=4",
    seed: int = 0,
) -> Path:
    """A run of `steps` steps in `seconds`; worker `straggler` computes at half the speed, `killed` died halfway."""
    draw = random.Random(seed)
    path.mkdir(parents=True)
    config = {
        "script": "train.py",
        "args": ["--lr", "0.1"],
        "strategy": strategy,
        "workers": workers,
        "servers": servers,
    }
    config |= {"replicas": 2, "seed": 7, "started": START, "hosts": [], "versions": {"torch": "2.13.0"}}
    write(path / "config.json", config)
    per_step = seconds / steps
    with open(path / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            loss = 0.3 + 2 * math.exp(-4 * step / steps) + draw.gauss(0, 0.05)
            at = START + 5 + step * per_step
            file.write(
                f'{{"step": {step}, "epoch": {step * 2 // (steps + 1)}, "loss": {loss}, "samples": 1024, "time": {at}}}\n'
            )
    lines(
        path / "epochs.jsonl",
        [
            {"epoch": k, "step": steps * (k + 1) // 2, "time": START + 5 + seconds * (k + 1) / 2}
            | {
                "loss": 0.6 - 0.2 * k,
                "accuracy": 0.7 + 0.1 * k,
                "val_loss": 0.62 - 0.17 * k,
                "val_accuracy": 0.69 + 0.09 * k,
            }
            for k in range(2 if is_over else 1)
        ],
    )
    lines(path / "events.jsonl", events(workers, servers, steps, seconds, killed=killed, is_over=is_over))
    (path / "activity").mkdir()
    for rank in range(workers):
        slow = 1.9 if rank == straggler else 1.0 + 0.1 * draw.random()
        lines(
            path / "activity" / f"worker-{rank}.jsonl",
            [worker_line(rank, k, slow, steps, seconds, draw) for k in range(seconds)],
        )
    for number in range(servers):
        lines(
            path / "activity" / f"server-{number}.jsonl",
            [server_line(number, k, steps, seconds, draw) for k in range(seconds)],
        )
    write(path / "graph.json", GRAPH)
    if is_over:
        figures = {"loss": 0.4, "accuracy": 0.8, "val_loss": 0.45, "val_accuracy": 0.78}
        summary = {
            "strategy": strategy,
            "workers": workers,
            "servers": servers,
            "exit": 0,
            "error": None,
            "steps": steps,
        }
        summary |= {
            "samples": steps * 1024,
            "seconds": float(seconds),
            "samples_per_s": steps * 1024 / seconds,
        }
        write(
            path / "summary.json",
            summary | {"metrics": figures, "restarts": int(killed is not None), "ended": START + seconds + 9},
        )
    return path


def events(
    workers: int, servers: int, steps: int, seconds: int, *, killed: int | None, is_over: bool
) -> list[dict[str, Any]]:
    half = START + 5 + seconds / 2
    found: list[dict[str, Any]] = [{"time": START, "event": "coordinator-started", "pid": 100}]
    found += [
        {"time": START + 1, "event": "worker-started", "rank": k, "pid": 200 + k, "incarnation": 0}
        for k in range(workers)
    ]
    found += [
        {"time": START + 1, "event": "server-started", "server": k, "pid": 900 + k, "incarnation": 0}
        for k in range(servers)
    ]
    if servers:
        held = {
            str(k): {"incarnation": 0, "primary": 256 // servers, "replica": 256 // servers, "filling": 0}
            for k in range(servers)
        }
        found.append({"time": START + 2, "event": "server-view", "view": 1, "servers": held})
    if killed is not None:
        found += [
            {"time": half, "event": "worker-exited", "rank": killed, "incarnation": 0, "code": -9},
            {
                "time": half + 0.05,
                "event": "worker-replaced",
                "rank": killed,
                "pid": 777,
                "incarnation": 1,
                "after_s": 0.05,
            },
            {
                "time": half + 0.6,
                "event": "view-formed",
                "view": 2,
                "donor": 0,
                "finished": steps // 2,
                "call": 1,
            },
            {"time": half + 1.2, "event": "worker-live", "rank": killed, "incarnation": 1, "after_s": 1.2},
        ]
    found.append(
        {"time": half + 2, "event": "leases", "by_rank": {str(k): [4, 4096] for k in range(workers)}}
    )
    if is_over:
        end = START + seconds + 8
        found += [
            {"time": end, "event": "worker-exited", "rank": k, "incarnation": int(k == killed), "code": 0}
            for k in range(workers)
        ]
        found += [
            {"time": end + 0.5, "event": "server-exited", "server": k, "incarnation": 0, "code": -9}
            for k in range(servers)
        ]
        found.append({"time": end + 1, "event": "job-ended", "exit": 0})
    return found


def worker_line(
    rank: int, k: int, slow: float, steps: int, seconds: int, draw: random.Random
) -> dict[str, Any]:
    busy = min(0.97, 0.42 * slow * (0.95 + 0.1 * draw.random()))
    read, rest = 0.08 * draw.random(), 1 - busy
    return {
        "at": START + 6 + k,
        "process": f"worker-{rank}",
        "incarnation": 0,
        "step": (k + 1) * steps // seconds,
        "steps": max(1, steps // seconds),
        "samples": 256,
        "seconds": {
            "read": read,
            "compute": busy - read,
            "pull": 0.25 * rest,
            "push": 0.15 * rest,
            "wait": 0.5 * rest,
        },
        "bytes": {"sent": 4_000_000 + rank * 1000, "received": 5_000_000},
        "rss_bytes": 600_000_000 + rank * 1_000_000 + k * 10_000,
        "cpu_s": busy + 0.05,
        "interval_s": 1.0,
        "num_steps": steps,
        "num_epochs": 2,
        "cache": {"hits": 900, "misses": 100},
    }


def server_line(number: int, k: int, steps: int, seconds: int, draw: random.Random) -> dict[str, Any]:
    return {
        "at": START + 6 + k,
        "process": f"server-{number}",
        "incarnation": 0,
        "step": (k + 1) * steps // seconds,
        "seconds": {"apply": 0.2 + 0.1 * draw.random(), "wait": 0.5},
        "bytes": {"sent": 9_000_000, "received": 8_000_000 + int(2e6 * draw.random())},
        "rss_bytes": 900_000_000,
        "cpu_s": 0.4,
        "slots": 128,
        "rows": {"rows.weight": 50_000 + number},
        "queue_s": 0.0004 + 0.0006 * draw.random(),
        "staleness": {"0": 40, "1": 22, "2": 9, "3": 3, "4": 1},
        "replicas": 128,
    }


GRAPH: dict[str, Any] = {
    "version": 1,
    "note": "recorded in the first step of worker-0",
    "sources": [
        {"name": "dense", "shape": "342×13", "bytes": 17784},
        {"name": "ids", "shape": "342×26", "bytes": 71136},
    ],
    "layers": [
        {
            "name": "rows",
            "kind": "Embedding",
            "shape": "342×26×16",
            "parameters": 1_600_000,
            "parameter_bytes": 6_400_000,
        }
        | {"where": "servers 0-1", "how": "rows by key", "is_cut": True},
        {
            "name": "layers.0",
            "kind": "Linear",
            "shape": "342×128",
            "parameters": 55_040,
            "parameter_bytes": 220_160,
        }
        | {"where": "servers 0-1", "how": "in chunks"},
        {
            "name": "layers.1",
            "kind": "ReLU",
            "shape": "342×128",
            "parameters": 0,
            "parameter_bytes": 0,
            "where": "each worker",
            "how": "",
        },
        {"name": "layers.2", "kind": "Linear", "shape": "342×1", "parameters": 129, "parameter_bytes": 516}
        | {"where": "servers 0-1", "how": "in chunks"},
    ],
    "edges": [
        {"from": "ids", "to": "rows", "bytes": 71136},
        {"from": "dense", "to": "layers.0", "bytes": 17784},
        {"from": "rows", "to": "layers.0", "bytes": 569088},
        {"from": "layers.0", "to": "layers.1", "bytes": 175104},
        {"from": "layers.1", "to": "layers.2", "bytes": 175104},
    ],
    "communication": [
        {"layer": "rows", "what": "pull rows, push gradients", "bytes": 1_138_176},
        {"layer": "layers.0", "what": "pull weights, push gradients", "bytes": 440_320},
    ],
}


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def lines(path: Path, values: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
