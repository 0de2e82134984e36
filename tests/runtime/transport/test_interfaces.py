"""Interfaces are bound to by name, and one that cannot be is refused with those that can."""

from __future__ import annotations

import socket
from typing import NamedTuple

import pytest

from shoal.cli.hosts import hosts_config
from shoal.errors import ConfigError
from shoal.runtime.transport import interfaces

TWO_INTERFACES = {"lo": "127.0.0.1", "eth0": "10.0.0.1"}


class AddressOf(NamedTuple):
    family: int
    address: str


def test_an_interface_has_the_address_that_leads_back_to_it() -> None:
    assert interfaces.named("lo") == {"lo": "127.0.0.1"}
    for name, address in interfaces.addresses().items():
        assert interfaces.of_address(address) == name
    assert interfaces.of_address("203.0.113.9") is None


@pytest.mark.parametrize("said", ["eth99", "lo,eth99", "", "lo,"])
def test_an_interface_that_does_not_exist_is_refused_with_those_that_do(said: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is no network interface of this machine.*there are .*lo \(127\.0\.0\.1\)"
    ):
        interfaces.named(said)


def test_an_interface_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        interfaces.named("lo,lo")


def test_the_head_listens_at_the_address_of_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {name: [AddressOf(socket.AF_INET, address)] for name, address in TWO_INTERFACES.items()}
    monkeypatch.setattr(interfaces.psutil, "net_if_addrs", lambda: present)
    config = hosts_config("2", None, None, "eth0")
    assert config is not None
    assert (config.bind, config.interfaces) == ("10.0.0.1", ("eth0",))
    with pytest.raises(ConfigError, match="--bind says 203"):
        hosts_config("2", "203.0.113.9", None, "eth0")
    with pytest.raises(ConfigError, match="--interface is for a job on several hosts"):
        hosts_config(None, None, None, "eth0")


def test_loopback_is_refused_unless_it_is_bound_by_name() -> None:
    with pytest.raises(ConfigError, match=r"lo has the address 127\.0\.0\.1, which no other host can reach"):
        hosts_config("2", None, None, "lo")
    config = hosts_config("2", "127.0.0.1", None, "lo")
    assert config is not None
    assert config.bind == "127.0.0.1"
