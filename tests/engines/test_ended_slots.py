"""Slots that end: a cancelled job of Slurm, a replacement that fails, an engine that fails itself."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cluster.hosts.hosts import Hosts
from shoal.config.hosts import HostsConfig, Resources
from shoal.config.liveness import LivenessConfig
from shoal.engines import slurm_commands
from shoal.engines.mpi import Mpi
from shoal.engines.protocol import Ticket, join_function
from shoal.engines.slurm import Slurm
from shoal.errors import ClusterError, WaitTimedOut

SLOT = """
import os, signal, subprocess, sys
from shoal.engines import slurm_slot
signal.pause = lambda: None
sys.exit(slurm_slot.Slot([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])())
"""

HOST = """
import os, signal, sys, time
heard = []
signum = int(sys.argv[1])
signal.signal(signum, lambda signum, frame: heard.append(signum))
for _ in range(2):  # Slurm signals the slot's process alone, and may do so twice
    os.kill(os.getppid(), signum)
    until = time.monotonic() + 10
    while not heard and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.2)
sys.exit(0 if heard == [signum] else f"the host heard {heard}")
"""


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(stat.S_IRWXU)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2])
@pytest.mark.parametrize(("state", "requeued"), [("RUNNING", "7_2\n"), ("COMPLETING", ""), ("CANCELLED", "")])
def test_a_job_of_slurm_forwards_one_signal_and_is_requeued_when_it_is_preempted_and_not_when_it_is_cancelled(
    tmp_path: Path, state: str, requeued: str, signum: signal.Signals
) -> None:
    """The controller restarts meanwhile: its first answer is an error."""
    program(
        tmp_path,
        "scontrol",
        f"""cd {tmp_path}; [ $1 = requeue ] && echo $2 >> requeued && exit
if [ -e asked ]; then echo "JobId=9 JobState={state} Reason=None"; exit; fi
touch asked; echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1""",
    )
    array = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    env = {**os.environ, **array, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([sys.executable, "-c", SLOT, HOST, str(int(signum))], env=env, check=True, timeout=60)
    (tmp_path / "requeued").touch()
    assert (tmp_path / "requeued").read_text() == requeued


def test_a_signal_before_the_host_has_started_is_forwarded_when_it_has() -> None:
    early = """
