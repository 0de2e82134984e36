"""A message as bytes, and bytes as a message or a refusal.

    preamble   16 bytes   magic "SHOL", version, number of frames, header bytes, checksum
    lengths    8 bytes per frame
    header     the message, msgpack
    frames     raw bytes, as they are

Every length is checked against `Limits` before anything is allocated, and the checksum covers all
but the frames, so a damaged copy of a message is refused and not taken for another one. Frames are
excluded on purpose: they are the bulk, they stay inside one host or inside TLS, and one more pass
over them would be a large part of the cost of sending them.
"""

from __future__ import annotations

import socket
import struct
import time
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, Union

import msgspec

from shoal.errors import WireError
from shoal.runtime.transport.messages import MESSAGES
from shoal.runtime.transport.messages.message import Message

MAGIC = b"SHOL"
VERSION = 1

Bytes: TypeAlias = bytes | bytearray | memoryview
Received: TypeAlias = tuple[Message, list[Bytes]]
"""A message and its frames."""

_PREAMBLE = struct.Struct("<4sHHII")
_SUMMED_BYTES = _PREAMBLE.size - 4  # the checksum stands last and does not sum itself
_to_header = msgspec.msgpack.Encoder().encode
_from_header = msgspec.msgpack.Decoder(Union[MESSAGES]).decode  # noqa: UP007  `|` takes no tuple


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """The largest message a receiver takes; what is larger is refused before it is allocated."""

    header_bytes: int = 4 << 20
    """Largest header. Values of the store and tracebacks travel in it."""

    num_frames: int = 0
    """Most frames; 0 where a conversation has none."""

    frames_bytes: int = 0
    """All frames of one message together."""


CONTROL = FrameLimits()
"""For conversations without frames: the coordinator's and the supervisor's."""


def encode(message: Message, frames: Sequence[Bytes] = (), *, limits: FrameLimits = CONTROL) -> list[Bytes]:
    """The parts to send, in order: for `sendmsg`, or joined. Refuses what the other side would refuse."""
    header = _to_header(message)
    lengths = [len(frame) if type(frame) is bytes else memoryview(frame).nbytes for frame in frames]
    _check(len(header), len(lengths), limits)
    _check_frames(lengths, limits)
    table = struct.pack(f"<{len(lengths)}Q", *lengths)
    summed = _PREAMBLE.pack(MAGIC, VERSION, len(lengths), len(header), 0)[:_SUMMED_BYTES]
    checksum = zlib.crc32(header, zlib.crc32(table, zlib.crc32(summed)))
    return [summed + checksum.to_bytes(4, "little") + table + header, *frames]


def decode(packet: Bytes, *, limits: FrameLimits = CONTROL) -> Received:
    """The one message that `packet` holds, whole and alone: for sockets that keep packets apart."""
    decoder = Decoder(limits)
    received = decoder.feed(packet)
    if len(received) != 1 or decoder.num_pending_bytes:
        raise WireError(f"a packet of {len(packet)} bytes does not hold exactly one message")
    return received[0]


class Decoder:
    """Incremental decoder for a server that must not block."""

    def __init__(self, limits: FrameLimits = CONTROL) -> None:
        self._limits = limits
        self._pending = bytearray()
        self._parser = parse(limits)
        self._wanted = next(self._parser)
        self._taken = 0

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of a message that is not whole yet."""
        return self._taken + len(self._pending)

    def feed(self, data: Bytes) -> list[Received]:
        """Messages that `data` completes. After a WireError the stream is invalid: close it."""
        self._pending += data
        received: list[Received] = []
        while len(self._pending) >= self._wanted:
            part = bytes(memoryview(self._pending)[: self._wanted])
            del self._pending[: self._wanted]
            self._taken += len(part)
            try:
                self._wanted = self._parser.send(part)
            except StopIteration as done:
                received.append(done.value)
                self._parser = parse(self._limits)
                self._wanted, self._taken = next(self._parser), 0
        return received


def send_message(
    sock: socket.socket, message: Message, frames: Sequence[Bytes] = (), *, limits: FrameLimits = CONTROL
) -> None:
    """Send one message over a blocking socket."""
    first, *rest = encode(message, frames, limits=limits)
    sock.sendall(first)
    for frame in rest:
        sock.sendall(frame)


def read_message(
    sock: socket.socket, *, limits: FrameLimits = CONTROL, timeout_s: float | None = None
) -> Received:
    """Read one message from a blocking socket; EOFError if the other side closed it between messages.

    With `timeout_s` the whole message must arrive within it (else TimeoutError, and the connection
    is unusable); without, the socket's own time-out applies to each piece, and a peer may send byte
    by byte for ever.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    parser = parse(limits)
    wanted, begun = next(parser), False
    while True:
        part = bytearray(wanted)
        view = memoryview(part)
        while view:
            if deadline is not None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"a message was not whole after {timeout_s:g} s")
                sock.settimeout(left_s)
            count = sock.recv_into(view)
            if not count:
                if begun:
                    raise WireError("the connection ended in the middle of a message")
                raise EOFError("the connection was closed")
            view, begun = view[count:], True
        try:
            wanted = parser.send(part)
        except StopIteration as done:
            received: Received = done.value
            return received


