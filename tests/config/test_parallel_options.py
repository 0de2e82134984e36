"""The options beside a strategy: handed on whole, written down flat, and said as they were typed."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.cluster.launch.api import resume_config
from shoal.config.job import Job
from shoal.config.launch import LaunchConfig
from shoal.config.parallel_options import KEPT, ParallelOptions, as_typed, kept_of, options_of

EARLIER: dict[str, Any] = {
    "script": "/home/me/train.py",
    "args": ["--lr", "0.1"],
    "cwd": "/home/me",
    "strategy": "ddp",
    "shard": "weighted=1,2,1",
    "workers": 3,
    "seed": 7,
    "threads": 1,
    "step_timeout_s": 300.0,
    "join_timeout_s": 120.0,
    "grace_s": 60.0,
    "exchange": "ring",
    "compress": "bf16",
    "device": "cpu",
    "versions": {"python": "3.11.9", "torch": "2.13.0", "shoal": "0.1.0"},
    "started": 1.8e9,
}
"""config.json as it was written before these options were one thing, and before some of them were there."""


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_bytes(msgspec.json.encode(EARLIER))
    return tmp_path / "mine"


def test_what_one_carries_reaches_the_other_whole() -> None:
    said = ParallelOptions(
        exchange="ring", sync_every=3, outer="nesterov", soft_placement=True, shard="equal"
    )
    job = Job(name="x", run_dir=Path("x"), **options_of(said))
    assert options_of(job) == options_of(said)
    assert set(options_of(said)) == {option.name for option in fields(ParallelOptions)}


def test_they_are_said_as_they_are_typed() -> None:
    assert as_typed(ParallelOptions(exchange_rule="native<=65536,shm")) == ""
    assert as_typed(ParallelOptions(offload=True, batchnorm="sync")) == " --batchnorm sync --offload"
    config = LaunchConfig(script="t.py", workers=3, sync_every=10, checkpoint_activations=True)
    assert as_typed(config) == " --sync-every 10 --checkpoint-activations"


def test_the_run_of_an_earlier_version_goes_on_as_it_was(earlier: Path) -> None:
    config = resume_config(earlier)
    as_before = ParallelOptions(shard="weighted=1,2,1", exchange="ring", compress="bf16", device="cpu")
    assert options_of(config) == options_of(as_before)
    assert (config.strategy, config.workers, config.resume) == ("ddp", 3, True)


def test_under_another_strategy_only_what_was_not_said_of_the_former_is_kept(earlier: Path) -> None:
    config = resume_config(earlier, strategy="fsdp")
    assert options_of(config) == options_of(ParallelOptions(**kept_of(config)))
    assert [getattr(config, name) for name in KEPT] == ["weighted=1,2,1", "cpu", False, None]


def test_a_rule_for_sums_is_kept_only_by_as_many_workers(earlier: Path) -> None:
    ruled = EARLIER | {"exchange": "auto", "exchange_rule": "native<=65536,shm", "shard": None}
    (earlier / "config.json").write_bytes(msgspec.json.encode(ruled))
    assert resume_config(earlier).exchange_rule == "native<=65536,shm"
    assert resume_config(earlier, workers=2).exchange_rule == ""


def test_what_ran_before_may_fill_the_machine_again_and_more_is_looked_at(earlier: Path) -> None:
    assert resume_config(earlier).oversubscribe
    assert resume_config(earlier, workers=2, shard="equal").oversubscribe
    assert not resume_config(earlier, workers=4, shard="equal").oversubscribe
    assert not resume_config(earlier, strategy="ps", servers=40).oversubscribe
    assert resume_config(earlier, workers=4, shard="equal", oversubscribe=True).oversubscribe
