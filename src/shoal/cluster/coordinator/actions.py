"""Actions that the coordinator's state machines return, and the tick that all of them are fed."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.runtime.transport.messages.message import Message


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time has passed."""

    at: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Send `message` to `client`."""

    client: int
    message: Message


@dataclass(frozen=True, slots=True)
class DropClient:
    """Close this client's connection; `problem` describes its protocol violation, if any."""

    client: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class NotifySupervisor:
    """Send `message` to the supervisor, on every connection that watches."""

    message: Message
