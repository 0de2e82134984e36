from __future__ import annotations

import gzip
import io
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_runs import BEGAN, SAMPLES, activity, write_lines, write_run, write_spans
from rich.console import Console
from typer.testing import CliRunner

from shoal.cli import app
from shoal.cli.inspect.live import draw
from shoal.errors import ConfigError
from shoal.observe import live, record, trace
from shoal.observe.figures import MeasuredBandwidth, Target, figures
from shoal.observe.page import page, thinned, ticks
from shoal.observe.trace import timeline

FIXTURE = Path(__file__).parent.parent / "fixtures" / "run_0_1_0"


def reported(path: Path, **options: Any) -> dict[str, Any]:
    found = record.read(path)
    traces, _ = record.read_traces(path, found.activity)
    return figures(found, traces=traces, **options)


def test_figures_of_an_even_run(tmp_path: Path) -> None:
    found = reported(write_run(tmp_path / "run"), target=Target.parse("loss<0.02"), price=3.6)
    assert found["samples_per_s"] == pytest.approx(10 * SAMPLES)
    assert found["step_latency"]["median_s"] == pytest.approx(0.1)
    assert found["time_to_target"] == {
        "target": "loss <= 0.02",
        "seconds": pytest.approx(10.0),
        "step": 50,
        "value": pytest.approx(0.02),
    }
    assert found["time_by_worker"]["worker-3"]["seconds"]["compute"] == pytest.approx(8)
    assert found["time_by_worker"]["worker-3"]["exposed_communication"] == pytest.approx(0.1)
    assert found["stragglers"] == {}
    assert found["money"]["cost"] == pytest.approx(3.6 * 16 / 3600)
    assert found["imbalance"]["time computing"] == 1
    assert found["bottleneck"].startswith("Compute is")
    assert found["missing"] == []


def test_bytes_are_a_share_of_the_bandwidth_that_was_measured(tmp_path: Path) -> None:
    link = MeasuredBandwidth(1e6, "by hand")
    found = reported(write_run(tmp_path / "run"), bandwidth=link)
    node = found["nodes"]["worker-0"]
    assert node["bytes_per_s"] > 0
    assert node["share_of_bandwidth"] == pytest.approx(node["bytes_per_s"] / 1e6, rel=1e-3)
    assert "by hand" in page(record.read(tmp_path / "run"), found)
    assert reported(tmp_path / "run")["nodes"]["worker-0"]["share_of_bandwidth"] is None


def test_speedup_is_against_the_baseline_and_one_beyond_the_ideal_is_doubted(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    scaling = reported(path, baseline={"run": "run-baseline", "samples_per_s": 2.5 * SAMPLES})["scaling"]
    assert (scaling["speedup"], scaling["efficiency"]) == (pytest.approx(4), pytest.approx(1))
    doubted = reported(path, baseline={"run": "run-baseline", "samples_per_s": SAMPLES})
    assert "250% of the ideal cannot be, so run-baseline was disturbed" in doubted["missing"][-1]


def test_devices_are_those_that_workers_allocated_on(tmp_path: Path) -> None:
    """The default is --device auto, which says nothing; two of four workers share a device, and one is on the CPU."""
    told = {0: "cuda:0", 1: "cuda:1", 2: "cuda:1"}
    by_worker = {f"worker_{k}": {"device": d, "device_peak_bytes": (k + 1) << 20} for k, d in told.items()}
    path = write_run(tmp_path / "run", **by_worker)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"device": "auto"}))
    found = reported(path)
    assert found["gpu_seconds"] == pytest.approx(2 * found["seconds"], abs=0.1)
    assert found["device_peak_bytes"] == 3 << 20
    assert "peak memory of a device" in page(record.read(path), found)
    there = reported(write_run(tmp_path / "cpu"))
    assert (there["gpu_seconds"], there["device_peak_bytes"]) == (None, None)


