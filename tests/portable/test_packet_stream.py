"""Packets over a stream, which take the place of SOCK_SEQPACKET: whole under signals, with descriptors that no program inherits."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from shoal import system
from shoal.system import PacketStream

PACKET = 4 << 20
"""More than a socket takes at once."""


@pytest.fixture
def ends() -> Iterator[tuple[PacketStream, PacketStream]]:
    one, other = (PacketStream(fileno=end.detach()) for end in socket.socketpair())
    with one, other:
        yield one, other


def test_a_packet_sent_by_a_signals_handler_comes_behind_the_one_that_is_being_sent(
    ends: tuple[PacketStream, PacketStream],
) -> None:
    sender, receiver = ends
    is_blocked, received = threading.Event(), list[bytes]()
    sender.setblocking(False)

    def receive() -> None:
        # The first part is there, so the sender waits within its packet; there the signal finds it.
        assert receiver.recv_into(bytearray(1), 1, socket.MSG_PEEK) == 1
        is_blocked.set()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert handled.wait(30)
        received.extend(receiver.next_packet() or b"" for _ in range(2))

    handled = threading.Event()

    def send(*_: object) -> None:
        sender.send(b"from the handler")
        handled.set()

    before = signal.signal(signal.SIGUSR1, send)
    reader = threading.Thread(target=receive)
    reader.start()
    try:
        sender.send(bytes(PACKET))
    finally:
        reader.join()
        signal.signal(signal.SIGUSR1, before)
    assert is_blocked.is_set()
    assert [len(each) for each in received] == [PACKET, len(b"from the handler")]


class Interrupted(PacketStream):
    """A signal's handler sends, too, just before the first packet that finds no room."""

    def _send_whole(self, packet: bytes, ancdata: Any, flags: int) -> None:
        if len(packet) > 100:
            self.send(b"from the handler")
        super()._send_whole(packet, ancdata, flags)


def test_a_handlers_packet_is_sent_though_the_one_it_came_behind_found_no_room() -> None:
    one, other = socket.socketpair()
    one.setblocking(False)
    num_filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            num_filled += one.send(bytes(4096))
    sender, receiver = Interrupted(fileno=one.detach()), PacketStream(fileno=other.detach())
    with sender, receiver:
        drained = threading.Timer(0.2, lambda: socket.socket.recv(receiver, num_filled, socket.MSG_WAITALL))
        drained.start()
        with pytest.raises(BlockingIOError):
            sender.send(bytes(4096))
        drained.join()
        assert receiver.next_packet(socket.MSG_DONTWAIT) == b"from the handler"


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_descriptors_that_came_are_not_inherited_and_unwanted_ones_are_closed(
    ends: tuple[PacketStream, PacketStream], monkeypatch: pytest.MonkeyPatch, is_asked_for: bool
) -> None:
    monkeypatch.setattr(system, "CMSG_CLOEXEC", 0)
    sender, receiver = ends
    given, peer = socket.socketpair()
    with given, peer:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [given.fileno()]))
        sender.sendmsg([b"take it"], [rights])
        if is_asked_for:
            packet, [(_, _, came)], _, _ = receiver.recvmsg(100, 100)
            [fd] = array("i", came)
            assert not os.get_inheritable(fd)
            os.close(fd)
        else:
            packet = system.receive_from(receiver, 100)
        assert packet == b"take it"
        given.close()
        assert peer.recv(1) == b""  # nobody else has it open
