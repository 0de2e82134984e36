"""Several hosts on one machine, out of Linux namespaces. Needs root, util-linux and iproute2; see `unsupported`.

    with Cluster(3, folder) as cluster:             # in tests: the fixture start_cluster(3)
        head, *others = cluster
        server = head.popen([sys.executable, "serve.py"], stdout=subprocess.PIPE)
        others[0].run(["ping", head.address])       # or head.name: every host can resolve all names
        others[0].drop("out")                       # a link that fails one way
        others[1].kill()                            # power loss
        others[1].start()                           # the same disk, empty /tmp and /dev/shm

Each host has a network, PID, mount, IPC and UTS namespace: its own `eth0`
(10.77.0.x), hostname, /proc, /sys, /tmp, /run and /dev/shm, and a disk at
/srv. The rest of the file system is the machine's: the interpreter, the
sources, the home directory with its caches. The bridge between the hosts has
a network namespace too, so the machine's own network is not touched and any
number of clusters can live side by side.

A host lives as long as its init process, which ends when its stdin closes:
nothing stays behind, even when the tests are killed. No namespace has a name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import psutil

INTERFACE = "eth0"
DISK = Path("/srv")

_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_ROOT = Path(__file__).resolve().parents[2]
_LIBC = ctypes.CDLL(None, use_errno=True)

# As PID 1 the interpreter inherits orphans; with SIGCHLD ignored the kernel reaps them.
_INIT = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""

# Paths below /tmp that must stay visible are bound into the new /tmp before it covers the old one.
# No link-local IPv6 addresses: they could not be used in their first second.
_BOOT = """
set -eu
name=$1 folder=$2; shift 2
mount --bind "$folder/disk" /srv
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs "$folder/tmp"
for path in "$@"; do mkdir -p "$folder$path"; mount --rbind "$path" "$folder$path"; done
mount --move "$folder/tmp" /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t sysfs sysfs /run
mount --rbind /sys/fs/cgroup /run/fs/cgroup
mount --move /run /sys
mount -t tmpfs -o mode=755 tmpfs /run
mount -t proc proc /proc
echo "$name" > /proc/sys/kernel/hostname
ipv6=/proc/sys/net/ipv6/conf/default/addr_gen_mode; if [ -e $ipv6 ]; then echo 1 > $ipv6; fi
"""

_SWITCH = "ip link add bridge type bridge && ip link set bridge up && echo ready && exec cat"

_PROBE = """
mount -t tmpfs tmpfs /tmp && ip link add bridge type bridge && ip link add near type veth peer name far &&
tc qdisc add dev near root tbf rate 1mbit burst 64kb latency 50ms && tc qdisc replace dev near root blackhole
"""

Direction = Literal["in", "out"]


def unsupported() -> str | None:
    """The reason why this machine cannot have namespaced hosts, or None."""
    if os.geteuid() != 0:
        return "namespaced hosts need root"
    missing = [tool for tool in ("unshare", "nsenter", "mount", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"namespaced hosts need {', '.join(missing)} (util-linux and iproute2)"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-c", _PROBE],
        capture_output=True,
        text=True,
    )
    if probe.returncode != 0:
        return f"this kernel or container cannot have namespaced hosts: {probe.stderr.strip()}"
    return None


class Host:
    """One host of a `Cluster`; made and started by it."""

    def __init__(self, index: int, folder: Path, cluster: Cluster) -> None:
        self.name = f"host-{index}"
        self.address = f"10.77.0.{index + 1}"
        self.port = ""  # the other end of its cable, at the bridge
        # Stays over a restart: peers have it in their ARP caches.
        self._mac = f"02:77:00:00:00:{index + 1:02x}"
        self._folder, self._cluster = folder, cluster
        self._init: subprocess.Popen[str] | None = None
        self._num_boots = 0
        self._started: list[subprocess.Popen[Any]] = []
        self._pid_namespace: IO[str] | None = None  # open, so that its number stays its own after `kill`
        self._paused: set[psutil.Process] = set()
        self._bandwidth: str | None = None
        self._dropped: tuple[Direction, ...] = ()

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}{'' if self._init else ' (off)'}>"

    @property
    def init_pid(self) -> int:
        """Of its first process, which has its namespaces; as the machine numbers it."""
        return self._running().pid

    def popen(self, args: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process of this host, by default in a session of its own and in the folder of the disk.

        It is a child of the caller: signals, waiting and pipes work as with any other.
        """
        pid = self._running().pid
        options.setdefault("start_new_session", True)
        cwd = str(options.pop("cwd", DISK))
        enter = ["nsenter", "--target", str(pid), "--net", "--mount", "--uts", "--ipc", f"--wdns={cwd}", "--"]
        assert self._pid_namespace is not None
        with _children_in(self._pid_namespace):
            process = subprocess.Popen([*enter, *args], **options)
        self._started.append(process)
        return process

    def run(
        self, args: Sequence[str], timeout_s: float = 30.0, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; output is text. With `check` a failure is an error that quotes it."""
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process = self.popen(args, **pipes | options)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
        if check and process.returncode != 0:
            raise RuntimeError(f"{self.name}: {list(args)} ended with {process.returncode}\n{out}{err}")
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def processes(self) -> list[psutil.Process]:
        """The living processes of this host without its init, as the machine numbers them."""
        assert self._pid_namespace is not None
        namespace = os.fstat(self._pid_namespace.fileno()).st_ino
        init = self._init.pid if self._init is not None else None
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if pid != init and os.stat(f"/proc/{pid}/ns/pid").st_ino == namespace:
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def path(self, path: str | Path) -> Path:
        """The path by which the caller reaches a file of this host. Only those of the disk outlive `kill`."""
        path = Path(path)
        if path.is_relative_to(DISK):
            return self._folder / "disk" / path.relative_to(DISK)
        return Path(f"/proc/{self._running().pid}/root", path.relative_to("/"))

    def read(self, path: str | Path) -> str:
        return self.path(path).read_text()

    def write(self, path: str | Path, text: str) -> None:
        self.path(path).write_text(text)

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Sockets that this thread opens in the block belong to this host, also afterwards."""
        with open("/proc/thread-self/ns/net") as own, open(f"/proc/{self._running().pid}/ns/net") as here:
            _set_namespace(here, _CLONE_NEWNET)
            try:
                yield
            finally:
                _set_namespace(own, _CLONE_NEWNET)

    def link(self, *, down: bool) -> None:
        """Pull the cable out (the interface loses its carrier), or put it back."""
        self._cluster.switch("ip", "link", "set", self.port, "down" if down else "up")

    def drop(self, *directions: Direction) -> None:
        """Lose every packet in these directions without a sign; `drop()` ends it."""
        self._dropped = directions
        self._shape()

    def cut_off_from(self, other: Host) -> None:
        """Lose every packet to one other host without a sign, until this one is killed."""
        nowhere = f"neigh replace {other.address} lladdr 02:77:00:00:00:ff dev {INTERFACE} nud permanent"
        _run_in_network(self._running().pid, "ip", *nowhere.split())

    def refuse(self, other: Host) -> None:
        """Refuse every connection to one other host, as a firewall that rejects does, until this one is killed."""
        # Its address is this host's own here, where nothing listens; to the network it stays the other's.
        _run_in_network(self._running().pid, "sysctl", "-qw", "net.ipv4.conf.all.arp_ignore=1")
        _run_in_network(self._running().pid, "ip", "addr", "add", f"{other.address}/32", "dev", "lo")

    def limit(self, bandwidth: str | None) -> None:
        """Limit the rate in each direction: "100mbit", "1gbit"; None is no limit."""
        self._bandwidth = bandwidth
        self._shape()

    def pause(self) -> None:
        """Stop every process. The kernel goes on: it acknowledges packets until the buffers are full."""
        is_changing = True
        while is_changing:  # a process may fork before its turn comes
            is_changing = False
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_STOPPED:
                        process.suspend()
                        self._paused.add(process)
                        is_changing = True

    def resume(self) -> None:
        for process in self._paused:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self._paused.clear()

    def kill(self) -> None:
        """Power loss. The link is cut first, so that peers see silence and not connections that close."""
        self._running()
        self.link(down=True)
        self._end()
        self._bandwidth, self._dropped = None, ()

    def start(self) -> None:
        """Boot after `kill`: the same name, address and disk, and nothing else of before."""
        self._boot()
        self._connect()

    def _boot(self) -> None:
        assert self._init is None, f"{self.name} is on"
        needed = {str(_ROOT), sys.prefix, sys.base_prefix}
        visible = sorted(path for path in needed if path.startswith("/tmp/"))
        boot = ["sh", "-c", _BOOT + 'exec "$0" -ISc "$INIT"', sys.executable, self.name, str(self._folder)]
        with _children_in(None):
            self._init = _start(
                ["unshare", "--net", "--mount", "--uts", "--ipc", *boot, *visible],
                env=os.environ | {"INIT": _INIT},
            )

    def _connect(self) -> None:
        pid = _wait_ready(self._running())
        self._forget_namespace()
        self._pid_namespace = open(f"/proc/{pid}/ns/pid")  # noqa: SIM115
        # The port of a host that was killed vanishes some time after it, so each boot has another.
        self._num_boots += 1
        self.port = f"{self.name}.{self._num_boots}"
        peer = f"peer name {INTERFACE} address {self._mac} netns {pid}"
        self._cluster.switch("ip", *f"link add {self.port} up master bridge type veth {peer}".split())
        commands = f"link set lo up\naddr add {self.address}/24 dev {INTERFACE}\nlink set {INTERFACE} up\n"
        _run_in_network(pid, "ip", "-batch", "-", input=commands)

    def add_interface(self, name: str, address: str, bridge: str) -> None:
        """One more cable, to another bridge of the cluster (`Cluster.add_bridge`). It is gone after `kill`."""
        pid, port = self._running().pid, f"{self.name}.{name}"
        self._cluster.switch(
            "ip", *f"link add {port} up master {bridge} type veth peer name {name} netns {pid}".split()
        )
        _run_in_network(
            pid, "ip", "-batch", "-", input=f"addr add {address}/24 dev {name}\nlink set {name} up\n"
        )

    def sent_bytes(self, interface: str = INTERFACE) -> int:
        return int(self.read(f"/sys/class/net/{interface}/statistics/tx_bytes"))

    def _shape(self) -> None:
        # Both ends of the cable are shaped where packets leave; at arrival the kernel can only police.
        tc = ("tc", "qdisc", "replace", "dev")
        _run_in_network(self._running().pid, *tc, INTERFACE, "root", *self._discipline("out"))
        self._cluster.switch(*tc, self.port, "root", *self._discipline("in"))

    def _discipline(self, direction: Direction) -> list[str]:
        if direction in self._dropped:
            return ["blackhole"]
        if self._bandwidth is not None:
            # A burst of 64 kB is too little at 1 Gbit/s: where cores are busy a fifth of the rate is lost.
            return ["tbf", "rate", self._bandwidth, "burst", "256kb", "latency", "50ms"]
        return ["noqueue"]

    def _running(self) -> subprocess.Popen[str]:
        assert self._init is not None, f"{self.name} is off"
        return self._init

    def _end(self) -> None:
        """Kill init, and with it everything. Its end waits for the caller's children to be reaped."""
        init, self._init = self._init, None
        if init is not None:
            init.kill()
            for process in self._started:
                process.wait()
            _close(init)
        self._paused.clear()

    def _forget_namespace(self) -> None:
        if self._pid_namespace is not None:
            self._pid_namespace.close()
            self._pid_namespace = None

    def _close(self) -> None:
        self._end()
        self._forget_namespace()
        for process in self._started:
            _close(process)


class Cluster(Sequence[Host]):
    """Hosts on one bridge, started together; at its end nothing of them is left."""

    def __init__(self, num_hosts: int, folder: Path) -> None:
        self.hosts = [Host(index, folder / f"host-{index}", self) for index in range(num_hosts)]
        self._switch = _start(["unshare", "--net", "sh", "-c", _SWITCH])
        try:
            names = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
            for host in self.hosts:
                for name in ("disk", "tmp"):
                    (folder / host.name / name).mkdir(parents=True)
                (folder / host.name / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
                host._boot()
            _wait_ready(self._switch)
            for host in self.hosts:
                host._connect()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, index: Any) -> Any:
        return self.hosts[index]

    def __len__(self) -> int:
        return len(self.hosts)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def switch(self, *command: str) -> str:
        """Run a command where the bridge is: `ip` and `tc` on `host.port`, say."""
        return _run_in_network(self._switch.pid, *command)

    def add_bridge(self, name: str) -> None:
        """Another network, for `Host.add_interface`."""
        self.switch("ip", "link", "add", name, "up", "type", "bridge")

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """As `Host.network`, where the bridges are."""
        with open("/proc/thread-self/ns/net") as own, open(f"/proc/{self._switch.pid}/ns/net") as here:
            _set_namespace(here, _CLONE_NEWNET)
            try:
                yield
            finally:
                _set_namespace(own, _CLONE_NEWNET)

    def close(self) -> None:
        for host in self.hosts:
            host._close()
        self._switch.kill()
        _close(self._switch)


def _start(args: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """A process that holds a namespace until its stdin closes. A session of its own: Ctrl-C is for the tests."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        args, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **options
    )


def _wait_ready(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    assert process.stderr is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"{process.args} failed: {process.stderr.read()}")
    return process.pid


def _close(process: subprocess.Popen[Any]) -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # unsent input
                pipe.close()


def _run_in_network(pid: int, *command: str, input: str = "") -> str:
    done = subprocess.run(
        ["nsenter", "--target", str(pid), "--net", *command], input=input, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}")
    return done.stdout


def _set_namespace(namespace: IO[str], kind: int) -> None:
    if _LIBC.setns(namespace.fileno(), kind) != 0:
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


@contextlib.contextmanager
def _children_in(pid_namespace: IO[str] | None) -> Iterator[None]:
    """Children that this thread starts in the block are in a PID namespace; None is a new one.

    Not `nsenter --pid` or `unshare --pid`: these stay between the caller and
    the process, and a signal to them does not reach it.
    """
    with open("/proc/thread-self/ns/pid") as own:
        if pid_namespace is not None:
            _set_namespace(pid_namespace, _CLONE_NEWPID)
        elif _LIBC.unshare(_CLONE_NEWPID) != 0:
            raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            _set_namespace(own, _CLONE_NEWPID)
