"""Feed, buckets and views: what is read of a run directory, however long, torn or old it is."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.dashboard import prometheus, views
from shoal.observe.dashboard.buckets import Buckets
from shoal.observe.dashboard.feed import MAX_INTERVALS, RunFeed
from shoal.observe.json_lines import CHUNK_BYTES, JsonLines, objects
from simulated_run import START, lines, write_run


def polled(path: Path) -> RunFeed:
    feed = RunFeed(path)
    feed.poll(10.0)
    return feed


def steps(path: Path, first: int, last: int, **more: Any) -> None:
    with open(path / "metrics.jsonl", "a") as file:
        for step in range(first, last + 1):
            file.write(
                json.dumps(
                    {"step": step, "epoch": 0, "loss": 1.0, "samples": 8, "time": 100.0 + step, **more}
                )
                + "\n"
            )


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
    cuts=st.lists(st.integers(0, 300), max_size=5),
)
def test_buckets_keep_extremes_and_mean_however_they_are_fed(values: list[float], cuts: list[int]) -> None:
    buckets = Buckets(16)
    bounds = sorted({0, len(values), *(min(cut, len(values)) for cut in cuts)})
    for begin, end in itertools.pairwise(bounds):
        buckets.add(np.arange(begin, end), {"loss": np.array(values[begin:end])})
    curve = buckets.curve("loss")
    assert len(curve["step"]) <= 16
    assert min(curve["low"]) == pytest.approx(min(values), rel=1e-5, abs=1e-9)
    assert max(curve["high"]) == pytest.approx(max(values), rel=1e-5, abs=1e-9)
    assert curve["step"][-1] == len(values) - 1


def test_a_spike_of_one_step_among_many_is_drawn() -> None:
    buckets = Buckets(64)
    loss = np.ones(100_000)
    loss[77_777] = 50.0
    buckets.add(np.arange(100_000), {"loss": loss})
    assert max(buckets.curve("loss")["high"]) == 50.0


def test_rate_counts_the_steps_of_all_workers_where_lines_are_those_of_one() -> None:
    buckets = Buckets()
    at = np.array([1, 4, 7, 10])  # a relaxed strategy: others did the steps between
    buckets.add(at, {"samples": np.full(4, 8.0), "time": 100.0 + at})
    assert buckets.rate()["rate"] == [8.0, 8.0, 8.0]


def test_rate_is_that_of_stretches_and_not_of_single_steps() -> None:
    buckets = Buckets()
    at = 100.0 + np.arange(1, 1001) * 0.01 + np.tile([0.0, 0.009], 500)  # a step of 1 ms after one of 19 ms
    buckets.add(np.arange(1, 1001), {"samples": np.full(1000, 8.0), "time": at})
    found = buckets.rate()
    assert len(found["rate"]) == pytest.approx(20, abs=1)
    assert found["rate"] == pytest.approx([800.0] * len(found["rate"]), rel=0.05)
    assert (found["step"][-1], found["seconds"][-1]) == (1000, pytest.approx(at[-1] - at[0]))


def test_new_lines_are_added_and_a_torn_one_waits_for_its_rest(tmp_path: Path) -> None:
    steps(tmp_path, 1, 10)
    feed = polled(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "loss": 0.5, "sam')
    assert not feed.poll()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('ples": 8, "time": 111.0}\n')
    assert feed.poll()
    assert (feed.last["step"], feed.last["loss"]) == (11, 0.5)
    version = feed.version
    assert not feed.poll()
    assert feed.version == version


@pytest.mark.parametrize("how", ["cut in place", "replaced"])
def test_a_resumed_run_that_drops_its_last_steps_is_read_anew(tmp_path: Path, how: str) -> None:
    steps(tmp_path, 1, 20)
    feed = polled(tmp_path)
    path = tmp_path / "metrics.jsonl"
    kept = path.read_bytes().splitlines(keepends=True)[:10]
    if how == "replaced":
        path.with_name("new").write_bytes(b"".join(kept))
        os.replace(path.with_name("new"), path)
    else:
        os.truncate(path, sum(map(len, kept)))
    steps(tmp_path, 11, 12, loss=9.0)
    feed.poll()
    assert feed.steps.curve("loss")["step"] == [float(step) for step in range(1, 13)]


def test_damaged_lines_and_values_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": 1.0}\n\xff\xfe broken\n[1, 2]\n{"step": -3, "loss": 1.0}\n{"step": 1e400}\n'
        b'{"step": 2, "loss": null, "accuracy": 0.5, "note": "text"}\n{"loss": 3}\n'
    )
    lines(
        tmp_path / "events.jsonl",
        [{"event": "worker-exited"}, {"event": "x", "time": "then"}, {"time": None}],
    )
    feed = polled(tmp_path)
    assert feed.steps.curve("loss")["step"] == [1.0]
    assert feed.steps.curve("accuracy")["mean"] == [0.5]
    for view in views.PAGES.values():
        json.dumps(view(feed))


def test_a_long_run_is_shown_from_a_sample_and_then_exactly(tmp_path: Path) -> None:
    write_run(tmp_path / "long", steps=120_000, workers=1, servers=0)
    feed = RunFeed(tmp_path / "long")
    feed.poll(0.0)
    assert feed.is_sampled
    assert views.head(feed)["unread_bytes"] > 0
    assert feed.last["step"] == 120_000  # the newest is there at once
    while feed.left_bytes:
        feed.poll(0.0)
        assert feed.last["step"] == 120_000  # and does not go back while the others are read
    assert not feed.is_sampled
    assert len(feed.steps.curve("loss")["step"]) == pytest.approx(120_000 / 128, abs=1)


def test_a_line_that_is_too_long_is_passed_over_once(tmp_path: Path) -> None:
    long = b'{"x": "' + b"x" * (2 * CHUNK_BYTES) + b'"}\n'
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "a"}\n' + long + b'{"event": "b"}\n')
    file, found = JsonLines(path), b""
    for _ in range(4):
        lines, is_other = file.read()
        assert not is_other
        found += lines
    assert [each["event"] for each in objects(found)] == ["a", "b"]
    assert file.left_bytes == 0
    with open(path, "ab") as more:
        more.write(b'{"event": "c"}\n')
    assert file.read() == (b'{"event": "c"}\n', False)
    assert objects(JsonLines(path, tail_bytes=CHUNK_BYTES).read()[0])[0] == {"event": "b"}


def test_long_events_are_read_in_one_poll_and_of_leases_only_the_newest_is_kept(tmp_path: Path) -> None:
    told = [{"event": "leases", "by_rank": {"0": [k, k]}, "x": "x" * 300} for k in range(5000)]
    lines(
        tmp_path / "events.jsonl",
        [{"event": "worker-started", "rank": 0, "pid": 7}, *told, {"event": "worker-live", "rank": 0}],
    )
    feed = polled(tmp_path)
    assert [event["event"] for event in feed.events] == ["worker-started", "worker-live"]
    assert views.workers(feed)["workers"][0]["leases"] == [4999, 4999]


def test_epochs_count_from_one_and_other_columns_are_kept(tmp_path: Path) -> None:
    steps(tmp_path, 1, 10)
    assert views.progress(polled(tmp_path))["epoch"] == 1
    lines(
        tmp_path / "metrics.jsonl",
        [{"step": k, "loss": 1.0, "samples": 8, "time": 1.0 * k, "lr": 0.5} for k in range(4)],
    )
    feed = polled(tmp_path)
    assert feed.steps.curve("lr")["mean"] == [0.5] * 4
    assert views.progress(feed)["epoch"] is None


@pytest.mark.parametrize(("last", "said"), [(-3.0, "yes"), (-1.0, "hardly any more"), (1.0, "no")])
def test_a_negative_loss_that_falls_is_learning(tmp_path: Path, last: float, said: str) -> None:
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(40):
            loss = -0.5 if step < 4 else -1.0 if step < 36 else last
            file.write(json.dumps({"step": step, "loss": loss, "samples": 8, "time": 1.0 * step}) + "\n")
    assert said in views.overview(polled(tmp_path))["answers"][0]["answer"]


def test_a_validation_loss_that_rises_is_told_beside_a_loss_that_falls(tmp_path: Path) -> None:
    lines(tmp_path / "metrics.jsonl", [{"step": k, "loss": 1 / k} for k in range(1, 41)])
    lines(
        tmp_path / "epochs.jsonl", [{"epoch": k, "val_loss": loss} for k, loss in enumerate([0.7, 0.5, 0.6])]
    )
    answer = views.overview(polled(tmp_path))["answers"][0]
    assert answer["level"] == "fair"
    assert answer["answer"].endswith("but val_loss 0.5 → 0.6 since its best epoch")


def test_time_in_no_span_is_named(tmp_path: Path) -> None:
    (tmp_path / "activity").mkdir()
    told = [{"at": 100.0 + k, "interval_s": 1.0, "steps": 3, "seconds": {"compute": 0.3}} for k in range(9)]
    lines(tmp_path / "activity" / "worker-0.jsonl", told)
    assert views.overview(polled(tmp_path))["answers"][2]["answer"].startswith("code outside of the step")


STEP = {"compute": 0.5, "apply": 0.369, "exchange": 0.119}


def told_by_four(path: Path, seconds: dict[str, float], **config: Any) -> RunFeed:
    """Of four workers, each line is of one second."""
    (path / "activity").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"workers": 4, "strategy": "ddp"} | config))
    told = [{"at": 100.0 + k, "interval_s": 1.0, "steps": 3, "seconds": seconds} for k in range(9)]
    for rank in range(4):
        lines(path / "activity" / f"worker-{rank}.jsonl", told)
    return polled(path)


@pytest.mark.parametrize(
    ("seconds", "config", "said"),
    [
        # (1 / 0.9 - 1 / 1) * (4 * 0.5 + 0.369): the optimizer is whole in every worker, and does not shrink.
        (
            STEP,
            {},
            "hardly: about 26% of what one adds alone; by the same estimate the next one stops paying at 2;",
        ),
        (STEP, {"strategy": "ps"}, "hardly: about 26% of"),
        (
            {"compute": 0.05, "exchange": 0.9},
            {},
            "hardly: about 0% of what one adds alone; by the same estimate a second one does not pay;",
        ),
        # (1 / 0.8262 - 1) * 4 * 0.869: shards of the optimizer do.
        (
            STEP,
            {"strategy": "fsdp"},
            "yes: about 73% of what one adds alone; by the same estimate the next one stops paying at 11;",
        ),
        (
            {"compute": 1.0},
            {},
            "yes: about 100% of what one adds alone; by the same estimate the next one pays up to 1,024 workers;",
        ),
        (STEP, {"strategy": "ps:async"}, "not known: under ps:async a worker steps without the others"),
        (STEP, {"sync_every": 8}, "not known: under --sync-every a worker steps without the others"),
        ({"exchange": 0.9}, {}, "not known: no computing was recorded"),
        (STEP, {"strategy": None}, "not known: config.json names no strategy"),
    ],
)
def test_what_another_worker_adds_is_by_the_time_that_it_makes_shorter(
    tmp_path: Path, seconds: dict[str, float], config: dict[str, Any], said: str
) -> None:
    answer = views.overview(told_by_four(tmp_path / "run", seconds, **config))["answers"][4]["answer"]
    assert answer.startswith(said)
    assert answer.endswith("; shoal plan measures it")


def test_a_plan_answers_beside_the_estimate_and_no_activity_is_said_as_such(tmp_path: Path) -> None:
    run = tmp_path / "run"
    feed = told_by_four(run, STEP)
    (run / "plan.json").write_text(
        json.dumps({"stops_paying": "The next worker stops paying at 3: measured."})
    )
    feed.poll()
    assert views.overview(feed)["answers"][4]["answer"].endswith(
        ". Its plan: The next worker stops paying at 3: measured."
    )
    (tmp_path / "empty").mkdir()
    assert views.overview(polled(tmp_path / "empty"))["answers"][4]["answer"].startswith(
        "no activity recorded"
    )


def test_steps_of_an_evaluation_are_not_those_of_the_fit(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", workers=1, servers=0)
    with open(run / "activity" / "worker-0.jsonl", "a") as file:
        line = {"at": START + 200, "phase": "evaluate", "num_steps": 16, "num_epochs": None, "step": 400}
        file.write(json.dumps(line) + "\n")
    feed = polled(run)
    assert (views.progress(feed)["num_steps"], views.progress(feed)["num_epochs"]) == (400, 2)
    assert 'shoal_steps_expected{run="run"} 400.0' in prometheus.text([prometheus.figures(feed)])


def test_links_devices_and_foreign_names_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"step": 1, "loss": 42.0}\n')
    run = tmp_path / "run"
    (run / "activity").mkdir(parents=True)
    (run / "metrics.jsonl").symlink_to(tmp_path / "secret")
    (run / "config.json").symlink_to(tmp_path / "secret")
    (run / "activity" / "worker-0.jsonl").symlink_to(tmp_path / "secret")
    (run / "activity" / "..evil.jsonl").write_text('{"at": 1}\n')
    os.mkfifo(run / "events.jsonl")
    feed = polled(run)
    assert (feed.last, feed.config, list(feed.events)) == ({}, {}, [])
    assert not any(feed.activity.values())


def test_activity_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "activity").mkdir()
    lines(tmp_path / "activity" / "worker-0.jsonl", [{"at": float(k)} for k in range(3 * MAX_INTERVALS)])
    assert len(polled(tmp_path).activity["worker-0"]) == MAX_INTERVALS


def test_an_empty_directory_and_an_old_run_have_every_page(tmp_path: Path) -> None:
    old = Path(__file__).parents[1] / "fixtures" / "run_0_1_0"
    for path in (tmp_path, *(each.parent for each in old.rglob("config.json"))):
        feed = polled(path)
        for view in views.PAGES.values():
            json.dumps(view(feed))


def test_straggler_death_and_progress_are_found(tmp_path: Path) -> None:
    feed = polled(write_run(tmp_path / "run", straggler=2, killed=1))
    shown = views.workers(feed)["workers"]
    assert [worker["process"] for worker in shown if worker["is_straggler"]] == ["worker-2"]
    [fault] = views.faults(feed)  # and not the servers that ended with the job
    assert (fault["process"], fault["signal"], fault["replaced_after_s"], fault["live_after_s"]) == (
        "worker-1",
        "SIGKILL",
        0.05,
        1.2,
    )
    assert fault["step"] == 200
    assert views.progress(feed)["num_steps"] == 400
    [learning, _, bottleneck, died, pays] = [answer["answer"] for answer in views.overview(feed)["answers"]]
    assert pays.startswith("not known: under ps:ssp=4 a worker steps without the others")
    assert pays.endswith("shoal plan measures it")
    assert learning.startswith("yes")
    assert "worker-2" in bottleneck
    assert "worker-1" in died


def test_servers_have_slots_staleness_and_hits(tmp_path: Path) -> None:
    found = views.servers(polled(write_run(tmp_path / "run", servers=3)))
    assert found["num_slots"] == 3 * (256 // 3)
    assert found["staleness"]["0"] == 3 * 40 * 120
    assert found["row_cache_hit_rate"] == 0.9
    assert found["servers"][0]["rows"] == {"rows.weight": 50_000}


def test_figures_for_prometheus_are_labelled_and_escaped(tmp_path: Path) -> None:
    said = prometheus.text([prometheus.figures(polled(write_run(tmp_path / 'a "b"', steps=50)))])
    assert '# TYPE shoal_step gauge\nshoal_step{run="a \\"b\\""} 50.0\n' in said


def _launch(at: float, *ends: dict[str, Any]) -> list[dict[str, Any]]:
    begin = [
        {"event": "coordinator-started", "pid": 1},
        {"event": "server-started", "server": 0, "incarnation": 0},
        {"event": "worker-started", "rank": 0, "incarnation": 0},
    ]
    return [{"time": at + second, **event} for second, event in enumerate([*begin, *ends])]


SENT_AWAY = ({"event": "server-exited", "server": 0, "code": -9}, {"event": "job-ended", "exit": 1})


@pytest.mark.parametrize(
    ("ends", "died"),
    [
        (({"event": "asked-to-leave"}, {"event": "worker-exited", "rank": 0, "code": 143}), []),
        (
            ({"event": "worker-failed", "rank": 0}, {"event": "worker-exited", "rank": 0, "code": 1}),
            ["worker-0"],
        ),
        (({"event": "worker-exited", "rank": 0, "code": -9},), ["worker-0", "server-0"]),
    ],
    ids=["interrupted", "script failed", "killed"],
)
def test_processes_that_the_job_sent_away_did_not_die(
    tmp_path: Path, ends: tuple[dict[str, Any], ...], died: list[str]
) -> None:
    run = write_run(tmp_path / "run", workers=1, servers=1, steps=4)
    lines(run / "events.jsonl", _launch(1000.0, *ends, *SENT_AWAY))
    feed = RunFeed(run)
    feed.poll()
    assert [fault["process"] for fault in views.faults(feed)] == died


def test_time_taken_is_that_of_all_launches_without_the_time_between_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", workers=1, servers=1, steps=4)
    first, second = _launch(1000.0, *SENT_AWAY), _launch(5000.0, *SENT_AWAY)
    lines(run / "events.jsonl", [*first, *second])
    for name, change in (("config", {"started": 4999.5}), ("summary", {"ended": 5004.0})):
        path = run / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    feed = RunFeed(run)
    feed.poll()
    assert views.progress(feed)["seconds"] == pytest.approx(8.0)
