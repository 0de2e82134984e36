"""Hosts of a job as its user asks for them: how many, where the head listens, and how the others come.

Parses `--hosts`, `--bind`, `--journal` and cluster files (`cluster.toml`, TF_CONFIG). Resolves no name and opens no socket.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any
from urllib.parse import unquote

from shoal.errors import ConfigError

DEFAULT_PORT = 7070
ETCD_PORT = 2379
MAX_HOSTS = 1024
WORKER, SERVER = "worker", "server"
"""Roles of a service."""

MAX_CONNECTIONS = 16
"""Of a worker to one server."""

_MEMBER = re.compile(r"(?:\[(?P<ip6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")
_HOSTNAME = re.compile(r"(?!-)[A-Za-z0-9._@\[\]:-]{1,253}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of a process, or of all processes of a host together."""

    cpus: float = 1.0
    gpus: int = 0
    memory_gb: float = 0.0
    """0: what the engine gives by default."""

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            cpus=self.cpus + other.cpus,
            gpus=self.gpus + other.gpus,
            memory_gb=self.memory_gb + other.memory_gb,
        )

    def __mul__(self, count: int) -> Resources:
        return Resources(cpus=self.cpus * count, gpus=self.gpus * count, memory_gb=self.memory_gb * count)


SERVER_RESOURCES = Resources(cpus=0.5)
"""A server takes half a core (measured: 40 to 60 % busy)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsConfig:
    """The hosts of a job, the head's own machine among them."""

    num_hosts: int
    """How many there are."""

    names: tuple[str, ...] = ()
    """Names of the hosts, this machine's first; empty: they are numbered as they come."""

    by_ssh: bool = False
    """Start `shoal join` on the named hosts by ssh; else the user starts it there."""

    ssh: str = "ssh -o BatchMode=yes"
    """Command that does so: the host's name and what to run there are added."""

    workers: tuple[int, ...] = ()
    """Workers of each host; empty: as many on each, as nearly as possible."""

    servers: tuple[int, ...] = ()
    """Servers of each host; empty: one after the other in turn."""

    on: str = ""
    """Engine that gives the hosts, as `NAME[:DETAIL]`; empty: they are machines that join."""

    head_takes_part: bool = True
    """The head runs workers and servers as host 0. An engine's job runs them in the engine's slots alone."""

    roles: tuple[str, ...] = ()
    """Role of each host where each is a service of one: "coordinator", "worker" or "server"; empty: hosts have both."""

    worker_resources: Resources = Resources()
    """Of each worker, where an engine gives the hosts."""

    server_resources: Resources = SERVER_RESOURCES
    """Of each server."""

    bind: str = ""
    """Address at which the head listens."""

    interfaces: tuple[str, ...] = ()
    """Network interfaces of the head for connections between hosts, the one of `bind` first; empty: that one."""

    connections: int = 0
    """Connections of a worker to each server on another host; 0: one where its host has at most two cores per process, else two."""

    port: int = DEFAULT_PORT
    """Port at which the head listens for joining hosts; 0: any."""

    advertise: str = ""
    """Address under which the others reach the head, where it is not `bind` (NAT)."""

    key_file: str | None = None
    """File of mode 0600 with the join key. None: from SHOAL_JOIN_KEY, else made and printed."""

    plaintext: bool = False
    """No encryption: for a fabric that is trusted."""

    ship: bool = False
    """Send the script's folder to hosts that have no shared file system."""

    join_timeout_s: float = 600.0
    """How long the head waits for all hosts."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_hosts <= MAX_HOSTS:
            raise ConfigError(
                f"--hosts {self.num_hosts} cannot be: give a number from 1 to {MAX_HOSTS}, or the hosts' names. Nothing was "
                "started."
            )
        if not self.bind:
            raise ConfigError(
                f"a job on {self.num_hosts} hosts needs --bind ADDRESS[:PORT], the address of this machine that the others "
                "reach, or --interface NAME. Nothing was started; `ip -brief address` lists them."
            )
        if not 0 <= self.connections <= MAX_CONNECTIONS:
            raise ConfigError(
                f"--connections {self.connections} cannot be: give a number from 1 to {MAX_CONNECTIONS}. Nothing was started."
            )
        check_wait("--join-timeout", self.join_timeout_s, "hosts", " (join_timeout_s in a cluster file)")
        for what, counts in (("workers", self.workers), ("servers", self.servers)):
            if counts and len(counts) != self.num_hosts:
                raise ConfigError(
                    f"{len(counts)} numbers of {what} for {self.num_hosts} hosts. Nothing was started; give one for each."
                )

    @property
    def num_places(self) -> int:
        """Hosts that have workers or servers."""
        return self.num_hosts - (not self.head_takes_part)

    def resources(self, num_workers: int, num_servers: int) -> Resources:
        """Resources of a host, for the fullest of them; of services, for the fullest that has workers."""
        if self.roles:
            return self.worker_resources * max(self.workers)
        workers = self.worker_resources * -(-num_workers // self.num_places)
        return workers + self.server_resources * -(-num_servers // self.num_places)

    def host_of(self, rank: int, num_workers: int) -> int:
        """Host of a rank: ranks fill one host after the other."""
        if not self.workers:
            return rank * self.num_hosts // num_workers
        for host, count in enumerate(self.workers):
            if rank < count:
                return host
            rank -= count
        raise ConfigError(
            f"the cluster has {sum(self.workers)} workers, and {num_workers} were asked for. Nothing was started."
        )

    def most_workers(self, num_workers: int) -> int:
        """Workers of the fullest host."""
        return max(self.workers) if self.workers else -(-num_workers // self.num_places)

    def with_seats(self, num_hosts: int, num_workers: int) -> HostsConfig:
        """More hosts than now: those that are added have neither workers nor named servers, and no home moves."""
        homes = [self.host_of(rank, num_workers) for rank in range(num_workers)]
        return replace(
            self,
            num_hosts=num_hosts,
            workers=tuple(homes.count(host) for host in range(num_hosts)),
            servers=self.servers and (*self.servers, *(0,) * (num_hosts - self.num_hosts)),
        )

    def with_a_server_on_each(self, num_workers: int) -> HostsConfig:
        """The same hosts with one server on each of those that have workers."""
        if any(self.servers):
            raise ConfigError(
                "--servers colocated is one server on each host that has workers, and the cluster names servers of its hosts too. "
                "Nothing was started; leave one of them out."
            )
        homes = {self.host_of(rank, num_workers) for rank in range(num_workers)}
        return replace(self, servers=tuple(int(host in homes) for host in range(self.num_hosts)))

    def takes(self, host: int, role: str) -> bool:
        """Whether processes of a role may run on a host."""
        return not self.roles or self.roles[host] == role

    def host_of_server(self, number: int) -> int:
        """Host of a server; beyond those that were named, one after the other in turn."""
        if self.roles:
            services = [host for host, role in enumerate(self.roles) if role == SERVER]
            return services[number % len(services)]
        left = number
        for host, count in enumerate(self.servers):
            if left < count:
                return host
            left -= count
        return number % self.num_places + (not self.head_takes_part)


def check_wait(option: str, seconds: float, what: str, also: str = "") -> None:
    """Refuse, by ConfigError, a time that no clock reaches: not positive, infinite or no number."""
    if not 0 < seconds < 1e9:
        raise ConfigError(
            f"{option} {seconds}{also} is no time to wait for {what}. Nothing was started; give a positive number of seconds."
        )


def parse_resources(said: str) -> dict[str, Resources]:
    """`worker:cpus=2,gpus=1,memory=8 server:cpus=1`: by role, as keyword arguments of HostsConfig."""
    found: dict[str, Resources] = {}
    for part in said.split():
        role, _, given = part.partition(":")
        if role not in ("worker", "server"):
            raise ConfigError(
                f"--resources {said}: '{role}' is no role; one is worker or server. Nothing was started; write worker:cpus=2,memory=8."
            )
        numbers: dict[str, Any] = {}
        for each in given.split(","):
            name, _, value = each.partition("=")
            form = r"\d+" if name == "gpus" else r"\d+(\.\d+)?"
            if name not in ("cpus", "gpus", "memory") or not re.fullmatch(form, value):
                raise ConfigError(
                    f"--resources {said}: '{each}' is none of cpus=N, gpus=N (whole) and memory=GB. Nothing was started."
                )
            numbers[{"memory": "memory_gb"}.get(name, name)] = int(value) if name == "gpus" else float(value)
        before = found.get(f"{role}_resources", SERVER_RESOURCES if role == "server" else Resources())
        found[f"{role}_resources"] = replace(before, **numbers)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig:
    """The etcd in which a job's head is recorded."""

    members: tuple[tuple[str, int], ...]
    """Address and port of each."""

    tls: bool = False
    """etcds://"""

    user: str = field(default="", repr=False)
    """Name for etcd's own authentication; empty: none."""

    password: str = field(default="", repr=False)
    """Of that user."""

    @property
    def shown(self) -> str:
        """The URL without user and password."""
        members = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.members)
        return f"etcd{'s' if self.tls else ''}://{','.join(members)}"


