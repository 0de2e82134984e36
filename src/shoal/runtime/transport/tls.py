"""Connections between hosts: TLS 1.3, both ends with a certificate of the job's own authority.

A certificate names a role and its incarnation (`worker-3`, 0); the accepting end learns from it who
connects, and a client states whom it expects. Machine names play no part.
`cluster/hosts/authority.py` issues certificates; this module only presents and verifies them.
`--plaintext` uses the same interface with a token instead of encryption, for a trusted fabric.

A stream behaves like a plain socket: a non-blocking one raises BlockingIOError, and `pending`
counts bytes that were decrypted and that no selector reports.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import os
import re
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from shoal.errors import ConfigError, WireError
from shoal.runtime.forkserver.messages import file_with

WRITE_BYTES = 256 << 10
"""Most bytes for one call of OpenSSL, which cuts it into records: fewer calls cost less."""

TLS, PLAIN = "tls://", "plain://"

_NAME = re.compile(r"(worker|server|host)-[0-9]{1,6}|head|coordinator")
_TOKEN = struct.Struct("!4s24sI32s")
_MAGIC = b"SHPT"


class Identity(NamedTuple):
    """The process at the other end, by its certificate."""

    name: str
    """`worker-3`, `server-0`, `host-1`, `coordinator` or `head`."""

    incarnation: int

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]

    @property
    def number(self) -> int:
        """Rank of a worker, number of a server or host; -1 for roles of which there is one."""
        return int(self.name.partition("-")[2] or -1)


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Certificate and key of one process; part of the specification it is started with."""

    name: str
    incarnation: int
    authority: bytes = b""  # PEM
    certificate: bytes = b""  # PEM
    key: bytes = b""  # PEM
    token_key: bytes = b""  # set with --plaintext, which has no certificates

    def __repr__(self) -> str:
        """Without the key: specs end up in tracebacks."""
        return f"Credentials({self.name}, incarnation {self.incarnation})"

    @property
    def scheme(self) -> str:
        return PLAIN if self.token_key else TLS

    def connect(
        self, address: str, *, expect: str, timeout_s: float, source: str | None = None
    ) -> TlsStream | PlainStream:
        """Connect to `tls://ip:port`. Raises OSError without an answer, WireError if it is not `expect`."""
        host, port = split_address(address)
        sock = socket.create_connection((host, port), timeout_s, (source, 0) if source else None)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock)
            if self.token_key:
                sock.sendall(self._token())
                return PlainStream(sock)
            sock = stream = _client_context(self).wrap_socket(sock)
            assert isinstance(stream, TlsStream)
            if stream.identity.name != expect:
                raise WireError(f"{address} is {stream.identity.name}, and {expect} was expected there")
            return stream
        except ssl.SSLCertVerificationError as error:
            sock.close()
            raise WireError(f"{address} has no certificate of this job ({error.verify_message})") from None
        except BaseException:
            sock.close()
            raise

    def accept(self, listener: socket.socket) -> TlsStream | PlainStream:
        """Next connection, non-blocking; its first reads do the handshake, so a silent peer blocks nobody.

        `identity` is known once something was read.
        """
        sock, _ = listener.accept()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock)
            sock.setblocking(False)
            if self.token_key:
                return PlainStream(sock, token_key=self.token_key)
            stream = server_context(self).wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except BaseException:
            sock.close()
            raise
        assert isinstance(stream, TlsStream)
        return stream

    def _token(self) -> bytes:
        name = self.name.encode()
        return _TOKEN.pack(_MAGIC, name, self.incarnation, _mac(self.token_key, name, self.incarnation))


