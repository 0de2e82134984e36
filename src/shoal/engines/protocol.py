"""Protocol of an engine: slots requested, watched and returned.

A slot is one process of the engine that runs `shoal join` and so becomes an ordinary host of the
job. The engine decides where a slot runs, the head decides what runs in it. Nothing here imports an
engine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.config.hosts import Resources
from shoal.errors import ShoalError

KEY_VARIABLE = "SHOAL_JOIN_KEY"

REACH_TIMEOUT_S = 10.0

FRAME_VARIABLE = "SHOAL_SPARK_FRAME"
"""Tells a script of `shoal.spark.run` where the rows are and where its model goes."""

FORWARDED = ("PYTHONPATH", "PATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", FRAME_VARIABLE)
"""Variables by which a slot finds the same Python, shoal and rows as the head; it keeps the engine's own for the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """All that a slot needs to join the job."""

    job: str
    """Name of the run."""

    address: str
    """Of the head, as `shoal join` takes it."""

    key: str
    """Join key: for the engine's secret mechanism or the environment, never a command line."""

    cores: int
    """Of a slot; more workers than these are not placed there."""

    folder: str
    """For files of the engine."""

    def command(self, *options: str) -> list[str]:
        """`shoal join`; `options` say which host it is to be."""
        return [
            *(sys.executable, "-m", "shoal", "join", self.address, "--cores", str(self.cores)),
            *("--run-dir", f"{self.folder}/copies", "--timeout", "60", *options),
        ]

    def environment(self) -> dict[str, str]:
        """Variables of a slot, the key among them."""
        found = {name: os.environ[name] for name in FORWARDED if name in os.environ}
        return {**found, KEY_VARIABLE: self.key}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """A job in an engine's own queue, in the engine's words. A module with a queue gives them by `queue(detail)`."""

    id: str
    name: str
    state: str
    user: str
    asks: str
    note: str
    """Where it runs, or why it waits."""


def join_function() -> Callable[[list[str], dict[str, str]], tuple[int, str]]:
    """A function that runs `shoal join` in a slot to its end: its exit code and last output.

    Defined here so that engines send it by value: the Python of a slot need not have shoal, only
    that of `shoal join`.
    """

    def run_join(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
        import ctypes
        import os
        import signal
        import subprocess

        def die_with_slot() -> None:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

        try:
            done = subprocess.run(
                command,
                env={**os.environ, **environment},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
                preexec_fn=die_with_slot,
            )
        except OSError as error:  # a Python that this machine does not have
            return 127, str(error)
        return done.returncode, " ".join(done.stderr.split())[-500:]

    return run_join


def reach(address: str) -> None:
    """Raise OSError if nothing listens at `scheme://host:port`, or at any of `scheme://host:port,host:port`: engines themselves try
    for minutes. ValueError for another form.
    """
    problem: OSError | None = None
    for each in address.rpartition("://")[2].split(","):
        host, _, port = each.rpartition(":")
        if not host or not port.isdecimal() or int(port) >= 1 << 16:
            raise ValueError(f"'{each}' is no HOST:PORT")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S).close()
        except OSError as error:
            problem = error
        else:
            return
    assert problem is not None
    raise problem


def words_of(error: BaseException) -> str:
    """An engine's own error, of whatever class, in a line."""
    if isinstance(error, ShoalError):
        return str(error)
    first = line_of(error)
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def line_of(said: object, number: int = 0) -> str:
    """One line of what an engine said, without its full stop: the first, or the last (-1)."""
    return (str(said).strip().splitlines() or [""])[number].strip().rstrip(".")


def tail_of(log: str | Path, num_lines: int) -> str:
    """Last lines of a slot's log, as one; empty where there is none."""
    with contextlib.suppress(OSError):
        lines = Path(log).read_text(errors="replace").splitlines()[-num_lines:]
        return " ".join(line.strip() for line in lines if line.strip())
    return ""


def join_ended(end: tuple[int, str]) -> str:
    """End of a slot's `shoal join`, as `join_function` returns it, in words."""
    code, said = end
    return f"`shoal join` ended with exit code {code}: {said or 'it said nothing'}"


class Engine(Protocol):
    """Slots of one job in an engine. Its constructor takes the detail of `--on NAME:DETAIL` and the ticket.

    A module of an engine also has `is_local(detail)`: whether all its slots are on this machine, where they are
    reached by loopback. It raises ConfigError where the engine is not there.
    """

    def start(self, hosts: Sequence[int], resources: Resources) -> None:
        """Ask for a slot for each of these hosts, without waiting. ConfigError where it refuses; again for one that was lost."""

    def watch(self) -> dict[int, str]:
        """Slots that ended by themselves since they were asked for: host -> why, in words."""

    def stop(self) -> None:
        """Give all slots back; returns when they are gone, or the engine has been told."""

    def logs(self, host: int) -> str:
        """Last lines that a slot printed; empty where the engine keeps none."""
