"""A writer of checkpoints that is killed, for real, at the worst moments."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import torch

from shoal.errors import CheckpointDamaged
from shoal.parallel.protocol import Piece
from shoal.train.checkpoint.checkpoint import newest_checkpoint, step_path, write_checkpoint

WRITER = """
import sys, time
import torch
from shoal.parallel.protocol import Piece
from shoal.train.checkpoint import storage as checkpoint_storage
from shoal.train.checkpoint.checkpoint import write_checkpoint
from shoal.train.checkpoint.checkpoint import step_path

def write(step):
    piece = Piece("model/w", torch.full((200_000,), float(step)), (200_000,), (0,))
    write_checkpoint(step_path(sys.argv[1], step), [piece], progress={"step": step})
"""


def start(directory: Path, code: str) -> subprocess.Popen[str]:
    script = WRITER + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", script, str(directory)], stdout=subprocess.PIPE, text=True)


def end(writer: subprocess.Popen[str]) -> None:
    writer.kill()
    writer.wait()
    assert writer.stdout is not None
    writer.stdout.close()


def nobody(damaged: CheckpointDamaged) -> None:
    raise AssertionError(damaged)


def check_and_go_on(directory: Path) -> int:
    """What the next process does: find the newest, and write one more. Returns the step found."""
    newest = newest_checkpoint(directory, nobody)
    assert newest is not None
    step = int(newest.progress["step"])
    assert (newest.pieces["model/w"] == step).all()
    write_checkpoint(
        step_path(directory, step + 1), [Piece("model/w", torch.ones(1), (1,), (0,))], progress={}
    )
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []
    return step


def test_killed_between_writing_and_renaming_the_previous_one_is_used(tmp_path: Path) -> None:
    writer = start(
        tmp_path,
        """
        write(1)
        def stuck(temporary, target):
            print("written", flush=True)
            time.sleep(600)
        checkpoint_storage.replace_directory = stuck
        write(2)
        """,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "written\n"
    end(writer)
    assert len([path for path in tmp_path.iterdir() if path.name.startswith(".step-000000002.tmp-")]) == 1
    assert check_and_go_on(tmp_path) == 1


def test_killed_at_any_moment_the_newest_is_whole(tmp_path: Path) -> None:
    writers = start(  # one that imports torch, and its forks
        tmp_path,
        """
        import os
        for folder in "012":
            if os.fork() == 0:
                sys.argv[1] += f"/{folder}"
                for step in range(1, 100_000):
                    write(step)
                    if step == 1:
                        print(folder, os.getpid(), flush=True)
        for _ in "012":
            os.wait()
        """,
    )
    assert writers.stdout is not None
    for seed in range(3):
        folder, pid = writers.stdout.readline().split()
        time.sleep(random.Random(seed).uniform(0.0, 0.3))  # any moment will do
        writer = psutil.Process(int(pid))
        writer.kill()
        writer.wait()
        assert check_and_go_on(tmp_path / folder) >= 1
    end(writers)
