"""Messages between hosts about files that not all of them have.

A block is (url, stamp, number): the stamp changes with the file's content, so
a block of an older file is never taken for one of the newer.
"""

from __future__ import annotations

from shoal.runtime.transport.messages.message import Count, Message


class ShareFiles(Message, frozen=True, tag="share-files"):
    """Worker to its host's keeper: "we hold these files (url, bytes, stamp), asked for as `where`; others may read them".

    Answered by BlocksNoted. Repeating it is safe. What no worker of the host
    has opened itself is never served.
    """

    where: str
    files: list[tuple[str, Count, str]]


class AskFiles(Message, frozen=True, tag="ask-files"):
    """Worker to any keeper: "which files does `where` stand for at your host?" Answered by FilesAre, or by
    BlockRefused where nobody there has opened them yet.
    """

    where: str


class FilesAre(Message, frozen=True, tag="files-are"):
    """Keeper to worker: the files as they were shared."""

    files: list[tuple[str, Count, str]]


class NeedBlocks(Message, frozen=True, tag="need-blocks"):
    """Worker to its keeper: "of this file only these blocks will ever be read here". Answered by BlocksNoted."""

    url: str
    stamp: str
    numbers: list[Count]


class FetchBlock(Message, frozen=True, tag="fetch-block"):
    """Worker to its keeper: "put this block into the host's cache". Answered by BlockKept or BlockRefused.

    `sources` are the hosts that have the file itself.
    """

    url: str
    stamp: str
    number: Count
    sources: list[Count]


class BlockKept(Message, frozen=True, tag="block-kept"):
    """Keeper to worker: "it is there", and where it came from: cache, a host's number, or source."""

    origin: str


class AskBlock(Message, frozen=True, tag="ask-block"):
    """Keeper to keeper: "give me this block". Answered by BlockIs, by BlockAt where another host was given it before and
    can give it on (unless the asker insists), or by BlockRefused.
    """

    asker: Count
    url: str
    stamp: str
    number: Count
    insist: bool = False


class BlockIs(Message, frozen=True, tag="block-is"):
    """Keeper to keeper: the block. One frame: its bytes."""


class BlockAt(Message, frozen=True, tag="block-at"):
    """Keeper to keeper: "this host has it from me"."""

    host: Count


class WhichBlocks(Message, frozen=True, tag="which-blocks"):
    """Keeper to keeper: "of the blocks first..last of this file, which do you want?" Answered by WantBlocks."""

    url: str
    stamp: str
    first: Count
    last: Count


class WantBlocks(Message, frozen=True, tag="want-blocks"):
    """Keeper to keeper: those that it does not hold and will need."""

    numbers: list[Count]


class TakeBlock(Message, frozen=True, tag="take-block"):
    """Keeper to keeper: "here is a block; keep it and give it on along this route". One frame. Answered by BlocksNoted
    as soon as it is kept; giving it on is the receiver's business from then on.
    """

    url: str
    stamp: str
    number: Count
    route: list[Count]


class SpreadFiles(Message, frozen=True, tag="spread-files"):
    """Worker to the keeper of a host that has files: "send them to all who want them", by `broadcast` or along a
    `chain`. Answered by BlocksNoted when it has begun; repeating it is safe.
    """

    how: str
    where: str


class BlocksNoted(Message, frozen=True, tag="blocks-noted"):
    """Keeper to worker or keeper: "done"."""


class BlockRefused(Message, frozen=True, tag="block-refused"):
    """Keeper to worker or keeper: "I cannot", and why."""

    reason: str
