"""A session with Spark: the context, its log, and what Java said. For hosts (`spark.py`) and tasks (`tasks.py`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.engines.protocol import reach, words_of
from shoal.errors import ConfigError

JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Of driver and executors: they start processes of Python and wait. Measured on two crowded cores, an empty job took 45 and 59 s
with them, and 122 and 114 s with Java's own, which compile for long runs and start a thread for each core."""


def active_context() -> Any:
    from pyspark import SparkContext

    return SparkContext._active_spark_context


def open_context(master: str, name: str, settings: Mapping[str, str]) -> Any:
    """A context of our own; what Spark's configuration says beats `settings`. ConfigError where Spark does not start."""
    from pyspark import SparkConf, SparkContext

    if master.startswith("spark://"):
        try:
            reach(master)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"Spark cannot be reached at {master}: {error}. Nothing was started; leave the address out, and a Spark is started here."
            ) from None
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    conf = SparkConf().setMaster(master).setAppName(name)
    ours = dict.fromkeys(("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"), JAVA_OPTIONS)
    for key, value in {"spark.ui.showConsoleProgress": "false", **ours, **settings}.items():
        conf.setIfMissing(key, value)
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        return SparkContext(conf=conf)
    except Exception as error:  # whatever Java raised
        java = _java_version() if "JAVA_GATEWAY_EXITED" in str(error) else ""
        raise ConfigError(
            f"Spark at {master} did not start: {cause(error)}{java}. Nothing was started."
        ) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)  # Spark takes Ctrl-C for itself


def _java_version() -> str:
    """Version of the Java on PATH: if it is older than 17, that is why Spark ended without a message."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else "java"
    try:
        said = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        ).stderr
    except (OSError, subprocess.SubprocessError) as error:
        return f" ({java} cannot be run: {error})"
    return f" ({java} is {' '.join(said.split()[:3])}, and Spark needs Java 17 or newer)"


def driver_options(folder: Path) -> str:
    """Java options of a driver whose log goes to a file of the run directory instead of the terminal."""
    settings = folder / "log4j2.properties"
    settings.write_text(
        "rootLogger.level = warn\nrootLogger.appenderRef.file.ref = file\nappender.file.type = File\nappender.file.name = file\n"
        f"appender.file.fileName = {folder / 'spark.log'}\nappender.file.layout.type = PatternLayout\n"
        "appender.file.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n\n"
    )
    return f"{JAVA_OPTIONS} -Dlog4j2.configurationFile=file:{settings}"


def cause(error: Exception) -> str:
    """Java's root cause; its first line only names the failed call."""
    for line in str(error).splitlines():
        if "failed because" in line or "failure reason" in line or "Caused by" in line:
            return line.split("reason:")[-1].strip().rstrip(".")
    with contextlib.suppress(IndexError):
        return words_of(error)
    return type(error).__name__
