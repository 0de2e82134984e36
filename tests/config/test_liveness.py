"""LivenessConfig: one place for heartbeats and tolerated silences, checked at birth and carried to every process."""

from __future__ import annotations

import msgspec
import pytest

from shoal.cluster.coordinator.process import CoordinatorSpec
from shoal.cluster.coordinator.state import CoordinationConfig
from shoal.cluster.launch.roles import ServerSpec, decode_spec, encode_spec
from shoal.config.launch import LaunchConfig
from shoal.config.liveness import LivenessConfig
from shoal.errors import ConfigError

SHORT = LivenessConfig(heartbeat_interval_s=0.5, step_timeout_s=1.0, join_timeout_s=2.0)


@pytest.mark.parametrize("name", LivenessConfig.__dataclass_fields__)
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_is_not_a_positive_time_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a positive number of seconds"):
        LivenessConfig(**{name: value})


def test_a_coordinator_must_be_allowed_to_miss_a_heartbeat() -> None:
    with pytest.raises(ConfigError, match="coordinator_dead_after_s must be several heartbeats long"):
        LivenessConfig(heartbeat_interval_s=15.0, coordinator_dead_after_s=15.0)


def test_four_heartbeats_fit_into_the_tolerated_silence_of_a_server() -> None:
    assert SHORT.server_heartbeat_s == 0.25
    assert LivenessConfig().server_heartbeat_s == LivenessConfig().heartbeat_interval_s


def test_the_options_of_a_launch_become_its_liveness() -> None:
    config = LaunchConfig(script="train.py", step_timeout_s=1.0, join_timeout_s=2.0)
    assert config.liveness == LivenessConfig(step_timeout_s=1.0, join_timeout_s=2.0)


def test_liveness_reaches_the_coordinator_and_the_servers() -> None:
    told = CoordinatorSpec(config=CoordinationConfig(num_workers=2, liveness=SHORT))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=CoordinatorSpec) == told
    server = ServerSpec(
        job="x",
        number=0,
        num_workers=2,
        num_servers=1,
        num_replicas=1,
        strategy="ps",
        run_dir="",
        liveness=SHORT,
    )
    assert decode_spec(encode_spec(server)).liveness == SHORT
