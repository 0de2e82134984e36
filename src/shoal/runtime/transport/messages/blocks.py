"""Messages between hosts about files that not all of them have.

A block is (url, stamp, number): the stamp changes with the file's content, so
a block of an older file is never taken for one of the newer.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.runtime.transport.messages.message import Count, Message, Text

TaskName = Annotated[str, msgspec.Meta(pattern=r"^(map|part)-[0-9]{5}\Z")]
"""A task of a map-reduce, and the file of its output."""

Partition = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]

NumPartitions = Annotated[int, msgspec.Meta(ge=1, le=10**5)]


class UseCache(Message, frozen=True, tag="use-cache"):
    """Worker to its block server: "keep blocks in this directory, at most so many bytes". Answered by BlocksNoted, or by BlockRefused where another worker wants another one. Repeating it is safe."""

    directory: Text
    max_bytes: Count | None  # None: half of what is free there


class ShareFiles(Message, frozen=True, tag="share-files"):
    """Worker to its host's block server: "we hold these files (url, bytes, stamp), asked for as `where`; others may read them".

    Answered by BlocksNoted. Repeating it is safe. What no worker of the host
    has opened itself is never served.
    """

    where: str
    files: list[tuple[str, Count, str]]


class AskFiles(Message, frozen=True, tag="ask-files"):
    """Worker to any block server: "which files does `where` stand for at your host?" Answered by FilesAre, or by
    BlockRefused where nobody there has opened them yet.
    """

    where: str


class FilesAre(Message, frozen=True, tag="files-are"):
    """Block server to worker: the files as they were shared."""

    files: list[tuple[str, Count, str]]


class NeedBlocks(Message, frozen=True, tag="need-blocks"):
    """Worker to its block server: "of this file only these blocks will ever be read here". Answered by BlocksNoted."""

    url: Text
    stamp: Text
    numbers: list[Count]


class FetchBlock(Message, frozen=True, tag="fetch-block"):
    """Worker to its block server: "put this block into the host's cache". Answered by BlockKept or BlockRefused.

    `sources` are the hosts that have the file itself.
    """

    url: Text
    stamp: Text
    number: Count
    sources: list[Count]


class BlockKept(Message, frozen=True, tag="block-kept"):
    """Block server to worker: "it is there", and where it came from: cache, a host's number, or source."""

    origin: str


class AskBlock(Message, frozen=True, tag="ask-block"):
    """Block server to block server: "give me this block". Answered by BlockIs, by BlockAt where another host was given it before and
    can give it on (unless the asker insists), or by BlockRefused.
    """

    url: Text
    stamp: Text
    number: Count
    insist: bool = False


class BlockIs(Message, frozen=True, tag="block-is"):
    """Block server to block server: the block. One frame: its bytes."""


class BlockAt(Message, frozen=True, tag="block-at"):
    """Block server to block server: "this host has it from me"."""

    host: Count


class WhichBlocks(Message, frozen=True, tag="which-blocks"):
    """Block server to block server: "of the blocks first..last of this file, which do you want?" Answered by WantBlocks."""

    url: Text
    stamp: Text
    first: Count
    last: Count


class WantBlocks(Message, frozen=True, tag="want-blocks"):
    """Block server to block server: those that it does not hold and will need."""

    numbers: list[Count]


class TakeBlock(Message, frozen=True, tag="take-block"):
    """Block server to block server: "here is a block; keep it and give it on along this route". One frame. Answered by BlocksNoted
    as soon as it is kept; giving it on is the receiver's business from then on.
    """

    url: Text
    stamp: Text
    number: Count
    route: list[Count]


class SpreadFiles(Message, frozen=True, tag="spread-files"):
    """Worker to the block server of a host that has files: "send them to all who want them", by `broadcast` or along a
    `chain`. Answered by BlocksNoted when it has begun; repeating it is safe.
    """

    how: str
    where: str


class ShareRun(Message, frozen=True, tag="share-run"):
    """Worker to its block server: "outputs of this map-reduce are in this directory; others may read them". Answered by
    BlocksNoted. Repeating it is safe.
    """

    run: Text
    directory: Text
    num_partitions: NumPartitions


class FetchRun(Message, frozen=True, tag="fetch-run"):
    """Worker to its block server: "get the output of a task, or one partition of it (-1: all), from this host". Answered by
    BlockKept, ShuffleState or BlockRefused.
    """

    run: Text
    host: Count
    task: TaskName
    partition: Partition


class AskRun(Message, frozen=True, tag="ask-run"):
    """Block server to block server: "the output of this task, or one partition of it, from this byte on". Answered by RunPart, by
    ShuffleState where it is not there, or by BlockRefused where that host has not come to the map-reduce.
    """

    run: Text
    task: TaskName
    partition: Partition
    offset: Count


class RunPart(Message, frozen=True, tag="run-part"):
    """Block server to block server: the bytes, of so many in all. One frame."""

    num_bytes: Count


class ShuffleState(Message, frozen=True, tag="run-state"):
    """Block server to block server or worker: "it is not here", a number that changes while tasks go on, and whether this host has the
    whole result.
    """

    progress: Count
    is_complete: bool


class BlocksNoted(Message, frozen=True, tag="blocks-noted"):
    """Block server to worker or block server: "done"."""


class BlockRefused(Message, frozen=True, tag="block-refused"):
    """Block server to worker or block server: "I cannot", and why."""

    reason: str