def parse_journal(url: str) -> JournalConfig:
    """`etcd://[USER:PASSWORD@]h1:2379,h2:2379,h3:2379`. An error never quotes the password."""
    scheme, _, rest = url.partition("://")
    login, has_login, listed = rest.rpartition("@")
    shown = f"{scheme}://{'...@' if has_login else ''}{listed}" if rest else url
    example = "one reads etcd://h1:2379,h2:2379,h3:2379, or etcds:// with TLS. Nothing was started."
    if scheme not in ("etcd", "etcds"):
        raise ConfigError(f"--journal {shown} is no address of an etcd; {example}")
    members = []
    for member in listed.rstrip("/").split(","):
        found = _MEMBER.fullmatch(member.strip())
        port = int(found["port"] or ETCD_PORT) if found else 0
        if found is None or not 0 < port < 1 << 16:
            raise ConfigError(f"--journal {shown}: '{member}' is no member of an etcd; {example}")
        members.append((found["ip6"] or found["host"], port))
    user, _, password = login.partition(":")
    return JournalConfig(
        members=tuple(dict.fromkeys(members)),
        tls=scheme == "etcds",
        user=unquote(user),
        password=unquote(password),
    )


def parse_hosts(said: str) -> tuple[int, tuple[str, ...]]:
    """`3` or `a,b,c`: how many hosts, and their names where they were named."""
    if said.strip().isdecimal():
        return int(said), ()
    names = tuple(name.strip() for name in said.split(","))
    for name in names:
        if not _HOSTNAME.fullmatch(name):
            raise ConfigError(
                f"--hosts {said}: '{name}' is no host name. Nothing was started; give a number (--hosts 3) or names "
                "(--hosts node1,node2)."
            )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"--hosts {said} names {twice} twice. Nothing was started.")
    return len(names), names


