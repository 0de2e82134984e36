"""System calls of Linux, each beside its replacement on macOS.

Chosen once, by whether this Python has Linux's calls. The replacements use calls that both systems
have, and `tests/portable` runs them on Linux by removing Linux's own calls.

    memfd                     an unlinked file
    pidfd                     a pipe that ends with the process
    PR_SET_PDEATHSIG          a thread that polls the parent
    SOCK_SEQPACKET            a stream with the length before each packet
    SO_PEERCRED               LOCAL_PEERCRED
    abstract socket, O_PATH   a socket file in a private directory
    eventfd                   a socket pair
    /proc                     psutil
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

IS_LINUX = hasattr(os, "memfd_create")


def missing_calls() -> str | None:
    """Why no job can be launched here: a Python on Linux that was built without Linux's calls, whose fallbacks check less."""
    # The last by tests/portable.
    if IS_LINUX or not sys.platform.startswith("linux") or hasattr(sys, "without_linux"):
        return None
    return (
        f"this Python ({sys.executable}) was built for a Linux before 3.17 and lacks os.memfd_create, which processes of a job share "
        "memory by. Nothing was started; use a Python built on glibc 2.27 or newer (that of the distribution, of pyenv, or a newer release of yours)."
    )


LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

MAX_SOCKET_PATH_BYTES = 107 if IS_LINUX else 103
"""sun_path holds one byte more, a zero."""

CMSG_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
"""Descriptors that arrive are not inherited. Where it is 0, `keep_from_children` does it as soon as they are here."""

LOOK_FOR_PARENT_EVERY_S = 0.1
FINISH_PACKET_S = 30.0
"""Time for the rest of a packet that the receiver has begun to read."""

_PR_SET_PDEATHSIG = 1
_SOL_LOCAL, _LOCAL_PEERCRED, _LOCAL_PEERPID = 0, 1, 2  # <sys/un.h> of macOS
_XUCRED = struct.Struct("IIh2x16I")  # version, user, number of groups, groups


# ---- files without a name ---------------------------------------------------------------------------


def anonymous_file(name: str, *, can_seal: bool = False) -> int:
    """An empty unlinked file: in RAM under Linux, where `name` is shown by /proc/PID/maps."""
    if IS_LINUX:
        return os.memfd_create(name, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if can_seal else 0))
    return temporary_file(tempfile.gettempdir())


def temporary_file(directory: str | os.PathLike[str]) -> int:
    """An empty file on the disk of `directory`, without a name there."""
    if IS_LINUX:
        # Some file systems have no such thing.
        with contextlib.suppress(OSError):
            return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    fd, path = tempfile.mkstemp(prefix="shoal-", dir=directory)
    os.unlink(path)
    return fd


def read_only(fd: int) -> int:
    """A second descriptor of an anonymous file: Linux makes it read-only, elsewhere its holders are trusted."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC) if IS_LINUX else os.dup(fd)


def allocate(fd: int, offset: int, num_bytes: int) -> None:
    """Reserve disk space, so that a later write through a mapping cannot fail. OSError if the disk is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, num_bytes)
        return
    if os.fstatvfs(fd).f_bavail * os.fstatvfs(fd).f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, max(os.fstat(fd).st_size, offset + num_bytes))


# ---- memory -----------------------------------------------------------------------------------------

NO_RESERVE = 0x4000 if IS_LINUX else 0
"""MAP_NORESERVE, which the standard library names from 3.13 on. macOS reserves nothing anyway."""


def use_huge_pages(memory: mmap.mmap, start: int = 0) -> None:
    """Large pages from `start` on, where the kernel has them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, start)


_MADV_COLLAPSE = 25  # since Linux 6.1


def move_to_huge_pages(address: int, num_bytes: int) -> None:
    """Put memory that is in use into large pages, where the kernel has them and can. It waits for the copy."""
    if not IS_LINUX:
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(begin, size, mmap.MADV_HUGEPAGE)  # older kernels then do it by themselves, in time
    madvise(begin, size, _MADV_COLLAPSE)


# ---- processes --------------------------------------------------------------------------------------

_lifelines: set[int] = set()  # ends of pipes that this process holds to its end, and its children must not


def fork() -> tuple[int, int]:
    """os.fork, and a descriptor that is readable once the child has ended; (0, -1) in the child."""
    if IS_LINUX:
        pid = os.fork()
        if pid == 0:
            return 0, -1
        try:
            return pid, os.pidfd_open(pid)  # before it is reaped, so its number cannot mean another process
        except OSError:  # no descriptor is left, and an unwatched child must not exist
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    ended, lifeline = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(ended)
        os.close(lifeline)
        raise
    if pid == 0:
        os.close(ended)
        _lifelines.add(lifeline)
        return 0, -1
    os.close(lifeline)
    return pid, ended


def _let_go_of_lifelines() -> None:
    for fd in _lifelines:
        with contextlib.suppress(OSError):
            os.close(fd)
    _lifelines.clear()


if not IS_LINUX:
    os.register_at_fork(after_in_child=_let_go_of_lifelines)


def send_signal(pid: int, ended: int, signum: int) -> None:
    """Signal a process by what `fork` gave for it. ProcessLookupError where it has ended."""
    if IS_LINUX:
        signal.pidfd_send_signal(ended, signum)
        return
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    if poll.poll(0):
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    os.kill(pid, signum)


def die_with_parent(
    parent_pid: int | None, signum: int = signal.SIGKILL, *, may_start_thread: bool = True
) -> None:
    """Request `signum` when the parent ends. On Linux: when the parent's *thread* that forked this process ends."""
    if IS_LINUX:
        _libc().prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    elif may_start_thread:
        threading.Thread(target=_look_for_parent, args=(os.getppid(), signum), daemon=True).start()
    if parent_pid not in (None, os.getppid()):  # it died before the kernel was told
        os._exit(1)


