"""Spark, for real: executors of this machine as hosts, one of them killed; DataFrames in, predictions out."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from engine_jobs import TRAINING, EngineJob, aggregate_on, command_lines, differences, rounds_with_a_kill

from waiting import wait_until

KEY = "a-key-for-tests-0123456789"
DRIVER = Path(__file__).parent / "spark_driver.py"


@pytest.fixture(autouse=True)
def spark(installed: Callable[[str], None]) -> None:
    installed("spark")


def test_a_killed_executor_is_replaced_and_the_bits_are_those_of_this_machine_alone(
    start_job: Callable[..., EngineJob], undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    options = ["-n", "3", "--exchange", "native", "--on", "spark:local-cluster[3,1,1024]", "--hosts", "3"]
    job = start_job(*options, str(TRAINING), str(out), "--gate", "5", env={"SHOAL_JOIN_KEY": KEY})
    job.wait_for_gate(out, 3)
    assert KEY not in command_lines()
    executor = next(
        each for each in job.agent(2).parents() if "CoarseGrainedExecutorBackend" in " ".join(each.cmdline())
    )
    executor.kill()
    (out / "go").touch()
    assert job.wait() == 0, job.output()
    assert [event["ranks"] for event in job.events("host-lost")] == [[1]]
    assert "asked for another" in job.output()  # "is being", where the engine takes its time
    assert differences(out, undisturbed) == []


def test_a_task_killed_before_its_host_has_joined_ends_the_job_with_its_name(
    start_job: Callable[..., EngineJob],
) -> None:
    job = start_job("--on", "spark", str(TRAINING), "nowhere")
    job.slot(1).kill()
    assert job.wait() == 3, job.output()
    assert "host 1 was lost during the start: its task died" in job.output()
    assert "Nothing was trained" in job.output()


def test_a_driver_trains_on_its_dataframe_and_gets_a_transform_back(tmp_path: Path) -> None:
    job = EngineJob(tmp_path / "driver", [], {}, program=[sys.executable, str(DRIVER)])
    assert job.wait(300) == 0, job.output()
    said = job.output()
    assert "4 partitions as 4 shards" in said
    assert "predictions are those of the weights" in said
    assert "its script never called shoal.spark.keep(trainer)" in said
    assert "'z'" in said
    assert "the column 'nested' of the DataFrame is of type struct" in said
    assert "the DataFrame has no column 'missing'; it has a, b, y" in said
    job.close()


def test_a_script_has_its_aggregate_from_tasks_of_spark_with_the_bytes_of_local_processes(
    tmp_path: Path,
) -> None:
    aggregate_on("spark", tmp_path / "driver")


def test_map_reduce_runs_as_tasks_and_a_failed_one_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("b\t1\na\t2\nb\t3\n")
    (tmp_path / "once.sh").write_text("#!/bin/sh\n[ -e failed ] && exec cat\ntouch failed; exit 7\n")
    (tmp_path / "once.sh").chmod(0o755)
    program = [sys.executable, "-m", "shoal", "map-reduce", "--on", "spark", "-n", "2"]
    for mapper, code in (("../once.sh", 0), ("sh -c 'echo no such city >&2; exit 3'", 3)):
        args = ["--mapper", mapper, "--reducer", "cat", "../in", "../out" if code == 0 else "../none"]
        job = EngineJob(tmp_path / f"job-{code}", args, {}, program=program)
        assert job.wait() == code, job.output()
        assert ("exit code 3; last it said: no such city" in job.output()) == bool(code)
    assert (tmp_path / "out" / "part-00000").read_text() == "a\t2\nb\t1\nb\t3\n"
    assert (tmp_path / "job-0" / "failed").exists()


def test_a_task_that_spark_runs_once_fails_with_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a\n")
    program = [sys.executable, "-m", "shoal", "map-reduce", "--on", "spark:local[1]"]
    args = ["--mapper", "sh -c 'echo no such city >&2; exit 3'", "../in", "../none"]
    job = EngineJob(tmp_path / "job", args, {}, program=program)
    assert job.wait() == 3, job.output()
    assert "exit code 3; last it said: no such city" in job.output()
    assert "Spark failed" not in job.output()


def test_rounds_as_tasks_of_spark_give_the_bits_of_local_processes_where_one_is_killed(
    start_job: Callable[..., EngineJob], local_rounds: dict[str, Any], tmp_path: Path
) -> None:
    there = rounds_with_a_kill(start_job, tmp_path / "there", "--on", "spark")
    assert all(torch.equal(each, there["weights"][name]) for name, each in local_rounds["weights"].items())


def test_more_than_spark_has_is_refused_with_both_numbers(start_job: Callable[..., EngineJob]) -> None:
    job = start_job("-n", "2", "--hosts", "2", "--on", "spark:local[1]", str(TRAINING), "nowhere")
    assert job.wait() == 2, job.output()
    assert "2 hosts of 1 core each need 2 cores, and Spark at local[1] has 1" in job.output()


CONTEXT = """
import json, sys
from shoal.config.hosts import Resources
from shoal.engines import spark
from shoal.engines.protocol import Ticket

ticket = Ticket(job="a", address="shoal://h:1", key="k" * 20, cores=1, folder=".")
context = spark._make_context(sys.argv[1], ticket, 1, Resources(memory_gb=1))
context.parallelize([0], 1).count()
java = context._jvm.java
options = list(java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments())
print(json.dumps([options, dict(context.getConf().getAll())]))
if sys.argv[2:]:
    print(java.lang.String(java.net.URL(sys.argv[2]).openStream().readAllBytes(), "utf-8").replace("\\n", " "))