def parse_bind(said: str) -> tuple[str, int]:
    """`10.0.0.1`, `10.0.0.1:7070`, `[fe80::1]:7070`: address and port."""
    if said.startswith("["):
        host, _, rest = said[1:].partition("]")
        port = rest.lstrip(":")
    elif said.count(":") == 1:
        host, _, port = said.partition(":")
    else:
        host, port = said, ""
    if not host or (port and not port.isdecimal()) or int(port or 0) >= 1 << 16:
        raise ConfigError(
            f"--bind {said} is no address; one reads 10.0.0.1:{DEFAULT_PORT}. Nothing was started."
        )
    return host, int(port) if port else DEFAULT_PORT


_CLUSTER_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "bind": ((str,), "an address in quotes"),
    "advertise": ((str,), "an address in quotes"),
    "plaintext": ((bool,), "true or false"),
    "ship": ((bool,), "true or false"),
    "join_timeout_s": ((int, float), "a number of seconds"),
}


def read_cluster(text: str, source: str) -> dict[str, Any]:
    """Content of a cluster file, as keyword arguments of HostsConfig.

    bind = "10.0.0.1:7070"
    [[host]]
    name = "10.0.0.1"
    workers = 2
    servers = 1
    """
    try:
        said = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is no TOML: {error}. Nothing was started.") from None
    _refuse_unknown(said, {"host", *_CLUSTER_TYPES}, source)
    for key, (kinds, in_words) in _CLUSTER_TYPES.items():
        # A string would count as true: plaintext = "no" must not turn encryption off.
        if type(said.get(key)) not in (*kinds, type(None)):
            raise ConfigError(f"{source}: {key} = {said[key]!r} is not {in_words}. Nothing was started.")
    hosts = said.pop("host", [])
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, dict) for host in hosts):
        raise ConfigError(
            f"{source} names no hosts: each is a table [[host]] with a name. Nothing was started."
        )
    for host in hosts:
        _refuse_unknown(host, {"name", "workers", "servers"}, source)
        for what in ("workers", "servers"):
            if type(host.get(what, 0)) is not int or host.get(what, 0) < 0:  # true is an int too
                raise ConfigError(
                    f"{source}: {what} = {host[what]!r} is no number of {what}. Nothing was started."
                )
        if not isinstance(host.get("name"), str) or not _HOSTNAME.fullmatch(host["name"]):
            raise ConfigError(
                f"{source}: a host without a name, or with one that is none. Nothing was started."
            )
    found: dict[str, Any] = {key: said[key] for key in said if key != "bind"}
    if "bind" in said:
        found["bind"], found["port"] = parse_bind(said["bind"])
    found["names"] = tuple(host["name"] for host in hosts)
    twice = [name for name, count in Counter(found["names"]).items() if count > 1]
    if twice:
        raise ConfigError(
            f"{source} names the host {twice[0]} twice. Nothing was started; add up its workers in one table."
        )
    found["num_hosts"] = len(hosts)
    found["workers"] = tuple(host.get("workers", 1) for host in hosts)
    found["servers"] = tuple(host.get("servers", 0) for host in hosts)
    return found


