"""Timeline of all processes of a run as a Chrome trace (JSON), which ui.perfetto.dev and chrome://tracing open.

A process is a row, nested spans below each other. Events of the run (deaths,
views, checkpoints) are marks over all of them. What `--profile` recorded of a
worker is put beside its spans, on rows of its own.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.observe.record import Trace, read, read_traces
from shoal.runtime import own_files

MAX_PROFILE_BYTES = 256 << 20
"""Of a profile, packed or not: three steps have some megabytes."""

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError)
_NOT_FACTS = ("time", "monotonic", "event")


def timeline(run: Path) -> tuple[dict[str, Any], list[str]]:
    """(the trace, a sentence for each thing that is missing from it)."""
    record = read(run)
    traces, problems = read_traces(run, record.activity)
    known = {trace.process for trace in traces}
    absent = sorted(set(record.activity) - known)
    if not traces:
        problems.append(f"{run / 'trace'} has no spans: runs of an earlier version wrote none.")
    elif absent:
        problems.append(
            f"spans of {', '.join(absent)} are not here: they stay on their own host where it does not share the run directory."
        )
    events: list[dict[str, Any]] = []
    for row, trace in enumerate(traces, start=1):
        events += _process(row, trace)
        profile = run / "trace" / f"{trace.process}.{trace.incarnation}.profile.json.gz"
        if profile.exists():
            try:
                events += _profile(row, profile)
            except (*_UNREADABLE, zlib.error) as error:
                problems.append(f"{profile.name} is left out: {error}.")
    first = min(
        (int(each.spans["start_ns"].min()) + each.unix_ns for each in traces if len(each.spans)), default=0
    )
    events += [mark for mark in _marks(record.events) if mark["ts"] >= first / 1e3 - 60e6]
    events.sort(key=lambda each: each.get("ts", 0))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run": run.name}}, problems


def _process(row: int, trace: Trace) -> Iterator[dict[str, Any]]:
    name = trace.process + (f" (incarnation {trace.incarnation})" if trace.incarnation else "")
    yield {
        "ph": "M",
        "name": "process_name",
        "pid": row,
        "tid": 0,
        "args": {"name": f"{name} on {trace.host}"},
    }
    yield {"ph": "M", "name": "process_sort_index", "pid": row, "tid": 0, "args": {"sort_index": row}}
    yield {"ph": "M", "name": "thread_name", "pid": row, "tid": 1, "args": {"name": f"process {trace.pid}"}}
    spans = trace.spans
    # In whole nanoseconds until here: a double holds seconds since 1970 to 200 ns.
    starts = (spans["start_ns"] + trace.unix_ns) / 1e3
    lengths = (spans["end_ns"] - spans["start_ns"]) / 1e3
    is_worker = trace.process.startswith("worker-")
    columns = (starts.tolist(), lengths.tolist(), spans["kind"].tolist(), spans["step"].tolist())
    for start, length, kind, step in zip(*columns, strict=True):
        yield {
            "ph": "X",
            "name": trace.kinds[kind],
            "cat": "shoal",
            "pid": row,
            "tid": 1,
            "ts": start,
            "dur": length,
            # The count is of steps that are over; servers and coordinator have none.
            "args": {"step": step + 1} if is_worker else {},
        }


def _marks(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for event in events:
        if isinstance(event.get("time"), (int, float)) and event.get("event") != "leases":
            facts = {key: value for key, value in event.items() if key not in _NOT_FACTS}
            mark = {"ph": "i", "s": "g", "cat": "event", "pid": 0, "tid": 0, "ts": event["time"] * 1e6}
            yield mark | {"name": str(event.get("event")), "args": facts}


def _profile(row: int, path: Path) -> Iterator[dict[str, Any]]:
    """Ranges of torch.profiler, moved to this process's row; its times count from a base that the file names."""
    raw = own_files.read(path, any_owner=True, max_bytes=MAX_PROFILE_BYTES)
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as packed:
        text = packed.read(MAX_PROFILE_BYTES + 1)
    if len(text) > MAX_PROFILE_BYTES:
        raise ValueError(f"it has more than {MAX_PROFILE_BYTES:,} bytes once it is unpacked")
    found = json.loads(text)
    base_us = float(found.get("baseTimeNanoseconds", 0)) / 1e3
    threads: dict[Any, int] = {}
    for event in found["traceEvents"]:
        if event.get("ph") != "X" or event.get("cat") not in (
            "cpu_op",
            "user_annotation",
            "kernel",
            "gpu_memcpy",
        ):
            continue
        place = (event.get("pid"), event.get("tid"))
        if place not in threads:
            threads[place] = 10 + len(threads)
            where = "device" if event["cat"] in ("kernel", "gpu_memcpy") else "torch"
            about = {"name": f"{where} {event.get('tid')}"}
            yield {"ph": "M", "name": "thread_name", "pid": row, "tid": threads[place], "args": about}
        yield {
            "ph": "X",
            "name": event["name"],
            "cat": event["cat"],
            "pid": row,
            "tid": threads[place],
            "ts": float(event["ts"]) + base_us,
            "dur": event.get("dur", 0),
        }
