"""Namespaced hosts: separate like machines, joined by links that can fail, gone when the test is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from namespaces import Cluster, Host, unsupported

from waiting import wait_until

StartCluster = Callable[[int], Cluster]

ECHO = """
import socket
listener = socket.create_server(("0.0.0.0", 7070))
print("listening", flush=True)
connection, _ = listener.accept()
while data := connection.recv(100):
    connection.sendall(data)
"""


def _python(code: str) -> list[str]:
    return [sys.executable, "-ISc", code]


def _echo_server(host: Host) -> subprocess.Popen[str]:
    server = host.popen(_python(ECHO), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    return server


def _connection(client: Host, server: Host) -> tuple[socket.socket, socket.socket]:
    with server.network():
        listener = socket.create_server((server.address, 0))
    with listener:
        with client.network():
            near = socket.create_connection(listener.getsockname(), timeout=10)
        far, _ = listener.accept()
        far.settimeout(10)
        return near, far


def _datagrams(host: Host) -> socket.socket:
    with host.network():
        datagrams = socket.socket(type=socket.SOCK_DGRAM)
    datagrams.bind((host.address, 0))
    datagrams.settimeout(10)
    return datagrams


def test_hosts_have_names_and_reach_each_other_by_them(start_cluster: StartCluster) -> None:
    cluster = start_cluster(3)
    assert [host.run(_python("import socket; print(socket.gethostname())")).stdout for host in cluster] == [
        "host-0\n",
        "host-1\n",
        "host-2\n",
    ]
    _echo_server(cluster[0])
    ask = "import socket; s = socket.create_connection(('host-0', 7070)); s.sendall(b'hello'); print(s.recv(100))"
    assert cluster[2].run(_python(ask)).stdout == "b'hello'\n"


def test_clusters_with_the_same_addresses_do_not_meet(start_cluster: StartCluster) -> None:
    one, other = start_cluster(2), start_cluster(2)
    _echo_server(one[0])
    with other[1].network(), pytest.raises(ConnectionRefusedError):
        socket.create_connection((one[0].address, 7070), timeout=10)


def test_loopback_of_a_host_is_its_own(start_cluster: StartCluster) -> None:
    host = start_cluster(1)[0]
    with socket.create_server(("127.0.0.1", 0)) as of_machine:
        with host.network(), pytest.raises(ConnectionRefusedError):
            socket.create_connection(of_machine.getsockname(), timeout=10)
    with host.network(), socket.create_server(("127.0.0.1", 0)) as of_host:
        socket.create_connection(of_host.getsockname(), timeout=10).close()


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "/run", "/srv"])
def test_files_of_a_host_are_its_own(start_cluster: StartCluster, folder: str) -> None:
    cluster = start_cluster(2)
    path = f"{folder}/of-host-0"
    cluster[0].run(["sh", "-c", f"echo here > {path}"])
    assert cluster[0].read(path) == "here\n"
    assert not cluster[1].path(path).exists()
    assert cluster[1].run(["cat", path], check=False).returncode == 1
    assert not Path(path).exists()
    cluster[1].write(path, "there\n")
    assert cluster[1].run(["cat", path]).stdout == "there\n"


def test_a_host_sees_its_own_processes_only(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    sleeper = cluster[0].popen(["sleep", "1000"])
    assert [process.pid for process in cluster[0].processes()] == [sleeper.pid]
    assert cluster[1].processes() == []
    seen = cluster[1].run(_python("import os; print(sum(name.isdigit() for name in os.listdir('/proc')))"))
    assert seen.stdout == "2\n"  # init and itself


def test_init_reaps_orphans(start_cluster: StartCluster) -> None:
    host = start_cluster(1)[0]
    orphan = (
        "import os; print(os.fork() or os.fork(), flush=True)"  # the child ends first or last: init reaps it
    )
    host.run(_python(orphan))
    assert wait_until(lambda: [name for name in os.listdir(host.path("/proc")) if name.isdigit()] == ["1"])


def test_signals_and_exit_codes_are_those_of_the_process(start_cluster: StartCluster) -> None:
    host = start_cluster(1)[0]
    assert host.run(["sh", "-c", "exit 7"], check=False).returncode == 7
    sleeper = host.popen(["sleep", "1000"])
    sleeper.send_signal(signal.SIGTERM)
    assert sleeper.wait(10) == -signal.SIGTERM
    with pytest.raises(RuntimeError, match=r"host-0: .* ended with 1\nno such thing"):
        host.run(["sh", "-c", "echo no such thing >&2; exit 1"])
    with pytest.raises(subprocess.TimeoutExpired):
        host.run(["sleep", "1000"], timeout_s=0.1)


def test_kill_ends_every_process_and_peers_see_silence(start_cluster: StartCluster) -> None:
    cluster = start_cluster(3)
    server = _echo_server(cluster[0])
    cluster[0].run(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &"])
    with cluster[1].network():
        client = socket.create_connection((cluster[0].address, 7070), timeout=10)
    with client:
        client.sendall(b"before")
        assert client.recv(100) == b"before"
        assert len(cluster[0].processes()) == 2
        cluster[0].kill()
        assert cluster[0].processes() == []
        assert server.returncode == -signal.SIGKILL
        client.sendall(b"after")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):  # not the end of the stream, and no reset
            client.recv(100)
    with pytest.raises(AssertionError, match="host-0 is off"):
        cluster[0].popen(["true"])
    near, far = _connection(cluster[1], cluster[2])
    near.close()
    far.close()


def test_a_host_boots_again_with_its_disk_and_address(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    near, far = _connection(cluster[0], cluster[1])  # both have each other's hardware address now
    for host_file in ("/srv/kept", "/tmp/lost", "/dev/shm/lost"):
        cluster[0].write(host_file, "x")
    cluster[0].drop("in")
    cluster[0].kill()
    assert cluster[0].read("/srv/kept") == "x"
    cluster[0].start()
    assert cluster[0].read("/srv/kept") == "x"
    # A checkout below /tmp is mounted into every host.
    assert "lost" not in os.listdir(cluster[0].path("/tmp"))
    assert os.listdir(cluster[0].path("/dev/shm")) == []
    for one in (near, far, *_connection(cluster[0], cluster[1])):
        one.close()


def test_link_down_loses_packets_both_ways_until_it_is_up(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    near, far = _connection(*cluster)
    with near, far:
        cluster[0].link(down=True)
        near.sendall(b"out")
        far.sendall(b"in")
        for end in (near, far):
            end.settimeout(0.3)
            with pytest.raises(TimeoutError):
                end.recv(100)
            end.settimeout(30)
        cluster[0].link(down=False)
        assert near.recv(100) == b"in"  # TCP sends again
        assert far.recv(100) == b"out"


@pytest.mark.parametrize("direction", ["in", "out"])
def test_drop_loses_packets_one_way(start_cluster: StartCluster, direction: str) -> None:
    cluster = start_cluster(2)
    with _datagrams(cluster[0]) as host, _datagrams(cluster[1]) as peer:
        lost, passes = ((peer, host), (host, peer)) if direction == "in" else ((host, peer), (peer, host))

        def send(text: bytes, between: tuple[socket.socket, socket.socket]) -> None:
            between[0].sendto(text, between[1].getsockname())

        for between in (lost, passes):
            send(b"before", between)
            assert between[1].recv(100) == b"before"
        cluster[0].drop(direction)  # type: ignore[arg-type]
        send(b"lost", lost)
        send(b"passes", passes)
        assert passes[1].recv(100) == b"passes"
        cluster[0].drop()
        send(b"after", lost)
        assert lost[1].recv(100) == b"after"


@pytest.mark.parametrize("way", ["in", "out"])
def test_limit_bounds_the_rate_each_way(start_cluster: StartCluster, way: str) -> None:
    cluster = start_cluster(2)
    num_bytes, limit = 4 << 20, 100e6 / 8
    near, far = _connection(*cluster)
    sender, receiver = (far, near) if way == "in" else (near, far)

    def transfer_s() -> float:
        begin = time.monotonic()
        sending = pool.submit(sender.sendall, bytes(num_bytes))
        left = num_bytes
        while left > 0:
            left -= len(receiver.recv(1 << 20))
        sending.result()
        return time.monotonic() - begin

    with ThreadPoolExecutor(1) as pool, near, far:
        cluster[0].limit("100mbit")
        limited_s = transfer_s()
        assert limited_s > 0.9 * num_bytes / limit
        cluster[0].limit(None)
        assert any(transfer_s() < limited_s for _ in range(20))  # others use the cores too


def test_pause_stops_processes_until_resume(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    _echo_server(cluster[0])
    with cluster[1].network():
        client = socket.create_connection((cluster[0].address, 7070), timeout=10)
    with client:
        cluster[0].pause()
        assert {process.status() for process in cluster[0].processes()} == {psutil.STATUS_STOPPED}
        client.sendall(b"hello")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(100)
        cluster[0].resume()
        client.settimeout(10)
        assert client.recv(100) == b"hello"


def _traces() -> dict[str, list[str]]:
    """Everything of the machine that a cluster might leave changed."""
    return {
        "children": [str(child.pid) for child in psutil.Process().children(recursive=True)],
        "mounts": Path("/proc/self/mounts").read_text().splitlines(),
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "named namespaces": sorted(map(str, Path("/run/netns").glob("*"))),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "namespaces": [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "pid_for_children")],
    }


def test_a_cluster_leaves_nothing_behind_when_a_test_fails(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    before = _traces()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with Cluster(3, tmp_path / "cluster") as cluster:
            for host in cluster:
                host.popen(
                    ["sh", "-c", "setsid sleep 1000 & wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            cluster[1].kill()
            cluster[2].pause()
            raise KeyboardInterrupt
    assert _traces() == before


def test_hosts_end_with_the_process_that_made_them(start_cluster: StartCluster, tmp_path: Path) -> None:
    script = f"""
import pathlib, time
from namespaces import Cluster
cluster = Cluster(3, pathlib.Path({str(tmp_path / "cluster")!r}))
for host in cluster:
    host.popen(["sh", "-c", "setsid sleep 1000 & wait"])
print("ready", flush=True)
time.sleep(1000)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        started = psutil.Process(owner.pid).children(recursive=True)
        assert len(started) >= 7  # the switch, and of each host init and a process
        owner.kill()
    assert wait_until(lambda: not any(process.is_running() for process in started))


def test_missing_tools_are_named(start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert unsupported() == "namespaced hosts need unshare, nsenter, mount, ip, tc (util-linux and iproute2)"
