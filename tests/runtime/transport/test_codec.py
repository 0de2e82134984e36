from __future__ import annotations

import math
import socket
import struct
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.config.row_policy import RowPolicy
from shoal.errors import WireError
from shoal.runtime.transport.framing import (
    MAGIC,
    VERSION,
    Decoder,
    FrameLimits,
    decode,
    encode,
    read_message,
    send_message,
)
from shoal.runtime.transport.messages import MESSAGES
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.supervisor import Progress
from shoal.runtime.transport.messages.worker_coordinator import Leave, StoreGet, StoreSet

FRAMES = FrameLimits(header_bytes=1 << 20, num_frames=8, frames_bytes=1 << 20)

COUNTS = st.integers(1, 1 << 20)
POLICIES = st.builds(
    RowPolicy,
    admit_after=COUNTS,
    ttl_steps=st.none() | COUNTS,
    max_rows=st.none() | COUNTS,
    keep=st.sampled_from(["recent", "frequent", {"sightings": 1.0, "age": -0.5}]),
    sweep_every=COUNTS,
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values that a field of this type may hold, read from the message class itself."""
    info = msgspec.inspect
    match kind:
        case info.BoolType():
            return st.booleans()
        case info.IntType(ge=low, le=high):
            return st.integers(-(2**63) if low is None else low, 2**63 - 1 if high is None else high)
        case info.FloatType(ge=low, le=high):
            return st.floats(low, high, allow_nan=False)
        case info.StrType(pattern=pattern) if pattern is not None:
            return st.from_regex(pattern)
        case info.StrType():
            return st.text(max_size=20)
        case info.BytesType(min_length=least, max_length=most):
            return st.binary(min_size=least or 0, max_size=min(most or 40, 40))
        case info.NoneType():
            return st.none()
        case info.LiteralType(values=values):
            return st.sampled_from(values)
        case info.ListType(item_type=item):
            return st.lists(values_of(item), max_size=4)
        case info.DictType(key_type=key, value_type=value):
            return st.dictionaries(values_of(key), values_of(value), max_size=4)
        case info.TupleType(item_types=items):
            return st.tuples(*(values_of(each) for each in items))
        case info.DataclassType(cls=cls) if cls is RowPolicy:
            return POLICIES
        case info.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: values_of(field.type) for field in fields})
        case info.UnionType(types=types):
            return st.one_of([values_of(each) for each in types])
    raise AssertionError(f"the test does not know fields of type {kind}")


def instances_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    fields = msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
    return st.builds(kind, **{field.name: values_of(field.type) for field in fields})


BY_KIND = {kind: instances_of(kind) for kind in MESSAGES}
messages = st.one_of(list(BY_KIND.values()))
calm = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # cores are shared: time proves nothing


def joined(message: Message, frames: list[bytes] | None = None) -> bytes:
    return b"".join(encode(message, frames or [], limits=FRAMES))


@calm
@given(st.data(), st.sampled_from(MESSAGES), st.lists(st.binary(max_size=50), max_size=8))
def test_every_message_comes_back_as_it_was_sent(
    data: st.DataObject, kind: type[Message], frames: list[bytes]
) -> None:
    message = data.draw(BY_KIND[kind])
    assert decode(joined(message, frames), limits=FRAMES) == (message, frames)


@calm
@given(st.data(), st.sampled_from(MESSAGES), st.integers(1, 255))
def test_every_message_refuses_a_copy_of_itself_with_one_byte_damaged(
    data: st.DataObject, kind: type[Message], flip: int
) -> None:
    packet = bytearray(joined(data.draw(BY_KIND[kind])))
    packet[data.draw(st.integers(0, len(packet) - 1))] ^= flip
    with pytest.raises(WireError):
        decode(packet)


@calm
@given(messages, st.data())
def test_a_torn_message_is_refused(message: Message, data: st.DataObject) -> None:
    packet = joined(message)
    with pytest.raises(WireError):
        decode(packet[: data.draw(st.integers(0, len(packet) - 1))])


@calm
@given(messages)
def test_a_packet_with_more_than_one_message_is_refused(message: Message) -> None:
    with pytest.raises(WireError):
        decode(joined(message) * 2)
    with pytest.raises(WireError):
        decode(joined(message) + b"S")


@calm
@given(st.lists(st.tuples(messages, st.lists(st.binary(max_size=50), max_size=3)), max_size=5), st.data())
def test_a_stream_gives_the_same_messages_however_it_is_cut(
    sent: list[tuple[Message, list[bytes]]], data: st.DataObject
) -> None:
    stream = b"".join(joined(message, frames) for message, frames in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    decoder, received = Decoder(FRAMES), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += decoder.feed(stream[start:stop])
    assert received == sent
    assert decoder.num_pending_bytes == 0


@calm
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_never_become_a_message(noise: bytes, with_magic: bool) -> None:
    start = MAGIC + struct.pack("<H", VERSION) if with_magic else b""
    try:
        assert Decoder(FRAMES).feed(start + noise) == []
    except WireError:
        pass


def preamble(
    num_frames: int = 0, header_bytes: int = 10, version: int = VERSION, magic: bytes = MAGIC
) -> bytes:
    return struct.pack("<4sHHII", magic, version, num_frames, header_bytes, 0)


@pytest.mark.parametrize(
    ("start", "problem"),
    [
        (preamble(magic=b"GET "), "begins with b'GET '"),
        (preamble(version=VERSION + 1), f"version {VERSION + 1}"),
        (preamble(header_bytes=2**32 - 1), "4294967295"),
        (preamble(header_bytes=0), "header of 0 bytes"),
        (preamble(num_frames=9), "9 frames"),
        (preamble(num_frames=1) + struct.pack("<Q", 2**63), str(2**63)),
        (preamble(num_frames=2) + struct.pack("<QQ", 2**64 - 1, 2**64 - 1), str(2**65 - 2)),
    ],
)
def test_limits_are_checked_before_the_bytes_they_speak_of_arrive(start: bytes, problem: str) -> None:
    with pytest.raises(WireError, match=problem):
        Decoder(FRAMES).feed(start)


def test_a_conversation_without_frames_takes_none() -> None:
    with pytest.raises(WireError, match="1 frames, where at most 0"):
        decode(joined(Leave(), [b"x"]))


def test_the_sender_refuses_what_the_receiver_would_refuse() -> None:
    with pytest.raises(WireError, match="header of"):
        encode(StoreSet({"key": bytes(5 << 20)}))
    with pytest.raises(WireError, match="frames of 2000000 bytes"):
        encode(Leave(), [bytes(2_000_000)], limits=FRAMES)


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -1.0])
def test_a_wait_without_a_sane_deadline_is_refused(timeout_s: float) -> None:
    with pytest.raises(WireError):
        decode(joined(StoreGet(["key"], timeout_s)))


def test_a_loss_that_is_not_a_number_can_be_reported() -> None:
    progress = Progress(0, 1, "fit", 0, None, 3, None, math.nan, {"x": math.inf}, 8, 0.0, None)
    (received, _) = decode(joined(progress))
    assert isinstance(received, Progress)
    assert received.loss is not None
    assert math.isnan(received.loss)


def test_messages_cross_a_stream_socket_whole_and_its_end_is_told_apart_from_a_torn_one() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_message(ours, StoreSet({"a": b"1"}), [b"frame", b""], limits=FRAMES)
        send_message(ours, Leave())
        assert read_message(theirs, limits=FRAMES) == (StoreSet({"a": b"1"}), [b"frame", b""])
        assert read_message(theirs) == (Leave(), [])
        ours.sendall(joined(Leave())[:-1])
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(WireError, match="in the middle"):
            read_message(theirs)
        with pytest.raises(EOFError):
            read_message(theirs)


def test_the_wire_does_not_import_torch() -> None:
    code = "import sys, shoal.runtime.transport.framing, shoal.runtime.transport.unix; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