def read_tf_config(text: str) -> dict[str, Any]:
    """Content of TensorFlow's TF_CONFIG, as keyword arguments of HostsConfig: chief and workers, and `ps` as servers."""
    try:
        cluster = json.loads(text)["cluster"]
        if not all(isinstance(addresses, list) for addresses in cluster.values()):
            raise TypeError
        workers = [str(each) for role in ("chief", "master", "worker") for each in cluster.get(role, [])]
        servers = [str(each) for each in cluster.get("ps", [])]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            'TF_CONFIG is not what TensorFlow writes there: {"cluster": {"worker": ["host:port", ...], "ps": [...]}}. '
            "Nothing was started."
        ) from None
    names = list(dict.fromkeys(each.rpartition(":")[0] or each for each in [*workers, *servers]))
    if not names:
        raise ConfigError("TF_CONFIG names no worker. Nothing was started.")

    def count(addresses: list[str], name: str) -> int:
        return sum((each.rpartition(":")[0] or each) == name for each in addresses)

    return {
        "num_hosts": len(names),
        "names": tuple(names),
        "workers": tuple(count(workers, name) for name in names),
        "servers": tuple(count(servers, name) for name in names),
    }


def _refuse_unknown(said: Mapping[str, Any], known: set[str], source: str) -> None:
    for key in said:
        if key not in known:
            guess = get_close_matches(key, known, n=1)
            raise ConfigError(
                f"{source} has '{key}', which a cluster file has not.{f' Did you mean {guess[0]!r}?' if guess else ''} "
                "Nothing was started."
            )
