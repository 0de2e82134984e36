"""Joining a job: how a machine that only has the key becomes a host with a certificate.

    joiner                                   head
      TLS 1.3, the head's certificate unknown
      JoinHost(nonce)            ─────────▶
                                 ◀─────────   HostChallenge(nonce)
      HostProof(mac, facts)      ─────────▶  key and versions and clock are checked
                                 ◀─────────   HeadProof(mac, script, run directory)
      HostFiles(hash, mark)      ─────────▶  the script is compared
                                 ◀─────────   HostAdmitted(number, certificate)

Both MACs cover the certificate that the joiner saw, so both ends detect a man in the middle, who
has another one. The head reveals nothing about the job to a peer with a wrong key. The private key
never leaves the joiner. Every later connection presents the certificate.
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import hashlib
import hmac
import ipaddress
import os
import platform
import queue
import random
import secrets
import socket
import ssl
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import psutil

import shoal
from shoal.cluster.hosts import run_copy
from shoal.cluster.hosts.authority import Authority, new_key
from shoal.cluster.hosts.files import FileService
from shoal.cluster.hosts.seats import HostSeat, JoiningHost, Seats
from shoal.cluster.launch import roles
from shoal.cluster.launch.threads import available_cores
from shoal.errors import ConfigError, HostNotAdmitted, WireError
from shoal.runtime.transport import tls
from shoal.runtime.transport.framing import read_message, send_message
from shoal.runtime.transport.messages.hosts import (
    AgentReady,
    HeadProof,
    HostAdmitted,
    HostChallenge,
    HostFiles,
    HostProof,
    HostRefused,
    JoinHost,
    ListFiles,
    MeasureLink,
)
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.tls import Credentials, Identity, TlsStream

KEY_VARIABLE = "SHOAL_JOIN_KEY"
MIN_KEY_CHARACTERS = 20
"""A key is proven by a MAC, which an eavesdropper may try to brute-force: the key must be too long for that."""

HANDSHAKE_S = 15.0
"""From a connection to its admission; a slower peer is dropped."""

CONNECT_EVERY_S = 0.2

MAX_HANDSHAKES = 64
MAX_HANDSHAKES_PER_ADDRESS = 8
"""With more under way, the oldest is dropped: a handshake takes a fraction of a second, a silent peer its whole time."""

MAX_CLOCK_SKEW_S = 60.0
"""Between head and host. Certificates, logs and the ledger carry times."""

M = TypeVar("M", bound=Message)
T = TypeVar("T")


# ---- the key ------------------------------------------------------------------------------------


def new_join_key() -> str:
    """130 random bits, to be read aloud: 26 letters and digits in groups."""
    letters = base64.b32encode(secrets.token_bytes(20)).decode()[:26]
    return "-".join(letters[at : at + 7] for at in range(0, 26, 7))


def read_key(path: str | None) -> str | None:
    """The key from a file of mode 0600, else from the environment; None where there is neither.

    The variable is removed, so that no child of this process inherits the key.
    """
    if path is None:
        said = os.environ.pop(KEY_VARIABLE, None)
        return _checked(said, KEY_VARIABLE) if said is not None else None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise ConfigError(
                    f"the join key's file {path} is no regular file. Nothing was started; name a file of mode 0600 that holds the key."
                )
            if info.st_uid != os.getuid() or info.st_mode & 0o077:
                raise ConfigError(
                    f"the join key's file {path} can be read by others (mode {stat.S_IMODE(info.st_mode):04o}, user "
                    f"{info.st_uid}). Nothing was started; make it yours alone: chmod 600 {path}."
                )
            said = file.read(4096).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(
            f"the join key's file {path} cannot be read: {error.strerror}. Nothing was started."
        ) from None
    return _checked(said, path)


def ask_for_key(address: str) -> str:
    """Prompt for the key without echo."""
    if not sys.stdin.isatty():
        raise ConfigError(
            f"joining {address} needs the key that the head printed, and there is no terminal to type it. Nothing was "
            f"started; put it into a file of mode 0600 and give --join-key-file, or into {KEY_VARIABLE}."
        )
    return _checked(getpass.getpass("join key: "), "the key that was typed")


def _checked(said: str, source: str) -> str:
    key = said.strip()
    if len(key) < MIN_KEY_CHARACTERS:
        raise ConfigError(
            f"{source} holds a join key of {len(key)} characters, and one has at least {MIN_KEY_CHARACTERS}. Nothing was "
            "started; to join, give the key of the head, which makes and prints one where it is given none."
        )
    return key


# ---- the head -----------------------------------------------------------------------------------


class JobFacts(NamedTuple):
    """The job as a joining host has to match it."""

    job: str
    script: str
    script_hash: str
    run_dir: str
    run_dir_mark: str
    is_shipped: bool
    launches: tuple[float, ...] = ()
    """Start time of each launch of the run."""

    journal: str = ""
    """URL of the etcd in which the head is recorded."""


class JoinedHost(NamedTuple):
    """A host agent that has connected with its certificate."""

    number: int
    incarnation: int
    stream: TlsStream
    address: str
    """As the head sees it."""


class _Handshake:
    """A connection that has proven nothing yet."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock, self.peer = sock, peer

    def cut(self) -> None:
        """End it, whatever its thread waits for."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)  # that of TLS is for the thread that reads


def _crowded_out(under_way: Sequence[_Handshake], peer: str) -> _Handshake | None:
    """The handshake, of all in the order they began, that has to make room for one more of `peer`."""
    of_peer = [each for each in under_way if each.peer == peer]
    if len(of_peer) >= MAX_HANDSHAKES_PER_ADDRESS:
        return of_peer[0]
    if len(under_way) < MAX_HANDSHAKES:
        return None
    counts = Counter(each.peer for each in under_way)
    return max(under_way, key=lambda each: counts[each.peer])  # the first of those with the most


class Door:
    """The head's listening socket: admits hosts, and passes connected agents on.

    Handshakes run in threads, each with a deadline; the supervisor never waits for them. `fileno`
    is readable when `joined` has something.
    """

    def __init__(
        self,
        listener: socket.socket,
        authority: Authority,
        key: str,
        facts: JobFacts,
        numbers: Sequence[int],
        files: FileService,
        names: Mapping[int, str],
        services: Sequence[str] = (),
    ) -> None:
        self._names = names
        self._seats = Seats(numbers, facts.job, names, services)
        self.refusals: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._joined: queue.SimpleQueue[JoinedHost] = queue.SimpleQueue()
        self._listener, self._authority, self._facts, self._files = listener, authority, facts, files
        self._key = key.encode()
        private, public = new_key()
        credentials = Credentials(
            name="head",
            incarnation=0,
            authority=authority.certificate,
            certificate=authority.sign(public, "head"),
            key=private,
        )
        self._context = tls.context(credentials, ssl.PROTOCOL_TLS_SERVER)
        self._context.verify_mode = ssl.CERT_OPTIONAL  # a peer without a certificate may only join
        self._fingerprint = hashlib.sha256(
            ssl.PEM_cert_to_DER_cert(credentials.certificate.decode())
        ).digest()
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._under_way: list[_Handshake] = []
        self._wake, self._waker = socket.socketpair()
        for sock in (self._wake, self._waker):
            # A full socket wakes up all the same, and a handshake must not block on it.
            sock.setblocking(False)
        self._thread = threading.Thread(target=self._accept, name="join listener", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._wake.fileno()

    @property
    def seats(self) -> dict[int, HostSeat]:
        return self._seats.taken

    def open_seats(self, num_hosts: int) -> None:
        """Let the key admit more hosts, up to so many with the head."""
        with self._released:
            self._seats.open(num_hosts)
            self._released.notify_all()

    def release(self, number: int, incarnation: int) -> None:
        """Free the number of a host that was lost, or failed to join."""
        with self._released:
            self._seats.release(number, incarnation)
            self._released.notify_all()  # a number is not for everyone

    def launched_again(self, launches: Sequence[float]) -> None:
        """Set the start times of the run's launches, for hosts that join from now on."""
        self._facts = self._facts._replace(launches=tuple(launches))

    def joined(self) -> list[JoinedHost]:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._joined.get_nowait())
        return found

    def close(self) -> None:
        with self._released:
            self._seats.close()
            self._released.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._listener.close()
        self._thread.join(5.0)
        for each in self.joined():
            each.stream.close()
        self._wake.close()
        self._waker.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0 or not _is_listening(self._listener):
                    return
                time.sleep(0.05)  # out of descriptors: one may be free in the next turn
                continue
            handshake = _Handshake(sock, str(address[0]))
            with self._lock:
                crowded_out = _crowded_out(self._under_way, handshake.peer)
                if crowded_out is not None:
                    self._under_way.remove(crowded_out)
                    crowded_out.cut()
                self._under_way.append(handshake)
            threading.Thread(
                target=self._serve, args=(handshake,), name=f"join {handshake.peer}", daemon=True
            ).start()

    def _serve(self, handshake: _Handshake) -> None:
        # The deadline is the connection's as a whole: a peer that sends byte by byte is cut off too.
        stream: ssl.SSLSocket | None = None
        sock, peer = handshake.sock, handshake.peer
        watchdog = threading.Timer(HANDSHAKE_S, handshake.cut)
        watchdog.daemon = True
        watchdog.start()
        try:
            sock.settimeout(HANDSHAKE_S)
            tls.keep_alive(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            assert isinstance(stream, TlsStream)
            self._go_on_as(handshake, stream)
            stream.do_handshake()
            if stream.getpeercert():
                self._is_over(handshake)  # hosts at work are never dropped, and keep no others from joining
                first = read_message(stream)[0]
                watchdog.cancel()
                if isinstance(first, ListFiles | MeasureLink):
                    identity = _as_host(stream)
                    with self._lock:
                        self._seats.heard(identity.number, identity.incarnation, time.monotonic())
                    self._files.serve(stream, first)
                else:
                    self._hand_over(stream, peer, _expect(first, AgentReady))
                    stream = None
            else:
                self._admit(stream, handshake)
        except (OSError, EOFError, WireError) as error:
            self._refused(peer, in_words(error))
        except HostNotAdmitted as error:
            self._refused(peer, error.reason)
            if stream is not None:
                with contextlib.suppress(OSError, WireError):
                    send_message(stream, HostRefused(error.reason))
        finally:
            watchdog.cancel()
            self._is_over(handshake)
            if stream is not None:
                stream.close()
            else:
                sock.close()

    def _go_on_as(self, handshake: _Handshake, stream: TlsStream) -> None:
        with self._lock:
            handshake.sock = stream
            if handshake not in self._under_way:
                raise ConnectionAbortedError("it was dropped, because too many others were joining")

    def _is_over(self, handshake: _Handshake) -> None:
        with self._lock:
            if handshake in self._under_way:
                self._under_way.remove(handshake)

    def _admit(self, stream: TlsStream, handshake: _Handshake) -> None:
        peer = handshake.peer
        hello = _expect(read_message(stream)[0], JoinHost)
        nonce = secrets.token_bytes(32)
        send_message(stream, HostChallenge(nonce))
        proof = _expect(read_message(stream)[0], HostProof)
        said = msgspec.structs.replace(proof, mac=bytes(32))
        bound = hello.nonce + nonce + self._fingerprint
        if not hmac.compare_digest(proof.mac, _mac(self._key, b"host", bound, said)):
            raise HostNotAdmitted("the join key is not this job's")
        self._is_over(handshake)  # a peer with the key is never dropped
        _compare(proof)
        number, incarnation = self._take_seat(proof, peer)
        try:
            facts = self._facts
            answer = HeadProof(
                bytes(32), facts.job, facts.script, facts.run_dir, facts.is_shipped, list(facts.launches)
            )
            mac = _mac(self._key, b"head", bound, answer)
            send_message(stream, msgspec.structs.replace(answer, mac=mac))
            files = _expect(read_message(stream)[0], HostFiles)
            if not facts.is_shipped:
                _compare_script(files, facts, proof.hostname)
            sees_run_dir = files.run_dir_mark == facts.run_dir_mark
            if not sees_run_dir:
                run_copy.refuse_fork(proof.hostname, files.launches, files.alive, facts.launches)
            with self._lock:
                self._seats.admit(number, incarnation, sees_run_dir=sees_run_dir)
            try:
                certificate = self._authority.sign(proof.public_key, f"host-{number}", incarnation)
            except ValueError:
                raise HostNotAdmitted("its public key cannot be read") from None
            send_message(
                stream,
                HostAdmitted(
                    number,
                    incarnation,
                    self._authority.certificate,
                    certificate,
                    self._authority.token_key,
                    sees_run_dir,
                    facts.journal,
                ),
            )
        except BaseException:
            self.release(number, incarnation)
            raise

    def _take_seat(self, proof: HostProof, peer: str) -> tuple[int, int]:
        """Number and incarnation for a host that joins, once there is one for it."""
        joiner = JoiningHost(
            proof.hostname,
            peer,
            proof.num_cores,
            proof.machine,
            proof.wants,
            proof.role,
            self._named(proof, peer),
        )
        with self._released:
            asked_at = now = time.monotonic()
            while (taken := self._seats.take(joiner, asked_at, now)) is None:
                self._released.wait(self._seats.decides_at(joiner, asked_at) - now)
                now = time.monotonic()
            return taken

    def _named(self, proof: HostProof, peer: str) -> tuple[int, ...]:
        if proof.wants >= 0 or proof.role:
            return ()  # it does not go by its name, and resolving those of all hosts takes time
        return tuple(
            number for number, name in self._names.items() if proof.hostname == name or peer in resolved(name)
        )

    def _hand_over(self, stream: TlsStream, peer: str, ready: AgentReady) -> None:
        identity = _as_host(stream)
        if (identity.number, identity.incarnation) != (ready.number, ready.incarnation):
            raise WireError(f"{identity.name} says that it is host {ready.number}")
        with self._lock:  # also of `close`, which closes those that were not taken in
            self._seats.connect(ready.number, ready.incarnation)
            self._joined.put(JoinedHost(ready.number, ready.incarnation, stream, peer))
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    def _refused(self, peer: str, reason: str) -> None:
        self.refusals.put(f"{peer}: {reason}")
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")


def _as_host(stream: TlsStream) -> Identity:
    if stream.identity.role != "host":
        raise WireError(f"{stream.identity.name} has nothing to ask of the head")
    return stream.identity


def _compare(proof: HostProof) -> None:
    ours = own_versions()
    for what, here in ours.items():
        there = getattr(proof, what)
        if there != here:
            raise HostNotAdmitted(
                f"{proof.hostname} has {what} {there} and the head {here}; install the same there"
            )
    if proof.protocol != roles.protocol_version():
        raise HostNotAdmitted(
            f"{proof.hostname} has shoal {proof.shoal} like the head, but not the same files of it; install the same there"
        )
    skew_s = proof.clock - time.time()
    if not abs(skew_s) <= MAX_CLOCK_SKEW_S:
        raise HostNotAdmitted(
            f"the clock of {proof.hostname} is {abs(skew_s):,.0f} s {'ahead of' if skew_s > 0 else 'behind'} the head's; "
            "set it (NTP) and join again"
        )


def _compare_script(files: HostFiles, facts: JobFacts, hostname: str) -> None:
    if not files.script_hash:
        raise HostNotAdmitted(
            f"{facts.script} does not exist on {hostname}; use a shared file system or copy it there, or start the job "
            "with --ship"
        )
    if files.script_hash != facts.script_hash:
        raise HostNotAdmitted(
            f"{facts.script} on {hostname} is not the script of this job (SHA-256 {files.script_hash[:12]} there, "
            f"{facts.script_hash[:12]} on the head); copy it there, or start the job with --ship"
        )


# ---- the joiner ---------------------------------------------------------------------------------


class Admission(NamedTuple):
    """Answer to a host that was admitted."""

    number: int
    credentials: Credentials
    token_key: bytes
    facts: HeadProof
    sees_run_dir: bool
    own_address: str
    """Of the interface that leads to the head."""
    journal: str
    """URL of the etcd in which the head is recorded; empty: none."""
    interfaces: str = ""
    """Names of the requested interfaces, comma-separated."""
    advertised: str = ""
    """Address under which other hosts reach this one."""


def join(
    address: str,
    key: str,
    *,
    timeout_s: float,
    wants: int = -1,
    run_dir: Path = Path("runs"),
    source: str | None = None,
    cores: int | None = None,
    role: str = "",
    say: Callable[[str], None] = lambda told: None,
) -> Admission:
    """Join the job at `shoal://host:port`. Raises HostNotAdmitted with the head's reason; ConfigError if nobody answers.

    The head may be started last, so attempts go on for `timeout_s`, announced through `say`.
    `run_dir` is the place of a possible copy of the run, `source` the local address to connect
    from, `cores` the cores the job may use, `role` that of a service.
    """
    host, port = tls.split_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the MAC of the key proves the head
    context.sslsocket_class = TlsStream
    source = source or _loopback_source(host, wants)
    deadline, place = time.monotonic() + timeout_s, tls.join_address("", host, port)

    def prove() -> _Proven:
        left_s = max(0.1, deadline - time.monotonic())
        with socket.create_connection((host, port), left_s, (source, 0) if source else None) as sock:
            sock.settimeout(HANDSHAKE_S)
            own_address = sock.getsockname()[0]
            stream = context.wrap_socket(sock)
            try:
                return _prove(stream, key.encode(), own_address, wants, cores, role)
            except BaseException:
                stream.close()
                raise

    def tell(error: Exception) -> None:
        say(f"no head answers at {place} yet ({in_words(error)}); trying for {timeout_s:g} s")

    try:
        proven = retried(prove, timeout_s, tell)
        with proven.stream:
            return _be_admitted(proven, run_dir)
    except socket.gaierror as error:
        raise ConfigError(
            f"{host} is no host that this one knows ({error.strerror}). Nothing was started."
        ) from None
    except (OSError, EOFError, WireError) as error:
        raise ConfigError(
            f"no job can be joined at {address}: {in_words(error)}. Nothing was started; the address is what the head printed, and must "
            "be reachable from here."
        ) from None


def in_words(error: Exception) -> str:
    """In words of a user: those of OpenSSL name its source files."""
    if isinstance(error, EOFError | ssl.SSLEOFError):
        return "it hung up"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid here: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"it does not speak TLS 1.3 as hosts of a job do: {error.reason or 'no reason is known'}"
    if isinstance(error, TimeoutError):
        return "it was silent for too long"
    return getattr(error, "strerror", None) or str(error)


def retried(
    act: Callable[[], T], timeout_s: float, tell: Callable[[Exception], None] = lambda error: None
) -> T:
    """Result of talking to the head, which may be started last and drops the oldest of too many handshakes.

    `tell` is called with the first error. HostNotAdmitted is the head's answer, and final.
    """
    deadline, has_told = time.monotonic() + timeout_s, False
    while True:
        try:
            return act()
        except (OSError, EOFError, WireError) as error:
            # Hosts that were dropped together must not all come back together.
            wait_s = CONNECT_EVERY_S * (1 + random.random())
            if time.monotonic() + wait_s >= deadline:
                raise
            if not has_told:
                has_told = True
                tell(error)
        time.sleep(wait_s)


def _loopback_source(host: str, wants: int) -> str | None:
    """Source address for a slot on the head's own machine: each host needs an address of its own, and
    loopback has 16 million.
    """
    try:
        is_shared = wants > 0 and ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return None
    return str(ipaddress.IPv4Address("127.0.0.1") + wants) if is_shared else None


class _Proven(NamedTuple):
    """A connection on which both ends have proven that they have the key."""

    stream: ssl.SSLSocket
    own_address: str
    private_key: bytes
    answer: HeadProof


def _prove(
    stream: ssl.SSLSocket, key: bytes, own_address: str, wants: int, cores: int | None, role: str
) -> _Proven:
    fingerprint = hashlib.sha256(stream.getpeercert(binary_form=True) or b"").digest()
    private, public = new_key()
    nonce = secrets.token_bytes(32)
    # Services, and slots that an engine gave a number and cores, may share a machine and its address.
    shared = f" {role} {os.getpid()}" if role else f" slot {wants}" if wants > 0 and cores else ""
    send_message(stream, JoinHost(nonce))
    challenge = _expect(read_message(stream)[0], HostChallenge)
    bound = nonce + challenge.nonce + fingerprint
    proof = HostProof(
        mac=bytes(32),
        public_key=public,
        hostname=platform.node()[:200],
        protocol=roles.protocol_version(),
        clock=time.time(),
        num_cores=cores or available_cores(),
        machine=machine_id(own_address + shared),
        wants=wants,
        role=role,
        **own_versions(),
    )
    send_message(stream, msgspec.structs.replace(proof, mac=_mac(key, b"host", bound, proof)))
    answer = _expect(read_message(stream)[0], HeadProof)
    if not hmac.compare_digest(
        answer.mac, _mac(key, b"head", bound, msgspec.structs.replace(answer, mac=bytes(32)))
    ):
        raise HostNotAdmitted(
            "the process that answers there does not have the join key: it is not the head of this job"
        )
    return _Proven(stream, own_address, private, answer)


def _be_admitted(proven: _Proven, run_dir: Path) -> Admission:
    stream, own_address, private, answer = proven
    mark = run_dir_mark(answer.run_dir)
    launches, alive = run_copy.history(run_dir, answer.job, answer.launches)
    send_message(stream, HostFiles(file_hash(answer.script), mark, launches, alive))
    admitted = _expect(read_message(stream)[0], HostAdmitted)
    credentials = Credentials(
        name=f"host-{admitted.number}",
        incarnation=admitted.incarnation,
        authority=admitted.authority,
        certificate=admitted.certificate,
        key=private,
    )
    return Admission(
        admitted.number,
        credentials,
        admitted.token_key,
        answer,
        admitted.sees_run_dir,
        own_address,
        admitted.journal,
        advertised=own_address,
    )


# ---- both ---------------------------------------------------------------------------------------


def own_versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "shoal": shoal.__version__,
    }


