"""Requests and actions: the seam between a server's core and the process around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.shared_server import Request

__all__ = ["Action", "DropPeer", "Frame", "Reply", "Request", "Send", "Tell"]

Frame: TypeAlias = bytes | memoryview  # raw bytes of a message, wherever they lie


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a request. Data for the asker's `into` buffers is already written."""

    peer: int
    ticket: int
    message: Message
    frames: Sequence[Frame] = ()
    fds: Sequence[int] = ()  # descriptors that go with it; they stay open here


@dataclass(frozen=True, slots=True)
class Send:
    """Tell another server, over the one connection that this server made to it; in this order.

    What it answers goes to `ServerCore.answered`. The frames stay as they are
    until then.
    """

    server: int
    message: Message
    frames: Sequence[Frame] = ()


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the coordinator."""

    message: Message


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Close this connection: its process has been replaced, or sends invalid messages."""

    peer: int
    problem: str


Action: TypeAlias = Reply | Send | Tell | DropPeer
