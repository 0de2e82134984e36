"""Messages between a fork server and its owner, and the passing of descriptors.

One packet is one message: JSON on a pair of sockets that only the two processes hold. A child's
specification goes in a file beside the packet: an environment may be larger than a packet, and the
server does not read it.
"""

from __future__ import annotations

import os
import socket
from array import array
from typing import Annotated, TypeVar

import msgspec

from shoal import system
from shoal.errors import WireError

MAX_PACKET_BYTES = 64 * 1024
MAX_FDS = 96
"""The kernel takes 253 at once. A worker of a job with servers gets a descriptor for each possible one."""


class Fork(msgspec.Struct, tag="fork", forbid_unknown_fields=True, frozen=True):
    """ "Fork a child." Owner to server; answered by Forked or NotForked."""

    role: str  # for the function that the child runs
    title: str  # of the process, as `ps` shows it
    fds: list[str]  # names of the descriptors beside the packet, in order


class Signal(msgspec.Struct, tag="signal", forbid_unknown_fields=True, frozen=True):
    """ "Send this signal to your child, and to its whole group if it is SIGKILL."

    No answer; a child that is gone is no error. It goes through the server
    because only a parent knows that the number still means that child.
    """

    pid: int
    signum: Annotated[int, msgspec.Meta(ge=1, le=64)]


class Close(msgspec.Struct, tag="close", forbid_unknown_fields=True, frozen=True):
    """ "End your children and yourself." No answer. A closed socket says the same with no grace."""

    grace_s: float  # for children to end by themselves before SIGKILL


Command = Fork | Signal | Close


class ServerReady(msgspec.Struct, tag="ready", forbid_unknown_fields=True, frozen=True):
    """ "I have imported everything and can fork." Said once, by a server that is started as a program."""

    import_s: float
    # Hash of what was imported: the owner's own files may have been replaced since it started
    protocol_version: int = msgspec.field(name="dialect")


class Forked(msgspec.Struct, tag="forked", forbid_unknown_fields=True, frozen=True):
    """The child lives. With this message travels a descriptor that is readable once it has ended."""

    pid: int


class NotForked(msgspec.Struct, tag="not-forked", forbid_unknown_fields=True, frozen=True):
    """There is no child, and why."""

    reason: str


class ChildExited(msgspec.Struct, tag="exited", forbid_unknown_fields=True, frozen=True):
    """A child ended and was reaped; so was everything left in its process group, where it had its own."""

    pid: int
    code: int  # as `os.waitstatus_to_exitcode` has it: minus the signal for a killed process


Report = ServerReady | Forked | NotForked | ChildExited

_commands = msgspec.json.Decoder(Command)
_reports = msgspec.json.Decoder(Report)
_encoder = msgspec.json.Encoder()

T = TypeVar("T")


def send(sock: socket.socket, message: Command | Report, fds: list[int] | None = None) -> None:
    """Send one message, with descriptors. The receiver gets copies; the caller's stay open."""
    send_packet(sock, _encoder.encode(message), fds)


def receive_command(sock: socket.socket) -> tuple[Command, list[int]] | None:
    """The next command and its descriptors; None when the owner is gone."""
    return _receive(sock, _commands)


def receive_report(sock: socket.socket) -> tuple[Report, list[int]] | None:
    """The next report and its descriptors; None when the server is gone."""
    return _receive(sock, _reports)


def _receive(sock: socket.socket, decoder: msgspec.json.Decoder[T]) -> tuple[T, list[int]] | None:
    try:
        packet, fds = receive_packet(sock, max_bytes=MAX_PACKET_BYTES, max_fds=MAX_FDS)
    except (EOFError, ConnectionError):
        return None
    try:
        return decoder.decode(packet), fds
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        for fd in fds:
            os.close(fd)
        raise WireError(f"{len(packet)} bytes between a fork server and its owner ({error})") from None


def send_packet(sock: socket.socket, data: bytes, fds: list[int] | None = None, *, flags: int = 0) -> None:
    """One packet, and copies of descriptors beside it."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    sock.sendmsg([data], rights, flags)


def receive_packet(
    sock: socket.socket, *, max_bytes: int, max_fds: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """One packet, and the descriptors beside it, the caller's to close. EOFError where the other end is gone."""
    # Not socket.recv_fds: in Python 3.11 it drops the flag that keeps descriptors from a child's children.
    room = socket.CMSG_SPACE(max_fds * array("i").itemsize)
    data, ancillary, _, _ = sock.recvmsg(max_bytes, room, system.CMSG_CLOEXEC | flags)
    fds = array("i")
    for level, kind, rights in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    if not data:
        raise EOFError("the other end was closed")
    return data, fds.tolist()


def file_with(content: bytes) -> int:
    """A descriptor of a nameless file that holds `content`, to be read from its start."""
    fd = system.anonymous_file("shoal-spec")
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd
