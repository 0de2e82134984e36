"""Spark: each host is a barrier stage of one task; `--on spark` starts Spark here, `--on spark:MASTER` joins another.

A driver that has a session already (`shoal.spark.run`) keeps it. Stages have one task each because
a barrier stage fails as a whole: with one stage for all, the death of an executor would take every
host with it. The join key is in the closure of the task, which Spark does not display.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.config.hosts import Resources
from shoal.engines.protocol import Ticket, join_ended, join_function
from shoal.engines.spark_session import DRIVER_JAVA, active_context, cause, driver_options, open_context
from shoal.errors import ConfigError

END_S = 5.0
"""From the job's end to the end of its tasks, before they are cancelled."""

EXECUTOR_MEMORY = "512m"
"""Of an executor's JVM, which only waits: the host's memory is outside of it."""


def is_local(detail: str) -> bool:
    active = active_context()
    return (active.master if active is not None else detail or "local").startswith("local")


def open_engine(detail: str, ticket: Ticket) -> Spark:
    return Spark(detail, ticket)


class Spark:
    """Tasks of one job."""

    def __init__(self, master: str, ticket: Ticket) -> None:
        self._master, self._ticket = master, ticket
        self._context = active_context()
        self._is_ours = self._context is None
        self._groups: dict[int, str] = {}  # job group of each host's last task
        self._ends: dict[str, str] = {}  # of groups that ended, in words
        self._threads: dict[str, threading.Thread] = {}

    def start(self, hosts: Sequence[int], resources: Resources) -> None:
        from pyspark import InheritableThread

        if self._context is None:
            self._context = _make_context(self._master, self._ticket, len(hosts), resources)
        if not self._groups:
            self._refuse_too_much(len(hosts))
        for host in hosts:
            group = f"shoal {self._ticket.job} host {host} #{len(self._threads)}"
            task = _task(self._ticket.command("--as-host", str(host)), self._ticket.environment())
            thread = InheritableThread(target=self._run, args=(group, task))
            thread.daemon = True
            self._groups[host], self._threads[group] = group, thread
            thread.start()

    def watch(self) -> dict[int, str]:
        return {host: self._ends[group] for host, group in self._groups.items() if group in self._ends}

    def stop(self) -> None:
        deadline = time.monotonic() + END_S
        # Those of lost hosts too: Spark may have started their tasks again.
        for group, thread in self._threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive() and self._context is not None:
                self._context.cancelJobGroup(group)
        if self._is_ours and self._context is not None:
            self._context.stop()

    def logs(self, host: int) -> str:
        return self.watch().get(host, "")

    def _run(self, group: str, task: Callable[[Iterable[int]], Iterator[tuple[int, str]]]) -> None:
        """Thread of a host: waits for its task."""
        try:
            self._context.setJobGroup(group, group, interruptOnCancel=True)
            [end] = self._context.parallelize([0], 1).barrier().mapPartitions(task).collect()
            self._ends[group] = f"its task's {join_ended(end)}"
        except Exception as error:  # whatever Java raised
            self._ends[group] = f"its task died: {cause(error)}"

    def _refuse_too_much(self, num_hosts: int) -> None:
        """Refuse what Spark on this machine, which cannot grow, can never run at once."""
        context = self._context
        each = int(context.getConf().get("spark.task.cpus", "1"))
        # Of a cluster it counts the executors that have come so far.
        is_fixed = context.master == "local" or context.master.startswith("local[")
        if is_fixed and num_hosts * each > context.defaultParallelism:
            raise ConfigError(
                f"{num_hosts} hosts of {each} core{'s' if each > 1 else ''} each need {num_hosts * each} cores, and Spark at "
                f"{context.master} has {context.defaultParallelism}. Nothing was trained; use fewer hosts or workers, or a larger master."
            )


def _make_context(master: str, ticket: Ticket, num_hosts: int, resources: Resources) -> Any:
    master = master or f"local[{num_hosts * ticket.cores}]"
    is_local = master.startswith("local")
    if resources.gpus and is_local and not master.startswith("local-cluster"):
        raise ConfigError(
            f"{resources.gpus} GPUs a host were asked of Spark at {master}, which gives none: only a cluster's workers have GPUs. Nothing "
            "was started; name a cluster's master with --on spark:MASTER, or leave gpus out of --resources."
        )
    defaults = {
        "spark.executor.memory": EXECUTOR_MEMORY,
        "spark.ui.enabled": str(not is_local).lower(),
        "spark.stage.maxConsecutiveAttempts": "1",  # the head asks for another host
        # A barrier stage looks every 15 s whether executors have come, and gives up after 40 times; --join-timeout decides here.
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "100000",
        DRIVER_JAVA: driver_options(Path(ticket.folder)),
    }
    asked = {"spark.task.cpus": str(ticket.cores), "spark.executor.cores": str(ticket.cores)}
    if not is_local:
        asked["spark.cores.max"] = str(ticket.cores * num_hosts)
    if resources.memory_gb and not is_local:
        # A standalone master reserves what the JVM may take alone; YARN and Kubernetes also what is beside it.
        key = "spark.executor.memory" if master.startswith("spark://") else "spark.executor.memoryOverhead"
        asked[key] = f"{round(resources.memory_gb * 1024)}m"
    if resources.gpus:
        asked |= dict.fromkeys(
            ("spark.task.resource.gpu.amount", "spark.executor.resource.gpu.amount"), f"{resources.gpus:g}"
        )
    return open_context(master, f"shoal {ticket.job}", defaults, asked)


def _task(
    command: list[str], environment: dict[str, str]
) -> Callable[[Iterable[int]], Iterator[tuple[int, str]]]:
    """A task that runs `shoal join`."""
    run_join = join_function()

    def task(_: Iterable[int]) -> Iterator[tuple[int, str]]:
        yield run_join(command, environment)

    return task
