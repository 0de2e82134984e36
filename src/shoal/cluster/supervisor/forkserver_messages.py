"""What supervisor and warm parent say to each other, and how a descriptor travels with it.

One packet is one message: JSON on a SOCK_SEQPACKET pair that only the two
processes hold. What a child needs to know goes in a memfd beside the packet,
because an environment may be larger than a packet can be, and the warm parent
has no business reading it.
"""

from __future__ import annotations

import os
import socket
from array import array
from typing import TypeVar

import msgspec

from shoal.errors import WireError

MAX_PACKET_BYTES = 64 * 1024
MAX_FDS = 96
"""The kernel takes 253 at once. A worker of a job with servers is given a way to each there may be."""


class Fork(msgspec.Struct, tag="fork", forbid_unknown_fields=True, frozen=True):
    """ "Fork a child into this role." Supervisor to warm parent; answered by Forked or NotForked."""

    role: str
    title: str  # of the process, as `ps` shows it
    fds: list[str]  # names of the descriptors that come along, in order; "spec" is one of them


class Signal(msgspec.Struct, tag="signal", forbid_unknown_fields=True, frozen=True):
    """ "Send this signal to your child, and to its whole group if it is SIGKILL."

    No answer; a child that is gone is no error. It goes through the parent
    because only a parent knows that the number still means that child.
    """

    pid: int
    signum: int


Command = Fork | Signal


class Ready(msgspec.Struct, tag="ready", forbid_unknown_fields=True, frozen=True):
    """ "I have imported everything and can fork." Said once."""

    import_s: float
    dialect: int  # of what was imported: the supervisor's own files may have been replaced since it started


class Forked(msgspec.Struct, tag="forked", forbid_unknown_fields=True, frozen=True):
    """The child lives."""

    pid: int


class NotForked(msgspec.Struct, tag="not-forked", forbid_unknown_fields=True, frozen=True):
    """There is no child, and why."""

    reason: str


class Exited(msgspec.Struct, tag="exited", forbid_unknown_fields=True, frozen=True):
    """A child ended and was reaped; so was everything left in its process group."""

    pid: int
    code: int  # as `os.waitstatus_to_exitcode` has it: minus the signal for a killed process


Report = Ready | Forked | NotForked | Exited

_commands = msgspec.json.Decoder(Command)
_reports = msgspec.json.Decoder(Report)
_encoder = msgspec.json.Encoder()

T = TypeVar("T")


def send(sock: socket.socket, message: Command | Report, fds: list[int] | None = None) -> None:
    """Send one message, with descriptors. The receiver gets copies; the caller's stay open."""
    socket.send_fds(sock, [_encoder.encode(message)], fds or [])


def receive_command(sock: socket.socket) -> tuple[Command, list[int]] | None:
    """The next command and its descriptors; None when the supervisor is gone."""
    return _receive(sock, _commands)


def receive_report(sock: socket.socket) -> Report | None:
    """The next report; None when the warm parent is gone."""
    received = _receive(sock, _reports)
    return received[0] if received else None


def _receive(sock: socket.socket, decoder: msgspec.json.Decoder[T]) -> tuple[T, list[int]] | None:
    # Not socket.recv_fds: in Python 3.11 it drops the flag that keeps descriptors from a child's children.
    room = socket.CMSG_SPACE(MAX_FDS * array("i").itemsize)
    try:
        packet, ancillary, _, _ = sock.recvmsg(MAX_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    if not packet:
        return None
    fds = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data)
    try:
        return decoder.decode(packet), fds.tolist()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        for fd in fds:
            os.close(fd)
        raise WireError(f"{len(packet)} bytes between the supervisor and its warm parent ({error})") from None


def memfd_with(content: bytes) -> int:
    """A descriptor of nameless memory that holds `content`, to be read from its start."""
    fd = os.memfd_create("shoal-spec", os.MFD_CLOEXEC)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd
