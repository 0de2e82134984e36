"""Jobs over namespaced hosts: the head's `shoal run`, `shoal join` on the others, and what came of them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from namespaces import DISK, Cluster, Host
from zygote import Started, Zygote

from waiting import wait_until

SCRIPT = Path(__file__).parent / "training.py"
PORT = 7070
KEY = "a-key-for-tests-0123456789"


class HostsJob:
    """One job over the hosts of a cluster.

    Its files are in a folder that all hosts share; with `own_disks` the run
    directory is on the head's own disk, and what the commands print is shared.
    """

    def __init__(
        self, cluster: Cluster, zygote: Zygote, folder: Path, script: Path, *, own_disks: bool = False
    ) -> None:
        self.cluster, self.folder = cluster, folder
        self.cwd = DISK if own_disks else folder
        self.head_number = 0
        self.env: dict[str, str] = {"SHOAL_JOIN_KEY": KEY}
        """Of every command of the job."""
        self._zygote, self._script = zygote, script
        self._started: list[Started] = []
        self.head: Started
        self.agents: dict[int, Started] = {}

    def start(
        self,
        workers: int,
        *args: str,
        options: Sequence[str] = (),
        joining: Sequence[int] | None = None,
        join_options: Sequence[str] = (),
        is_named: bool = False,
    ) -> HostsJob:
        """Start the head, and an agent on every other host, or on those that are `joining`.

        `is_named`: the options say which hosts there are.
        """
        address = self.cluster[0].address
        given = ["-n", str(workers)]
        if len(self.cluster) > 1 and not is_named:
            given += ["--hosts", str(len(self.cluster)), "--bind", f"{address}:{PORT}"]
        where = ["--run-dir", str(self.cwd / "runs"), "--name", "job"]
        self.head = self._run(0, ["run", *given, *where, *options, str(self._script), *args])
        for number in range(1, len(self.cluster)) if joining is None else joining:
            self.join(number, *join_options)
            # In turn, so that numbers in the job are those of the cluster.
            self.wait_for(lambda number=number: "joined" in self.output(number))
        return self

    def resume(self, number: int, *options: str, joining: Sequence[int] = ()) -> HostsJob:
        """Go on with the run on this host, with others that join."""
        self.head_number, self.agents = number, {}
        given: list[str] = []
        if joining:
            address = f"{self.cluster[number].address}:{PORT}"
            given = ["--hosts", str(1 + len(joining)), "--bind", address]
        self.head = self._run(number, ["resume", "job", *given, *options])
        for other in joining:
            self.join(other)
        return self

    def join(self, number: int, *options: str) -> Started:
        where = f"shoal://{self.cluster[self.head_number].address}:{PORT}"
        agent = self.agents[number] = self._run(number, ["join", where, *options])
        return agent

    def run_on_head(self, *args: str) -> Started:
        """Another command on the head; `said` is what all of them printed."""
        return self.run_on(0, *args)

    def run_on(self, number: int, *args: str) -> Started:
        return self._run(number, [*args, "--run-dir", str(self.cwd / "runs")], "commands.out")

    def said(self) -> str:
        return " ".join((self.folder / "commands.out").read_text(errors="replace").split())

    def _run(self, number: int, args: Sequence[str], output: str = "") -> Started:
        host: Host = self.cluster[number]
        started = self._zygote.start(
            host.init_pid,
            args,
            cwd=self.cwd,
            output=self.folder / (output or f"host-{number}.out"),
            env={**os.environ, **self.env},
        )
        self._started.append(started)
        return started

    # ---- what came of it ------------------------------------------------------------------------

    def output(self, number: int = 0) -> str:
        """Printed by the command of this host; 0: the head."""
        return (self.folder / f"host-{number}.out").read_text(errors="replace")

    @property
    def run_dir(self) -> Path:
        return self.run_dir_on(self.head_number)

    def run_dir_on(self, number: int) -> Path:
        """The run directory, or this host's copy of it."""
        if self.cwd == DISK:
            return self.cluster[number].path(DISK / "runs" / "job")
        return next(iter(sorted((self.cwd / "runs").iterdir())))

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        try:
            lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        except (OSError, StopIteration):
            return []
        said = [json.loads(line) for line in lines if line.endswith("}")]
        return [each for each in said if not kind or each["event"] == kind]

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 150.0) -> None:
        def is_over() -> bool:
            return bool(condition()) or self.head.poll() is not None

        wait_until(is_over, timeout_s)
        assert condition(), self.story()

    def wait_for_gate(self, out: Path, num_workers: int) -> None:
        """Until every rank is at the gate of `training.py`."""
        self.wait_for(lambda: all((out / f"at-gate-{rank}").exists() for rank in range(num_workers)))

    def wait(self, timeout_s: float = 150.0) -> int:
        try:
            return self.head.wait(timeout_s)
        except TimeoutError:
            raise AssertionError(f"the head has not ended\n{self.story()}") from None

    def processes(self) -> list[str]:
        """Left on any host."""
        return [
            f"{host.name}: {' '.join(process.cmdline())}"
            for host in self.cluster
            for process in host.processes()
        ]

    def pid_of(self, title: str, number: int) -> int:
        """Of the process of a host whose title begins so."""
        for process in self.cluster[number].processes():
            if re.match(title, " ".join(process.cmdline())):
                return int(process.pid)
        raise AssertionError(f"no {title} on host {number}: {self.processes()}")

    def story(self) -> str:
        told = [
            f"--- host {number}\n{self.output(number)}"
            for number in range(len(self.cluster))
            if (self.folder / f"host-{number}.out").exists()
        ]
        events = "\n".join(str(each)[:300] for each in self.events())
        return "\n".join([*told, f"--- events\n{events}", f"--- processes\n{self.processes()}"])

    def close(self) -> None:
        for started in self._started:
            if started.poll() is None:
                started.send_signal(signal.SIGCONT)
            started.close()


def differences(one: Path, other: Path, num_workers: int) -> list[str]:
    """Tensors and reports in which two runs of `training.py` differ, in any bit."""
    weights, others = torch.load(one / "weights.pt"), torch.load(other / "weights.pt")
    found = [name for name in weights if not torch.equal(weights[name], others[name])]
    found += sorted(weights.keys() ^ others.keys())
    ranks = [f"rank-{rank}.json" for rank in range(num_workers)]
    return found + [name for name in ranks if (one / name).read_text() != (other / name).read_text()]
