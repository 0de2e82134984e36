"""Who keeps a waiting worker waiting: asked of a server, which knows, and told to the coordinator, which can have it looked at."""

from __future__ import annotations

from shoal.runtime.transport.messages.message import Count, Message, Seconds


class AskMissing(Message, frozen=True, tag="ps-ask-missing"):
    """Client to server: "whose contribution is it that my requests wait for?" Answered by Missing, at once, in any view."""


class Missing(Message, frozen=True, tag="ps-missing"):
    """Server to client: these ranks; none where nothing of the asker waits for a rank."""

    ranks: list[Count]


class Late(Message, frozen=True, tag="late"):
    """Worker to coordinator: "I wait for these ranks, for so long". Answered by LateHeard; repeating it is safe.

    A process of theirs that was stopped is killed and replaced. One that is at work is let be.
    """

    ranks: list[Count]
    waited_s: Seconds
    operation: str


class LateHeard(Message, frozen=True, tag="late-heard"):
    """Coordinator to worker: "they are looked at"."""


LATENESS_MESSAGES: tuple[type[Message], ...] = (AskMissing, Missing, Late, LateHeard)
"""All of them; `messages.py` adds them to what a decoder accepts."""
