"""Meshes by name: what multiplies, who sits where, who speaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import strategy as strategies
from shoal.config.strategy import Axes
from shoal.errors import ConfigError

degrees = st.integers(1, 4)


@given(degrees, degrees, degrees, degrees)
def test_every_rank_has_a_place_and_every_part_of_a_batch_one_speaker(
    pp: int, dp: int, fsdp: int, tp: int
) -> None:
    axes = Axes(pp, dp, fsdp, tp)
    places = {axes.coordinates(rank) for rank in range(axes.num_ranks)}
    assert len(places) == axes.num_ranks == pp * dp * fsdp * tp
    speakers = axes.speakers()
    assert [axes.data_rank(rank) for rank in speakers] == list(range(dp * fsdp))
    assert all(axes.coordinates(rank).pp == pp - 1 for rank in speakers)


def test_neighbours_share_layers() -> None:
    axes = Axes(pp=2, dp=2, tp=2)
    assert [axes.coordinates(rank).tp for rank in range(4)] == [0, 1, 0, 1]
    assert [axes.coordinates(rank).pp for rank in range(8)] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("name", "num_workers", "axes"),
    [
        ("fsdp", 3, Axes(fsdp=3)),
        ("tp", 2, Axes(tp=2)),
        ("dp=2,tp=2,pp=2", 8, Axes(pp=2, dp=2, tp=2)),
        ("fsdp=2,tp=2", 4, Axes(fsdp=2, tp=2)),
        ("pp=1", 1, Axes()),
    ],
)
def test_names_mean_axes(name: str, num_workers: int, axes: Axes) -> None:
    parsed = strategies.parse_axes(name)
    assert parsed is not None
    assert strategies.fill_axes(parsed, num_workers, name) == axes
    if axes.pp == 1:
        assert strategies.choose(name, num_workers) == name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dp=2,tp=2", "2 replicas of the model x 2 parts of each layer: 4 workers, and 3 were asked for"),
        ("tp=2,tp=2", "says tp twice"),
        ("fsdp=0", "fsdp=0"),
        ("tp=1", r"multiply to 3 \(dp=3,tp=1\)"),
    ],
)
def test_what_does_not_multiply_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        strategies.choose(name, 3)


@pytest.mark.parametrize("name", ["ddp", "dp:2", "tp=", "tp=2;pp=2", "", "xp=2"])
def test_other_names_are_no_meshes(name: str) -> None:
    assert strategies.parse_axes(name) is None
