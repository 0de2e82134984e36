"""Host inside a Slurm job: forwards the signals of preemption and time limit to it, and requeues the job."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from shoal import system
from shoal.engines.slurm_commands import UNKNOWN, job_state

LEAVING = (signal.SIGTERM, signal.SIGUSR2)
"""Preemption and time limit."""

RETRY_S = 1.0


class Slot:
    """`shoal join` as a job of Slurm; pickled by submitit, so it holds no key."""

    def __init__(self, command: list[str]) -> None:
        self.command = command

    def __call__(self) -> int:
        """Run until the host has ended. One that had to leave is requeued.

        Under proctrack/cgroup Slurm signals this process alone, under proctrack/pgid its whole process
        group. The host is in a session of its own and so hears one signal under both: of a second one
        it would leave without saving.
        """
        asked: list[int] = []

        def forward(signum: int, frame: object) -> None:
            asked.append(signum)
            if len(asked) == 1:
                host.send_signal(signum)

        # Until there is a host to forward them to.
        signal.pthread_sigmask(signal.SIG_BLOCK, LEAVING)
        host = subprocess.Popen(self.command, start_new_session=True, preexec_fn=_begin_host)
        for signum in LEAVING:
            signal.signal(signum, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LEAVING)
        code = host.wait()
        if asked and _is_running(job := _own_job()):
            subprocess.run(["scontrol", "requeue", job], check=False)
            signal.pause()  # until Slurm ends this one
        return code


def run_slot(slot: Slot) -> int:
    return slot()


def _begin_host() -> None:
    """Between fork and exec. Slurm's last SIGKILL may miss another session, so the host dies with the slot."""
    system.program_dies_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEAVING)


def _is_running(job: str) -> bool:
    """Whether the job still counts as running, as a preempted one does until its grace is over; if it ended by itself then, it
    would count as done. A cancelled one does not: requeued, it would come back without a head."""
    while (state := job_state(job)) == UNKNOWN:
        time.sleep(RETRY_S)  # a controller that restarts; the end of the grace ends this too
    return state == "RUNNING"


def _own_job() -> str:
    """This job for scontrol. SLURM_JOB_ID alone may be the id of the whole array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
