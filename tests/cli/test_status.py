from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from invoking import Shoal
from rich.console import Console

from shoal.cli.inspect.status import _list_table
from shoal.cluster.launch.api import resume_config
from shoal.cluster.launch.run_directory import RunDirectory
from shoal.config.launch import GivenOption, HostFacts, RunConfig, Versions
from shoal.observe import runs
from shoal.observe.live import look

MakeRun = Callable[..., RunDirectory]


@pytest.fixture
def make_run(shoal: Shoal) -> MakeRun:
    """A run directory as a supervisor makes it, claimed until it is closed."""

    def make(name: str, *, run_dir: str = "runs", **facts: Any) -> RunDirectory:
        config = {"strategy": "ddp", "workers": 2, "seed": 7, "started": 1.8e9} | facts
        return RunDirectory.claim(
            Path(run_dir),
            name=name,
            config=RunConfig(
                script="/home/me/train.py",
                args=["--lr", "0.1"],
                cwd="/home/me",
                threads=1,
                step_timeout_s=300.0,
                join_timeout_s=120.0,
                grace_s=60.0,
                versions=Versions(python="3.11", torch="2.13", shoal="0.1"),
                **config,
            ),
        )

    return make


def test_options_are_shown_with_their_origin_also_after_a_resume(shoal: Shoal, make_run: MakeRun) -> None:
    options = {
        "workers": GivenOption(value=2, origin="cfg.toml"),
        "args": GivenOption(value="--lr 0.1", origin="cfg.toml"),
        "exchange": GivenOption(value="ring", origin="command line"),
        "grace": GivenOption(value=60.0, origin="default"),
    }

    def shown(name: str, given: dict[str, GivenOption]) -> str:
        make_run(name, options=given, exchange="ring").close()
        return " ".join(shoal("status", name).output.split())

    assert "options workers 2, args --lr 0.1 (cfg.toml); exchange ring (command line) seed" in shown(
        "click", options
    )
    resumed = resume_config("runs/click", workers=1).options
    assert "workers 1 (command line (resume)); args --lr 0.1 (cfg.toml)" in shown("resumed", resumed)
    assert "exchange" not in resume_config("runs/click", strategy="fsdp").options  # it belonged to the former


def write_steps(run: RunDirectory, *lines: dict[str, Any], torn: str = "") -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.path / "metrics.jsonl").write_text(text + torn)


def test_a_run_is_alive_as_long_as_its_lock_is_held(make_run: MakeRun) -> None:
    run = make_run("click")
    assert runs.read(run.path).state is runs.RunState.ALIVE
    run.close()
    assert runs.read(run.path).state is runs.RunState.DEAD


@pytest.mark.parametrize(
    ("exit_code", "state"),
    [
        (0, "finished"),
        (1, "failed"),
        (3, "failed"),
        (7, "failed"),
        (130, "interrupted"),
        (143, "interrupted"),
    ],
)
def test_an_ended_run_stands_as_its_summary_says(make_run: MakeRun, exit_code: int, state: str) -> None:
    with make_run("click") as run:
        run.write_summary({"exit": exit_code})
    assert runs.read(run.path).state == state


def test_status_lists_every_run_with_its_numbers(shoal: Shoal, make_run: MakeRun) -> None:
    with make_run("one") as one, make_run("two", workers=1, strategy="single", started=1.7e9):
        write_steps(one, {"step": 1, "loss": 2.0, "samples": 8}, {"step": 2, "loss": 1.5, "samples": 8})
        result = shoal("status")
    assert result.exit_code == 0
    head, _, two, first = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert head == ["run", "state", "strategy", "workers", "step", "loss", "samples/s", "started"]
    assert two[:7] == ["two", "alive", "single", "1", "-", "-", "-"]
    assert first[:7] == ["one", "alive", "ddp", "2", "2", "1.5", "-"]


@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_narrow_terminal_gets_fewer_columns_and_whole_names(make_run: MakeRun, width: int) -> None:
    with make_run("train-1") as one, make_run("a-name-of-thirty-one-characters"):
        write_steps(one, {"step": 375, "loss": 0.0742737, "samples": 8})
        found = [runs.read(one.path.parent / name) for name in runs.names(one.path.parent)]
    screen = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    with screen.capture() as captured:
        screen.print(_list_table(found, width))
    shown = captured.get()
    assert "…" not in shown
    assert "train-1" in shown
    assert "a-name-of-thirty-one-characters" in "".join(
        line.split()[0] for line in shown.split("\n") if line.strip()
    )
    assert "state" in shown


def test_the_steps_of_an_evaluation_are_not_those_of_the_training(make_run: MakeRun) -> None:
    with make_run("click") as run:
        write_steps(run, {"step": 375, "loss": 0.07, "samples": 8})
        (run.path / "activity").mkdir(exist_ok=True)
        begun = time.time()
        lines: list[dict[str, object]] = [
            {"at": begun, "step": 319, "phase": "fit", "epoch": 3, "num_epochs": 3, "num_steps": 375, "loss": 0.08},
            {"at": begun + 1, "step": 375, "phase": "evaluate", "epoch": 0, "num_steps": 1, "loss": None},
        ]  # fmt: skip
        text = "\n".join(json.dumps(line | {"process": "worker-0", "interval_s": 1.0}) for line in lines)
        (run.path / "activity" / "worker-0.jsonl").write_text(text + "\n")
        now = look(run.path, begun + 1)
    assert (now.step, now.num_steps, now.epoch, now.loss) == (375, 375, 3, 0.07)