context.stop()
"""


def context(tmp_path: Path, *args: str, env: dict[str, str]) -> list[Any]:
    """What `CONTEXT` prints of a driver's Java: each line is JSON."""
    done = subprocess.run(
        [sys.executable, "-c", CONTEXT, *args],
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_settings_of_the_site_beat_those_of_shoal_and_their_java_options_are_kept(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "# of the site\n"
        "spark.driver.extraJavaOptions  -Djavax.net.ssl.trustStore=/site/store \\\n    -XX:+UseParallelGC\n"
        "spark.executor.extraJavaOptions=-Dsite=yes\n"
        "spark.executor.memory: 3g\n"
        "spark.task.cpus 7\n"
    )
    env = {"SPARK_CONF_DIR": str(tmp_path), "JDK_JAVA_OPTIONS": ""}
    ((options, settings),) = context(tmp_path, "local[1]", env=env)
    assert "-Djavax.net.ssl.trustStore=/site/store" in options
    assert "-XX:TieredStopAtLevel=1" in options
    assert [each for each in options if each.endswith("GC")] == ["-XX:+UseParallelGC"]
    assert any(each.startswith("-Dlog4j2.configurationFile=") for each in options)
    executor = settings["spark.executor.extraJavaOptions"]  # after Spark's own
    assert executor.endswith(" -Dsite=yes")
    assert "-XX:TieredStopAtLevel" not in executor
    assert settings["spark.executor.memory"] == "3g"
    assert settings["spark.task.cpus"] == "1"  # of --resources


def test_a_standalone_master_reserves_the_memory_and_executors_keep_its_java_options(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, page = one.getsockname()[1], other.getsockname()[1]
    deploy = [spark_class(), "org.apache.spark.deploy"]
    at = ["--host", "127.0.0.1", "--webui-port"]
    url = f"http://127.0.0.1:{page}/json/"
    commands = [
        [f"{deploy[1]}.master.Master", *at, str(page), "--port", str(port)],
        [f"{deploy[1]}.worker.Worker", *at, "0", "-c", "1", "-m", "2g", "-d", str(tmp_path / "work")],
    ]
    commands[1].append(f"spark://127.0.0.1:{port}")
    with contextlib.ExitStack() as stack, (tmp_path / "log").open("wb") as log:
        for command in commands:
            started = subprocess.Popen([deploy[0], *command], stdout=log, stderr=log)
            stack.callback(started.wait)
            stack.callback(started.terminate)

        def is_there() -> bool:
            with contextlib.suppress(OSError), urlopen(url) as answer:
                return bool(json.load(answer)["aliveworkers"] == 1)
            return False

        assert wait_until(is_there, 120), (tmp_path / "log").read_text()
        env = {"JDK_JAVA_OPTIONS": "-XX:+UseParallelGC"}  # two collectors would end Java
        (_, settings), state = context(tmp_path, f"spark://127.0.0.1:{port}", url, env=env)
    assert state["memoryused"] == 1024
    assert settings["spark.executor.memory"] == "1024m"
    assert "-XX:TieredStopAtLevel" not in settings.get("spark.executor.extraJavaOptions", "")


def spark_class() -> str:
    import pyspark

    return str(Path(pyspark.__file__).parent / "bin/spark-class")


def test_tasks_that_no_executor_takes_are_told_of_and_a_stop_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a\n")
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    at = ["--host", "127.0.0.1", "--webui-port", "0", "--port", str(port)]
    program = [sys.executable, "-m", "shoal", "map-reduce", "--on", f"spark:spark://127.0.0.1:{port}"]
    program += ["--mapper", "cat"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            [spark_class(), "org.apache.spark.deploy.master.Master", *at], stdout=log, stderr=log
        ) as master,
    ):
        try:
            assert wait_until(lambda: "elected leader" in (tmp_path / "log").read_text(), 120)
            job = EngineJob(tmp_path / "job", ["../in", "../out"], {}, program=program)
            job.wait_for(lambda: "Initial job has not accepted any resources" in job.output())
            job.process.terminate()
            assert job.wait() == 143, job.output()
        finally:
            master.terminate()
    assert "stopped by SIGTERM; no output was written" in job.output()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "job", "log"]


def test_a_java_that_is_too_old_is_named(start_job: Callable[..., EngineJob], tmp_path: Path) -> None:
    java = """#!/bin/sh
echo 'NOTE: Picked up JDK_JAVA_OPTIONS: -Xmx1g' >&2
echo 'openjdk version "11.0.2" 2019-01-15' >&2
exit 1
"""
    (tmp_path / "java").write_text(java)
    (tmp_path / "java").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JAVA_HOME": ""}
    job = start_job("--on", "spark", str(TRAINING), "nowhere", env=env)
    assert job.wait() == 2, job.output()
    assert '(java is openjdk version "11.0.2", and Spark needs Java 17 or newer)' in job.output()


def test_a_spark_that_does_not_answer_is_named(start_job: Callable[..., EngineJob]) -> None:
    job = start_job("--on", "spark:spark://127.0.0.1:1", str(TRAINING), "nowhere")
    assert job.wait() == 2, job.output()
    assert "Spark cannot be reached at spark://127.0.0.1:1" in job.output()
