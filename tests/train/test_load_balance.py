"""Shares by measured speed, and what a fit tells the ledger."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal.data import Dataset
from shoal.errors import ConfigError
from shoal.train.load_balance import SMALLEST, next_weights, refuse


def test_a_worker_four_times_slower_comes_to_have_a_quarter() -> None:
    weights = next_weights([100.0, 25.0, 100.0], [])
    assert weights[1] == pytest.approx(weights[0] / 4, rel=1e-3)


def test_shares_follow_half_way_and_stay_where_hardly_anything_changed() -> None:
    before = [1.0, 1.0]
    assert next_weights([150.0, 50.0], before) == [1.25, 0.75]
    assert next_weights([101.0, 99.0], before) is before


def test_a_worker_that_measured_nothing_keeps_its_share() -> None:
    assert next_weights([0.0, 0.0], [2.0, 1.0]) == [2.0, 1.0]
    assert next_weights([0.0, 300.0, 100.0], [1.0, 1.0, 1.0])[0] == 1.0


def test_nobody_is_left_without_samples() -> None:
    assert min(next_weights([1e9, 1e-9], [])) == SMALLEST


@given(st.lists(st.floats(1.0, 1e4), min_size=1, max_size=6), st.integers(1, 12))
def test_agreeing_again_and_again_ends_at_shares_in_proportion(speeds: list[float], num_before: int) -> None:
    weights: list[float] = [1.0] * len(speeds)
    for _ in range(30):
        weights = next_weights(speeds, weights)
    mean = sum(speeds) / len(speeds)
    for weight, speed in zip(weights, speeds, strict=True):
        assert weight == pytest.approx(max(speed / mean, SMALLEST), rel=0.25, abs=0.02)


def test_one_process_refuses_nothing_and_several_what_they_cannot_do() -> None:
    batches = Dataset.from_arrays(torch.arange(8)).batch(4)
    dynamic, measured = batches.shard("dynamic"), batches.shard("weighted", weights="measured")
    for sharded in (batches, dynamic, measured):
        refuse(sharded, num_workers=1, strategy="single", what="fit")
    with pytest.raises(ConfigError, match="hands whole batches to whichever worker is free"):
        refuse(dynamic, num_workers=2, strategy="ddp", what="fit")
    with pytest.raises(ConfigError, match=r"only Trainer\.fit does"):
        refuse(measured, num_workers=2, strategy="ddp", what="shoal.setup")
    refuse(measured, num_workers=2, strategy="ddp", what="fit")


@pytest.mark.parametrize("how", [("dynamic", {}), ("weighted", {"weights": "measured"}), ("equal", {})])
def test_a_script_that_shards_runs_in_one_process_too(how: tuple[str, dict[str, str]]) -> None:
    data = Dataset.from_arrays((torch.randn(12, 3), torch.randn(12, 1))).batch(5)
    trainer = shoal.Trainer(
        nn.Linear(3, 1), loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    )
    trainer.fit(data.shard(how[0], **how[1]), epochs=2)  # type: ignore[arg-type]  # strings are among what it takes
    assert trainer.step == 6
