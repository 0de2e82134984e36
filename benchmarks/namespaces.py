"""Two network namespaces with a slow link between them: made for a benchmark, and removed whatever happens.

A worker steps into one by `enter`: its connections from then on go over the
link, while Unix sockets and shared files stay what they were.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

PREFIX = "shoal-bench"
INTERFACE = "veth"
_CLONE_NEWNET = 0x40000000


class NotPermitted(Exception):
    """Not an error: this machine does not let us make networks; the text says why."""


@contextlib.contextmanager
def slow_link(rate: str = "100mbit") -> Iterator[list[str]]:
    """Names of two namespaces whose only way to each other passes `rate`, in each direction."""
    names = [f"{PREFIX}-{os.getpid()}-{number}" for number in range(2)]
    _remove_leftovers()
    # A benchmark that is asked to end removes them too; Ctrl-C is an exception already.
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        _make(names, rate)
        yield names
    finally:
        signal.signal(signal.SIGTERM, before)
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def enter(name: str) -> None:
    """This process's network is from now on that of the namespace `name`."""
    with open(f"/run/netns/{name}", "rb") as handle:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _make(names: list[str], rate: str) -> None:
    for name in names:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
    here, there = names
    _ip("-n", here, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", there)
    for number, name in enumerate(names):
        _ip("-n", name, "address", "add", f"10.254.254.{number + 1}/30", "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "up")
        bucket = ["rate", rate, "burst", "128kb", "latency", "200ms"]
        _run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *bucket])


def _remove_leftovers() -> None:
    """Of benchmarks that were killed."""
    for path in Path("/run/netns").glob(f"{PREFIX}-*-*"):
        owner = re.fullmatch(rf"{PREFIX}-(\d+)-\d", path.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise NotPermitted(f"there is no `{command[0]}` here (package iproute2)") from None
    except subprocess.CalledProcessError as error:
        raise NotPermitted(f"`{' '.join(command)}` says: {error.stderr.strip()}") from None


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
