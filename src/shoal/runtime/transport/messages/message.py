"""Base class of all messages, and the types of their fields."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Numbers and totals: never negative, and never more than the journal's and the kernels' 64 bits hold."""

Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A number that may be negative."""

Rank = Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)]
"""A worker's rank, or a server's number: the receiver's lists are as long."""

NumProcesses = Annotated[int, msgspec.Meta(ge=0, le=2**16)]
"""How many workers or servers there are."""

Incarnation = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""How often a process was started again."""

Pid = Annotated[int, msgspec.Meta(ge=0, le=2**22)]
"""A process, as Linux numbers them."""

Slot = Annotated[int, msgspec.Meta(ge=0, le=255)]
"""A slot of the parameter servers, of which there are 256."""

ExitCode = Annotated[int, msgspec.Meta(ge=-255, le=255)]
"""How a process ended: negative is a signal."""

Text = Annotated[str, msgspec.Meta(max_length=4096)]
"""Names, addresses and reasons."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""A time to wait. The bound keeps NaN and infinity out of the deadlines."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """One sentence. Immutable, tagged, and refused when it holds a field its class has not."""
