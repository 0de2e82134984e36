"""Which hosts there are and where their keepers listen.

A folder that all of them see, with a file per host. On one machine that may
be treated as several (`shoal run --pretend-hosts 3`) it is the job's scratch
directory.
"""

from __future__ import annotations

import os
from pathlib import Path

from shoal.config import job as jobs
from shoal.runtime import scratch


class Hosts:
    """The hosts of this job, and which of them is this process's."""

    def __init__(self, directory: Path, *, mine: int, num_hosts: int) -> None:
        self._directory = directory
        self.mine, self.num_hosts = mine, num_hosts
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    @classmethod
    def of_job(cls) -> Hosts:
        """Those of the job that this process belongs to."""
        job = jobs.current()
        return cls(scratch.directory("hosts"), mine=job.host, num_hosts=job.num_hosts)

    @property
    def others(self) -> list[int]:
        """All but mine."""
        return [host for host in range(self.num_hosts) if host != self.mine]

    def folder(self) -> Path:
        """My host's own folder: its keeper's lock, and its cache."""
        path = self._directory / f"host-{self.mine}"
        path.mkdir(exist_ok=True, mode=0o700)
        return path

    def publish(self, address: tuple[str, int]) -> None:
        """My keeper listens there from now on."""
        path = self._directory / f"{self.mine}.address"
        half = path.with_suffix(f".{os.getpid()}")
        half.write_text(f"{address[0]} {address[1]}")
        half.rename(path)

    def address(self, host: int) -> tuple[str, int] | None:
        """Where a host's keeper listened last; None before it first did."""
        try:
            name, port = (self._directory / f"{host}.address").read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return name, int(port)
