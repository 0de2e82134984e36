from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from invoking import Shoal

from shoal.cli.plan import CLEARLY, _Asked, _latency, _Planner, _rate, auto
from shoal.errors import ConfigError
from shoal.observe.planner.cost_model import ClusterShape, PlanCandidate, Prediction
from shoal.observe.planner.measuring import ScriptRuns
from shoal.observe.planner.plan_file import VERSION, digest, read_plan


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("import shoal\n")
    return path


def planned(script: Path, **changed: Any) -> Path:
    """A plan for two workers of a script, as `shoal plan` writes it."""
    found = {
        "version": VERSION,
        "script": script.name,
        "cwd": str(script.parent),
        "args": ["--lr", "0.1"],
        "script_sha256": digest(script),
        "workers": 2,
        "hosts": 1,
        "strategy": "ddp",
        "exchange": "ring",
        "model": {"weight": [2, 3]},
        "candidates": [],
    }
    file = script.with_name("plan.json")
    file.write_text(json.dumps(found | changed))
    return file


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--objective", "cost"], "--objective cost needs the price of a host"),
        (["--objective", "speed"], "there are time and cost"),
        (["--bandwidth", "10Gbit"], "is of the link between hosts, and --hosts 1 has none"),
        (["--latency", "5us"], "is of the link between hosts"),
        (["--memory", "8G", "--device-memory", "80G"], "give the one that is short"),
        (["--hosts", "4", "--per-host", "8", "--run"], "the plan is for 4 hosts with 8 workers each"),
        (["--device-speed", "20", "--run"], "at 20 times its speed"),
        (["--device-speed", "0"], "is no speed"),
        (["--hosts", "2", "--bandwidth", "fast"], "--bandwidth fast is no rate"),
        (["--hosts", "2", "--latency", "5"], "--latency 5 is no time"),
        (["--device-memory", "much"], "--device-memory much is no size"),
        (["-o", "nowhere/plan.json"], "there is no folder nowhere"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused_before_anything_is_measured(
    shoal: Shoal, script: Path, options: list[str], said: str
) -> None:
    shown = shoal("plan", str(script), *options)
    assert shown.exit_code == 2
    assert said in " ".join(shown.stderr.split())
    assert not (script.parent / "runs").exists()


def test_a_script_that_is_not_there_cannot_be_planned(shoal: Shoal) -> None:
    shown = shoal("plan", "nowhere.py")
    assert shown.exit_code == 2
    assert "there is no script nowhere.py" in shown.stderr


@pytest.mark.parametrize(
    ("text", "rate"),
    [("10Gbit", 1.25e9), ("1.2GB/s", 1.2e9), ("100Mbit", 12.5e6), ("8 gbps", 1e9), ("400B", 400.0)],
)
def test_a_bandwidth_is_bits_or_bytes_a_second(text: str, rate: float) -> None:
    assert _rate(text) == pytest.approx(rate)


def test_a_latency_has_its_unit() -> None:
    assert _latency("50us") == pytest.approx(50e-6)
    assert _latency("0.2ms") == pytest.approx(2e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["-n", "4"],
            "-n and --plan plan.json both say how to run it: the plan is ddp --exchange ring on 2 workers",
        ),
        (["--strategy", "fsdp"], "--strategy and --plan plan.json both say"),
        (["--compress", "int8"], "--compress and --plan"),
        (["other.py"], "was given. Nothing was started"),
        (["train.py", "--lr", "0.2"], "a plan for the arguments --lr 0.1, and --lr 0.2 were given"),
    ],
)
def test_options_beside_a_plan_that_contradict_it_are_refused(
    shoal: Shoal, script: Path, words: list[str], said: str
) -> None:
    planned(script)
    shown = shoal("run", "--plan", "plan.json", *words)
    assert shown.exit_code == 2
    assert said in " ".join(shown.stderr.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is no plan of `shoal plan`"),
        ("[]", "is no plan of `shoal plan`"),
        ('{"version": 1}', "missing required field"),
    ],
)
def test_what_is_no_plan_is_refused(shoal: Shoal, tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    shown = shoal("run", "--plan", "plan.json")
    assert shown.exit_code == 2
    assert said in " ".join(shown.stderr.split())


def test_a_plan_of_another_version_or_script_is_refused(shoal: Shoal, script: Path) -> None:
    planned(script, version=VERSION + 1)
    assert "it is of version 2" in " ".join(shoal("run", "--plan", "plan.json").stderr.split())
    planned(script, model={})
    script.write_text("import shoal  # changed\n")
    said = " ".join(shoal("run", "--plan", "plan.json").stderr.split())
    assert "the script has changed since" in said
    planned(script)
    script.unlink()
    assert "there is no such script" in " ".join(shoal("run", "--plan", "plan.json").stderr.split())


def test_a_plan_becomes_the_options_of_a_run(script: Path) -> None:
    found = read_plan(planned(script, strategy="ps", servers=2, hosts=2, exchange="auto"))
    assert found.options() == {
        "script": str(script),
        "args": ["--lr", "0.1"],
        "workers": 2,
        "strategy": "ps",
        "exchange": "auto",
        "compress": "none",
        "schedule": "1f1b",
        "servers": "2",
        "hosts": "2",
    }


@pytest.mark.parametrize("option", [["--exchange", "ring"], ["--servers", "1"], ["--hosts", "2"]])
def test_auto_is_refused_beside_what_it_chooses(shoal: Shoal, script: Path, option: list[str]) -> None:
    shown = shoal("run", "-n", "2", "--strategy", "auto", *option, str(script))
    assert shown.exit_code == 2
    assert f"--strategy auto chooses for this machine by itself, and {option[0]} was given" in " ".join(
        shown.stderr.split()
    )


def test_auto_says_what_it_takes_and_measures_nothing_twice(script: Path, tmp_path: Path) -> None:
    assert auto(str(script), [], module=False, workers=1, run_dir=tmp_path)[0] == {"strategy": "single"}
    with pytest.raises(ConfigError, match="there is no script"):
        auto(str(tmp_path / "nowhere.py"), [], module=False, workers=2, run_dir=tmp_path)


@pytest.mark.parametrize(("fsdp_s", "chosen"), [(0.9, "ddp"), (0.8, "fsdp")])
def test_auto_leaves_ddp_which_it_measured_only_for_what_is_clearly_quicker(
    tmp_path: Path, fsdp_s: float, chosen: str
) -> None:
    runs = ScriptRuns(script="train.py", args=(), folder=tmp_path, seconds=1.0, say=print)
    asked = _Asked(hosts=1, per_host=2, cores=2, cores_here=2, speed=1.0)
    planner = _Planner(
        runs=runs, cluster=ClusterShape(per_host=2), asked=asked, objective="time", inexact=False
    )
    planner.predictions = [
        Prediction(
            candidate=PlanCandidate(workers=2, strategy=strategy),
            batch=8,
            hosts=1,
            terms={"compute": took_s},
            memory_bytes=0,
        )
        for strategy, took_s in (("ddp", 1.0), ("fsdp", fsdp_s))
    ]
    planner.prefer("ddp", unless=CLEARLY)
    assert planner.chosen.candidate.strategy == chosen
