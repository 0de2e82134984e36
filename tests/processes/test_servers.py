"""Servers are started, watched, replaced and seen off; with stand-ins that hold nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import Launched

from shoal.cli.scale import scale
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.config.faults import Faults
from shoal.errors import ClusterError, ConfigError
from shoal.observe import runs

PROLOGUE = """
import os, pathlib, time
from shoal.cluster.worker import session
from shoal.cluster.worker.coordinator_client import LeaseClient
from shoal.config.job import current
job = current()
servers = LeaseClient(job)
view = servers.ask_servers(0, 30.0)

def wait_for(is_it):
    global view
    while not is_it(view):
        view = servers.ask_servers(view.view, 30.0)

def progress(step):
    session.report(phase="fit", epoch=1, num_epochs=1, step=step, num_steps=step, loss=0.0, metrics={},
                   samples=step, samples_per_s=1.0, eta_s=None)
"""

Launch = Callable[..., Launched]


@pytest.fixture(scope="module")
def warm_parent() -> Iterator[WarmParent]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *([before] if before else [])])
    try:
        warm = WarmParent("tests", preload=["stub_server"])
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    with warm:
        warm.wait_ready()
        yield warm


def test_a_server_is_started_and_workers_learn_of_it(launch_script: Launch) -> None:
    done = launch_script(
        PROLOGUE
        + "print(job.num_servers, job.num_replicas, len(job.servers), view.view, view.incarnations, view.holders[255])\n"
        + "print(all(os.path.exists(path) for path in job.servers))\n",
        workers=2,
        strategy="ps",
    )
    assert (done.exit_code, done.error) == (0, None)
    assert done.stdout == "1 1 16 1 {0: 0} [0]\nTrue\n"
    assert done.log(1) == done.stdout
    assert (done.run_dir / "logs" / "server-0.log").read_text() == "server 0 incarnation 0\n"
    assert done.summary["servers"] == 1
    kinds = [event["event"] for event in done.events]
    assert kinds.count("server-started") == kinds.count("server-exited") == 1


def test_a_killed_server_is_replaced_and_gets_its_slots_back(launch_script: Launch) -> None:
    done = launch_script(
        PROLOGUE
        + "first = view.holders\n"
        + "progress(1)\n"
        + "wait_for(lambda view: view.incarnations == {0: 1, 1: 0} and not view.joining)\n"
        + "print(view.holders == first, sorted(map(sorted, view.holders)) == [[0, 1]] * 256)\n",
        workers=2,
        strategy="ps",
        servers=2,
        faults=Faults().kill("server-0", at_step=1),
    )
    assert (done.exit_code, done.stdout) == (0, "True True\n"), done.stderr
    assert "server 0 was killed by SIGKILL; replacing it (1 of 3 times)" in done.stderr
    assert done.summary["restarts"] == 1
    shown = runs.servers(done.events, runs.RunState.FINISHED)
    assert [(each["server"], each["restarts"], each["filling"]) for each in shown] == [(0, 1, 0), (1, 0, 0)]
    assert sum(each["primary"] for each in shown) == sum(each["replica"] for each in shown) == 256


def test_a_server_that_dies_again_and_again_ends_the_job_with_its_last_lines(
    launch_script: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_FAILS", "1")
    done = launch_script(PROLOGUE, workers=1, strategy="ps", max_restarts=1)
    assert done.exit_code == 3
    assert isinstance(done.error, ClusterError)
    assert "server 0 ended with exit code 1 2 times without the job getting ahead" in str(done.error)
    assert "no room for anything" in str(done.error)
    assert "[server 0] SystemExit: no room for anything" in done.stderr


def test_a_paused_server_is_killed_and_replaced(launch_script: Launch) -> None:
    done = launch_script(
        PROLOGUE + "progress(1)\nwait_for(lambda view: view.incarnations == {0: 1, 1: 0})\n",
        strategy="ps",
        servers=2,
        step_timeout_s=2.0,  # in which the other one says something, on a busy machine too
        faults=Faults().pause("server-0", at_step=1),
    )
    assert done.exit_code == 0, done.error
    assert "said nothing for" in done.stderr


def test_servers_and_views_outlive_the_coordinator(launch_script: Launch) -> None:
    done = launch_script(
        PROLOGUE
        + "progress(1)\n"
        + "wait_for(lambda view: view.incarnations == {0: 0, 1: 1} and not view.joining)\n"
        + "print(view.view > 1)\n",
        strategy="ps",
        servers=2,
        faults=Faults().kill("coordinator", at_step=1).kill("server-1", at_step=1),
    )
    assert (done.exit_code, done.stdout) == (0, "True\n"), done.error


def test_lost_slots_take_everybody_back_to_the_checkpoint(launch_script: Launch) -> None:
    done = launch_script(
        PROLOGUE
        + "session.live()\n"
        + "print(job.incarnation, job.resume, view.incarnations, flush=True)\n"
        + "if job.incarnation == 0:\n"
        + "    if job.rank == 0:\n"  # alone: the other would have the server killed before this one has said anything
        + "        progress(1)\n"
        + "        session.saved('checkpoints/step-1', 1)\n"
        + "        progress(3)\n"
        + "    wait_for(lambda view: False)\n",
        workers=2,
        strategy="ps",
        faults=Faults().kill("server-0", at_step=3),
    )
    assert done.exit_code == 0, done.error
    assert done.stdout == "0 False {0: 0}\n1 True {0: 2}\n"
    assert "going back to checkpoints/step-1: steps 2 to 3 are repeated" in done.stderr
    assert done.summary["went_back"] == 1


def test_a_second_loss_without_progress_ends_the_job(launch_script: Launch) -> None:
    done = launch_script(
        PROLOGUE + "progress(1)\nwait_for(lambda view: False)\n",
        strategy="ps",
        faults=Faults().kill("server-0", at_step=1).kill("server-0", after_s=2.0),
    )
    assert done.exit_code == 3
    assert "the second time without the job getting ahead" in str(done.error)
    assert "the job begins anew" in done.stderr


def test_every_sample_is_leased_once_though_a_worker_dies(launch_script: Launch, tmp_path: Path) -> None:
    done = launch_script(
        PROLOGUE
        + """
