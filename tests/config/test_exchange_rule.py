"""Choice of `--exchange auto` by size, from imagined measurements."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import exchange_rule
from shoal.config.choices import EXCHANGES
from shoal.config.exchange_rule import choose, parse

SMALL, LARGE = 4096, 1 << 20


def rule(by_size: dict[int, dict[str, float]], *, workers: int = 2, **there: object) -> str:
    here = {"num_workers": workers, "num_hosts": 1, "processor": "x86_64"} | there
    return choose({2: by_size}, **here)  # type: ignore[arg-type]


def test_without_a_measurement_it_is_shm_within_hosts_and_torchs_own_where_each_has_one_worker() -> None:
    assert choose({}, num_workers=2, num_hosts=1, processor="x86_64") == "shm"
    assert choose({}, num_workers=3, num_hosts=2, processor="x86_64") == "hierarchical"
    assert choose({}, num_workers=3, num_hosts=2, processor="aarch64") == "native"
    assert choose({}, num_workers=2, num_hosts=2, processor="x86_64") == "native"
    assert choose({}, num_workers=2, num_hosts=1, processor="aarch64") == "native"


def test_the_fastest_at_each_size_is_taken() -> None:
    assert rule({SMALL: {"shm": 1.0, "native": 5.0}, LARGE: {"shm": 1.0, "native": 2.0}}) == "shm"
    assert (
        rule({SMALL: {"shm": 1.0, "native": 0.5}, LARGE: {"shm": 1.0, "native": 2.0}}) == "native<=65536,shm"
    )
    assert rule({SMALL: {"shm": 1.0, "ring": 2.0}, LARGE: {"shm": 1.0, "ring": 0.5}}) == "shm<=65536,ring"


def test_a_small_advantage_is_noise() -> None:
    assert rule({SMALL: {"shm": 1.0, "native": 0.9}}) == "shm"


def test_what_was_measured_here_says_nothing_about_several_hosts_or_another_processor() -> None:
    measured = {SMALL: {"shm": 1.0, "native": 5.0, "ring": 4.9}}
    assert rule(measured, num_hosts=2) == "native"
    assert rule(measured, processor="aarch64") == "native"


def test_the_nearest_number_of_workers_counts() -> None:
    measured = {2: {SMALL: {"shm": 1.0, "native": 0.1}}, 4: {SMALL: {"shm": 0.1, "native": 1.0}}}
    chosen = [choose(measured, num_workers=n, num_hosts=1, processor="x86_64") for n in (2, 3, 4, 9)]
    assert chosen == ["native", "native", "shm", "shm"]


@given(
    st.dictionaries(
        st.sampled_from([4096, 65536, 1 << 20, 1 << 24]),
        st.dictionaries(
            st.sampled_from(sorted(set(EXCHANGES) - {"auto", "hierarchical"})), st.floats(1e-6, 1.0)
        ),
    )
)
def test_a_rule_covers_every_size_and_holds_one_relayed_exchange_at_most(
    by_size: dict[int, dict[str, float]],
) -> None:
    parts = parse(rule(by_size))
    limits = [most for most, _ in parts]
    assert limits == sorted(limits)
    assert limits[-1] == math.inf
    assert len({name for _, name in parts} - set(exchange_rule.IN_MEMORY)) <= 1


def test_the_table_comes_back_on_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "deep" / "exchange.json"
    measured = {2: {SMALL: {"shm": 0.5}}}
    assert exchange_rule.read(table) == {}
    assert exchange_rule.write(table, measured)
    assert exchange_rule.read(table) == measured
    monkeypatch.setattr("platform.node", lambda: "another")
    assert exchange_rule.read(table) == {}
    table.write_text("[1]")
    assert exchange_rule.read(table) == {}
