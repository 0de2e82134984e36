"""Run directories as a job would leave them, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.runtime import recorder
from shoal.runtime.recorder import Recorder, Span, TraceFile

BEGAN = 1_700_000_000.0
STEP_S = 0.1
SAMPLES = 64


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def activity(at: float, process: str, **facts: Any) -> dict[str, Any]:
    return {
        "at": at,
        "process": process,
        "incarnation": 0,
        "interval_s": 1.0,
        "step": int((at - BEGAN) / STEP_S),
        "steps": 10,
        "samples": 10 * SAMPLES // 4,
        "seconds": {"compute": 0.8, "exchange": 0.1, "read": 0.05},
        "bytes": {"sent": 1000, "received": 1000},
        "rss_bytes": 5 << 20,
        "peak_bytes": 6 << 20,
        "cpu_s": 0.9,
        **facts,
    }


def write_run(path: Path, *, seconds: int = 10, workers: int = 4, **of_worker: dict[str, Any]) -> Path:
    """A finished run of `workers`, ten steps a second; `worker_2={...}` changes the activity of one."""
    path.mkdir(parents=True)
    config = {
        "script": "/x/train.py",
        "args": [],
        "cwd": "/x",
        "strategy": "ddp",
        "workers": workers,
        "started": BEGAN - 5,
        "threads": 1,
        "device": "cpu",
    }
    (path / "config.json").write_text(json.dumps(config))
    num_steps = round(seconds / STEP_S)
    write_lines(
        path / "metrics.jsonl",
        [
            {
                "step": k + 1,
                "epoch": 0,
                "loss": 1 / (k + 1),
                "samples": SAMPLES,
                "time": BEGAN + (k + 1) * STEP_S,
            }
            for k in range(num_steps)
        ],
    )
    write_lines(
        path / "epochs.jsonl", [{"epoch": 0, "step": num_steps, "time": BEGAN + seconds, "val_auroc": 0.8}]
    )
    write_lines(path / "events.jsonl", [{"time": BEGAN - 4, "event": "worker-started", "rank": 0, "pid": 1}])
    for rank in range(workers):
        changed = of_worker.get(f"worker_{rank}", {})
        quiet = activity(BEGAN, f"worker-{rank}", steps=0, samples=0, seconds={"other": 1.0})
        lines = [activity(BEGAN + 1 + k, f"worker-{rank}", **changed) for k in range(seconds)]
        write_lines(path / "activity" / f"worker-{rank}.jsonl", [quiet, *lines])
    summary = {
        "exit": 0,
        "samples": num_steps * SAMPLES,
        "seconds": seconds,
        "ended": BEGAN + seconds + 1,
        "restarts": 0,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def write_spans(path: Path, process: str, spans: list[tuple[str, int, int, int]], monkeypatch: Any) -> None:
    """`spans`: kind, step, begin and end in ns."""
    recorded = Recorder()
    recorded.own(capacity=16)
    for kind, step, begin, end in spans:
        recorded.step = step
        monkeypatch.setattr(recorder, "monotonic_ns", lambda now=begin: now)
        with Span(recorded, kind):
            monkeypatch.setattr(recorder, "monotonic_ns", lambda now=end: now)
    file = TraceFile(path / "trace", process, 0)
    monkeypatch.setattr(recorder.time, "time_ns", lambda: 10**18)
    monkeypatch.setattr(recorder, "monotonic_ns", lambda: 0)
    file.write(recorded)
    file.close()