def program_dies_with_parent(signum: int = signal.SIGKILL) -> None:
    """Between fork and exec: as `die_with_parent`. Only Linux can; elsewhere the program ends by itself."""
    if IS_LINUX:
        _libc().prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def _look_for_parent(parent_pid: int, signum: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(LOOK_FOR_PARENT_EVERY_S)
    os.kill(os.getpid(), signum)


def _libc() -> Any:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def parent_of(pid: int) -> int | None:
    """None where there is no such process."""
    if IS_LINUX:
        fields = _stat(pid)
        return int(fields[1]) if len(fields) > 1 else None
    parent: int | None = _ask_psutil(pid, lambda process: process.ppid(), None)
    return parent


def start_of(pid: int) -> str:
    """When a process began, which tells it from a later one of its number; "" where there is none."""
    if IS_LINUX:
        fields = _stat(pid)
        return fields[19] if len(fields) > 19 else ""
    began: str = _ask_psutil(pid, lambda process: repr(process.create_time()), "")
    return began


def is_stopped(pid: int) -> bool:
    """True if a process was stopped by a signal or a debugger: the one kind of silence that is not work."""
    if IS_LINUX:
        return _stat(pid)[:1] in (["T"], ["t"])
    return bool(_ask_psutil(pid, lambda process: process.status() in ("stopped", "tracing-stop"), False))


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name of the program."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _ask_psutil(pid: int, question: Callable[[Any], Any], without: Any) -> Any:
    import psutil

    try:
        return question(psutil.Process(pid))
    except psutil.Error:
        return without


def resident_bytes() -> int:
    """Memory of this process, with what it shares with others."""
    return _statm(1) if IS_LINUX else _ask_psutil(os.getpid(), lambda process: process.memory_info().rss, 0)


def peak_bytes() -> int:
    """The most memory that this process had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def private_bytes() -> int:
    """Memory that only this process has: neither files nor what is shared with others, where the system can tell."""
    return _statm(1) - _statm(2) if IS_LINUX else resident_bytes()


def _statm(field: int) -> int:
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(256).split()[field]) * mmap.PAGESIZE


def other_threads() -> list[str]:
    """Names of the threads beside the calling one: the libraries' too under Linux, elsewhere Python's."""
    if not IS_LINUX:
        return [each.name for each in threading.enumerate() if each is not threading.current_thread()]
    names = []
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as comm:
                names.append(comm.read().strip())
    return names


def cores() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if IS_LINUX else list(range(os.cpu_count() or 1))


def namespace() -> str:
    """Identity of the pid namespace: processes with the same value agree on process numbers, on one machine."""
    return os.readlink("/proc/self/ns/pid") if IS_LINUX else "processes"


# ---- descriptors ------------------------------------------------------------------------------------


def open_descriptors() -> list[int]:
    """Descriptors of this process, including the one used to list them."""
    return [int(name) for name in os.listdir("/proc/self/fd" if IS_LINUX else "/dev/fd") if name.isdecimal()]


def raise_open_files() -> tuple[int, int]:
    """Raise the limit of open files as far as it goes; returns the limits before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in (hard, 10_240):  # macOS says infinity, and takes OPEN_MAX
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            break
    return soft, hard


def socket_identity(fd: int) -> str:
    """Identity of a descriptor's socket: differs for another one, also after the number was reused. "" for none."""
    try:
        if IS_LINUX:
            # Not by its mode: a path to a socket, opened as a path, is no connection.
            where = os.readlink(f"/proc/self/fd/{fd}")
            return where if where.startswith("socket:") else ""
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return ""
        with socket.socket(fileno=os.dup(fd)) as sock:
            ends = [str(sock.getsockname())]
            with contextlib.suppress(OSError):
                ends.append(str(sock.getpeername()))
            return f"socket:{'-'.join(ends)}"
    except OSError:
        return ""


def open_sockets() -> dict[int, str]:
    """This process's sockets: descriptor -> which socket that is."""
    found = {fd: socket_identity(fd) for fd in open_descriptors()}
    return {fd: which for fd, which in found.items() if which}


def is_closed_by_peer(fds: Iterable[int]) -> bool:
    """Whether the other end of any of these connections was closed."""
    poll = select.poll()
    events = select.POLLRDHUP if IS_LINUX else select.POLLIN
    for fd in fds:
        poll.register(fd, events)
    if IS_LINUX:
        return bool(poll.poll(0))
    return any(event & ~select.POLLIN or _is_at_end(fd) for fd, event in poll.poll(0))


def _is_at_end(fd: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:  # reset
        return True


def keep_from_children(fds: Iterable[int]) -> None:
    """Set close-on-exec on received descriptors, where `CMSG_CLOEXEC` does not exist."""
    if not CMSG_CLOEXEC:
        for fd in fds:
            os.set_inheritable(fd, False)


class Wakeup:
    """A descriptor that any thread can make readable, and one thread waits for."""

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None
        if IS_LINUX:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self._ends = socket.socketpair()
            for end in self._ends:
                end.setblocking(False)
            self._fd = self._ends[0].fileno()

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        if self._ends is None:
            os.eventfd_write(self._fd, 1)
        else:
            with contextlib.suppress(BlockingIOError):  # full of wake-ups that were not read yet
                self._ends[1].send(b"\0")

    def clear(self) -> None:
        """BlockingIOError where it is not set."""
        if self._ends is None:
            os.eventfd_read(self._fd)
        else:
            self._ends[0].recv(1 << 16)

    def close(self) -> None:
        if self._ends is None:
            os.close(self._fd)
        else:
            for end in self._ends:
                end.close()


# ---- sockets between processes ----------------------------------------------------------------------


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket, as of the moment it connected or listened."""
    if hasattr(socket, "SO_PEERCRED"):
        room = struct.calcsize("iII")
        pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, room))
    else:
        uid = _XUCRED.unpack(sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size))[1]
        pid = sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
    return pid, uid


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep the bounds of packets, and pass descriptors beside them."""
    if IS_LINUX:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return tuple(PacketStream(fileno=end.detach()) for end in socket.socketpair())  # type: ignore[return-value]


def packet_socket(fd: int) -> socket.socket:
    """An end of `packet_pair` that came as a descriptor."""
    return socket.socket(fileno=fd) if IS_LINUX else PacketStream(fileno=fd)


def know_senders(sock: socket.socket) -> None:
    """Enable sender credentials. Before the first `receive_from`."""
    if IS_LINUX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def receive_from(sock: socket.socket, max_bytes: int) -> bytes | None:
    """The next packet, which may be empty; None at the end. OSError where none has come."""
    if isinstance(sock, PacketStream):
        packet = sock.next_packet()
        sock.drop_descriptors()
        return packet
    # The end of the stream has no sender. An empty packet has one, and must not be taken for the end.
    packet, sender, _, _ = sock.recvmsg(max_bytes, socket.CMSG_SPACE(struct.calcsize("iII")))
    return packet if sender else None


class PacketStream(socket.socket):
    """A stream socket with the length before each packet, so that send and recv keep its bounds.

    Never reads past a packet: unread bytes stay in the kernel, where a selector sees them.
    """

    _HEAD = struct.Struct("=I")
    _MAX_FDS = 253

    def __init__(self, *, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self._read, self._fds = bytearray(), array("i")
        self._sending = threading.RLock()
        self._is_within, self._later = False, list[bytes]()  # see `sendmsg`

    def next_packet(self, flags: int = 0) -> bytes | None:
        """The next one; None at the end. What came beside it is in `_fds`."""
        while (missing := self._num_missing()) > 0:
            data, ancillary, _, _ = super().recvmsg(
                missing, socket.CMSG_SPACE(self._MAX_FDS * self._fds.itemsize), flags | CMSG_CLOEXEC
            )
            for level, kind, rights in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    came = array("i", rights[: len(rights) - len(rights) % self._fds.itemsize])
                    keep_from_children(came)
                    self._fds += came
            if not data:
                return None
            self._read += data
        packet = bytes(self._read[self._HEAD.size :])
        self._read.clear()
        return packet

    def _num_missing(self) -> int:
        if len(self._read) < self._HEAD.size:
            return self._HEAD.size - len(self._read)
        return int(self._HEAD.size + self._HEAD.unpack_from(self._read)[0] - len(self._read))

    def recvmsg(self, bufsize: int, ancbufsize: int = 0, flags: int = 0, /) -> Any:
        packet = self.next_packet(flags & ~CMSG_CLOEXEC)
        if not ancbufsize:
            self.drop_descriptors()
        fds, self._fds = self._fds, array("i")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())] if fds else []
        return (packet or b"")[:bufsize], rights, 0, None

    def drop_descriptors(self) -> None:
        """Close those that came beside the packet, as the kernel does where nobody asks for them."""
        while self._fds:
            os.close(self._fds.pop())

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        data: bytes = self.recvmsg(bufsize, 0, flags)[0]
        return data

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None, /) -> int:
        data = b"".join(buffers)
        packet = self._HEAD.pack(len(data)) + data
        with self._sending:
            if self._is_within:
                # A signal's handler, between two parts of a packet of its own thread: the rest of that one goes first.
                if ancdata:
                    raise BlockingIOError(errno.EAGAIN, "descriptors cannot be sent by a signal's handler")
                self._later.append(packet)
                return len(data)
            while True:
                self._is_within = True
                try:
                    if packet:
                        self._send_whole(packet, ancdata, flags)
                    self._send_later()
                except BlockingIOError:
                    # Nothing of this packet went. Those of handlers count as sent, and the caller may never send again.
                    self._send_later()
                    raise
                finally:
                    self._is_within = False
                if not self._later:  # a handler may have come after the last look
                    return len(data)
                packet = b""

    def _send_later(self) -> None:
        while self._later:
            self._send_rest(memoryview(self._later[0]))
            del self._later[0]

    def _send_whole(self, packet: bytes, ancdata: Any, flags: int) -> None:
        sent = super().sendmsg([packet], ancdata, flags)
        self._send_rest(memoryview(packet)[sent:])

    def _send_rest(self, rest: memoryview) -> None:
        while rest:
            # A packet must be completed once begun: the receiver waits for the rest of it.
            poll = select.poll()
            poll.register(self, select.POLLOUT)
            if not poll.poll(FINISH_PACKET_S * 1000):
                raise ConnectionError(f"the receiver did not take a packet within {FINISH_PACKET_S:g} s")
            with contextlib.suppress(BlockingIOError):
                rest = rest[super().send(rest, socket.MSG_DONTWAIT) :]

    def send(self, data: Any, flags: int = 0, /) -> int:
        return self.sendmsg([data], (), flags)

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        self.sendmsg([data], (), flags)