def test_no_runs_are_no_error(shoal: Shoal) -> None:
    result = shoal("status")
    assert (result.exit_code, result.stdout) == (0, "no runs in runs\n")
    assert shoal("status", "--json").stdout.strip() == "[]"


def test_status_of_one_run_tells_what_its_directory_tells(shoal: Shoal, make_run: MakeRun) -> None:
    with make_run("click") as run:
        run.event("worker-started", rank=0, pid=41)
        run.event("worker-started", rank=1, pid=42)
        run.event("saved", rank=0, path="x", step=500)
        run.event("worker-exited", rank=1, code=-9)
        for step in (400, 500):
            (run.path / "checkpoints" / f"step-{step:09}").mkdir()
            (run.path / "checkpoints" / f"step-{step:09}" / "manifest.json").write_text("{}")
        (run.path / "checkpoints" / "step-000000600").mkdir()  # not finished: no manifest
        write_steps(run, {"step": 512, "epoch": 1, "loss": 0.25, "samples": 8})
        shown = shoal("status", "click").stdout
        told = json.loads(shoal("status", "click", "--json").stdout)
    assert "alive" in shown
    assert "/home/me/train.py --lr 0.1" in shown
    assert "step 512, epoch 2, loss 0.25 " in shown  # epochs as the progress table counts them
    assert "rank 0, process 41: running" in shown
    assert "rank 1, process 42: exited with code -9" in shown
    assert "step-000000500" in shown
    assert told["checkpoint"].endswith("step-000000500")
    assert told["progress"]["step"] == told["step"] == 512
    assert told["processes"] == [
        {"rank": 0, "pid": 41, "restarts": 0, "state": "running", "code": None},
        {"rank": 1, "pid": 42, "restarts": 0, "state": "exited", "code": -9},
    ]
    assert told["events"][-1]["event"] == "worker-exited"
    # Its supervisor is gone, and no worker outlives it.
    assert json.loads(shoal("status", "click", "--json").stdout)["processes"][0]["state"] == "gone"


