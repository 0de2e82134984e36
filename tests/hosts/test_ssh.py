"""`--hosts a,b`: the head starts the others by a real ssh."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from namespaces import Host

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")
KEYGEN = shutil.which("ssh-keygen")

pytestmark = pytest.mark.skipif(
    not (SSHD and KEYGEN and shutil.which("ssh")), reason="openssh-server is not installed here"
)

SCRIPT = """
import shoal, torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(64, 4)
model = nn.Linear(4, 1)
trainer = shoal.Trainer(model, loss=nn.MSELoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), progress=False)
trainer.fit(shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).batch(16), epochs=1)
print("trained on", shoal.num_workers())
"""


def run_shoal(host: Host, folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of a job whose head is this host."""
    (folder / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "shoal",
        "run",
        "-n",
        "2",
        "--bind",
        host.address,
        "--run-dir",
        str(folder / "runs"),
    ]
    job = host.popen(
        [*command, *options, str(folder / "train.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output, _ = job.communicate(timeout=200)
    return job.returncode, output


def start_sshd(host: Host, folder: Path) -> str:
    """A server with keys of its own, which lets the key of this test in; returns the command that reaches it."""
    assert SSHD is not None
    assert KEYGEN is not None
    for name in ("host-key", "user-key"):
        subprocess.run([KEYGEN, "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    host.run(["mkdir", "-p", "/run/sshd"])
    options = {
        "HostKey": folder / "host-key",
        "AuthorizedKeysFile": folder / "user-key.pub",
        "ListenAddress": host.address,
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
    }
    given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    host.popen([SSHD, "-D", "-e", "-f", "/dev/null", *given], stderr=subprocess.DEVNULL)
    return f"ssh -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -i {folder}/user-key"


def test_named_hosts_are_started_by_ssh_and_the_key_is_on_no_command_line(
    start_cluster: Callable[[int], Sequence[Host]], shared_folder: Path
) -> None:
    head, other = start_cluster(2)
    ssh = start_sshd(other, shared_folder)
    code, output = run_shoal(head, shared_folder, "--hosts", f"{head.address},{other.address}", "--ssh", ssh)
    assert code == 0, output
    assert "trained on 2" in output
    assert other.processes() == [] or all("sshd" in each.name() for each in other.processes())


def test_a_host_that_ssh_cannot_reach_ends_the_job_with_its_name(
    start_cluster: Callable[[int], Sequence[Host]], shared_folder: Path
) -> None:
    head, other = start_cluster(2)
    code, output = run_shoal(head, shared_folder, "--hosts", f"{head.address},{other.address}")
    assert code == 3, output
    assert f"host 1 could not be started: {other.address}" in output
    assert "Connection refused" in output


def test_a_job_of_the_queue_is_placed_on_two_hosts(
    start_cluster: Callable[[int], Sequence[Host]], shared_folder: Path
) -> None:
    head, other = start_cluster(2)
    ssh = start_sshd(other, shared_folder)
    (shared_folder / "train.py").write_text(SCRIPT)
    queue = ("--queue", str(shared_folder / "queue"))
    jobs = (sys.executable, "-m", "shoal", "jobs")
    pool = ("--cores", "1", "--bind", head.address, "--host", f"{other.address}:cores=1", "--ssh", ssh)
    # A pool before the first job: until then `submit` knows of this machine alone.
    for command in (
        ("run", *queue, *pool, "--until-empty"),
        (
            "submit",
            *queue,
            "--hosts",
            "2",
            "--",
            "-n",
            "2",
            "--oversubscribe",
            str(shared_folder / "train.py"),
        ),
        ("run", *queue, *pool, "--until-empty"),
    ):
        done = head.popen([*jobs, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output, _ = done.communicate(timeout=200)
        assert done.returncode == 0, output
    log = (shared_folder / "queue/logs/1.log").read_text()
    assert "job 1 finished" in output, output + log
    assert "trained on 2" in log
    assert other.address in (shared_folder / "queue/runs/job-1/config.json").read_text()