def test_bytes_and_waiting_are_summed_by_host_and_by_the_link_to_servers(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", **{f"worker_{rank}": {"host": rank // 3} for rank in range(4)})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"strategy": "ps"}))
    found = reported(path)
    assert found["hosts"].keys() == {"host 0", "host 1"}
    first, second = found["hosts"].values()
    assert (first["processes"], first["sent_bytes"], first["waited_s"]) == (3, 30_000, pytest.approx(3))
    assert (second["processes"], second["sent_bytes"]) == (1, 10_000)
    assert found["links"] == {"workers to servers": 40_000, "servers to workers": 40_000}
    text = page(record.read(path), found)
    assert "host 0, 3 processes" in text
    assert "Bytes by link: workers to servers 40 KB" in text
    there = reported(write_run(tmp_path / "here"))
    assert (there["hosts"], there["links"]) == ({}, {})


@pytest.mark.parametrize(
    ("changed", "blamed"),
    [
        ({"seconds": {"read": 0.6, "compute": 0.3, "exchange": 0.05}}, "Reading is"),
        ({"seconds": {"compute": 0.3, "exchange": 0.6}}, "Communication is"),
        ({"seconds": {"compute": 0.5, "exchange": 0.1, "checkpoint": 0.3}}, "Saving is"),
        ({"cpu_s": 0.2}, "The cores are"),
        # Cores that idle while a worker waits for data are not short.
        ({"seconds": {"read": 0.7, "compute": 0.2}, "cpu_s": 0.2}, "Reading is"),
        ({"seconds": {"read": 0.1, "compute": 0.4}}, "Code outside of the step is"),
    ],
)
def test_bottleneck_is_what_takes_the_time(tmp_path: Path, changed: dict[str, Any], blamed: str) -> None:
    everyone = {f"worker_{rank}": changed for rank in range(4)}
    assert reported(write_run(tmp_path / "run", **everyone))["bottleneck"].startswith(blamed)


@pytest.mark.parametrize(
    ("device", "torch", "blamed"),
    [
        ("auto", "2.13.0+cu126", "Compute is"),
        ("cuda", "2.13.0+cpu", "Compute is"),
        ("auto", "2.13.0+cpu", "The cores are"),
    ],
)
def test_cores_that_may_idle_beside_a_device_are_not_blamed(
    tmp_path: Path, device: str, torch: str, blamed: str
) -> None:
    path = write_run(tmp_path / "run", **{f"worker_{rank}": {"cpu_s": 0.2} for rank in range(4)})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"device": device, "versions": {"torch": torch}}))
    assert reported(path)["bottleneck"].startswith(blamed)


def test_a_run_that_was_resumed_is_reported_without_the_time_in_which_it_was_down(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    down_s = 3600.0
    for name in ("metrics", *(f"activity/worker-{rank}" for rank in range(4))):
        file = path / f"{name}.jsonl"
        written = [json.loads(line) for line in file.read_text().splitlines()]
        half = len(written) // 2
        for line in written[half:]:
            line["at" if "at" in line else "time"] += down_s
        if name != "metrics":  # a second launch begins with imports, too
            written[half:half] = [activity(written[half]["at"] - 1, "worker", steps=0, samples=0)]
        write_lines(file, written)
    config, summary = (json.loads((path / f"{name}.json").read_text()) for name in ("config", "summary"))
    (path / "config.json").write_text(json.dumps(config | {"started": BEGAN + down_s + 4}))
    (path / "summary.json").write_text(json.dumps(summary | {"ended": summary["ended"] + down_s}))
    found = reported(path, target=Target.parse("loss<0.1"), price=3.6)
    assert found["samples_per_s"] == pytest.approx(10 * SAMPLES, rel=0.01)
    assert found["seconds"] == pytest.approx(11, abs=2)  # from the first step on
    assert found["time_to_target"]["seconds"] == pytest.approx(0.9)


def test_steps_without_lines_of_metrics_are_those_of_one_worker_unless_each_has_its_own(
    tmp_path: Path,
) -> None:
    path = write_run(tmp_path / "run")
    (path / "metrics.jsonl").unlink()
    assert reported(path)["steps"] == 100
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"strategy": "ps:async"}))
    assert reported(path)["steps"] == 400


