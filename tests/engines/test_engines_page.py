"""Commands of the engines page, run as they stand: here, and those that name a cluster where one has that address.

That cluster is of namespaced hosts, with cores, memory and GPUs by its own word.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "hosts"))

import namespaces
import test_ssh
from slurm_cluster import SlurmCluster, unsupported

from waiting import wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "engines.md").read_text()
ELSEWHERE = ("10.0.0.", "partition=gpu", "gpus=", "--host ")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
WORDS = "#!/usr/bin/env python\nimport sys\nfor line in sys.stdin:\n    for word in line.split():\n        print(f'{word}\\t1')\n"
COUNT = (
    "#!/usr/bin/env python\nimport itertools, sys\n"
    "for word, lines in itertools.groupby(sys.stdin, key=lambda line: line.split('\\t')[0]):\n"
    "    print(f'{word}\\t{len(list(lines))}')\n"
)


def blocks(*, name_a_cluster: bool = False) -> dict[str, str]:
    """Commands by the heading they stand under: those that name a cluster, or the others."""
    found: dict[str, list[str]] = {}
    heading = is_code = ""
    for line in PAGE.splitlines():
        is_code = is_code if not line.startswith("```") else "" if is_code else line
        if line.startswith("## ") and not is_code:
            heading = line[3:]
        elif (
            line.startswith("    ")
            and not is_code
            and any(word in line for word in ELSEWHERE) == name_a_cluster
        ):
            found.setdefault(heading, []).append(line.strip())
    return {heading: "\n".join(lines) for heading, lines in found.items()}


def test_the_page_has_a_command_for_every_engine() -> None:
    assert {"Ray", "Spark", "MPI", "Slurm", "Kubernetes", "A cloud"} <= set(blocks())


def prepared(folder: Path) -> dict[str, str]:
    """Write the files that the commands name; the environment in which they run."""
    script = re.search(r"```python\n(# train\.py\n.*?)```", PAGE, re.DOTALL)
    assert script is not None
    (folder / "train.py").write_text(script[1])
    (folder / "books").mkdir()
    (folder / "books" / "a.txt").write_text("one fish two fish\n")
    (folder / "bin").mkdir()
    programs = {"bin/shoal": "shoal", "bin/torchrun": "torch.distributed.run"}
    texts = {
        name: f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n' for name, module in programs.items()
    }
    for name, text in {**texts, "words.py": WORDS, "count.py": COUNT}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **AS_ROOT, "PATH": path}


@pytest.mark.matrix
@pytest.mark.parametrize("heading", blocks())
def test_the_commands_run_as_they_stand(
    heading: str, installed: Callable[[str], None], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    installed("mpi")
    commands = blocks()[heading]
    env = prepared(tmp_path)
    cluster = None
    if "slurm" in commands:
        installed("slurm")
        if reason := unsupported():
            pytest.skip(reason)
        cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
        env |= cluster.env
    try:
        for number, command in enumerate(_runs(commands)):
            done = subprocess.run(
                ["bash", "-e", "-c", command.replace(" counts", f" counts-{number}")],
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
            if "train.py" in command and "shoal run" in command and "mapreduce" not in command:
                assert "trained on 2 workers" in done.stdout + done.stderr, command
    finally:
        if cluster is not None:
            cluster.close()


@pytest.mark.matrix
@pytest.mark.parametrize("heading", ["Ray", "Spark", "Slurm"])
def test_the_commands_that_name_a_cluster_run_on_it_as_they_stand(
    heading: str, installed: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    installed(heading.lower())
    if reason := namespaces.unsupported() or unsupported():
        pytest.skip(reason)
    [command] = blocks(name_a_cluster=True)[heading].splitlines()
    with contextlib.ExitStack() as stack:
        # /tmp is each host's own.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        env = {**prepared(folder), "RAY_AUTH_MODE": "disabled"}
        hosts = stack.enter_context(namespaces.Cluster(4 if heading == "Ray" else 1, folder / "hosts"))
        for number, host in enumerate(hosts):
            host.run(["ip", "addr", "add", f"10.0.0.{5 + number}/24", "dev", "eth0"])
            host.run(["ip", "route", "add", "default", "dev", "eth0"])
        if heading == "Ray":
            start_ray(hosts, env)
        elif heading == "Spark":
            start_spark(hosts[0], env)
        else:
            slurm = SlurmCluster(tmp_path_factory.mktemp("slurm"), num_cpus=8)
            stack.callback(slurm.close)
            env |= slurm.env
        words = ["bash", "-c", command]
        if heading == "Slurm":
            done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
        else:
            done = hosts[0].run(words, 300, check=False, cwd=folder, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "trained on 8 workers" in done.stdout


@pytest.mark.matrix
def test_the_queue_over_two_hosts_runs_as_it_stands(installed: Callable[[str], None]) -> None:
    installed("mpi")  # with the other engines, by `make matrix`
    if reason := namespaces.unsupported() or (
        "" if test_ssh.SSHD else "openssh-server is not installed here"
    ):
        pytest.skip(reason)
    [command] = blocks(name_a_cluster=True)["Several jobs"].splitlines()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        env = prepared(folder)
        hosts = stack.enter_context(namespaces.Cluster(2, folder / "hosts"))
        for number, host in enumerate(hosts):
            host.run(["ip", "addr", "add", f"10.0.0.{1 + number}/24", "dev", "eth0"])
            host.write("/etc/hosts", host.read("/etc/hosts") + "10.0.0.2 node2\n")
        ssh = test_ssh.start_sshd(hosts[1], folder).replace("ssh", shutil.which("ssh") or "", 1)
        (folder / "bin/ssh").write_text(f'#!/bin/sh\nexec {ssh} -o HostName={hosts[1].address} "$@"\n')
        (folder / "bin/ssh").chmod(0o755)

        def jobs(*words: str) -> subprocess.CompletedProcess[str]:
            return hosts[0].run(["shoal", "jobs", *words], 60, check=False, cwd=folder, env=env)

        def states() -> list[str]:
            return [job["state"] for job in json.loads(jobs("list", "--json").stdout)]

        runner = hosts[0].popen(["bash", "-c", command], cwd=folder, env=env)
        # Until the runner has told of its hosts, a job for two could never run.
        assert wait_until(
            lambda: jobs("submit", "--hosts", "2", "--", "-n", "2", "train.py").returncode == 0, 60
        )
        assert wait_until(lambda: states() in (["finished"], ["failed"]), 150)
        runner.send_signal(signal.SIGINT)
        runner.wait(30)
        log = next((folder / "runs/queue/logs").iterdir()).read_text()
        assert states() == ["finished"], log
        assert "trained on 2 workers" in log
        assert "node2" in log


def start_ray(hosts: Sequence[namespaces.Host], env: dict[str, str]) -> None:
    """A node on each host, with 8 CPUs, 2 GPUs and 32 GB each."""
    has = ["--num-cpus=8", "--num-gpus=2", f"--memory={32 << 30}", f"--object-store-memory={80 << 20}"]
    for number, host in enumerate(hosts):
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            f"--node-ip-address=10.0.0.{5 + number}",
        ]
        role = (
            ["--head", "--port=6379", "--include-dashboard=false"]
            if number == 0
            else ["--address=10.0.0.5:6379"]
        )
        host.run([*command, *role, *has, "--disable-usage-stats"], 170, env=env)


def start_spark(host: namespaces.Host, env: dict[str, str]) -> None:
    """A master, and one worker with 16 cores and 80 GB: it runs all executors."""
    import pyspark

    start = [str(Path(pyspark.__file__).parent / "bin/spark-class"), "org.apache.spark.deploy"]
    at = ["--host", "10.0.0.5", "--webui-port", "0"]
    master = [f"{start[1]}.master.Master", *at, "--port", "7077"]
    worker = [
        f"{start[1]}.worker.Worker",
        *at,
        "-c",
        "16",
        "-m",
        "80g",
        "-d",
        "/tmp/work",
        "spark://10.0.0.5:7077",
    ]

    def is_there() -> bool:
        with contextlib.suppress(OSError), host.network(), socket.create_connection(("10.0.0.5", 7077), 1):
            return True
        return False

    for command in (master, worker):
        host.popen([start[0], *command], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert wait_until(is_there, 60)


def _runs(commands: str) -> list[str]:
    """Lines that belong together (a variable, something in the background) as one script, others each alone."""
    return [commands + "\nwait"] if "export " in commands and "&" in commands else commands.splitlines()
