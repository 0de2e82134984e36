"""Outputs of map-reduce tasks, as a block server gives them to other hosts and gets them from there.

The name of a task is all that another host may choose: nothing but outputs of
tasks is read, in directories that a worker of this host has named.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from shoal.data.mapreduce.spill import partition_as_file
from shoal.data.remote import blocks
from shoal.runtime.transport.framing import Bytes
from shoal.runtime.transport.messages.blocks import (
    AskRun,
    BlockKept,
    BlockRefused,
    FetchRun,
    RunPart,
    ShareRun,
    ShuffleState,
)
from shoal.runtime.transport.messages.message import Message


def output_name(task: str, partition: int) -> str:
    """File of a task's output on a host that fetched it, or one partition of it."""
    return task if partition < 0 else f"{task}.{partition:05d}"


class SharedRuns:
    """The map-reduce calls of one host."""

    def __init__(self) -> None:
        self._runs: dict[str, ShareRun] = {}

    def share(self, run: ShareRun) -> None:
        self._runs[run.run] = run

    def serve(self, ask: AskRun) -> tuple[Message, Bytes | None]:
        run = self._runs.get(ask.run)
        if run is None:
            return BlockRefused("nobody at this host has come to this map_reduce yet"), None
        path = Path(run.directory, ask.task)
        try:
            if ask.partition >= 0:
                data, total = partition_as_file(path, ask.partition, ask.offset, blocks.BLOCK_BYTES)
            else:
                with open(path, "rb") as file:
                    data, total = (
                        os.pread(file.fileno(), blocks.BLOCK_BYTES, ask.offset),
                        os.fstat(file.fileno()).st_size,
                    )
        except FileNotFoundError:
            return _state(run), None
        return RunPart(total), data

    def fetch(self, wanted: FetchRun, ask: Callable[[AskRun], tuple[Message, Bytes]]) -> Message:
        """Fetch an output into the directory of its map-reduce here; returns the other host's answer if it has none."""
        run = self._runs.get(wanted.run)
        if run is None:
            return BlockRefused("this map_reduce was not shared here")
        path = os.path.join(run.directory, output_name(wanted.task, wanted.partition))
        if os.path.exists(path):
            return BlockKept("cache")
        beside = f"{run.directory}/.{os.path.basename(path)}.{os.getpid()}-{threading.get_ident()}"
        try:
            with open(beside, "wb") as file:
                num_bytes = None
                while num_bytes is None or file.tell() < num_bytes:
                    answer, data = ask(AskRun(wanted.run, wanted.task, wanted.partition, file.tell()))
                    if not isinstance(answer, RunPart):
                        return answer
                    if not data or num_bytes not in (None, answer.num_bytes):
                        return BlockRefused(f"{wanted.task} ended before its {answer.num_bytes} bytes")
                    num_bytes = answer.num_bytes
                    file.write(data)
            os.replace(beside, path)
        finally:
            if os.path.exists(beside):
                os.unlink(beside)
        return BlockKept(f"host {wanted.host}")


def _state(run: ShareRun) -> ShuffleState:
    files = set(os.listdir(run.directory))
    is_complete = all(f"part-{number:05d}" in files for number in range(run.num_partitions))
    claims = os.path.join(run.directory, "claims")
    with os.scandir(claims if os.path.isdir(claims) else run.directory) as entries:
        times = [entry.stat().st_mtime_ns for entry in entries]
    return ShuffleState(max([os.stat(run.directory).st_mtime_ns, *times]), is_complete)
