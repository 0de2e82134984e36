"""Number of servers of a launch, and numbers refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config.faults import Faults
from shoal.config.launch import LaunchConfig
from shoal.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "num_servers", "num_replicas"),
    [
        ({}, 0, 1),
        ({"workers": 3}, 0, 1),
        ({"strategy": "ps"}, 1, 1),
        ({"strategy": "ps:async", "servers": 3}, 3, 2),
        ({"strategy": "ps:ssp=2", "servers": 3, "replicas": 1}, 3, 1),
        ({"strategy": "ps", "servers": 3, "replicas": 3}, 3, 3),
    ],
)
def test_servers_and_replicas_follow_the_strategy(
    options: dict[str, Any], num_servers: int, num_replicas: int
) -> None:
    config = LaunchConfig(script="x.py", **options)
    assert (config.num_servers, config.num_replicas) == (num_servers, num_replicas)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"servers": 2}, "'single' has no servers"),
        ({"workers": 2, "servers": 1}, "'ddp' has no servers"),
        ({"workers": 2, "replicas": 2}, "nothing is replicated"),
        ({"strategy": "ps", "servers": 0}, "needs a server"),
        ({"strategy": "ps", "servers": 65}, "from 1 to 64"),
        ({"strategy": "ps", "servers": -1}, "from 1 to 64"),
        ({"strategy": "ps", "replicas": 2}, "need as many servers"),
        ({"strategy": "ps", "servers": 2, "replicas": 0}, "from 1 to 2"),
        ({"strategy": "ps", "faults": Faults().kill("server-1", at_step=3)}, "server-0 to server-0"),
        ({"workers": 2, "faults": Faults().kill("server-0", at_step=3)}, "0 servers has none"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        LaunchConfig(script="x.py", **options)


def test_faults_at_random_hit_servers_too_where_there_are_some() -> None:
    def drawn(num_servers: int) -> set[str]:
        faults = Faults.random(seed=1, num_workers=2, num_servers=num_servers, every_s=1.0, for_s=200.0)
        return {fault.process for fault in faults.planned}

    assert drawn(0) == {"worker-0", "worker-1", "coordinator"}
    assert drawn(2) == {"worker-0", "worker-1", "coordinator", "server-0", "server-1"}
