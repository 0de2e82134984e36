"""Ordinary tasks: one function over many arguments, in threads here, or as tasks of Ray or Spark.

For functions that leave their result in files all machines reach. A task that raises is retried
alone; the first that keeps failing ends the whole.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any, TypeVar

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
    end: Callable[[], None] = lambda: None,
) -> list[R]:
    """Results in the order of the arguments. `on` is an engine as --on names it; empty: `workers` threads here.

    The connection to the engine stays for the next call, until the `session` around it or this process ends.
    `end` is called once threads here are to stop, by Ctrl-C or a failure, and ends what they wait for.
    An engine sends the function by value in its own form, over its own connections.

    Raises what the last attempt of a task raised, here; an engine's error elsewhere.
    """
    if not on:
        return _in_threads(function, arguments, workers, attempts, end)
    name, detail = parse(on)
    return (_in_ray if name == "ray" else _in_spark)(function, arguments, detail, workers, attempts)


@contextlib.contextmanager
def session(on: str) -> Iterator[None]:
    """Close the connection that `run_tasks` opens within; one that was there before is the caller's, and stays."""
    if not on:
        yield
        return
    is_open, close = (_ray_is_open, _close_ray) if parse(on)[0] == "ray" else (_spark_is_open, _close_spark)
    was_open = is_open()
    try:
        yield
    finally:
        if not was_open:
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


def _in_threads(
    function: Callable[[A], R], arguments: Sequence[A], workers: int, attempts: int, end: Callable[[], None]
) -> list[R]:
    results: dict[int, R] = {}
    with ThreadPoolExecutor(workers) as pool:
        try:
            running = {pool.submit(function, each): number for number, each in enumerate(arguments)}
            begun = Counter(running.values())
            while running:
                for each in wait(running, return_when=FIRST_COMPLETED).done:
                    number = running.pop(each)
                    # Retried by this thread, which gets Ctrl-C first: programs of tasks may end by it too.
                    if isinstance(each.exception(), Exception) and begun[number] < attempts:
                        running[pool.submit(function, arguments[number])] = number
                        begun[number] += 1
                    else:
                        results[number] = each.result()  # the first failure ends the whole
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end()
            raise
    return [results[number] for number in range(len(arguments))]


def _unsendable(engine: str, error: BaseException) -> ConfigError:
    return ConfigError(
        f"{engine} cannot send the tasks to its machines: {words_of(error)}. Nothing was started; give functions and data that hold no "
        "lock, connection or open file."
    )


def _in_ray(
    function: Callable[[A], R], arguments: Sequence[A], address: str, workers: int, attempts: int
) -> list[R]:
    import ray

    from shoal.engines.ray_session import can_grow, connect

    connect(address)
    if (cpus := ray.cluster_resources().get("CPU", 0)) < 1 and not can_grow():
        raise ConfigError(
            f"a task needs 1 CPU, and this Ray has {cpus:g} and no autoscaler. Nothing was started; add a node (`ray start --address`), or "
            "leave --on out."
        )

    @ray.remote(num_cpus=1, max_retries=attempts - 1, retry_exceptions=True)  # type: ignore[untyped-decorator]
    def task(function: Callable[[A], R], argument: A) -> R:
        return function(argument)  # an object that can be called, which Ray itself does not take

    try:
        sent = ray.put(function)  # once for all tasks
    except TypeError as error:
        raise _unsendable("Ray", error.__cause__ or error) from None
    try:
        return list(ray.get([task.remote(sent, each) for each in arguments]))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # what the task raised, without Ray's traceback in its words
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"Ray failed while it ran {len(arguments)} tasks ({words_of(error)}). No output was written; see that Ray is well, and "
            "start again."
        ) from None


def _ray_is_open() -> bool:
    import ray

    return bool(ray.is_initialized())


def _close_ray() -> None:
    from shoal.engines.ray_session import disconnect

    disconnect()


def _in_spark(
    function: Callable[[A], R], arguments: Sequence[A], master: str, workers: int, attempts: int
) -> list[R]:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from shoal.engines.spark_session import active_context, cause, open_context

    context = active_context()
    if context is None:
        # A local master runs a task once unless its name says how often.
        context = open_context(
            master or f"local[{workers},{attempts}]",
            "shoal map-reduce",
            {"spark.ui.enabled": "false"},
            {"spark.task.maxFailures": str(attempts)},
        )
        context.setLogLevel("OFF")
        # Without it nothing would be said while tasks wait for executors that never come.
        log4j = context._jvm.org.apache.logging.log4j
        scheduler = "org.apache.spark.scheduler.TaskSchedulerImpl"
        log4j.core.config.Configurator.setLevel(scheduler, log4j.Level.WARN)
    attempts = _attempts_of(context)

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
    except (Py4JError, PySparkException) as error:
        raise ClusterError(
            f"Spark failed while it ran {len(arguments)} tasks: {cause(error)}. No output was written; see that Spark is well, and "
            "start again."
        ) from None
    except Exception as error:  # of the function on its way to Spark: errors of tasks are results
        raise _unsendable("Spark", error) from None
    for each in found:
        if isinstance(each, Exception):
            raise each
    return list(found)


def _attempts_of(context: Any) -> int:
    """How often Spark runs a task: a local master as often as its name says, `local[2,4]`, and else once."""
    if context.master.startswith("local") and not context.master.startswith("local-cluster"):
        _, _, said = context.master.rstrip("]").partition(",")
        return int(said or 1)
    return int(context.getConf().get("spark.task.maxFailures", "4"))


def _spark_is_open() -> bool:
    from shoal.engines.spark_session import active_context

    return active_context() is not None


def _close_spark() -> None:
    from shoal.engines.spark_session import active_context

    if (context := active_context()) is not None:
        context.stop()
