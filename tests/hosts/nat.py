"""A host behind network address translation: others reach it at a public address that it does not have itself.

The kernels of containers have no netfilter, so packets pass through this
process: between a TUN device at the host, whose address is private, and one
where the bridges are, to which the public address is routed.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import threading

from namespaces import INTERFACE, Cluster, Host

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CHECKSUM_AT = {socket.IPPROTO_TCP: 16, socket.IPPROTO_UDP: 6}
GATEWAY = "10.77.0.254"


class Nat:
    """Takes a host off its bridge and puts it behind `public`, until `close`."""

    def __init__(self, cluster: Cluster, host: Host, *, private: str, public: str) -> None:
        self._private, self._public = socket.inet_aton(private), socket.inet_aton(public)
        with cluster.network():
            self._outside = _tun("nat0")
        for command in (
            f"ip addr add {GATEWAY}/24 dev bridge",
            "ip link set nat0 up",
            f"ip route add {public}/32 dev nat0",
            "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.bridge.proxy_arp=1",
        ):
            cluster.switch(*command.split())
        with host.network():
            self._inside = _tun("lan0")
        for command in (
            f"ip link set {INTERFACE} down",
            f"ip addr add {private}/24 dev lan0",
            "ip link set lan0 up",
            "ip route add default dev lan0",
        ):
            host.run(command.split())
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._pass_on, name="nat")
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for fd in (self._inside, self._outside, self._stop):
            os.close(fd)

    def _pass_on(self) -> None:
        while True:
            ready, _, _ = select.select([self._inside, self._outside, self._stop], [], [])
            if self._stop in ready:
                return
            if self._inside in ready:
                self._send(self._outside, os.read(self._inside, 65536), 12, self._private, self._public)
            if self._outside in ready:
                self._send(self._inside, os.read(self._outside, 65536), 16, self._public, self._private)

    @staticmethod
    def _send(to: int, packet: bytes, at: int, before: bytes, after: bytes) -> None:
        """With the address at `at` exchanged, and the checksums that cover it."""
        if packet[0] >> 4 != 4 or packet[at : at + 4] != before:
            return
        changed = bytearray(packet)
        changed[at : at + 4] = after
        _adjust(changed, 10, before, after)
        checksum = _CHECKSUM_AT.get(packet[9])
        if checksum is not None:
            _adjust(changed, (packet[0] & 15) * 4 + checksum, before, after)
        os.write(to, changed)


def _adjust(packet: bytearray, at: int, before: bytes, after: bytes) -> None:
    """RFC 1624: the checksum at `at` once 4 bytes that it covers have changed."""
    (checksum,) = struct.unpack_from("!H", packet, at)
    total = (checksum ^ 0xFFFF) + sum(word ^ 0xFFFF for word in struct.unpack("!2H", before))
    total += sum(struct.unpack("!2H", after))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", packet, at, total ^ 0xFFFF)


def _tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd
