"""Options of the command line beside a cluster file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.hosts import HostOptions
from shoal.errors import ConfigError

CLUSTER = 'bind = "10.0.0.1:81"\njoin_timeout_s = 30\nplaintext = true\n[[host]]\nname = "a"\n[[host]]\nname = "b"\n'


@pytest.mark.parametrize(
    ("given", "timeout_s"), [({}, 30.0), ({"join_timeout": 5.0}, 5.0), ({"join_timeout": 600.0}, 600.0)]
)
def test_a_cluster_file_counts_where_no_option_says_otherwise(
    tmp_path: Path, given: dict[str, float], timeout_s: float
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    hosts = HostOptions(cluster=file, **given).config(num_workers=2)  # type: ignore[arg-type]
    assert hosts is not None
    assert (hosts.join_timeout_s, hosts.plaintext, hosts.port) == (timeout_s, True, 81)


def test_the_head_waits_ten_minutes_where_nothing_says_otherwise() -> None:
    hosts = HostOptions(hosts="2", bind="10.0.0.1").config(num_workers=2)
    assert hosts is not None
    assert hosts.join_timeout_s == 600.0


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -5.0, 0.0])
@pytest.mark.parametrize("has_cluster", [False, True])
def test_a_wait_for_hosts_without_a_proper_end_is_refused(
    tmp_path: Path, timeout_s: float, has_cluster: bool
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    options = HostOptions(hosts="2", bind="10.0.0.1", join_timeout=timeout_s)
    if has_cluster:
        options = HostOptions(cluster=file, join_timeout=timeout_s)
    with pytest.raises(ConfigError, match="is no time to wait for hosts"):
        options.config(num_workers=2)
