"""A run over several hosts, seen from one: status, trace, report and dashboard have the processes of all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import SCRIPT, HostsJob
from typer.testing import CliRunner

from shoal.cli import app
from shoal.observe import record
from shoal.observe.dashboard import views
from shoal.observe.dashboard.feed import RunFeed


def shown(*args: str) -> str:
    done = CliRunner().invoke(app, [*args])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("own_disks", [False, True], ids=["shared", "own disks"])
def test_processes_of_all_hosts_are_seen_from_the_head(
    start_job: Callable[..., HostsJob], shared_folder: Path, own_disks: bool
) -> None:
    out = shared_folder / "out"
    out.mkdir()
    options = ("--compress", "int8")
    job = start_job(SCRIPT, str(out), "--gate", "5", workers=3, hosts=2, options=options, own_disks=own_disks)
    job.wait_for_gate(out, 3)
    (out / "go").touch()
    assert job.wait() == 0, job.story()
    run = job.run_dir

    of_head, of_other = json.loads((run / "config.json").read_text())["hosts"]
    assert of_head["link_bytes_per_s"] == 0.0
    assert of_other["link_bytes_per_s"] > 100e6, "two namespaces without a limit"
    assert "--compress int8 made steps of ddp slower" in job.output()

    told = record.read(run)
    assert list(told.workers) == ["worker-0", "worker-1", "worker-2"]
    hosts = {name: lines[-1].get("host") for name, lines in told.workers.items()}
    assert len(set(hosts.values())) == 2, hosts
    status = shown("status", "--once", str(run))
    assert all(f" {rank} " in status for rank in range(3))

    said = shown("trace", str(run))
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    rows = {
        each["pid"]: each["args"]["name"].partition(" on ")
        for each in events
        if each["name"] == "process_name"
    }
    ranks = {name: pid for pid, (name, _, _) in rows.items() if name.startswith("worker-")}
    if own_disks:
        # Lines come with the heartbeats; spans stay on a disk that is not here, and the command says whose.
        assert "they stay on their own host" in said
    else:
        assert len({host for _, _, host in rows.values()}) == 2
        # A sum of gradients is over for all at nearly the same time: clocks that were not aligned would show.
        ends = {
            rank: {
                each["args"]["step"]: each["ts"] + each["dur"]
                for each in events
                if each["pid"] == pid and each["name"] == "step"
            }
            for rank, pid in ranks.items()
        }
        steps = set.intersection(*(set(each) for each in ends.values())) - {5}
        apart = [max(e[step] for e in ends.values()) - min(e[step] for e in ends.values()) for step in steps]
        assert len(steps) >= 4
        assert sorted(apart)[len(apart) // 2] < 0.5e6

    shown("report", str(run))
    figures = json.loads((run / "report.json").read_text())
    assert len(figures["time_by_worker"]) == 3
    assert figures["bottleneck"]

    feed = RunFeed(run)
    feed.poll(5.0)
    assert views.head(feed)["hosts"] == 2
    assert len(views.workers(feed)["workers"]) == 3