def test_status_shows_the_hosts_with_their_processes(shoal: Shoal, make_run: MakeRun) -> None:
    hosts = [
        HostFacts(
            number=number,
            name=f"node{number}",
            address=f"10.0.0.{number + 1}",
            cores=8,
            workers=[2 * number, 2 * number + 1],
            servers=[number, number + 3],
            shares_run_dir=True,
        )
        for number in range(3)
    ]
    with make_run("click", workers=6, servers=2, strategy="ps", hosts=hosts) as run:
        for rank in range(6):
            run.event("worker-started", rank=rank, pid=40 + rank, host=rank // 2)
        run.event("host-lost", host=2, reason="nothing was heard of it for 3 s", ranks=[4, 5])
        run.event("worker-replaced", rank=4, pid=51, incarnation=1, host=0)
        told = json.loads(shoal("status", "click", "--json").stdout)
        shown = shoal("status", "click").stdout
    assert [(host["state"], host["workers"], host["servers"]) for host in told["hosts"]] == [
        ("here", [0, 1, 4], [0]),
        ("here", [2, 3], [1]),
        ("lost", [5], []),
    ]
    lines = [line.strip() for line in shown.splitlines()]
    assert "hosts       host 0, node0 (10.0.0.1), the head: here; workers 0-1, 4; server 0" in lines
    assert "host 1, node1 (10.0.0.2): here; workers 2-3; server 1" in lines
    assert "host 2, node2 (10.0.0.3): lost; worker 5; nothing was heard of" in shown
    assert "workers     rank 0, process 40: running" in lines
    assert "rank 2, process 42 on host 1: running" in lines


def test_a_replaced_worker_is_shown_as_the_process_that_took_its_place(
    shoal: Shoal, make_run: MakeRun
) -> None:
    with make_run("click") as run:
        run.event("worker-started", rank=0, pid=41, incarnation=0)
        run.event("worker-exited", rank=0, incarnation=0, code=-9)
        run.event("worker-replaced", rank=0, pid=51, incarnation=1, after_s=0.01)
        assert "rank 0, process 51: running" in shoal("status", "click").stdout


def test_a_view_that_nobody_brought_state_into_is_told_in_words(shoal: Shoal, make_run: MakeRun) -> None:
    with make_run("click") as run:
        run.event("view-formed", view=1, donor=-1, finished=-1, call=0, incarnations=[0, 0])
        run.event("view-formed", view=2, donor=1, finished=40, call=1, incarnations=[1, 0])
        shown = shoal("status", "click").stdout
    assert "view 1, donor none: all begin, incarnations [0, 0]" in shown
    assert "view 2, donor 1, finished 40, call 1, incarnations [1, 0]" in shown
    assert "donor -1" not in shown


def test_workers_that_a_resumed_run_no_longer_has_are_not_shown(shoal: Shoal, make_run: MakeRun) -> None:
    with make_run("click", workers=1) as run:
        for rank, pid in ((0, 41), (1, 42), (0, 51)):
            run.event("worker-started", rank=rank, pid=pid)
        shown = shoal("status", "click").stdout
    assert "rank 0, process 51: running" in shown
    assert "rank 1, process" not in shown


def test_a_run_is_found_by_name_or_path(shoal: Shoal, make_run: MakeRun) -> None:
    with make_run("click", run_dir="elsewhere"):
        pass
    for words in (["elsewhere/click"], ["click", "--run-dir", "elsewhere"]):
        assert json.loads(shoal("status", *words, "--json").stdout)["name"] == "click"


def test_an_unknown_run_is_answered_with_the_one_that_was_meant(shoal: Shoal, make_run: MakeRun) -> None:
    with make_run("click-model"), make_run("other"):
        for verb in ("status", "resume"):
            result = shoal(verb, "clik-model")
            assert result.exit_code == 2
            assert "there is no run 'clik-model'. Did you mean 'click-model'?" in " ".join(
                result.stderr.split()
            )


def test_brackets_in_a_name_are_shown_and_not_taken_for_colours(shoal: Shoal, make_run: MakeRun) -> None:
    with make_run("[red]run"):
        assert "[red]run" in shoal("status").stdout


def test_a_loss_that_is_not_finite_is_null_in_json(shoal: Shoal, make_run: MakeRun) -> None:
    with make_run("click") as run:
        write_steps(run, {"step": 1, "loss": float("nan"), "samples": 8})
        assert json.loads(shoal("status", "click", "--json").stdout)["loss"] is None
        assert " nan " in shoal("status").stdout


def test_speed_is_measured_over_the_last_steps_where_they_carry_their_time() -> None:
    lines = [{"step": step, "samples": 100, "time": 50.0 + step / 10} for step in range(5)]
    assert runs.recent_rate(lines) == pytest.approx(1000.0)
    assert runs.recent_rate(lines[:1]) is None
    assert runs.recent_rate([{"step": 1, "samples": 100}] * 3) is None


@given(
    st.lists(st.fixed_dictionaries({"step": st.integers(), "loss": st.floats(allow_nan=False)}), max_size=20),
    st.data(),
)
def test_a_file_cut_anywhere_gives_its_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    whole = "".join(json.dumps(line) + "\n" for line in lines).encode()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    found = runs.last_lines(path)
    num_whole = whole[:cut].count(b"\n")
    # The cut may fall just before a line's end: then it is whole, too.
    assert found in (lines[:num_whole], lines[: num_whole + 1])


def test_of_a_long_file_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "pad": "x" * 200}) + "\n" for step in range(5000)))
    found = runs.last_lines(path, 2)
    assert [line["step"] for line in found] == [4998, 4999]
    assert 0 < len(runs.last_lines(path)) < 2000


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00\x00"])
def test_files_that_hold_nonsense_read_as_nothing(shoal: Shoal, make_run: MakeRun, content: str) -> None:
    with make_run("click") as run:
        for name in ("metrics.jsonl", "summary.json", "events.jsonl", "config.json"):
            (run.path / name).write_text(content)
        assert shoal("status").exit_code == 0
        assert shoal("status", "click").exit_code == 0


def test_an_odd_run_does_not_hide_the_others(shoal: Shoal, make_run: MakeRun) -> None:
    make_run("good").close()
    run = make_run("odd")
    odd = {"started": "noon", "workers": [], "strategy": 3}
    (run.path / "config.json").write_text(json.dumps(odd))
    write_steps(run, {"step": "x", "time": 1.0, "loss": {}}, {"step": 1e300, "time": 2.0, "samples": None})
    run.close()
    (run.path / "summary.json").write_text("[" * 100_000)
    shown = shoal("status")
    assert shown.exit_code == 0
    assert "good" in shown.output
    assert shoal("status", "--json").exit_code == 0


def test_a_finished_run_whose_batches_were_leased_is_told_with_all_of_its_steps(
    shoal: Shoal, make_run: MakeRun
) -> None:
    run = make_run("relaxed", strategy="ps:async", workers=1, servers=1)
    write_steps(run, {"step": 88, "epoch": 1, "loss": 0.5, "samples": 8})
    run.event("server-started", server=0, pid=12, incarnation=0)
    run.event("server-view", view=1, servers={"0": {"primary": 256, "replica": 0, "filling": 0}})
    run.event("leases", by_rank={"0": [1, 8], "1": [2, 16]})
    run.close()
    (run.path / "summary.json").write_text(json.dumps({"exit": 0, "steps": 90, "leases": {"0": [1, 8]}}))
    said = shoal("status", "relaxed").output
    assert "ps:async, 1 worker, 1 server " in said
    assert "step 90, epoch 2" in said
    assert "process 12: ended with the job; answered for 256 slots " in said
    assert "leases  rank 0 1 lease, 8 samples; rank 1 2 leases, 16 samples" in said
