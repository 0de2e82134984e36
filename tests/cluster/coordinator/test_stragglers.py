from __future__ import annotations

import pytest

from shoal.cluster.coordinator.stragglers import DrainConfig, Drained, Readmitted, Stragglers
from shoal.errors import ConfigError


def draining(slower_than: float | None = 4.0) -> Stragglers:
    """Ranks 0 and 1 do 10 samples in a second."""
    found = Stragglers(DrainConfig(slower_than=slower_than, probe_every_s=10.0))
    for rank in (0, 1):
        assert found.finished(rank, 10, 1.0, at=0.0) is None
    return found


def test_a_worker_far_slower_than_the_others_is_drained_once_it_has_warmed_up() -> None:
    found = draining()
    assert found.finished(2, 10, 5.0, at=5.0) is None
    assert found.finished(2, 10, 5.0, at=10.0) == Drained(2, 2.0, 10.0)
    assert found.figures(2).times_slower == 5.0


def test_one_that_is_slower_and_not_that_slow_goes_on() -> None:
    found = draining()
    for at in range(8):
        assert found.finished(2, 10, 3.9, at=at) is None


def test_a_drained_worker_takes_a_probe_now_and_then() -> None:
    found = draining()
    found.finished(2, 10, 5.0, at=5.0)
    found.finished(2, 10, 5.0, at=10.0)
    assert [found.may_take(2, at) for at in (10.0, 19.9, 20.0)] == [False, False, True]
    assert found.may_take(0, 10.0)
    found.probed(2, 20.0)
    assert not found.may_take(2, 20.0)
    assert found.finished(2, 10, 5.0, at=25.0) is None
    assert [found.may_take(2, at) for at in (49.9, 50.0)] == [False, True]  # a fifth of its time


def test_it_is_readmitted_by_a_probe_that_shows_its_recovery_and_not_by_one_that_hardly_does() -> None:
    found = draining()
    found.finished(2, 10, 5.0, at=5.0)
    found.finished(2, 10, 5.0, at=10.0)
    assert found.finished(2, 10, 2.5, at=25.0) is None
    assert found.finished(2, 10, 1.0, at=40.0) == Readmitted(2, 10.0, 10.0)
    assert found.may_take(2, 40.0)


def test_a_worker_that_slows_down_is_judged_by_its_last_ranges() -> None:
    found = draining()
    for at in range(20):
        found.finished(2, 10, 1.0, at=at)
    said = [found.finished(2, 10, 8.0, at=20.0 + at) for at in range(3)]
    assert isinstance(said[0] or said[1], Drained)


def test_the_last_of_those_that_work_is_never_drained() -> None:
    found = Stragglers(DrainConfig(slower_than=2.0))
    for at in range(4):
        assert found.finished(0, 10, 100.0, at=at) is None
    found.finished(1, 10, 1.0, at=5.0)
    assert found.finished(0, 10, 100.0, at=6.0) is None
    assert isinstance(found.finished(0, 10, 100.0, at=7.0), Drained)
    for at in range(4):
        assert found.finished(1, 10, 1000.0, at=10.0 + at) is None  # there is nobody to compare it with


def test_a_replacement_begins_with_a_clean_slate() -> None:
    found = draining()
    found.finished(2, 10, 5.0, at=5.0)
    found.finished(2, 10, 5.0, at=10.0)
    found.replaced(2)
    assert found.may_take(2, 10.0)
    assert found.finished(2, 10, 5.0, at=15.0) is None


def test_without_the_setting_nobody_is_drained() -> None:
    found = draining(None)
    for at in range(5):
        assert found.finished(2, 10, 1000.0, at=at) is None


def test_how_long_a_range_takes_is_known_from_a_workers_own_pace_or_from_the_others() -> None:
    assert Stragglers(DrainConfig()).seconds_for(0, 10) is None
    found = draining()
    assert (found.seconds_for(0, 20), found.seconds_for(7, 20)) == (2.0, 2.0)
    found.finished(7, 10, 4.0, at=1.0)
    assert found.seconds_for(7, 20) == 8.0


@pytest.mark.parametrize(
    "options", [{"slower_than": 1.0}, {"probe_every_s": 0.0}, {"probe_share": 0.0}, {"min_leases": 0}]
)
def test_settings_that_cannot_be_meant_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        DrainConfig(**options)  # type: ignore[arg-type]  # on purpose


def test_one_hiccup_drains_nobody() -> None:
    found = draining()
    for at in range(4):
        found.finished(0, 10, 1.0, at=at)
        assert found.finished(1, 10, 100.0 if at == 2 else 1.0, at=at) is None
    assert found.finished(1, 10, 100.0, at=5.0) is None
    assert isinstance(found.finished(1, 10, 100.0, at=6.0), Drained)
