"""State transfer to ranks that are behind: parts of state, the log since the anchor, call results.

Plain values and tensors, packed side by side and sent over the new group, or
written to the run directory. The donor is chosen in `cluster/coordinator/views.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.reducer import Reducer
from shoal.errors import ClusterError
from shoal.runtime import serialization
from shoal.runtime.serialization import NotSerializable

_RESULT_TYPES: dict[str, type[Any]] = {}
"""Dataclasses that exchange results may contain, by name; filled by `register_result_type`."""

_OVERHEAD_BYTES = 256  # per object among many


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
    """Call that contains the anchor; calls below it are finished, and so is this one if `call_is_over`."""

    call_is_over: bool
    anchor: dict[str, Any]
    """State recorded by the running call at the anchor."""

    log: dict[int, Any] = field(default_factory=dict)
    """Results of the exchanges since the anchor."""

    results: dict[str, Any] = field(default_factory=dict)
    """Results of finished calls, and of the script's reductions between them."""

    parts: dict[int, Part] = field(default_factory=dict)
    """State by the number of its owner."""


def register_result_type(kind: type[Any]) -> type[Any]:
    """Class decorator: allow this dataclass in results that are sent to a replacement."""
    _RESULT_TYPES[kind.__name__] = kind
    return kind


def send(reducer: Reducer, state: RecoveryState, rank: int) -> None:
    """Send the state to `rank`, which must call `receive`."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    fields["parts"] = {
        owner: {"plain": part.plain, "tensors": part.tensors} for owner, part in state.parts.items()
    }
    try:
        header, leaves = serialization.pack(fields, _hook)
    except NotSerializable as error:
        raise _cannot_hand_over(error) from None
    with reducer.during("handing state over"):
        reducer.send_to(rank, torch.tensor([len(header)], dtype=torch.int64))
        reducer.send_to(rank, torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for leaf in leaves:
            raw = serialization.raw_bytes(leaf)
            if raw:
                # torch wants writable memory, and long byte strings are not.
                writable = bytearray(raw) if raw.readonly else raw
                reducer.send_to(rank, torch.frombuffer(writable, dtype=torch.uint8))


def receive(reducer: Reducer, donor: int) -> RecoveryState:
    """Receive the state that `donor` sends: all of it, or PeerLost."""
    with reducer.during("taking state over"):
        length = torch.zeros(1, dtype=torch.int64)
        reducer.receive_from(donor, length)
        raw = torch.zeros(int(length), dtype=torch.uint8)
        reducer.receive_from(donor, raw)
        header, leaves = raw.numpy().tobytes(), []
        for spec in serialization.leaf_specs(header):
            flat = torch.empty(spec.num_bytes, dtype=torch.uint8)
            if spec.num_bytes:
                reducer.receive_from(donor, flat)
            leaves.append(spec.leaf(flat.numpy().data))
    plain = serialization.unpack(header, leaves, _unhook)
    plain["parts"] = {owner: Part(**part) for owner, part in plain["parts"].items()}
    return RecoveryState(**plain)


def state_to_bytes(state: RecoveryState) -> bytes:
    """Serialize the state for a file."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    fields["parts"] = {
        owner: {"plain": part.plain, "tensors": part.tensors} for owner, part in state.parts.items()
    }
    return to_bytes(fields)


def state_from_bytes(raw: bytes) -> RecoveryState:
    plain = from_bytes(raw)
    plain["parts"] = {owner: Part(**part) for owner, part in plain["parts"].items()}
    return RecoveryState(**plain)


def num_bytes(value: Any) -> int:
    """Upper estimate of a result's bytes in memory."""
    if isinstance(value, Tensor):
        return _OVERHEAD_BYTES + value.numel() * value.element_size()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return _OVERHEAD_BYTES + sum(map(num_bytes, value))
    return _OVERHEAD_BYTES + (len(value) if isinstance(value, (str, bytes)) else 0)


def to_bytes(value: Any) -> bytes:
    """Serialize plain values, tensors and results into one buffer."""
    try:
        return serialization.dumps(value, _hook)
    except NotSerializable as error:
        raise _cannot_hand_over(error) from None


def from_bytes(raw: bytes | bytearray | memoryview) -> Any:
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


class KeptResults(MutableMapping[str, Any]):
    """Results by name: those of this process first, then those on disk."""

    def __init__(self, directory: Path, *, writes: bool) -> None:
        self._directory, self._writes = directory, writes
        self._own: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key in self._own:
            return self._own[key]
        try:
            name, value = from_bytes(self._path(key).read_bytes())
        except FileNotFoundError:
            raise KeyError(key) from None
        if name != key:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        self._own[key] = value
        if self._writes:
            path = self._path(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_bytes(to_bytes((key, value)))
            draft.rename(path)

    def __delitem__(self, key: str) -> None:
        del self._own[key]
        if self._writes:
            self._path(key).unlink(missing_ok=True)

    def __contains__(self, key: object) -> bool:
        return key in self._own or (isinstance(key, str) and self._path(key).exists())

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def _path(self, key: str) -> Path:
        return self._directory / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.bin"
