"""MPI: one mpirun whose processes are the hosts; `--on mpi:HOSTFILE` for several machines.

The join key is in mpirun's environment, from which `-x` forwards it. A process
that is killed does not end the others (`--enable-recovery`), and another mpirun
of one process takes its place.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from shoal.config.hosts import Resources
from shoal.engines.protocol import Ticket, tail_of
from shoal.errors import ConfigError

END_S = 5.0
"""From the job's end to the end of mpirun, before it is killed."""

LOG_LINES = 5

EXEC = ("sh", "-c", 'exec "$0" "$@"')
"""With --enable-recovery mpirun waits for ever for a program that a machine does not have; a shell ends, and says so."""


def is_local(detail: str) -> bool:
    if detail and not os.path.isfile(detail):
        raise ConfigError(
            f"--on mpi:{detail} names a hostfile that does not exist. Nothing was started; leave it out for this machine alone."
        )
    return not detail


def open_engine(detail: str, ticket: Ticket) -> Mpi:
    return Mpi(detail, ticket)


class Mpi:
    """Processes of one mpirun, and of those that replace them."""

    def __init__(self, hostfile: str, ticket: Ticket) -> None:
        self._hostfile, self._ticket = hostfile, ticket
        self._started: list[tuple[subprocess.Popen[bytes], Sequence[int], Path]] = []

    def start(self, hosts: Sequence[int], resources: Resources) -> None:
        if resources.gpus:
            raise ConfigError(
                "--on mpi cannot ask for GPUs: mpirun gives processes, and each sees its machine's. Nothing was started; leave "
                "gpus out of --resources."
            )
        where = ["--oversubscribe"]
        if self._hostfile:
            where = ["--hostfile", self._hostfile, "--map-by", "ppr:1:node", *self._machine_of(hosts)]
        environment = self._ticket.environment()
        forwarded = [word for name in environment for word in ("-x", name)]
        log = Path(self._ticket.folder) / f"mpirun-{len(self._started)}.log"
        # Host numbers by rank: those that are replaced are not 1, 2, 3 any more.
        numbers = ",".join(map(str, hosts))
        command = self._ticket.command("--mpi", "--as-host", numbers)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(
                        "mpirun",
                        "-n",
                        str(len(hosts)),
                        "--enable-recovery",
                        "--bind-to",
                        "none",
                        "--tag-output",
                    ),
                    *(*where, *forwarded, *EXEC, *command),
                ],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append((process, list(hosts), log))

    def _machine_of(self, hosts: Sequence[int]) -> list[str]:
        """The machine for a host that was lost: its own, which mpirun otherwise does not know, then each time another."""
        times = sum(hosts[0] in before for _, before, _ in self._started)
        if times == 0:
            return []
        lines = Path(self._hostfile).read_text().splitlines()
        names = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]
        return ["--host", names[(hosts[0] + times - 2) % len(names)]]

    def watch(self) -> dict[int, str]:
        ended: dict[int, str] = {}
        for process, hosts, log in self._started:  # the last mpirun of a host counts
            if process.poll() is None:
                for host in hosts:
                    ended.pop(host, None)
            else:
                said = tail_of(log, LOG_LINES) or "it said nothing"
                ended |= dict.fromkeys(hosts, f"mpirun ended with exit code {process.returncode}: {said}")
        return ended

    def stop(self) -> None:
        for process, _, _ in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            for signum in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    process.send_signal(signum)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(END_S)

    def logs(self, host: int) -> str:
        logs = [log for _, hosts, log in self._started if host in hosts]
        return tail_of(logs[-1], LOG_LINES) if logs else ""


def own_rank() -> int:
    """Rank of this process in its mpirun. ConfigError outside of one."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    raise ConfigError(
        "`shoal join --mpi` takes its host number from mpirun, and this process was not started by one. Nothing was started; "
        "use `mpirun -n 4 shoal join --mpi shoal://HEAD:PORT`."
    )
