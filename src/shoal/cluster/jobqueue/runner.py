"""Runner of the job queue: carries out the scheduler's actions, one `shoal run` process per job.

Jobs are sessions of their own, so they outlive a killed runner. The next runner finds them by their
process and by the lock of their run directory; a job whose supervisor was killed too continues by
`shoal resume`. A job's state is in the database before its process is started, and its end after it
was observed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from shoal import system
from shoal.cluster.jobqueue.queue import JobState, Queue, QueueEntry
from shoal.cluster.jobqueue.scheduler import (
    Action,
    Amount,
    Cancelled,
    Ended,
    Found,
    Pool,
    Refuse,
    Scheduler,
    Start,
    Stop,
    Submitted,
)
from shoal.cluster.launch.run_directory import is_alive
from shoal.cluster.launch.threads import available_cores

POLL_S = 0.2
MAX_RESUMES = 3
"""Resumes of a job whose supervisor was killed."""

START_TIMEOUT_S = 5.0
"""Time for a process to appear whose start the last runner was killed before recording."""


def machine() -> Amount:
    """Cores, GPUs and memory of this machine, as far as this process may use them."""
    gpus = len(_gpus())
    return Amount(cores=available_cores(), gpus=gpus, memory=int(psutil.virtual_memory().total))


def _gpus() -> list[str]:
    """Numbers of the NVIDIA devices that this process may use. Does not load torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [each for each in visible.split(",") if each.strip() not in ("", "-1")]
    return [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


class Runner:
    """Runs the jobs of one queue until it is stopped. Reports every change through `say`."""

    def __init__(
        self, queue: Queue, pool: Pool, *, say: Callable[[str], None], bind: str = "", ssh: str = ""
    ) -> None:
        self._queue, self._pool, self._say = queue, pool, say
        self._bind, self._ssh = bind, ssh
        self._scheduler = Scheduler(pool)
        self._known: set[int] = set()
        self._stopping: set[int] = set()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._is_over = False

    def run(self, *, until_empty: bool = False) -> None:
        """Run jobs as they are submitted, until a signal comes, or, if requested, until the queue is empty."""
        self._queue.claim()
        self._queue.pool = self._pool
        before = {number: signal.signal(number, self._end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._find_running()
            while not self._is_over:
                self._poll()
                if until_empty and not self._queue.jobs(JobState.WAITING, JobState.RUNNING):
                    return
                time.sleep(POLL_S)
            left = self._queue.jobs(JobState.RUNNING)
            if left:
                self._say(f"{len(left)} running jobs go on; the next `shoal jobs run` finds them")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self, *_: object) -> None:
        self._is_over = True

    def _find_running(self) -> None:
        """Recover jobs started by the last runner: they still run, have ended since, or are resumed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        for job in self._queue.jobs(JobState.RUNNING):
            self._known.add(job.id)
            # The first of its hosts is this machine, under any address that the last runner gave it.
            hosts = (next(iter(self._pool.hosts)), *job.placed["hosts"][1:])
            self._scheduler.handle(Found(job.request, hosts))
            while job.pid is None and not self._is_alive(job) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if job.pid is None and (pid := self._pid_of(job)) is not None:
                self._queue.update(job.id, pid=pid, born=_born(pid))
            if self._is_alive(self._queue.job(job.id)):
                self._say(f"job {job.id} runs: found again")

    def _pid_of(self, job: QueueEntry) -> int | None:
        """Process of a job whose runner was killed before recording its pid."""
        for process in psutil.process_iter(["pid", "cmdline"]):
            words = process.info["cmdline"] or []
            is_new = job.run in words and str(self._queue.runs) in words
            if "shoal" in words and (is_new or str(self._queue.runs / job.run) in words):
                return int(process.info["pid"])
        return None

    def _poll(self) -> None:
        for job in self._queue.jobs(JobState.RUNNING):
            if job.cancelled and job.id not in self._stopping:
                self._carry_out(self._scheduler.handle(Cancelled(job.id)))
            if not self._is_alive(job):
                self._ended(job)
        # Jobs that arrive together are ordered by priority; otherwise the first would start before the rest
        # is known.
        for job in sorted(self._queue.jobs(JobState.WAITING), key=lambda job: (-job.priority, job.id)):
            if job.id not in self._known:
                self._known.add(job.id)
                self._carry_out(self._scheduler.handle(Submitted(job.request)))
        waiting = {job.id for job in self._queue.jobs(JobState.WAITING)}
        for id in self._known - waiting - {job.id for job in self._queue.jobs(JobState.RUNNING)}:
            self._known.discard(id)  # cancelled while it waited
            self._carry_out(self._scheduler.handle(Cancelled(id)))
        for job in self._queue.jobs(JobState.WAITING):
            if (why := f"waits for {self._scheduler.waits_for(job.id)}") != job.reason:
                self._queue.update(job.id, reason=why)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(id, hosts):
                    job = self._queue.job(id)
                    if self._queue.begin(id, self._place(job, hosts)):
                        self._start(self._queue.job(id))
                    else:
                        self._known.discard(id)
                        self._carry_out(self._scheduler.handle(Ended(id)))
                case Stop(id):
                    self._stopping.add(id)
                    stop(self._queue.job(id))
                case Refuse(id, reason):
                    self._queue.update(id, state=JobState.REFUSED, ended=time.time(), reason=reason)
                    self._say(f"job {id} was refused: {reason}")

    def _place(self, job: QueueEntry, hosts: tuple[str, ...]) -> dict[str, object]:
        """Hosts, and numbers of this machine's cores and GPUs that are free."""
        taken = [each.placed for each in self._queue.jobs(JobState.RUNNING)]
        cores, gpus = system.cores(), _gpus()
        amount = next(iter(self._pool.hosts.values()))
        # With more cores shared out than there are, no job has cores of its own.
        free = [each for each in cores if not any(each in placed["cores"] for placed in taken)]
        own = free[: job.cores] if amount.cores <= len(cores) else []
        left = [each for each in gpus if not any(each in placed["gpus"] for placed in taken)]
        return {"hosts": list(hosts), "cores": own, "gpus": left[: job.gpus]}

    def _start(self, job: QueueEntry, *, resume: bool = False) -> None:
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if _gpus():
            env["CUDA_VISIBLE_DEVICES"] = ",".join(job.placed["gpus"])
        cores = job.placed["cores"]
        log = os.open(self._queue.logs / f"{job.id}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "shoal", *self._words(job, resume=resume)],
                cwd=job.cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores and system.IS_LINUX else None,
            )
        except (OSError, subprocess.SubprocessError) as error:  # its folder or its cores are gone
            self._finish(job, JobState.FAILED, None, f"its process could not be started: {error}")
            return
        finally:
            os.close(log)
        self._children[job.id] = child
        self._queue.update(job.id, pid=child.pid, born=_born(child.pid), reason="")
        self._say(f"job {job.id} {'goes on' if resume else 'started'}: {' '.join(job.words)}")

    def _words(self, job: QueueEntry, *, resume: bool) -> list[str]:
        """Command line of a job, after `shoal`."""
        words = ["resume", str(self._queue.runs / job.run)]
        if not resume:
            words = ["run", "--name", job.run, "--run-dir", str(self._queue.runs), "--again"]
        if len(job.placed["hosts"]) > 1:
            bind = f"{self._bind}:{free_port(self._bind)}"
            words += ["--hosts", ",".join(job.placed["hosts"]), "--bind", bind]
            words += ["--ssh", self._ssh] if self._ssh else []
        return words if resume else [*words, *job.words]

    def _is_alive(self, job: QueueEntry) -> bool:
        child = self._children.get(job.id)
        if child is not None:
            return child.poll() is None
        if process_of(job) is not None:
            return True
        return is_alive(self._queue.runs / job.run)

    def _ended(self, job: QueueEntry) -> None:
        child = self._children.pop(job.id, None)
        run = self._queue.runs / job.run
        code = child.returncode if child is not None else _exit_code(run)
        # A supervisor always writes a summary when it ends; a refused command has no run.
        has_run = (run / "config.json").exists()
        is_killed = (code is None or code < 0) and (not has_run or _exit_code(run) is None)
        if is_killed and not job.cancelled:
            if job.resumed < MAX_RESUMES:
                self._queue.update(job.id, resumed=job.resumed + 1, pid=None, born=None)
                self._say(f"job {job.id} was killed from outside: it goes on from its newest checkpoint")
                self._start(self._queue.job(job.id), resume=has_run)
                return
            self._finish(job, JobState.FAILED, code, f"killed from outside {MAX_RESUMES + 1} times")
        elif job.cancelled:
            self._finish(job, JobState.CANCELLED, code, "cancelled while it ran")
        elif code == 0:
            self._finish(job, JobState.FINISHED, 0, "")
        else:
            self._finish(
                job, JobState.FAILED, code, f"exit code {code}; see {self._queue.logs / f'{job.id}.log'}"
            )

    def _finish(self, job: QueueEntry, state: JobState, code: int | None, reason: str) -> None:
        self._queue.update(job.id, state=state, ended=time.time(), exit=code, reason=reason, pid=None)
        self._say(f"job {job.id} {state}" + (f": {reason}" if reason else ""))
        self._known.discard(job.id)
        self._stopping.discard(job.id)
        self._carry_out(self._scheduler.handle(Ended(job.id)))


def _exit_code(run: Path) -> int | None:
    """Exit code of a run that ended by itself; None if it was killed, or never began."""
    try:
        found = json.loads((run / "summary.json").read_bytes())["exit"]
    except (OSError, ValueError, KeyError):
        return None
    return int(found)


def process_of(job: QueueEntry) -> psutil.Process | None:
    """Live process of a job; None if it has none, or its pid was reused."""
    if job.pid is None or job.born is None or _born(job.pid) != job.born:
        return None
    try:
        process = psutil.Process(job.pid)
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def stop(job: QueueEntry) -> None:
    """Ask a running job to save and leave."""
    if (process := process_of(job)) is not None:
        process.terminate()


def _born(pid: int) -> float | None:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def free_port(address: str) -> int:
    """A free port of this address; OSError if the address is not this machine's."""
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])
