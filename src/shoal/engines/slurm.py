"""Slurm: an array of jobs, one per host, submitted through submitit; `--on slurm:partition=gpu,time=240`.

The join key is in the environment that sbatch keeps for the jobs. A job that is
preempted (SIGTERM) or near its time limit (SIGUSR2) has its host leave: all
workers save, and the job is put back into the queue. It joins again when Slurm
starts it again. A job that is cancelled (SIGTERM too) is not put back.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.config.hosts import Resources
from shoal.engines.protocol import EngineEntry, Ticket
from shoal.errors import ConfigError

PARAMETERS = {"partition", "time", "account", "qos", "constraint", "nodelist", "grace"}
DEFAULT_TIME_MIN = 24 * 60
GRACE_S = 60
"""From the signal before the time limit to the limit."""

END_S = 5.0
ASK_TIMEOUT_S = 20.0
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT"),
}


def is_local(detail: str) -> bool:
    _parameters(detail)
    return set(_ask("sinfo", "-h", "-N", "-o", "%N").split()) == {platform.node().partition(".")[0]}


def open_engine(detail: str, ticket: Ticket) -> Slurm:
    return Slurm(_parameters(detail), ticket)


class Slurm:
    """Jobs of one array, and those that replace them."""

    def __init__(self, parameters: dict[str, str], ticket: Ticket) -> None:
        self._parameters, self._ticket = parameters, ticket
        self._jobs: dict[int, Any] = {}  # submitit.Job by host

    def start(self, hosts: Sequence[int], resources: Resources) -> None:
        wanted = [
            host for host in hosts if self._state(host) in ("", *ENDED)
        ]  # Slurm itself brings a requeued one back
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
                jobs = executor.map_array(_call, slots)
        except Exception as error:  # submitit raises what sbatch said in several classes
            raise self._refused(len(wanted), resources, f"refuses it ({_last_line(error)})") from None
        self._jobs |= dict(zip(wanted, jobs, strict=True))

    def _has_room(self, resources: Resources) -> bool:
        partition = self._parameters.get("partition")
        nodes = _ask("sinfo", "-h", "-e", "-o", "%c %m", *(("-p", partition) if partition else ()))
        return any(
            int(cpus.rstrip("+")) >= self._ticket.cores
            and (mb == "1" or int(mb.rstrip("+")) >= resources.memory_gb * 1024)  # 1: not told
            for cpus, mb in (line.split() for line in nodes.splitlines())
        )

    def _refused(self, num_jobs: int, resources: Resources, why: str) -> ConfigError:
        nodes = "; ".join(_ask("sinfo", "-h", "-o", "%D of %c CPUs and %m MB in %P").splitlines())
        return ConfigError(
            f"{num_jobs} job{'s' if num_jobs > 1 else ''} of {self._ticket.cores} CPUs, {resources.gpus} GPUs and "
            f"{resources.memory_gb:g} GB were asked of Slurm, which {why}. It has {nodes or 'no nodes'}. Nothing was started; ask "
            "for less with --resources, or for more hosts with fewer workers each."
        )

    def watch(self) -> dict[int, str]:
        ended = {host: state for host in self._jobs if (state := self._state(host)) in ENDED}
        return {
            host: f"job {self._jobs[host].job_id} is {state}: {self.logs(host) or 'it said nothing'}"
            for host, state in ended.items()
        }

    def stop(self) -> None:
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and len(self.watch()) < len(self._jobs):
            time.sleep(0.2)
        left = [job.job_id for host, job in self._jobs.items() if self._state(host) not in ENDED]
        if left:
            _ask("scancel", *left, is_needed=False)

    def logs(self, host: int) -> str:
        path = Path(self._jobs[host].paths.stdout)
        with contextlib.suppress(OSError):
            return " ".join(path.read_text(errors="replace").splitlines()[-3:])
        return ""

    def _state(self, host: int) -> str:
        if host not in self._jobs:
            return ""
        # None: it ended so long ago that Slurm has forgotten it.
        return _job_state(self._jobs[host].job_id) or "COMPLETED"


class Slot:
    """`shoal join` as a job of Slurm; pickled by submitit, so it holds no key."""

    def __init__(self, command: list[str]) -> None:
        self.command = command

    def __call__(self) -> int:
        """Run until the host has ended. One that had to leave is put back into the queue.

        Slurm signals every process of a job, so the host hears it by itself; this one must only outlive it.
        """
        asked: list[int] = []
        for signum in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(signum, lambda signum, frame: asked.append(signum))
        code = subprocess.run(self.command, check=False).returncode
        # A preempted job runs on until its grace is over, and would count as done if it ended by itself. One that was cancelled
        # does not count as running any more: requeued, it would come back without a head.
        if asked and _job_state(job := _own_job()) == "RUNNING":
            subprocess.run(["scontrol", "requeue", job], check=False)
            signal.pause()  # until Slurm ends this one
        return code


def _call(slot: Slot) -> int:
    return slot()


def queue(detail: str) -> list[EngineEntry]:
    """Jobs of all users in Slurm's queue."""
    partition = ("-p", detail.partition("=")[2] or detail) if detail else ()
    lines = _ask("squeue", "-h", "-o", "%i|%j|%T|%u|%D|%C|%b|%R", *partition).splitlines()
    found = []
    for line in lines:
        id, name, state, user, nodes, cpus, gpus, note = line.split("|", 7)
        asks = f"{cpus} CPUs on {nodes} nodes" + (f", {gpus}" if gpus not in ("N/A", "(null)", "") else "")
        found.append(EngineEntry(id=id, name=name, state=state.lower(), user=user, asks=asks, note=note))
    return found


def _own_job() -> str:
    """This job for scontrol. SLURM_JOB_ID alone may be the id of the whole array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def _job_state(job: str) -> str:
    """Empty where Slurm does not know the job."""
    said = _ask("scontrol", "show", "job", "-o", job, is_needed=False)
    return next((word[9:] for word in said.split() if word.startswith("JobState=")), "")


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


def _ask(*command: str, is_needed: bool = True) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=is_needed)
    except (OSError, subprocess.SubprocessError) as error:
        if not is_needed:
            return ""
        said = getattr(error, "stderr", None) or str(error)
        raise ConfigError(
            f"Slurm cannot be reached from here ({command[0]}: {_last_line(said)}). Nothing was started; run this where sbatch "
            "works, or set SLURM_CONF."
        ) from None
    return done.stdout


def _last_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip().rstrip(".")
