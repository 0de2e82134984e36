"""Host inside a Slurm job: outlives the signals of preemption and time limit, and requeues its job."""

from __future__ import annotations

import os
import signal
import subprocess

from shoal.engines.slurm_commands import job_state


class Slot:
    """`shoal join` as a job of Slurm; pickled by submitit, so it holds no key."""

    def __init__(self, command: list[str]) -> None:
        self.command = command

    def __call__(self) -> int:
        """Run until the host has ended. One that had to leave is requeued.

        Slurm signals every process of a job, so the host receives the signal itself; this process
        must only outlive it.
        """
        asked: list[int] = []
        for signum in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(signum, lambda signum, frame: asked.append(signum))
        code = subprocess.run(self.command, check=False).returncode
        # A preempted job runs on until its grace is over, and would count as done if it ended by itself. A
        # cancelled one no longer counts as running: requeued, it would come back without a head.
        if asked and job_state(job := _own_job()) == "RUNNING":
            subprocess.run(["scontrol", "requeue", job], check=False)
            signal.pause()  # until Slurm ends this one
        return code


def run_slot(slot: Slot) -> int:
    return slot()


def _own_job() -> str:
    """This job for scontrol. SLURM_JOB_ID alone may be the id of the whole array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
