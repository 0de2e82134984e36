from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from invoking import Command, Shoal

from shoal.cli.bench import scale
from shoal.cli.bench.command import BENCHES, FROM_SOURCE, SCALE

ROOT = Path(__file__).parents[2]


def test_without_a_name_everything_that_can_be_measured_is_listed(shoal: Shoal) -> None:
    shown = shoal("bench")
    assert shown.exit_code == 0
    for name in (*BENCHES, SCALE, *FROM_SOURCE):
        assert any(line.startswith(f"  {name} ") for line in shown.stdout.splitlines()), name
    lines = [json.loads(line) for line in shoal("bench", "--json").stdout.splitlines()]
    assert [line["name"] for line in lines] == [*BENCHES, SCALE, *FROM_SOURCE]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["scale"], "scale measures a script of yours"),
        (["scale", "nowhere.py", "-n", "1,2"], "there is no script nowhere.py"),
        (["scale", "nowhere.py", "-n", "1,two"], "-n 1,two is no list of numbers of workers"),
        (["scale", "nowhere.py", "-n", "0,2"], "no list of numbers of workers"),
        (["ps", "train.py"], "`shoal bench scale train.py` does"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(shoal: Shoal, args: list[str], said: str) -> None:
    shown = shoal("bench", *args)
    assert shown.exit_code == 2
    assert said in " ".join(shown.stderr.split())


def swept(*rates: float) -> list[dict[str, Any]]:
    counts = [1, 2, 4][: len(rates)]
    return [
        {"workers": n, "samples_per_s": rate, "efficiency": rate / rates[0] / n}
        for n, rate in zip(counts, rates, strict=True)
    ]


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ((100.0,), "give more with -n"),
        ((100.0, 190.0, 370.0), "All 4 workers pay"),
        ((100.0, 190.0, 210.0), "2 workers pay: each of the 2 beyond 2 adds 10 samples/s"),
        ((100.0, 110.0, 120.0), "1 worker pays"),
        ((10.0, 190.0), "which cannot be"),
    ],
)
def test_a_sweep_says_how_many_workers_pay(rates: tuple[float, ...], said: str) -> None:
    assert said in scale.advice(swept(*rates))


def test_what_is_said_to_be_in_the_source_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    known = importlib.import_module("benchmarks.__main__").BENCHMARKS
    assert {*FROM_SOURCE} == {*known, "peers"}
    sys.modules.pop("benchmarks.__main__")


def test_what_needs_the_source_is_refused_with_the_way_to_run_it(shoal: Shoal) -> None:
    shown = shoal("bench", "ps_recovery")
    assert shown.exit_code == 2
    assert "python -m benchmarks ps_recovery" in " ".join(shown.stderr.split())


def test_a_misspelt_name_is_answered_with_the_one_that_was_meant(shoal: Shoal) -> None:
    shown = shoal("bench", "ps_recovry")
    assert shown.exit_code == 2
    assert "Did you mean 'ps_recovery'?" in " ".join(shown.stderr.split())


@pytest.mark.parametrize("name", BENCHES)
def test_every_measurement_measures_in_real_processes_and_leaves_nothing(
    command: Command, tmp_path: Path, name: str
) -> None:
    measured = command("bench", name, "--json", "--seconds", "0.3", OMP_NUM_THREADS="1")
    assert measured.returncode == 0, measured.stderr
    lines = [json.loads(line) for line in measured.stdout.splitlines()]
    assert len(lines) >= 8
    assert all(line["value"] > 0 and line["unit"] for line in lines)
    assert list(tmp_path.iterdir()) == []
