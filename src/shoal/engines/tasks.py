"""Ordinary tasks: one function over many arguments, in threads here, or as tasks of Ray or Spark.

For functions that leave their result in files all machines reach. A task that raises is retried
alone; the first that keeps failing ends the whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from shoal.engines import registry
from shoal.engines.protocol import words_of
from shoal.errors import ClusterError, ConfigError

A = TypeVar("A")
R = TypeVar("R")

ENGINES = ("ray", "spark")


def run_tasks(
    function: Callable[[A], R],
    arguments: Sequence[A],
    *,
    on: str = "",
    workers: int = 1,
    attempts: int = 4,
    keeps_engine: bool = False,
) -> list[R]:
    """Results in the order of the arguments. `on` is an engine as --on names it; empty: `workers` threads here.

    With `keeps_engine` the connection to it stays for the next call, until this process ends.

    Raises what the last attempt of a task raised, here; an engine's error elsewhere.
    """
    if not on:
        return _in_threads(function, arguments, workers, attempts)
    name, detail = parse(on)
    run, close = (_in_ray, _close_ray) if name == "ray" else (_in_spark, _close_spark)
    try:
        return run(function, arguments, detail, workers, attempts)
    finally:
        if not keeps_engine:
            close()


def parse(on: str) -> tuple[str, str]:
    """Name and detail of an engine of tasks. ConfigError where it has none, or is not installed."""
    name, detail = registry.parse(on)
    if name not in ENGINES:
        raise ConfigError(
            f"--on {on} gives hosts, and map-reduce runs tasks. Nothing was started; tasks run on {' and '.join(ENGINES)}, or here."
        )
    registry.load(name)
    return name, detail


def _in_threads(function: Callable[[A], R], arguments: Sequence[A], workers: int, attempts: int) -> list[R]:
    is_over = threading.Event()

    def persistent(argument: A) -> R:
        for _ in range(attempts - 1):
            try:
                return function(argument)
            except Exception:
                if is_over.is_set():  # Ctrl-C ends the programs of tasks too
                    raise
        return function(argument)

    with ThreadPoolExecutor(workers) as pool:
        futures: list[Future[R]] = [pool.submit(persistent, each) for each in arguments]
        try:
            waiting = set(futures)
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for each in done:
                    each.result()  # the first failure ends the whole, without those that have not begun
        finally:
            is_over.set()
            pool.shutdown(cancel_futures=True)
        return [each.result() for each in futures]


def _in_ray(
    function: Callable[[A], R], arguments: Sequence[A], address: str, workers: int, attempts: int
) -> list[R]:
    import ray

    from shoal.engines.ray_session import connect

    connect(address)

    @ray.remote(num_cpus=1, max_retries=attempts - 1, retry_exceptions=True)  # type: ignore[untyped-decorator]
    def task(argument: A) -> R:
        return function(argument)  # an object that can be called, which Ray itself does not take

    try:
        return list(ray.get([task.remote(each) for each in arguments]))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # what the task raised, without Ray's traceback in its words
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"Ray failed while it ran {len(arguments)} tasks ({words_of(error)}). No output was written; see that Ray is well, and "
            "start again."
        ) from None


def _close_ray() -> None:
    import ray

    ray.shutdown()


def _in_spark(
    function: Callable[[A], R], arguments: Sequence[A], master: str, workers: int, attempts: int
) -> list[R]:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from shoal.engines.spark_session import active_context, cause, open_context

    # A local master runs a task once unless its name says how often.
    context = active_context() or open_context(
        master or f"local[{workers},{attempts}]",
        "shoal map-reduce",
        {"spark.ui.enabled": "false"},
        {"spark.task.maxFailures": str(attempts)},
    )
    context.setLogLevel("OFF")

    def run(parts: Iterable[A]) -> Iterator[R | Exception]:
        from pyspark import TaskContext

        for each in parts:
            try:
                yield function(each)
            except Exception as error:
                if TaskContext.get().attemptNumber() < attempts - 1:
                    raise
                yield error  # raised there, it would come wrapped in Java's own

    try:
        found = context.parallelize(list(arguments), max(1, len(arguments))).mapPartitions(run).collect()
        for each in found:
            if isinstance(each, Exception):
                raise each
        return list(found)
    except (Py4JError, PySparkException) as error:
        raise ClusterError(
            f"Spark failed while it ran {len(arguments)} tasks: {cause(error)}. No output was written; see that Spark is well, and "
            "start again."
        ) from None


def _close_spark() -> None:
    from shoal.engines.spark_session import active_context

    if (context := active_context()) is not None:
        context.stop()