def machine_id(own_address: str) -> bytes:
    """Identity of this machine, as far as it has one: name, system id, network hardware, and its own address.

    Each alone may be shared: the name by clones, the id by copies of a disk image, hardware
    addresses by containers of several machines. Several hosts on one machine have different
    addresses.
    """
    try:
        system = Path("/etc/machine-id").read_bytes()
    except OSError:
        system = b""
    hardware = {
        each.address
        for all_of_it in psutil.net_if_addrs().values()
        for each in all_of_it
        if each.family == psutil.AF_LINK
    }
    known = (platform.node().encode(), system, *map(str.encode, sorted(hardware)), own_address.encode())
    return hashlib.sha256(b"\0".join(known)).digest()


def file_hash(path: str) -> str:
    """SHA-256 of a file, empty where there is none."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


MARK = "host-mark"


def make_mark(run_dir: Path) -> str:
    """Write a random word into the run directory: a host that can read it shares the file system."""
    word = secrets.token_hex(16)
    (run_dir / MARK).write_text(word)
    return word


def run_dir_mark(run_dir: str) -> str:
    try:
        fd = os.open(os.path.join(run_dir, MARK), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, encoding="ascii") as file:
            return file.read(64)
    except (OSError, UnicodeDecodeError):
        return ""


def _mac(key: bytes, side: bytes, bound: bytes, message: Message) -> bytes:
    return hmac.digest(key, side + b"\0" + bound + msgspec.msgpack.encode(message), "sha256")


def _expect(message: Message, kind: type[M]) -> M:
    if isinstance(message, HostRefused):
        raise HostNotAdmitted(message.reason)
    if not isinstance(message, kind):
        raise WireError(f"a {kind.__name__} was expected, and a {type(message).__name__} came")
    return message


def resolved(name: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(name.rpartition("@")[2], None)}
    except OSError:
        return set()


def _is_listening(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False
