"""Hosts as a user writes them: numbers, names, addresses, cluster files, TF_CONFIG."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.hosts import HostsConfig, parse_bind, parse_hosts, read_cluster, read_tf_config
from shoal.config.launch import LaunchConfig
from shoal.errors import ConfigError


@pytest.mark.parametrize(
    ("said", "address"),
    [
        ("10.0.0.1", ("10.0.0.1", 7070)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("[fe80::1]:81", ("fe80::1", 81)),
        ("::1", ("::1", 7070)),
    ],
)
def test_an_address_with_and_without_a_port(said: str, address: tuple[str, int]) -> None:
    assert parse_bind(said) == address


@pytest.mark.parametrize("said", ["", ":7070", "10.0.0.1:x", "10.0.0.1:70000"])
def test_what_is_no_address_is_refused(said: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        parse_bind(said)


def test_hosts_are_a_number_or_names() -> None:
    assert parse_hosts("3") == (3, ())
    assert parse_hosts("a, b.example,user@c") == (3, ("a", "b.example", "user@c"))
    for wrong in ("a,,b", "-oProxyCommand=x", "a b"):
        with pytest.raises(ConfigError, match="is no host name"):
            parse_hosts(wrong)
    with pytest.raises(ConfigError, match="twice"):
        parse_hosts("a,b,a")


@given(num_hosts=st.integers(1, 8), extra=st.integers(0, 40))
def test_ranks_fill_one_host_after_the_other_and_no_host_is_empty(num_hosts: int, extra: int) -> None:
    hosts = HostsConfig(num_hosts=num_hosts, bind="10.0.0.1")
    num_workers = num_hosts + extra
    placed = [hosts.host_of(rank, num_workers) for rank in range(num_workers)]
    assert placed == sorted(placed)
    assert set(placed) == set(range(num_hosts))
    counts = [placed.count(host) for host in range(num_hosts)]
    assert max(counts) - min(counts) <= 1


def test_a_cluster_file_names_hosts_with_their_roles() -> None:
    said = read_cluster(
        'bind = "10.0.0.1:81"\n[[host]]\nname = "a"\nworkers = 2\n[[host]]\nname = "b"\nworkers = 3\nservers = 2\n',
        "c.toml",
    )
    hosts = HostsConfig(**said)
    assert (hosts.names, hosts.workers, hosts.servers, hosts.port) == (("a", "b"), (2, 3), (0, 2), 81)
    assert [hosts.host_of(rank, 5) for rank in range(5)] == [0, 0, 1, 1, 1]
    assert [hosts.host_of_server(number) for number in range(3)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bind = ", "is no TOML"),
        ('bind = "10.0.0.1"', "names no hosts"),
        ("[[host]]\nworkers = 1", "without a name"),
        ('[[host]]\nname = "a"\nworker = 1', "Did you mean 'workers'"),
        ('[[host]]\nname = "a"\nworkers = -1', "is no number of workers"),
        ('[[host]]\nname = "a"\nworkers = true', "workers = True is no number of workers"),
        ('plaintext = "no"\n[[host]]\nname = "a"', "plaintext = 'no' is not true or false"),
        ('join_timeout_s = true\n[[host]]\nname = "a"', "is not a number of seconds"),
        ('[[host]]\nname = "a"\n[[host]]\nname = "a"', "names the host a twice"),
    ],
)
def test_a_wrong_cluster_file_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_cluster(text, "c.toml")


def test_tf_config_is_understood() -> None:
    said = read_tf_config(
        '{"cluster": {"chief": ["a:1"], "worker": ["a:2", "b:1"], "ps": ["b:3"]}, "task": {"type": "chief", "index": 0}}'
    )
    assert (said["names"], said["workers"], said["servers"]) == (("a", "b"), (2, 1), (0, 1))
    for wrong in ("{}", '{"cluster": {"worker": "host-0:1"}}'):
        with pytest.raises(ConfigError, match="TF_CONFIG is not"):
            read_tf_config(wrong)


def test_several_hosts_need_an_address_to_listen_at() -> None:
    with pytest.raises(ConfigError, match="needs --bind"):
        HostsConfig(num_hosts=2)


def launched(**options: object) -> LaunchConfig:
    asked = {"script": "train.py", "workers": 3, "strategy": "ps", **options}
    return LaunchConfig(**asked)  # type: ignore[arg-type]


def test_colocated_servers_are_one_on_each_host_that_has_workers() -> None:
    three = HostsConfig(num_hosts=3, bind="10.0.0.1")
    config = launched(servers="colocated", hosts=three)
    assert config.hosts is not None
    assert (config.num_servers, config.num_replicas, config.hosts.servers) == (3, 2, (1, 1, 1))
    uneven = launched(servers="colocated", hosts=replace(three, workers=(2, 0, 1)))
    assert uneven.hosts is not None
    assert [uneven.hosts.host_of_server(number) for number in range(uneven.num_servers)] == [0, 2]
    assert launched(servers="colocated").num_servers == 1
    assert uneven.notes() == []
    for refused, why in (
        ({"servers": "colocated", "strategy": "ddp"}, "has no servers"),
        ({"servers": "everywhere"}, "is no number of servers"),
        ({"servers": "colocated", "hosts": replace(three, servers=(0, 2, 0))}, "names servers of its hosts"),
    ):
        with pytest.raises(ConfigError, match=why):
            launched(**refused)


def test_servers_that_a_cluster_names_are_started_and_copies_on_one_host_are_told() -> None:
    config = launched(hosts=HostsConfig(num_hosts=2, bind="10.0.0.1", servers=(0, 2)))
    assert config.num_servers == 2
    (note,) = config.notes()
    assert "the 2 servers are on host 1, so 2 copies of everything share a host" in note


def test_an_encrypted_ring_needs_hosts_and_encryption() -> None:
    two = HostsConfig(num_hosts=2, bind="10.0.0.1")
    ring = {"strategy": "ddp", "exchange": "ring", "tls": True}
    assert launched(hosts=two, **ring).tls
    for wrong, why in (
        ({**ring}, "this job is on one machine"),
        ({**ring, "hosts": replace(two, plaintext=True)}, "--plaintext asks for none"),
        ({**ring, "hosts": two, "exchange": "tree"}, "encrypts the exchange 'ring'"),
    ):
        with pytest.raises(ConfigError, match=why):
            launched(**wrong)
