"""Workers of different kinds in one job share batches by measured speed; what cannot work so is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.config import job as jobs
from shoal.config import placement
from shoal.config.job import Job
from shoal.config.launch import LaunchConfig
from shoal.data import Dataset
from shoal.data.sharding import BySpeed
from shoal.errors import ConfigError
from shoal.train.calls import batches_of


def job(**settings: object) -> Job:
    wishes = {"num_workers": 2, "strategy": "ddp", "device": "cuda:0,cpu"} | settings
    return Job(name="x", run_dir=Path("x"), **wishes)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this host had one."""
    found = placement.place("cuda:0,cpu", num_workers=2, visible={"cuda": 1})
    monkeypatch.setattr(placement, "of_job", lambda job: found)


@pytest.mark.parametrize(
    ("settings", "what", "is_measured"),
    [
        ({}, "fit", True),
        ({}, "evaluate", False),  # nobody measures there
        ({"shard": "equal"}, "fit", False),
        ({"strategy": "ps"}, "fit", False),
    ],
)
def test_batches_of_a_mixed_job_are_cut_by_measured_speed_where_nobody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], what: str, is_measured: bool
) -> None:
    monkeypatch.setattr(jobs, "_current", job(**settings))
    batches = batches_of(Dataset.from_arrays(torch.zeros(8, 1)).batch(4), what=what, seed=0)
    assert isinstance(batches.sharding, BySpeed) == is_measured


def test_what_the_script_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_current", job())
    said = Dataset.from_arrays(torch.zeros(8, 1)).batch(4).shard("weighted", weights=[3, 1])
    assert not isinstance(batches_of(said, what="fit", seed=0).sharding, BySpeed)


def test_a_mesh_over_different_kinds_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="different kinds, and 'fsdp' cuts the model"):
        LaunchConfig(script="x.py", workers=2, strategy="fsdp", device="cuda:0,cpu")
