"""Options of the command line beside a cluster file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.hosts import HostOptions

CLUSTER = 'bind = "10.0.0.1:81"\njoin_timeout_s = 30\nplaintext = true\n[[host]]\nname = "a"\n[[host]]\nname = "b"\n'


@pytest.mark.parametrize(("given", "timeout_s"), [({}, 30.0), ({"join_timeout": 5.0}, 5.0)])
def test_a_cluster_file_counts_where_no_option_says_otherwise(
    tmp_path: Path, given: dict[str, float], timeout_s: float
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    hosts = HostOptions(cluster=file, **given).config(num_workers=2)  # type: ignore[arg-type]
    assert hosts is not None
    assert (hosts.join_timeout_s, hosts.plaintext, hosts.port) == (timeout_s, True, 81)