def test_a_target_is_found_among_values_between_epochs(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    written = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    written[29]["val_auroc"] = 0.77
    write_lines(path / "metrics.jsonl", written)
    found = figures(record.read(path, metric="val_auroc"), target=Target.parse("val_auroc>0.75"))
    assert (found["time_to_target"]["step"], found["time_to_target"]["value"]) == (30, 0.77)


def test_a_baseline_is_one_worker_of_the_same_job_and_no_other_run_is_touched(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    other = write_run(tmp_path / "run-baseline")  # of four workers
    before = {file: file.read_bytes() for file in other.rglob("*") if file.is_file()}
    refused = CliRunner().invoke(app, ["report", str(path), "--baseline"])
    assert refused.exit_code != 0
    assert "which is not this job with one worker" in " ".join(refused.output.split())
    assert before == {file: file.read_bytes() for file in other.rglob("*") if file.is_file()}
    assert CliRunner().invoke(app, ["report", str(path)]).exit_code == 0
    assert json.loads((path / "report.json").read_text())["scaling"] is None
    shutil.rmtree(other)
    write_run(other, workers=1)
    assert CliRunner().invoke(app, ["report", str(path), "--baseline"]).exit_code == 0
    assert json.loads((path / "report.json").read_text())["scaling"]["speedup"] == pytest.approx(4)


def test_a_report_is_not_written_through_a_link(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (tmp_path / "mine").write_text("kept")
    (path / "report.html").symlink_to(tmp_path / "mine")
    assert CliRunner().invoke(app, ["report", str(path)]).exit_code == 0
    assert (tmp_path / "mine").read_text() == "kept"
    assert "<svg" in (path / "report.html").read_text()


def test_a_slow_worker_is_named_and_blamed(tmp_path: Path) -> None:
    waiting = {"seconds": {"compute": 0.4, "exchange": 0.5}, "cpu_s": 0.5}
    others = {f"worker_{rank}": waiting for rank in (0, 1, 3)}
    path = write_run(tmp_path / "run", worker_2={"seconds": {"compute": 0.88, "exchange": 0.02}}, **others)
    found = reported(path)
    assert found["stragglers"] == {"worker-2": 1.96}
    assert found["bottleneck"].startswith("worker-2 is: it needs 1.96 times as long")
    assert [each.times_slower for each in live.look(path).processes] == [None, None, 1.96, None]


def test_a_worker_is_slow_by_what_is_in_no_span_too_and_not_by_little(tmp_path: Path) -> None:
    """A callback of one rank; and a worker that computes half as long again, of a fiftieth of its time."""
    quick = {"seconds": {"compute": 0.02, "exchange": 0.95}}
    slow = {"seconds": {"compute": 0.02, "exchange": 0.1}}
    path = write_run(tmp_path / "run", worker_0=quick, worker_1=slow, worker_2=quick, worker_3=quick)
    assert [*reported(path)["stragglers"]] == ["worker-1"]
    little = {"seconds": {"compute": 0.03, "exchange": 0.95}}
    path = write_run(tmp_path / "even", worker_0=quick, worker_1=little, worker_2=quick, worker_3=quick)
    assert reported(path)["stragglers"] == {}


def test_an_evaluation_after_the_fit_does_not_change_the_progress_of_the_fit(tmp_path: Path) -> None:
    fit = {"phase": "fit", "epoch": 2, "num_epochs": 3, "num_steps": 100, "loss": 0.5}
    path = write_run(tmp_path / "run", workers=1, worker_0=fit)
    file = path / "activity" / "worker-0.jsonl"
    *lines, last = file.read_text().splitlines()
    evaluated = {
        **json.loads(last),
        "phase": "evaluate",
        "epoch": 0,
        "num_epochs": None,
        "num_steps": 1,
        "loss": None,
    }
    file.write_text("\n".join([*lines, json.dumps(evaluated)]) + "\n")
    now = live.look(path)
    assert (now.step, now.num_steps, now.epoch, now.num_epochs) == (100, 100, 3, 3)


@pytest.mark.parametrize("phase", ["evaluate", "predict"])
def test_progress_of_the_fit_is_shown_during_a_long_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """The last line of the fit is older than the window over which a living run is looked at."""
    monkeypatch.setattr(record.runs, "state", lambda path, summary: record.runs.RunState.ALIVE)
    fit = {"phase": "fit", "epoch": 2, "num_epochs": 3, "num_steps": 120, "loss": 0.5, "eta_s": 9.0}
    path = write_run(tmp_path / "run", workers=1, worker_0=fit)
    file = path / "activity" / "worker-0.jsonl"
    aside = {"phase": phase, "epoch": 0, "num_epochs": None, "num_steps": 7, "loss": None, "eta_s": None}
    later = [activity(BEGAN + 11 + k, "worker-0", **aside, step=100) for k in range(60)]
    file.write_text(file.read_text() + "".join(json.dumps(line) + "\n" for line in later))
    now = live.look(path, now=BEGAN + 71)
    assert (now.epoch, now.num_epochs, now.num_steps, now.eta_s) == (2, 3, 120, 9.0)


def test_a_run_that_knows_neither_step_nor_total_is_not_taken_for_done(tmp_path: Path) -> None:
    told = {"epoch": 1, "num_epochs": 5, "num_steps": None, "step": None}
    path = write_run(tmp_path / "run", workers=1, worker_0=told)
    (path / "metrics.jsonl").unlink()
    assert live.look(path).epoch == 1


def test_a_remark_on_a_narrow_terminal_costs_no_figures(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", worker_1={"incarnation": 12, "seconds": {"compute": 3.0}})
    shown = io.StringIO()
    Console(width=80, file=shown).print(draw(live.look(path), has_colours=False, width=80))
    text = shown.getvalue()
    assert "samples/s" in text
    assert "memory" in text
    assert "incarnation" in text
    assert max(map(len, text.splitlines())) <= 80


def test_waiting_and_transfer_are_told_apart_by_the_last_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path / "run", workers=3)
    s = 1_000_000_000
    for process, begin in (("worker-0", 1.0), ("worker-1", 1.3), ("worker-2", 1.1)):
        write_spans(path, process, [("exchange", 7, int(begin * s), int(1.5 * s))], monkeypatch)
    found = reported(path)["exchange"]
    assert found["transfer_s_per_step"] == pytest.approx(0.2)
    assert found["waited_s_per_step"] == pytest.approx({"worker-0": 0.3, "worker-1": 0.0, "worker-2": 0.2})
    assert found["was_last"] == {"worker-0": 0, "worker-1": 1, "worker-2": 0}


def test_exchanges_of_a_replacement_before_it_has_caught_up_are_nobodys_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first exchange, under the first step's number, comes when the others have long done that step."""
    path = write_run(tmp_path / "run", workers=2)
    s = 1_000_000_000
    of_step_7 = ("exchange", 7, 12 * s, 13 * s)
    write_spans(path, "worker-0", [("exchange", 0, s, 2 * s), of_step_7], monkeypatch)
    write_spans(path, "worker-1", [("exchange", 0, 9 * s, 10 * s), of_step_7], monkeypatch)
    found = reported(path)["exchange"]
    assert found["steps"] == 1
    assert found["waited_s_per_step"] == {"worker-0": 0.0, "worker-1": 0.0}


def test_a_death_costs_the_step_that_lasted_over_it(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    steps = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in steps[50:]:
        line["time"] += 3.0
    write_lines(path / "metrics.jsonl", steps)
    write_lines(
        path / "events.jsonl",
        [
            {"time": BEGAN + 5.01, "event": "worker-exited", "rank": 1, "code": -9},
            {"time": BEGAN + 5.02, "event": "worker-replaced", "rank": 1, "incarnation": 1, "pid": 7},
            {"time": BEGAN + 99, "event": "worker-exited", "rank": 1, "code": 0},
        ],
    )
    [fault] = reported(path)["faults"]
    assert (fault["what"], fault["step"], fault["cost_s"]) == ("worker 1", 51, pytest.approx(3.0))


@pytest.mark.parametrize(
    ("said", "value", "is_reached"), [("loss=2", 1.5, True), ("auroc=0.7", 0.6, False), ("val_x>=3", 3, True)]
)
def test_target_knows_which_way_is_better(said: str, value: float, is_reached: bool) -> None:
    assert Target.parse(said).is_reached(value) is is_reached


@pytest.mark.parametrize("said", ["", "loss", "loss<", "loss<x", "<3"])
def test_a_target_that_is_none_is_refused(said: str) -> None:
    with pytest.raises(ConfigError, match="is no target"):
        Target.parse(said)


class Tags(HTMLParser):
    VOID = ("meta", "line", "rect", "circle", "polyline")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not any(name in ("src", "href") or name.startswith("on") for name, _ in attributes)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            while self.open.pop() != tag:
                pass


def test_page_is_whole_and_asks_the_network_for_nothing(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "config.json").write_text(
        json.dumps({"script": "<script>alert(1)</script>", "strategy": "ddp", "workers": 4})
    )
    found = record.read(path)
    text = page(found, figures(found))
    tags = Tags()
    tags.feed(text)
    assert "script" not in tags.seen
    assert {"svg", "table"} <= tags.seen
    assert tags.open == []
    assert "Exposed communication, exchange, push, pull, wait: " in text


def test_curves_keep_their_spikes_when_thinned() -> None:
    values = np.zeros(1_000_000)
    values[777_777] = 5.0
    x, y = thinned(np.arange(len(values)), values)
    assert len(x) <= 600
    assert y.max() == 5.0
    assert 777_777 in x


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 1e7), (0.1, 0.1003), (5, 5), (0, 1e-9)])
def test_ticks_are_between_the_ends(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 8
    assert all(low - 1e-12 <= tick <= high + 1e-12 for tick in found)


# ---- half a run -----------------------------------------------------------------------------------


def spoil(path: Path, how: str) -> None:
    match how:
        case "no activity":
            shutil.rmtree(path / "activity")
        case "no metrics":
            (path / "metrics.jsonl").unlink()
        case "killed":
            (path / "summary.json").unlink()
        case "torn":
            for file in (path / "metrics.jsonl", path / "activity" / "worker-1.jsonl"):
                file.write_bytes(file.read_bytes()[:-20])
        case "garbage":
            (path / "activity" / "worker-0.jsonl").write_bytes(b'\xff\x00{]\n[1]\n"x"\n{"at": "noon"}\n')
            (path / "events.jsonl").write_bytes(b"nonsense\n[]\n")
        case "spans":
            (path / "trace").mkdir()
            (path / "trace" / "worker-0.0.bin").write_bytes(b"nonsense" * 200)
            (path / "trace" / "worker-1.0.bin").write_bytes(b"")
        case "odd lines":
            odd = (
                b'{"step": 9223372036854775808, "loss": 1.0}\n{"step": 7, "loss": 1.0, "x": "\xff"}\n'
                + b"[" * 100_000
            )
            for name in ("metrics", "epochs", "events"):
                with open(path / f"{name}.jsonl", "ab") as file:
                    file.write(b'{"val_loss": 0.5, "time": 1.0}\n' + odd)
            write_lines(  # whose clock was set back
                path / "activity" / "worker-0.jsonl",
                [activity(BEGAN + at, "worker-0") for at in (1, 2, 3, 4, -500, -499)],
            )
        case "odd types":
            write_lines(
                path / "activity" / "worker-0.jsonl",
                [activity(BEGAN + 1, "worker-0", seconds=[], bytes=None, steps="3")],
            )


@pytest.mark.parametrize(
    "how", ["no activity", "no metrics", "killed", "torn", "garbage", "spans", "odd types", "odd lines"]
)
def test_half_a_run_is_reported_with_what_is_missing(tmp_path: Path, how: str) -> None:
    path = write_run(tmp_path / "run")
    spoil(path, how)
    shown = CliRunner().invoke(app, ["report", str(path)])
    assert shown.exit_code == 0, shown.output
    assert (path / "report.html").exists()
    assert json.loads((path / "report.json").read_text())["workers"] == 4
    if how in ("no activity", "no metrics", "killed", "spans"):
        assert "note: " in shown.output
    assert CliRunner().invoke(app, ["status", str(path)]).exit_code == 0


def test_a_run_of_an_earlier_version_says_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(FIXTURE, path)
    assert CliRunner().invoke(app, ["report", str(path)]).exit_code == 0
    traced = CliRunner().invoke(app, ["trace", str(path)])
    assert traced.exit_code != 0
    assert "runs of an earlier version wrote none" in " ".join(traced.output.split())


# ---- the timeline ---------------------------------------------------------------------------------


def test_timeline_has_all_processes_in_one_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "run", workers=3)
    write_spans(path, "worker-0", [("compute", 3, 1000, 5000), ("apply", 3, 2000, 3000)], monkeypatch)
    write_spans(path, "worker-1", [("compute", 3, 1000, 5000)], monkeypatch)
    # Of another host, whose clock is half a second behind.
    write_lines(path / "activity" / "worker-1.jsonl", [activity(BEGAN, "worker-1", clock_s=0.5)])
    found, problems = timeline(path)
    spans = {(e["pid"], e["name"]): e for e in found["traceEvents"] if e.get("cat") == "shoal"}
    assert spans[1, "compute"]["dur"] == 4
    assert spans[1, "compute"]["args"] == {"step": 4}
    assert spans[2, "compute"]["ts"] - spans[1, "compute"]["ts"] == pytest.approx(0.5e6)
    assert len(spans) == 3
    assert problems == [
        "spans of worker-2 are not here: they stay on their own host where it does not share the run directory."
    ]


def test_ring_that_wrapped_is_read_oldest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_spans(
        tmp_path, "worker-0", [("compute", k, 10 * k + 1, 10 * k + 5) for k in range(40)], monkeypatch
    )
    found = record.read_trace(tmp_path / "trace" / "worker-0.0.bin")
    assert found.spans["step"].tolist() == list(range(24, 40))
    assert found.count == 40


def test_a_profile_that_unpacks_to_too_much_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path / "run", workers=1)
    write_spans(path, "worker-0", [("compute", 3, 1000, 5000)], monkeypatch)
    packed = gzip.compress(b'{"traceEvents": []}' + b" " * 100_000)
    (path / "trace" / "worker-0.0.profile.json.gz").write_bytes(packed)
    assert timeline(path)[1] == []
    monkeypatch.setattr(trace, "MAX_PROFILE_BYTES", 10_000)
    assert "more than 10,000 bytes once it is unpacked" in timeline(path)[1][0]