class TlsStream(ssl.SSLSocket):
    """A TLS connection that can be used like a plain socket, non-blocking ones included."""

    @property
    def identity(self) -> Identity:
        """The other end. WireError where its certificate names no role, or the handshake is not over."""
        try:
            certificate = self.getpeercert()
        except ValueError:  # also of a connection that broke after what was read from it
            raise WireError("its handshake is not over, or its connection is") from None
        return _identity_of(certificate or {})

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Fills as much of the buffer as is there: one record is little for what is large."""
        view = memoryview(buffer)[: nbytes or None]
        if self.gettimeout() != 0:
            return super().recv_into(view, None, flags)  # a blocking read returns what there is
        filled, size = 0, len(view)
        read: Any = self.read  # typed as if it always made new bytes
        try:
            while filled < size:
                count = read(size - filled, view[filled:])
                if not count:
                    break
                filled += count
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not filled:
                raise BlockingIOError from None
        return filled

    def recvmsg_into(  # type: ignore[override]
        self, buffers: Any, ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, Any]:
        """No descriptor ever comes from another host."""
        return self.recv_into(buffers[0]), [], 0, None

    def send(self, data: Any, flags: int = 0) -> int:
        """Sends up to WRITE_BYTES: OpenSSL returns after every record, and a turn of the caller costs more than that."""
        with memoryview(data)[:WRITE_BYTES] as view:
            sent, size, write = 0, len(view), super().send
            try:
                while sent < size:
                    sent += write(view[sent:], flags)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not sent:
                    raise BlockingIOError from None
            return sent

    def sendmsg(self, buffers: Sequence[Any], *unused: Any) -> int:  # type: ignore[override]
        """Sends as much as the socket takes. A write that would block must be repeated with the same
        first bytes, which an in-order sender does.
        """
        sent = 0
        for chunk in _records(buffers):
            try:
                count = self.send(chunk)
            except BlockingIOError:
                if not sent:
                    raise
                break
            sent += count
            if count < len(chunk):
                break
        return sent


class PlainStream(socket.socket):
    """A connection without encryption; the first bytes of a client are a token that names it."""

    def __init__(self, sock: socket.socket, *, token_key: bytes = b"") -> None:
        timeout = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self.settimeout(timeout)
        self._token_key, self._token = token_key, bytearray()
        self._identity: Identity | None = None

    @property
    def identity(self) -> Identity:
        if self._identity is None:
            raise WireError("it did not say who it is")
        return self._identity

    def pending(self) -> int:
        return 0

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        return b"" if self._read_token() else super().recv(buflen, flags)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        return 0 if self._read_token() else super().recv_into(buffer, nbytes, flags)

    def recvmsg_into(
        self, buffers: Any, ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, Any]:
        return self.recv_into(buffers[0]), [], 0, None

    def sendmsg(self, buffers: Any, *unused: Any) -> int:
        return super().sendmsg(buffers)

    def _read_token(self) -> bool:
        """Read the token of an accepted connection first; True where it ended before that."""
        if not self._token_key or self._identity is not None:
            return False
        while len(self._token) < _TOKEN.size:
            part = super().recv(_TOKEN.size - len(self._token))
            if not part:
                return True
            self._token += part
        magic, padded, incarnation, mac = _TOKEN.unpack(self._token)
        name = padded.rstrip(b"\0")
        if magic != _MAGIC or not hmac.compare_digest(mac, _mac(self._token_key, name, incarnation)):
            raise WireError("its token is not one of this job")
        self._identity = Identity(name.decode("ascii", "replace"), incarnation)
        return False


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at one address. ConfigError where it cannot."""
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError, UnicodeError) as error:
        # Python appends the address once more, as a tuple.
        reason = str(getattr(error, "strerror", None) or error).partition(" (while attempting")[0]
        raise ConfigError(
            f"cannot listen at {host} port {port}: {reason}. Nothing was started; --bind takes an address of this "
            "machine and a free port (0: any)."
        ) from None


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `tls://host:port`, `plain://host:port` or `shoal://host:port`."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    is_host = bool(host) and (":" not in host or (host[0], host[-1]) == ("[", "]"))
    is_port = port.isdecimal() and 0 < int(port) < 1 << 16
    if scheme not in ("shoal", "tls", "plain") or not is_host or not is_port:
        raise ConfigError(
            f"'{address}' is no address; one reads shoal://10.0.0.1:7070 or shoal://[fd00::1]:7070. Nothing was started."
        )
    return host.strip("[]"), int(port)


