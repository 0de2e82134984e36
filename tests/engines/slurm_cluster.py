"""A Slurm of one machine for tests: munged, slurmctld and slurmd with configuration and state in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import socket
import subprocess
from pathlib import Path

from waiting import wait_until

NUM_CPUS = 4
"""As Slurm is told: slots of tests need not wait for each other on a small machine."""


FREEZER = Path("/sys/fs/cgroup/freezer")


def proctrack() -> str:
    """proctrack/cgroup, as clusters have it, where this machine lets Slurm make groups; else proctrack/pgid."""
    return "cgroup" if os.access(FREEZER, os.W_OK) else "pgid"


def unsupported() -> str:
    """Why there can be none here."""
    return "" if os.getuid() == 0 else "a Slurm of one's own needs root"


class SlurmCluster:
    """Ends with `close`; `env` is what its commands need."""

    def __init__(self, folder: Path, *, num_cpus: int = NUM_CPUS) -> None:
        folder.chmod(0o755)  # munged refuses a socket below a folder that others may write
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        conf = folder / "slurm.conf"
        self.env = {"SLURM_CONF": str(conf)}
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        name = platform.node()
        (folder / "gres.conf").write_text(
            f"Name=gpu File={folder}/gpu[0-7]\n"
        )  # files in the place of devices
        for number in range(8):
            (folder / f"gpu{number}").touch()
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        conf.write_text(
            f"""ClusterName=shoal
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={_free_port()}
SlurmdPort={_free_port()}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/{proctrack()}
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=15
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2,requeue_delay=1
GresTypes=gpu
NodeName={name} NodeAddr=127.0.0.1 CPUs={num_cpus} RealMemory=200000 Gres=gpu:8 State=UNKNOWN
PartitionName=low Nodes={name} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes={name} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=gpu Nodes={name} MaxTime=INFINITE State=UP PriorityTier=1
"""
        )
        self._start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
        )  # fmt: skip
        assert wait_until(lambda: (folder / "munge.socket").exists(), 20), self.logs()
        self._start("slurmctld", "-D", "-c", "-f", str(conf))
        self._start("slurmd", "-D", "-f", str(conf))
        assert wait_until(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T"), 40), self.logs()

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command, env={**os.environ, **self.env}, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log"))

    def close(self) -> None:
        self.ask("scancel", "--full", "-u", "root")
        wait_until(lambda: not self.ask("squeue", "-h").strip(), 20)
        for process in reversed(self._processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                process.kill()
                process.wait()
        with contextlib.suppress(OSError):  # none was made, or another Slurm of this machine uses it
            (FREEZER / f"slurm_{platform.node()}").rmdir()

    def _start(self, program: str, *options: str) -> None:
        output = (self.folder / f"{program}.output.log").open("wb")
        with output:
            self._processes.append(
                subprocess.Popen(
                    [f"/usr/sbin/{program}", *options],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**os.environ, **self.env},
                )
            )


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
