"""Options beside a strategy, and combinations refused before anything starts."""

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
        ("ddp", {"accumulate": 0}, "no number of parts"),
        ("pp", {"checkpoint_activations": True, "schedule": "zero-bubble"}, "takes backward apart"),
        ("ps", {"staleness_lr": True}, "under 'ps' no push is an update of its own"),
        ("ps:stale-ok", {"staleness_lr": True}, "under 'ps:stale-ok' no push is an update of its own"),
        ("ps", {"push_norm": 1.0}, "clip_norm"),
        ("ddp", {"push_norm": 1.0}, "under 'ddp' no push is an update of its own"),
        ("ps:async", {"push_norm": 0.0}, "no bound of a gradient's norm"),
        ("ps", {"push_every": 4}, "under 'ps' every step is one update of all workers"),
        ("ps:drop=1", {"pull_every": 4}, "under 'ps:drop=1' every step is one update"),
        ("ps:hybrid", {"push_every": 2}, "the dense half of those steps counts already"),
        ("ps:async", {"push_every": 0}, "no number of steps"),
        ("ps", {"compress": "topk"}, "ps:async or ps:ssp=K, or --strategy ddp"),
        ("ps:async", {"compress": "topk", "fan_in": 2}, "one push of several workers'"),
        ("ps", {"fan_in": 4}, "in the order of the ranks"),
        ("ps:async", {"fan_in": 2, "staleness_lr": True}, "--staleness-lr goes by the age of each"),
        ("ps:async", {"fan_in": 2, "push_norm": 1.0}, "--push-norm goes by the norm of each"),
        ("ps:async", {"fan_in": 1}, "no number of workers whose pushes are merged"),
        ("ps", {"row_cache": 100}, "workers every step is computed on the weights of the last"),
        ("ps:async", {"row_cache": 100}, "'ps:async' does not say how many those are"),
        ("ps:async", {"row_cache": 1, "pull_every": 2}, "no number of rows to keep"),
        ("ps:hybrid", {"pull_every": 2}, "it keeps rows only with --row-cache"),
        ("ps:ssp=2", {"push_every": 4}, "use --push-every 3 or ps:ssp=3"),
        ("ps:async", {"push_norm": float("nan")}, "no bound of a gradient's norm"),
        ("ddp", {"table_memory": "2G"}, "'ddp' has no servers"),
        ("ps", {"table_memory": "lots"}, "no number of bytes: give one as 2G"),
        ("ps", {"table_memory": "0"}, "no number of bytes"),
        ("ps", {"table_dir": "/tmp"}, "without --table-memory all do"),
        ("ddp", {"server_device": "auto"}, "'ddp' has no servers"),
        ("ps:hybrid", {"server_device": "cuda"}, "keeps dense parameters with its workers"),
        ("ps", {"server_device": "cuda0"}, "Did you mean 'cuda'"),
        ("ps", {"table_keep": "recent"}, "without --table-memory all do"),
        ("ps", {"table_keep": "newest", "table_memory": "2G"}, "none of recent, balanced, frequent"),
        ("ps", {"compress": "topk"}, "keeps a part of the gradient on each worker.*use bf16, fp16, int8"),
        ("ps:async", {"compress": "powersgd"}, "can be replaced at any step"),
        ("fsdp", {"compress": "bf16"}, "makes the gradients of ddp smaller"),
    ],
)
def test_options_that_do_not_go_with_a_strategy_are_refused(
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
        ("ps:async", {"staleness_lr": True, "push_norm": 2.5}),
        ("ps:ssp=2", {"push_norm": 2.5}),
        ("ps:ssp=2", {"push_every": 3, "pull_every": 8}),
        ("ps:ssp=2", {"row_cache": 100}),
        ("ps:async", {"compress": "topk:ratio=0.1", "push_every": 4}),
        ("ps:hybrid", {"row_cache": 100, "pull_every": 4}),
        ("ps:hybrid", {"staleness_lr": True}),
        (
            "ps",
            {"table_memory": "1.5 GiB", "table_dir": "/tmp", "table_keep": "frequent", "compress": "int8"},
        ),
        ("ps:hybrid", {"table_memory": "65536", "compress": "bf16"}),
        ("ps:async", {"server_device": "auto"}),
    ],
)
def test_others_are_taken(strategy: str, options: dict[str, Any]) -> None:
    LaunchConfig(script="train.py", workers=2, strategy=strategy, **options)


def test_the_only_worker_of_ps_may_keep_rows_and_nothing_else_about_pushes() -> None:
    alone = {"script": "train.py", "workers": 1, "strategy": "ps", "row_cache": 100}
    assert LaunchConfig(**alone, snapshot_every=10).row_cache == 100
    for options in ({"compress": "bf16"}, {"server_device": "cuda:0"}):
        with pytest.raises(ConfigError, match="update everything itself"):
            LaunchConfig(**alone, **options)