def join_address(scheme: str, host: str, port: int) -> str:
    return f"{scheme}[{host}]:{port}" if ":" in host else f"{scheme}{host}:{port}"


def is_remote(address: str) -> bool:
    """True for an address of another host, False for the path of a Unix socket."""
    return address.startswith((TLS, PLAIN))


def is_public(host: str) -> bool:
    """True where an address can be reached from anywhere."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return True


def keep_alive(sock: socket.socket) -> None:
    """Make the kernel detect a peer whose machine is gone while nothing is sent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    # Also while something was sent: otherwise the kernel retransmits for a quarter of an hour.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)


class Connections(NamedTuple):
    """How this process connects to servers on other hosts."""

    per_server: int = 1

    sources: tuple[str, ...] = ()
    """Addresses of its host's interfaces, the one that leads to the others first; empty: that one."""


_mine: Credentials | None = None
_connections = Connections()


def use(credentials: Credentials | None, connections: Connections | None = None) -> None:
    """Make these the credentials of this process."""
    global _mine, _connections
    _mine, _connections = credentials, connections or Connections()


def connections() -> Connections:
    return _connections


def mine() -> Credentials:
    if _mine is None:
        raise WireError("this process has no certificate, and another host was to be reached")
    return _mine


def context(credentials: Credentials, purpose: int) -> ssl.SSLContext:
    """TLS 1.3 with this certificate, and certificates of the same authority demanded."""
    made = ssl.SSLContext(purpose)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # roles have certificates, machines have not
    made.verify_mode = ssl.CERT_REQUIRED
    made.sslsocket_class = TlsStream
    if purpose == ssl.PROTOCOL_TLS_SERVER:
        # Sessions are not resumed; and a client that closes with a ticket unread resets what it has sent.
        made.num_tickets = 0
    made.load_verify_locations(cadata=credentials.authority.decode())
    # Keys must never be in the file system, but OpenSSL only reads files.
    chain, key = file_with(credentials.certificate), file_with(credentials.key)
    try:
        made.load_cert_chain(f"/proc/self/fd/{chain}", f"/proc/self/fd/{key}")
    finally:
        os.close(chain)
        os.close(key)
    return made


@functools.lru_cache(maxsize=4)
def _client_context(credentials: Credentials) -> ssl.SSLContext:
    return context(credentials, ssl.PROTOCOL_TLS_CLIENT)


@functools.lru_cache(maxsize=4)
def server_context(credentials: Credentials) -> ssl.SSLContext:
    return context(credentials, ssl.PROTOCOL_TLS_SERVER)


def _identity_of(certificate: Any) -> Identity:
    fields = {key: value for part in certificate.get("subject", ()) for key, value in part}
    name, incarnation = fields.get("commonName", ""), fields.get("organizationalUnitName", "")
    if not _NAME.fullmatch(name) or not incarnation.isdecimal():
        raise WireError(f"a certificate that names no role of a job ({name!r})")
    return Identity(name, int(incarnation))


def _mac(token_key: bytes, name: bytes, incarnation: int) -> bytes:
    return hmac.digest(token_key, name + b"/" + str(incarnation).encode(), "sha256")


def _records(buffers: Sequence[Any]) -> Any:
    """Cut buffers into what one write takes; small ones are joined."""
    waiting = bytearray()
    for buffer in buffers:
        view = memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"")
        at = 0
        if waiting:
            at = min(len(view), WRITE_BYTES - len(waiting))
            waiting += view[:at]
            if len(waiting) < WRITE_BYTES:
                continue
            yield bytes(waiting)
            waiting.clear()
        while len(view) - at >= WRITE_BYTES:
            yield view[at : at + WRITE_BYTES]
            at += WRITE_BYTES
        waiting += view[at:]
    if waiting:
        yield bytes(waiting)
