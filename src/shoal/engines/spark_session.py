"""A session with Spark: the context, its log, and what Java said. For hosts (`spark.py`) and tasks (`tasks.py`)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.engines.protocol import reach, words_of
from shoal.errors import ConfigError

SERIAL_GC = "-XX:+UseSerialGC"
JAVA_OPTIONS = f"-XX:TieredStopAtLevel=1 {SERIAL_GC}"
"""Of a driver and of executors on this machine: they start processes of Python and wait. Measured on two crowded cores, an empty
job took 45 and 59 s with them, and 122 and 114 s with Java's own, which compile for long runs and start a thread for each core."""

DRIVER_JAVA, EXECUTOR_JAVA = "spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"
JAVA_VARIABLES = ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")


def active_context() -> Any:
    from pyspark import SparkContext

    return SparkContext._active_spark_context


def open_context(
    master: str, name: str, defaults: Mapping[str, str], asked: Mapping[str, str] | None = None
) -> Any:
    """A context of our own. Spark's configuration beats `defaults`, and `asked` beats both. ConfigError where Spark does not start."""
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
    conf = SparkConf()
    site = site_settings() | dict(conf.getAll())
    ours = {"spark.ui.showConsoleProgress": "false", **defaults}
    # A collector of our choice beside another one would keep Java from starting, so machines of a cluster have their own.
    for key in (DRIVER_JAVA, EXECUTOR_JAVA) if master.startswith("local-cluster") else (DRIVER_JAVA,):
        ours[key] = " ".join(filter(None, (java_options(site), ours.get(key), site.pop(key, None))))
    conf.setMaster(master).setAppName(name)
    for key, value in {**{key: ours[key] for key in ours if key not in site}, **(asked or {})}.items():
        conf.set(key, value)
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


def site_settings() -> dict[str, str]:
    """Settings of spark-defaults.conf. Before there is a JVM pyspark does not read them, and what it is given beats them."""
    import pyspark

    home = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    folder = os.environ.get("SPARK_CONF_DIR") or Path(home, "conf")
    try:
        text = Path(folder, "spark-defaults.conf").read_text()
    except OSError:
        return {}
    # As Java reads properties: `key value`, `key=value` or `key: value`, and a line goes on after a backslash.
    lines = [line.strip() for line in re.sub(r"\\\n\s*", "", text).splitlines()]
    pairs = [re.split(r"\s*[=:\s]\s*", line, maxsplit=1) for line in lines if line and line[0] not in "#!"]
    return {key: "".join(value) for key, *value in pairs}


def java_options(site: Mapping[str, str]) -> str:
    """JAVA_OPTIONS, without a collector where the environment or Spark's configuration names one."""
    said = [os.environ.get(name, "") for name in JAVA_VARIABLES]
    said += [value for key, value in site.items() if key.endswith("JavaOptions")]
    is_chosen = re.search(r"-XX:\+Use\w+GC\b", " ".join(said))
    return JAVA_OPTIONS.removesuffix(SERIAL_GC).strip() if is_chosen else JAVA_OPTIONS


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
    # Above it are the variables from which Java took options.
    version = next((line for line in said.splitlines() if ' version "' in line), "of unknown version")
    return f" ({java} is {' '.join(version.split()[:3])}, and Spark needs Java 17 or newer)"


def driver_options(folder: Path) -> str:
    """Java options of a driver whose log goes to a file of the run directory instead of the terminal."""
    settings = folder / "log4j2.properties"
    settings.write_text(
        "rootLogger.level = warn\nrootLogger.appenderRef.file.ref = file\nappender.file.type = File\nappender.file.name = file\n"
        f"appender.file.fileName = {folder / 'spark.log'}\nappender.file.layout.type = PatternLayout\n"
        "appender.file.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n\n"
    )
    return f"-Dlog4j2.configurationFile=file:{settings}"


def cause(error: Exception) -> str:
    """Java's root cause; its first line only names the failed call."""
    for line in str(error).splitlines():
        if "failed because" in line or "failure reason" in line or "Caused by" in line:
            return line.split("reason:")[-1].strip().rstrip(".")
    with contextlib.suppress(IndexError):
        return words_of(error)
    return type(error).__name__
