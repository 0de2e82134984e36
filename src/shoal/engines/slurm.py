"""Slurm: an array of jobs, one per host, submitted through submitit; `--on slurm:partition=gpu,time=240`.

The join key is in the environment that sbatch keeps for the jobs. When a job is preempted (SIGTERM)
or near its time limit (SIGUSR2) its host leaves: all workers save, and the job is requeued. It
joins again when Slurm starts it again. A cancelled job (SIGTERM too) is not requeued.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.config.hosts import Resources
from shoal.engines.protocol import Ticket, line_of, tail_of
from shoal.engines.slurm_commands import ask, job_state, queue
from shoal.engines.slurm_slot import Slot, run_slot
from shoal.errors import ConfigError

__all__ = ["Slurm", "is_local", "open_engine", "queue"]

PARAMETERS = {"partition", "time", "account", "qos", "constraint", "nodelist", "grace"}
DEFAULT_TIME_MIN = 24 * 60
GRACE_S = 60
"""From the signal before the time limit to the limit."""

END_S = 5.0
LOG_LINES = 3
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT"),
}


def is_local(detail: str) -> bool:
    _parameters(detail)
    return set(ask("sinfo", "-h", "-N", "-o", "%N").split()) == {platform.node().partition(".")[0]}


def open_engine(detail: str, ticket: Ticket) -> Slurm:
    return Slurm(_parameters(detail), ticket)


class Slurm:
    """Jobs of one array, and those that replace them."""

    def __init__(self, parameters: dict[str, str], ticket: Ticket) -> None:
        self._parameters, self._ticket = parameters, ticket
        self._jobs: dict[int, Any] = {}  # submitit.Job by host

    def start(self, hosts: Sequence[int], resources: Resources) -> None:
        # Slurm itself brings a requeued one back.
        wanted = [host for host in hosts if self._state(host) in ("", *ENDED)]
        if not wanted:
            return
        import submitit

        if not self._has_room(resources):  # sbatch takes an array that can never start
            raise self._refused(len(wanted), resources, "has no node for it")
        executor = submitit.SlurmExecutor(folder=self._ticket.folder)
        said = {name: value for name, value in self._parameters.items() if name != "grace"}
        executor.update_parameters(
            job_name=self._ticket.job,
            nodes=1,
            ntasks_per_node=1,
            cpus_per_task=self._ticket.cores,
            stderr_to_stdout=True,
            signal_delay_s=int(self._parameters.get("grace", GRACE_S)),
            additional_parameters={"requeue": True},
            **{**said, "time": int(said.get("time", DEFAULT_TIME_MIN))},
            **({"gpus_per_node": resources.gpus} if resources.gpus else {}),
            **({"mem": f"{resources.memory_gb * 1024:.0f}MB"} if resources.memory_gb else {}),
        )
        slots = [Slot(self._ticket.command("--as-host", str(host))) for host in wanted]
        try:
            with _environment(self._ticket.environment()):
                jobs = executor.map_array(run_slot, slots)
        except Exception as error:  # submitit raises what sbatch said in several classes
            raise self._refused(len(wanted), resources, f"refuses it ({line_of(error, -1)})") from None
        self._jobs |= dict(zip(wanted, jobs, strict=True))

    def _has_room(self, resources: Resources) -> bool:
        partition = self._parameters.get("partition")
        nodes = ask("sinfo", "-h", "-e", "-o", "%c %m", *(("-p", partition) if partition else ()))
        return any(
            int(cpus.rstrip("+")) >= self._ticket.cores
            and (mb == "1" or int(mb.rstrip("+")) >= resources.memory_gb * 1024)  # 1: not told
            for cpus, mb in (line.split() for line in nodes.splitlines())
        )

    def _refused(self, num_jobs: int, resources: Resources, why: str) -> ConfigError:
        nodes = "; ".join(ask("sinfo", "-h", "-o", "%D of %c CPUs and %m MB in %P").splitlines())
        where = f" in partition {name}" if (name := self._parameters.get("partition")) else ""
        return ConfigError(
            f"{num_jobs} job{'s' if num_jobs > 1 else ''} of {self._ticket.cores} CPUs, {resources.gpus} GPUs and "
            f"{resources.memory_gb:g} GB were asked of Slurm{where}, which {why}. It has {nodes or 'no nodes'}. Nothing was started; ask "
            "for less with --resources, or for more hosts with fewer workers each."
        )

    def watch(self) -> dict[int, str]:
        ended = {host: state for host in self._jobs if (state := self._state(host)) in ENDED}
        return {
            host: f"job {self._jobs[host].job_id} is {state}: {self._printed(host) or 'it said nothing'}"
            for host, state in ended.items()
        }

    def stop(self) -> None:
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and len(self.watch()) < len(self._jobs):
            time.sleep(0.2)
        left = [job.job_id for host, job in self._jobs.items() if self._state(host) not in ENDED]
        if left:
            ask("scancel", *left, is_needed=False)

    def logs(self, host: int) -> str:
        """Of a job that waits in the queue, Slurm's reason why."""
        state = ask("squeue", "-h", "-j", self._jobs[host].job_id, "-o", "job %i is %T: %r", is_needed=False)
        return self._printed(host) or state.strip()

    def _printed(self, host: int) -> str:
        return tail_of(self._jobs[host].paths.stdout, LOG_LINES)

    def _state(self, host: int) -> str:
        if host not in self._jobs:
            return ""
        # Empty: it ended so long ago that Slurm has forgotten it.
        return job_state(self._jobs[host].job_id) or "COMPLETED"


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """The variables in this process's environment, for the sbatch that it starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _parameters(detail: str) -> dict[str, str]:
    """`partition=gpu,time=240`; a word alone is the partition."""
    found = {}
    for word in detail.split(",") if detail else ():
        name, _, value = word.partition("=") if "=" in word else ("partition", "", word)
        if name not in PARAMETERS or not value or (name in ("time", "grace") and not value.isdecimal()):
            raise ConfigError(
                f"--on slurm:{detail}: '{word}' is none of {', '.join(f'{each}=...' for each in sorted(PARAMETERS))} (time in "
                "minutes, grace in seconds). Nothing was started."
            )
        found[name] = value
    return found
