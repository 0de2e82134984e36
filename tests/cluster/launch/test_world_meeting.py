"""Processes of one launcher on one machine: only those of the same user are believed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cluster.launch import world as worlds
from shoal.config.launchers import World
from shoal.errors import ClusterError, ConfigError

STRANGER = """
import os, socket, struct, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + sys.argv[1])
os.setuid(int(sys.argv[2]))
listener.listen()
print("listens", flush=True)
listener.accept()[0].sendall(struct.pack("<i", 0))
"""


def world(rank: int) -> World:
    return World(launcher="torchrun", engine="torchrun", rank=rank, size=2, local_rank=rank, local_size=2)


@contextlib.contextmanager
def name_taken_by(uid: int) -> Iterator[None]:
    """A process of this user listens where the first process of this one's launcher would."""
    command = [sys.executable, "-c", STRANGER, worlds._meeting(), str(uid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listens\n"
        yield
        process.kill()


def test_a_name_that_is_taken_is_a_refusal() -> None:
    with (
        name_taken_by(os.getuid()),
        pytest.raises(ConfigError, match=r"rank 0, .* cannot listen for the others .* Nothing was started"),
        worlds.leading(world(0)),
    ):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="a process of another user takes root to start")
def test_an_exit_code_from_another_user_is_not_believed(tmp_path: Path) -> None:
    with (
        name_taken_by(65534),
        pytest.raises(ClusterError, match=r"user 65534 listens in place of rank 0"),
    ):
        worlds.follow(world(1), None, tmp_path)