def take(buffer: bytearray, start: int, end: int, limits: FrameLimits) -> tuple[Received, int] | None:
    """The message that begins at `start`, and where it ends, if all of it is there and nothing is wrong with it.

    Else None, and `parse` says what is missing or wrong: this is its short cut.
    """
    if end - start < _PREAMBLE.size:
        return None
    magic, version, num_frames, header_bytes, checksum = _PREAMBLE.unpack_from(buffer, start)
    table = start + _PREAMBLE.size
    header = table + 8 * num_frames
    at = header + header_bytes
    if magic != MAGIC or version != VERSION or num_frames > limits.num_frames or at > end:
        return None
    lengths = struct.unpack_from(f"<{num_frames}Q", buffer, table)
    stop = at + sum(lengths)
    if stop > end or not 0 < header_bytes <= limits.header_bytes or stop - at > limits.frames_bytes:
        return None
    with memoryview(buffer) as view:
        if zlib.crc32(view[table:at], zlib.crc32(view[start : start + _SUMMED_BYTES])) != checksum:
            return None
    try:
        message = _from_header(buffer[header:at])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    frames: list[Bytes] = []
    for length in lengths:
        frames.append(buffer[at : at + length])
        at += length
    return (message, frames), stop


def parse(
    limits: FrameLimits, announce: Callable[[Sequence[Bytes], int], None] | None = None
) -> Generator[int, Bytes, Received]:
    """Asks for so many bytes at a time and returns the message they make, wherever they come from.

    `announce(frames before it, bytes)` is called for each frame before it is asked for.
    """
    preamble = yield _PREAMBLE.size
    magic, version, num_frames, header_bytes, checksum = _PREAMBLE.unpack(preamble)
    if magic != MAGIC:
        raise WireError(f"it begins with {bytes(magic)!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"it speaks version {version}, this process version {VERSION}")
    _check(header_bytes, num_frames, limits)
    table: Bytes = b""
    if num_frames:
        table = yield 8 * num_frames
    lengths = struct.unpack(f"<{num_frames}Q", table)
    _check_frames(lengths, limits)
    header = yield header_bytes
    if zlib.crc32(header, zlib.crc32(table, zlib.crc32(preamble[:_SUMMED_BYTES]))) != checksum:
        raise WireError("its checksum does not match: bytes were damaged on the way")
    try:
        message = _from_header(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"it is no message of this version ({error})") from None
    frames: list[Bytes] = []
    for length in lengths:
        if announce is not None:
            announce(frames, length)
        frames += [(yield length) if length else b""]
    return message, frames


def _check(header_bytes: int, num_frames: int, limits: FrameLimits) -> None:
    if not 0 < header_bytes <= limits.header_bytes:
        raise WireError(f"a header of {header_bytes} bytes, where at most {limits.header_bytes} are allowed")
    if num_frames > limits.num_frames:
        raise WireError(f"{num_frames} frames, where at most {limits.num_frames} are allowed")


def _check_frames(lengths: Sequence[int], limits: FrameLimits) -> None:
    if sum(lengths) > limits.frames_bytes:
        raise WireError(f"frames of {sum(lengths)} bytes, where at most {limits.frames_bytes} are allowed")


# ---- several pieces in one frame ------------------------------------------------------------------


def pack(pieces: Sequence[bytes | memoryview]) -> bytes:
    """Pieces as one: their number, their lengths, then they."""
    lengths = [memoryview(piece).nbytes for piece in pieces]
    return struct.pack(f"<{1 + len(lengths)}Q", len(lengths), *lengths) + b"".join(pieces)


def unpack(raw: bytes | memoryview) -> list[bytes]:
    """Inverse of `pack`; WireError where it cannot be one."""
    memory = memoryview(raw)
    try:
        (count,) = struct.unpack_from("<Q", memory)
        lengths = struct.unpack_from(f"<{count}Q", memory, 8) if count <= len(memory) // 8 else None
    except struct.error:
        lengths = None
    if lengths is None or 8 * (1 + count) + sum(lengths) != len(memory):
        raise WireError(f"{len(memory)} bytes that are not what their head says")
    at, pieces = 8 * (1 + count), []
    for length in lengths:
        pieces.append(bytes(memory[at : at + length]))
        at += length
    return pieces