class Popen(subprocess.Popen):
    def __init__(self, *args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        super().__init__(*args, **options)
subprocess.Popen = Popen
slurm_slot._is_running = lambda job: False
"""
    slot = SLOT.replace("sys.exit", early + "sys.exit")
    env = {**os.environ, "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        [sys.executable, "-c", slot, "import time; time.sleep(60)"], env=env, check=False, timeout=50
    )
    assert done.returncode == 256 - signal.SIGTERM  # of sys.exit(-SIGTERM): the host's end


def test_a_job_counts_as_ended_where_slurm_has_forgotten_it_and_not_where_slurm_gives_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    engine = Slurm({}, Ticket(job="a", address="shoal://h:1", key="k" * 20, cores=1, folder=str(tmp_path)))
    paths = SimpleNamespace(stdout=tmp_path / "none")
    engine._jobs[1] = SimpleNamespace(job_id="7_0", paths=paths)
    said = {
        "slurm_load_jobs error: Invalid job id specified": {1: "job 7_0 is COMPLETED: it said nothing"},
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)": {},
        "slurm_load_jobs error: Socket timed out on send/recv operation": {},
    }
    for error, ended in said.items():
        program(tmp_path, "scontrol", f'echo "{error}" >&2; exit 1')
        assert engine.watch() == ended
    monkeypatch.setattr(slurm_commands, "ASK_TIMEOUT_S", 0.2)
    program(tmp_path, "scontrol", "exec sleep 30")
    assert engine.watch() == {}
    program(tmp_path, "scontrol", "echo JobId=9 JobState=PENDING")
    assert engine.watch() == {}


def test_a_replacement_that_fails_is_seen_while_the_first_mpirun_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "mpirun", 'if [ $2 = 2 ]; then exec sleep 60; else echo "no slots"; exit 5; fi')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    engine = Mpi("", Ticket(job="a", address="shoal://h:1", key="k" * 20, cores=1, folder=str(tmp_path)))
    engine.start([1, 2], Resources())
    engine.start([2], Resources())
    (first, _, _), (second, _, _) = engine._started
    second.wait(30)
    assert engine.watch() == {2: "mpirun ended with exit code 5: no slots"}
    engine.start([1], Resources())
    engine._started[-1][0].wait(30)
    assert sorted(engine.watch()) == [1, 2]
    first.send_signal(signal.SIGKILL)
    first.wait()


def test_a_python_that_a_slot_does_not_have_is_named() -> None:
    code, said = join_function()(["/no/such/python", "-m", "shoal"], {})
    assert code == 127
    assert "No such file or directory: '/no/such/python'" in said


class Broken:
    """Engine whose own library fails; it may still know what slots printed."""

    def __init__(self, said: str = "", *, fails: bool = True) -> None:
        self.said, self.fails = said, fails

    def start(self, hosts: Sequence[int], resources: Resources) -> None:
        raise RuntimeError("the control store is gone.\nSecond line")

    def watch(self) -> dict[int, str]:
        if self.fails:
            raise RuntimeError("the control store is gone.\nSecond line")
        return {}

    def stop(self) -> None: ...

    def logs(self, host: int) -> str:
        return self.said


def hosts_on(engine: Broken, *, join_timeout_s: float = 600.0) -> Hosts:
    config = HostsConfig(
        num_hosts=2,
        on="ray",
        head_takes_part=False,
        bind="127.0.0.1",
        workers=(0, 1),
        join_timeout_s=join_timeout_s,
    )
    cluster: Any = SimpleNamespace(
        config=config, engine=engine, slot=Resources(), starters=[], is_takeover=False
    )
    warm: Any = None
    return Hosts(warm, cluster, num_workers=1, server_numbers=[], liveness=LivenessConfig())


def test_an_error_of_the_engine_itself_is_one_paragraph_and_never_ends_a_job_that_trains() -> None:
    hosts = hosts_on(Broken())
    hosts.join_deadline_s()  # asks; the answer is looked at in the next turn
    assert hosts._watching is not None
    hosts._watching.exception(30)
    with pytest.raises(
        ClusterError, match=r"ray failed .*\(RuntimeError: the control store is gone\)\. Nothing was trained"
    ):
        hosts.join_deadline_s()
    assert hosts._asked_again(1) == "; ray gives no other: RuntimeError: the control store is gone"
    hosts._replaced_at = 0.0
    hosts.tick()
    hosts._engine_calls.shutdown()


def test_a_slot_that_never_joins_is_named_with_its_last_words() -> None:
    hosts = hosts_on(Broken("no route to host", fails=False), join_timeout_s=1e-9)
    with pytest.raises(WaitTimedOut, match=r"the job on 1 host waited .* for host 1 \(no route to host\)\."):
        hosts.join_deadline_s()
    hosts._engine_calls.shutdown()


def test_a_slow_engine_holds_up_no_heartbeat() -> None:
    release = threading.Event()

    class Slow(Broken):
        def watch(self) -> dict[int, str]:
            release.wait()
            return {1: "it was killed"}

        def start(self, hosts: Sequence[int], resources: Resources) -> None:
            started.extend(hosts)

    started: list[int] = []
    hosts = hosts_on(Slow())
    assert hosts._asked_again(1) == "; ray is being asked for another"
    hosts._replaced_at = 0.0
    hosts.tick()
    hosts._replaced_at = 0.0
    hosts.tick()  # the answer is not there yet
    assert started == []
    release.set()
    hosts._engine_calls.shutdown()
    assert hosts._asking is not None
    assert hosts._asking.result() == "; it was killed; ray was asked for another"
    assert started == [1, 1]


def test_a_slot_that_was_still_ending_is_asked_for_again_soon_and_then_ever_more_rarely() -> None:
    class Ending(Broken):
        def start(self, hosts: Sequence[int], resources: Resources) -> None: ...

    hosts = hosts_on(Ending(fails=False))
    hosts._asked_again(1)
    waits = []
    for _ in range(5):
        waits.append(hosts.tick())
        hosts._replaced_at = 0.0
        assert hosts._retrying is None or hosts._retrying.result(30) == []
    hosts._engine_calls.shutdown()
    assert waits == [0.25, 0.5, 1.0, 2.0, 2.0]


def test_slots_that_end_at_once_are_asked_for_again_for_more_than_ten_seconds() -> None:
    class Ending(Broken):
        def start(self, hosts: Sequence[int], resources: Resources) -> None:
            asked_at.append(waited_s)

        def watch(self) -> dict[int, str]:
            return {1: "it was killed"}

    waited_s, asked_at = 0.0, list[float]()
    hosts = hosts_on(Ending())
    hosts._asked_again(1)
    while hosts._replacing:
        waited_s += hosts.tick() or 0.0
        hosts._replaced_at = 0.0
        assert hosts._retrying is None or hosts._retrying.exception(30) is None
        assert waited_s < 60
    hosts._engine_calls.shutdown()
    assert asked_at[-1] > 10.0
