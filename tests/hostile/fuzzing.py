"""Hostile frames: messages with every field at its limits, messages with altered bytes, and noise."""

from __future__ import annotations

import os
import random
import re
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec

from shoal.config.row_policy import MOST_SIGHTINGS, RowPolicy
from shoal.runtime.transport.framing import MAGIC, VERSION
from shoal.runtime.transport.messages import MESSAGES
from shoal.runtime.transport.messages.message import Message

info = msgspec.inspect


def num_frames(usual: int) -> int:
    """Frames for one endpoint. SHOAL_HOSTILE_FRAMES=100000 is the whole suite, which takes many minutes."""
    return int(os.environ.get("SHOAL_HOSTILE_FRAMES", usual))


NAMES = ["worker-0", "worker-65535", "server-1", "kv-0-0", "worker-2", "map-00000", "map-99999", "part-00001"]
"""For fields with a pattern."""


def value_at_limits(kind: Any, rng: random.Random) -> Any:
    """A value of this type: a limit of it, or one next to zero."""
    match kind:
        case info.BoolType():
            return rng.random() < 0.5
        case info.IntType(ge=low, le=high):
            low, high = -(2**63) if low is None else low, 2**63 - 1 if high is None else high
            return rng.choice([low, low + 1, high, min(high, max(low, rng.randrange(4)))])
        case info.FloatType(ge=low, le=high):
            return rng.choice(
                [0.0, 1.0, 1e9 if high is None else high] + [float("nan"), -1.0, float("inf")] * (low is None)
            )
        case info.StrType(pattern=pattern) if pattern is not None:
            return rng.choice([name for name in NAMES if re.search(pattern, name)])
        case info.StrType(max_length=most):
            return rng.choice(
                ["", "a", "²", "../../etc/passwd", "fit", "SGD", "float32", "x" * min(most or 300, 300)]
            )
        case info.BytesType(min_length=least, max_length=most):
            return rng.randbytes(min(max(least or 0, rng.choice([0, 1, 32, 300])), most or 300))
        case info.NoneType():
            return None
        case info.LiteralType(values=values):
            return rng.choice(values)
        case info.ListType(item_type=item):
            return [value_at_limits(item, rng) for _ in range(rng.choice([0, 1, 3, 8]))]
        case info.DictType(key_type=key, value_type=value):
            return {value_at_limits(key, rng): value_at_limits(value, rng) for _ in range(rng.randrange(4))}
        case info.TupleType(item_types=items):
            return tuple(value_at_limits(each, rng) for each in items)
        case info.StructType(cls=cls, fields=fields):
            return cls(**{field.name: value_at_limits(field.type, rng) for field in fields})
        case info.DataclassType(cls=cls) if cls is RowPolicy:  # it checks itself, as its types alone do not
            most = (1 << 48) - 1
            at_limits = {"ttl_steps": most, "ttl_s": 1e-9, "max_rows": most, "keep": {"age": -1e308}}
            return cls(admit_after=MOST_SIGHTINGS, sweep_every=rng.choice([1, most]), **at_limits)
        case info.UnionType(types=types):
            return value_at_limits(rng.choice(types), rng)
    raise AssertionError(f"unknown type {kind}")


def message_at_limits(kind: type[Message], rng: random.Random) -> Message:
    fields = FIELDS[kind]
    return kind(**{field.name: value_at_limits(field.type, rng) for field in fields})


FIELDS = {kind: info.type_info(kind).fields for kind in MESSAGES}  # type: ignore[attr-defined]


def packed(header: bytes, frames: list[bytes]) -> bytes:
    """A packet with a right checksum around any header."""
    table = struct.pack(f"<{len(frames)}Q", *map(len, frames))
    head = struct.pack("<4sHHI", MAGIC, VERSION, len(frames), len(header))
    checksum = zlib.crc32(header, zlib.crc32(table, zlib.crc32(head)))
    return head + checksum.to_bytes(4, "little") + table + header + b"".join(frames)


def altered(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed[: rng.randrange(1, len(changed) + 1)] if rng.random() < 0.2 else changed)


def packets(
    count: int, *, seed: int, kinds: tuple[type[Message], ...] = MESSAGES, table: bool = False
) -> Iterator[bytes]:
    """So many packets: whole messages at their limits, altered ones under a right checksum, altered packets, noise.

    `table`: each has the first frame of an envelope, mostly a right one.
    """
    rng = random.Random(seed)
    corpus = [msgspec.msgpack.encode(message_at_limits(kind, rng)) for kind in kinds for _ in range(20)]
    for _ in range(count):
        header = rng.choice(corpus)
        frames: list[bytes] = []
        if table:
            inline = [rng.randbytes(rng.choice([0, 8, 16, 24, 100])) for _ in range(rng.randrange(4))]
            places = b"".join(struct.pack("<QQQ", 0, 0, len(each)) for each in inline)
            frames = [struct.pack("<QHHHxx", rng.randrange(2**63), 0, len(inline), 0) + places, *inline]
            if rng.random() < 0.1:
                frames[0] = altered(frames[0], rng)
        match rng.randrange(10):
            case 0:
                yield rng.randbytes(rng.randrange(1, 200))
            case 1 | 2:
                yield altered(packed(header, frames), rng)
            case 3 | 4 | 5:
                yield packed(altered(header, rng), frames)
            case _:
                yield packed(header, frames)
