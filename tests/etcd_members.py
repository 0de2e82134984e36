"""Real etcd of three members, of this machine or of namespaced hosts."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.cluster.hosts.etcd import Etcd, JobJournal
from shoal.config.hosts import parse_journal
from shoal.errors import JournalUnreachable
from waiting import wait_until


def unsupported() -> str | None:
    return None if shutil.which("etcd") else "no etcd on this machine (Debian: apt install etcd-server)"


class EtcdMembers:
    """Members that are started together; each can be killed by itself."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int, int]],
        start: Callable[[int, list[str]], subprocess.Popen[Any]],
        folder: Callable[[int], Path],
        options: Sequence[str] = (),
        scheme: str = "http",
    ) -> None:
        """`addresses` are (host, port of clients, port of members); `start` runs a command where member i belongs."""
        peers = [f"http://{host}:{peer}" for host, _, peer in addresses]
        clients = [f"{scheme}://{host}:{client}" for host, client, _ in addresses]
        members = ",".join(f"m{i}={peer}" for i, peer in enumerate(peers))
        self.url = ("etcds://" if scheme == "https" else "etcd://") + ",".join(
            f"{host}:{client}" for host, client, _ in addresses
        )
        self.members = []
        for i, (peer, client) in enumerate(zip(peers, clients, strict=True)):
            given = {
                "name": f"m{i}",
                "data-dir": str(folder(i)),
                "listen-client-urls": client,
                "advertise-client-urls": client,
                "listen-peer-urls": peer,
                "initial-advertise-peer-urls": peer,
                "initial-cluster": members,
            }
            self.members.append(
                start(i, ["etcd", *(f"--{key}={value}" for key, value in given.items()), *options])
            )

    def wait_until_ready(self) -> None:
        etcd = Etcd(parse_journal(self.url), timeout_s=1.0)

        def answers() -> bool:
            try:
                JobJournal(etcd, "any").read()
            except JournalUnreachable:
                return False
            return True

        assert wait_until(answers, 60.0), "etcd does not answer"

    def leader(self) -> int:
        """Number of the member that the others follow."""
        for number, (host, port) in enumerate(parse_journal(self.url).members):
            told = Etcd(parse_journal(f"etcd://{host}:{port}"), timeout_s=5.0).call(
                "/v3/maintenance/status", {}
            )
            if told["leader"] == told["header"]["member_id"]:
                return number
        raise AssertionError("no member leads")

    def kill(self, number: int) -> None:
        self.members[number].send_signal(signal.SIGKILL)
        self.members[number].wait()

    def close(self) -> None:
        for number in range(len(self.members)):
            self.kill(number)


def local_members(folder: Path, num_members: int = 3) -> EtcdMembers:
    """On this machine, at ports that are free."""
    ports = free_ports(2 * num_members)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    members = EtcdMembers(
        [("127.0.0.1", ports[2 * i], ports[2 * i + 1]) for i in range(num_members)],
        lambda _, command: subprocess.Popen(command, **quiet),  # type: ignore[call-overload]
        lambda i: folder / f"member-{i}",
    )
    members.wait_until_ready()
    return members


def free_ports(num_ports: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_ports)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
