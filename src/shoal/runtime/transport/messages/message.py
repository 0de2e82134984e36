"""Base class of all messages, and the types of their fields."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
"""Ranks, numbers and totals: never negative."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""A time to wait. The bound keeps NaN and infinity out of the deadlines."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """One sentence. Immutable, tagged, and refused when it holds a field its class has not."""
