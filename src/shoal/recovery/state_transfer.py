"""State transfer from a donor to ranks that are behind: parts of state, the log since the anchor, call results.

Plain values and tensors, packed side by side and sent over the new group.
The donor is chosen elsewhere: `cluster/coordinator/views.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.collectives.reducer import Reducer
from shoal.errors import ClusterError
from shoal.runtime import serialization
from shoal.runtime.serialization import NotSerializable

_RESULT_TYPES: dict[str, type[Any]] = {}
"""Dataclasses that results of exchanges may hold, by name; filled by `register_result_type`."""

_OVERHEAD_BYTES = 256
"""Of one object among many."""


@dataclass(slots=True)
class Part:
    """One Trainer's (or loop's) share of the recovery state."""

    plain: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(slots=True)
class RecoveryState:
    """Everything a fresh process needs to run forward from the donor's anchor."""

    anchored_at: int
    """Number of the first exchange after the anchor."""

    call: int
    """The call in which the anchor lies; calls below it are finished, and it too if `call_is_over`."""

    call_is_over: bool
    anchor: dict[str, Any]
    """What the running call noted at the anchor."""

    log: dict[int, Any] = field(default_factory=dict)
    """Results of the exchanges since the anchor."""

    results: dict[str, Any] = field(default_factory=dict)
    """Results of finished calls, and of what the script reduced between them."""

    parts: dict[int, Part] = field(default_factory=dict)
    """State by the number of its owner."""


def register_result_type(kind: type[Any]) -> type[Any]:
    """Class decorator: results that hold this dataclass can be handed to a replacement."""
    _RESULT_TYPES[kind.__name__] = kind
    return kind


def send(native: Reducer, state: RecoveryState, rank: int) -> None:
    """Send the state to `rank`, which must be in `receive`."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    fields["parts"] = {
        owner: {"plain": part.plain, "tensors": part.tensors} for owner, part in state.parts.items()
    }
    try:
        header, leaves = serialization.pack(fields, _hook)
    except NotSerializable as error:
        raise _cannot_hand_over(error) from None
    with native.during("handing state over"):
        dist.send(torch.tensor([len(header)], dtype=torch.int64), rank)
        dist.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), rank)
        for leaf in leaves:
            raw = serialization.raw_bytes(leaf)
            if raw:
                # torch wants memory that may be written, which long strings of bytes are not.
                dist.send(torch.frombuffer(bytearray(raw) if raw.readonly else raw, dtype=torch.uint8), rank)


def receive(native: Reducer, donor: int) -> RecoveryState:
    """Receive the state that `donor` sends; all of it, or PeerLost."""
    with native.during("taking state over"):
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, donor)
        raw = torch.zeros(int(length), dtype=torch.uint8)
        dist.recv(raw, donor)
        header, leaves = raw.numpy().tobytes(), []
        for spec in serialization.leaf_specs(header):
            flat = torch.empty(spec.num_bytes, dtype=torch.uint8)
            if spec.num_bytes:
                dist.recv(flat, donor)
            leaves.append(spec.leaf(flat.numpy().data))
    plain = serialization.unpack(header, leaves, _unhook)
    plain["parts"] = {owner: Part(**part) for owner, part in plain["parts"].items()}
    return RecoveryState(**plain)


def num_bytes(value: Any) -> int:
    """What a result takes in memory, or a little more."""
    if isinstance(value, Tensor):
        return _OVERHEAD_BYTES + value.numel() * value.element_size()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return _OVERHEAD_BYTES + sum(map(num_bytes, value))
    return _OVERHEAD_BYTES + (len(value) if isinstance(value, (str, bytes)) else 0)


def to_bytes(value: Any) -> bytes:
    """Plain values, tensors and results in one piece of memory."""
    try:
        return serialization.dumps(value, _hook)
    except NotSerializable as error:
        raise _cannot_hand_over(error) from None


def from_bytes(raw: bytes | bytearray | memoryview) -> Any:
    """What `to_bytes` was given."""
    return serialization.loads(raw, _unhook)


def _hook(value: Any) -> tuple[str, Any] | None:
    if type(value) in _RESULT_TYPES.values():
        return type(value).__name__, {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "tuple", list(value)
    return None


def _unhook(tag: str, parts: Any) -> Any:
    return tuple(parts) if tag == "tuple" else _RESULT_TYPES[tag](**parts)


def _cannot_hand_over(error: NotSerializable) -> ClusterError:
    return ClusterError(
        f"a result of the script holds {error.what}, which cannot be handed to a replaced worker. "
        "Return tensors, numbers, strings, and dicts, lists or tuples of them."
    )
