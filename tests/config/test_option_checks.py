"""What may be asked beside a strategy, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config.launch import LaunchConfig
from shoal.errors import ConfigError


@pytest.mark.parametrize(
    ("strategy", "options", "says"),
    [
        ("ddp", {"batchnorm": "synced"}, "Did you mean 'sync'"),
        ("ps", {"batchnorm": "sync"}, "the workers of 'ps' have no connection to each other"),
        ("ps:async", {"batchnorm": "sync"}, "have no connection to each other"),
        ("ddp", {"batchnorm": "sync", "sync_every": 3}, "they train apart"),
        ("ddp", {"sequence_parallel": True}, "'ddp' has no tp"),
        ("ddp", {"offload": True}, "'ddp' has no fsdp"),
        ("fsdp", {"schedule": "gpipe"}, "'fsdp' has no pp"),
        ("fsdp", {"snapshot_every": -1}, "no number of steps between two snapshots"),
        ("ddp", {"snapshot_every": 10}, "under 'ddp' one that dies is replaced from the others"),
        ("pp", {"checkpoint_activations": True, "schedule": "zero-bubble"}, "takes backward apart"),
    ],
)
def test_wishes_that_do_not_go_with_a_strategy_are_refused(
    strategy: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        LaunchConfig(script="train.py", workers=2, strategy=strategy, **options)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", {"batchnorm": "sync", "checkpoint_activations": True}),
        ("tp", {"sequence_parallel": True}),
        ("pp", {"batchnorm": "sync"}),
        ("dp=1,pp=2", {"schedule": "gpipe"}),
        ("fsdp", {"offload": True, "batchnorm": "sync", "snapshot_every": 0}),
        ("ddp", {"compress": "topk", "snapshot_every": 10}),
    ],
)
def test_others_are_taken(strategy: str, options: dict[str, Any]) -> None:
    LaunchConfig(script="train.py", workers=2, strategy=strategy, **options)