def way_to(listener: socket.socket, path: Path) -> int:
    """A descriptor through which only its holders can reach the socket at `path`; see `path_of_way`.

    Linux removes the name at once; elsewhere the directory of `path` goes with the listener.
    """
    if IS_LINUX:
        way = os.open(path, os.O_PATH | os.O_CLOEXEC)
        shutil.rmtree(path.parent)
        return way
    weakref.finalize(listener, _remove, path.parent, os.getpid())
    way = anonymous_file("shoal-way")
    os.write(way, os.fsencode(path))
    return way


def path_of_way(way: int) -> str:
    """Path to connect to through such a descriptor."""
    return f"/proc/self/fd/{way}" if IS_LINUX else os.fsdecode(os.pread(way, 4096, 0))


def close_way(way: int) -> None:
    """Close a descriptor of `way_to`, with its directory if there still is one."""
    if not IS_LINUX:
        shutil.rmtree(os.path.dirname(path_of_way(way)), ignore_errors=True)
    os.close(way)


def _remove(directory: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child inherits this, not the directory
        shutil.rmtree(directory, ignore_errors=True)


def address_of(name: str) -> str:
    """Address of the Unix socket that processes of this user know by `name`."""
    if IS_LINUX:
        return f"\0{name}"  # in the kernel's own namespace, which leaves no file behind
    directory = Path("/tmp", f"shoal-{os.getuid()}")  # not TMPDIR: its path may fill that of a socket
    directory.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EACCES, f"{directory} is not a directory of this user alone")
    return str(directory / name)


def bind_name(sock: socket.socket, name: str) -> None:
    """Bind to `address_of(name)`. OSError where another process has it."""
    address = address_of(name)
    if not IS_LINUX and os.path.lexists(address):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(address)
            except OSError:
                os.unlink(address)  # of a process that is gone
    sock.bind(address)
    if not IS_LINUX:
        weakref.finalize(sock, _unlink, address, os.getpid())


def _unlink(path: str, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        with contextlib.suppress(OSError):
            os.unlink(path)