from shoal.runtime.transport.messages.worker_coordinator import NoMoreLeases
session.live()
finished, out = [], pathlib.Path(f"{job.rank}-{job.incarnation}.txt").open("w", buffering=1)
while not isinstance(got := servers.ask_lease(call=1, finished=finished, num_samples=100, samples_per_lease=10,
                                              num_epochs=2), NoMoreLeases):
    if job.rank == 1 and job.incarnation == 0:
        os.kill(os.getpid(), 9)
    time.sleep(0.01)
    finished = []
    if not got.leases:
        continue  # the other one holds all that is left
    number, epoch, start, stop = got.leases[0]
    out.write(f"{number} {start} {stop}\\n")
    finished = [number]
""",
        workers=2,
        strategy="ps:async",
    )
    assert done.exit_code == 0, done.error
    lines = [line for path in tmp_path.glob("?-?.txt") for line in path.read_text().splitlines()]
    ran = sorted(int(line.split()[0]) for line in lines)
    assert ran == list(range(20))
    assert sum(samples for _, samples in done.summary["leases"].values()) == 200
    assert runs.leases(done.events) == done.summary["leases"]


def test_a_group_grows_and_shrinks_while_it_runs(
    launch_script: Launch,
    at_file: Callable[[Path, Callable[[], object]], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    at_file(tmp_path / "grow", lambda: scale("click", 3, tmp_path / "runs"))
    at_file(tmp_path / "shrink", lambda: scale("click", 2, tmp_path / "runs"))
    done = launch_script(
        PROLOGUE
        + "pathlib.Path('grow').touch()\n"
        + "wait_for(lambda view: len(view.incarnations) == 3 and not view.joining)\n"
        + "print(sorted({each for holders in view.holders for each in holders}))\n"
        + "time.sleep(0.3)\n"
        + "pathlib.Path('shrink').touch()\n"
        + "wait_for(lambda view: len(view.incarnations) == 2)\n"
        + "print(sorted({each for holders in view.holders for each in holders}))\n",
        strategy="ps",
        servers=2,
        name="click",
    )
    assert (done.exit_code, done.stdout) == (0, "[0, 1, 2]\n[0, 1]\n"), done.error
    said = capsys.readouterr().out
    assert "3 servers from now on" in said
    assert "2 servers hold everything" in said
    assert done.summary["restarts"] == 0


def test_what_cannot_be_scaled_is_refused_in_words(
    launch_script: Launch, at_file: Callable[[Path, Callable[[], object]], None], tmp_path: Path
) -> None:
    said: list[str] = []

    def refused(num_servers: int) -> None:
        try:
            scale("click", num_servers, tmp_path / "runs")
        except ConfigError as error:
            said.append(str(error))

    def all_refused() -> None:
        for num_servers in (1, 2, 99):
            refused(num_servers)
        (tmp_path / "done").touch()

    at_file(tmp_path / "now", all_refused)
    done = launch_script(
        PROLOGUE
        + "pathlib.Path('now').touch()\n"
        + "while not os.path.exists('done'): time.sleep(0.02)\n"
        + "print(servers.ask_servers(0, 1.0).view)\n",
        strategy="ps",
        servers=2,
        name="click",
    )
    assert (done.exit_code, done.stdout) == (0, "1\n")
    assert ["2 copies" in said[0], "2 servers already" in said[1], "2 to 16" in said[2]] == [True] * 3
    refused(3)
    assert "is not running" in said[3]
