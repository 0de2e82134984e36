"""Reading a server's dense parameters where they lie, on the same host."""

from __future__ import annotations

from shoal.runtime.transport.messages.message import Count, Message


class AskDense(Message, frozen=True, tag="ps-ask-dense"):
    """Client to server: "where are your chunks?" Answered by DenseAt.

    What is read there is of one version only while the server cannot update:
    in exact steps, between a pull's answer and the reader's next StepEnd.
    """

    view: Count


class DenseAt(Message, frozen=True, tag="ps-dense-at"):
    """Server to client: (chunk, memory, offset in bytes) of every chunk it answers for, and the bytes of each memory,
    whose descriptors come with this sentence; they can only be read.
    """

    places: list[tuple[int, int, int]]
    memories: list[Count]


SHARING_MESSAGES: tuple[type[Message], ...] = (AskDense, DenseAt)
"""Both; `messages.py` adds them to what a decoder accepts."""
