"""Figures of runs in the text format that Prometheus reads. Pure."""

from __future__ import annotations

import math
from typing import Any

from shoal.observe.dashboard import views
from shoal.observe.dashboard.feed import RunFeed
from shoal.observe.runs import RunState

HELP = {
    "shoal_run_alive": "1 while a supervisor holds the run.",
    "shoal_step": "Newest step.",
    "shoal_steps_expected": "Step at which the fit will end.",
    "shoal_loss": "Loss of the newest step.",
    "shoal_samples_per_second": "Throughput of the run.",
    "shoal_eta_seconds": "Seconds until the fit ends.",
    "shoal_restarts": "Processes replaced so far.",
    "shoal_process_rss_bytes": "Resident memory of a process.",
    "shoal_process_bytes_per_second": "Bytes sent and received by a process.",
    "shoal_worker_samples_per_second": "Throughput of a worker.",
    "shoal_worker_share": "Share of a worker's time by kind.",
    "shoal_worker_straggler": "1 for a worker slower than the median of the others, which keeps them waiting.",
    "shoal_server_slots": "Slots of a server by role.",
    "shoal_server_queue_seconds": "Mean delay of a request in a server's queue.",
    "shoal_server_load": "Share of a server's time spent applying updates.",
    "shoal_service_ready": "1 while a service can do its work.",
    "shoal_service_up_seconds": "Seconds since a service was started.",
    "shoal_service_processes": "Processes of the job under a service.",
    "shoal_service_joins": "Times that a service has joined its coordinator.",
    "shoal_service_coordinator_silent_seconds": "Seconds since a service last heard of its coordinator.",
    "shoal_hosts_joined": "Hosts and services of a job that are at work.",
    "shoal_hosts_missing": "Hosts and services that a job waits for.",
}
"""Metrics, all of them gauges."""

Figure = tuple[str, dict[str, str], float]


def figures(feed: RunFeed) -> list[Figure]:
    run = {"run": feed.name}
    progress, head = views.progress(feed), views.head(feed)
    found: list[tuple[str, dict[str, str], Any]] = [
        ("shoal_run_alive", run, float(feed.state is RunState.ALIVE)),
        ("shoal_step", run, progress["step"]),
        ("shoal_steps_expected", run, progress["num_steps"]),
        ("shoal_loss", run, progress["loss"]),
        ("shoal_samples_per_second", run, progress["samples_per_s"]),
        ("shoal_eta_seconds", run, progress["eta_s"]),
        ("shoal_restarts", run, head["restarts"]),
    ]
    if feed.state is RunState.ALIVE:
        for worker in views.workers(feed, with_lanes=False)["workers"]:
            labels = {**run, "process": worker["process"]}
            found += [
                ("shoal_worker_samples_per_second", labels, worker["samples_per_s"]),
                ("shoal_worker_straggler", labels, float(worker["is_straggler"])),
                ("shoal_process_rss_bytes", labels, worker["rss_bytes"]),
                ("shoal_process_bytes_per_second", labels, worker["bytes_per_s"]),
                *(("shoal_worker_share", {**labels, "kind": k}, v) for k, v in worker["shares"].items()),
            ]
        for server in views.servers(feed)["servers"]:
            labels = {**run, "process": server["process"]}
            found += [
                *(
                    ("shoal_server_slots", {**labels, "role": k}, server[k])
                    for k in ("primary", "replica", "filling")
                ),
                ("shoal_server_queue_seconds", labels, server["queue_s"]),
                ("shoal_server_load", labels, server["load"]),
                ("shoal_process_rss_bytes", labels, server["rss_bytes"]),
            ]
    return [
        (name, labels, float(value))
        for name, labels, value in found
        if isinstance(value, (int, float)) and math.isfinite(value)
    ]


def text(of_runs: list[list[Figure]]) -> str:
    lines = []
    for name, about in HELP.items():
        there = [figure for run in of_runs for figure in run if figure[0] == name]
        if there:
            lines += [f"# HELP {name} {about}", f"# TYPE {name} gauge"]
            lines += [f"{name}{{{_labels(labels)}}} {value!r}" for _, labels, value in there]
    return "\n".join([*lines, ""])


def _labels(labels: dict[str, str]) -> str:
    escapes = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
    return ",".join(f'{key}="{value.translate(escapes)}"' for key, value in labels.items())
