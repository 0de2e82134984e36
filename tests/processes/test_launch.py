"""A script under `launch` finds what it would find under python, and what a job adds."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched

import shoal
from shoal.cluster.launch import api
from shoal.cluster.launch.threads import available_cores
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.errors import ClusterError, ConfigError, ScriptFailed

Launch = Callable[..., Launched]


def test_script_sees_the_world_as_under_python(launch_script: Launch, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 'found'\n")
    done = launch_script(
        """
        import os, sys, beside
        print(__name__, sys.argv[1:], beside.value, os.getcwd(), __file__)
        left_open = open("left_open", "w")
        left_open.write("written at the end")
        def of_the_same_globals(): return left_open
        """,
        args=("--lr", "0.1"),
    )
    assert done.stdout == f"__main__ ['--lr', '0.1'] found {tmp_path} {tmp_path / 'script.py'}\n"
    assert (tmp_path / "left_open").read_text() == "written at the end"
    assert done.exit_code == 0
    assert done.error is None


def test_environment_arrives_whole_even_where_it_is_not_text(
    launch_script: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TEST_BYTES", os.fsdecode(b"caf\xe9"))
    monkeypatch.setenv("SHOAL_TEST_LONG", "x" * 100_000)
    done = launch_script(
        """
        import os
        print(os.environb[b"SHOAL_TEST_BYTES"], len(os.environ["SHOAL_TEST_LONG"]))
        """
    )
    assert done.stdout == "b'caf\\xe9' 100000\n"


def test_every_rank_knows_its_place_and_starts_from_the_same_seed(
    launch_script: Launch, tmp_path: Path
) -> None:
    done = launch_script(
        """
        import json, random, numpy, torch, shoal, pathlib
        numbers = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
        facts = {"num_workers": shoal.num_workers(), "numbers": numbers}
        pathlib.Path(f"rank-{shoal.rank()}").write_text(json.dumps(facts))
        """,
        workers=3,
        seed=5,
    )
    assert done.exit_code == 0
    facts = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(3)]
    assert facts[0] == facts[1] == facts[2]
    assert facts[0]["num_workers"] == 3


def test_only_rank_0_prints_and_every_stderr_is_marked(launch_script: Launch) -> None:
    done = launch_script(
        """
        import sys, shoal
        print("out of", shoal.rank())
        print("err of", shoal.rank(), file=sys.stderr)
        """,
        workers=2,
        quiet=True,
    )
    assert done.stdout == "out of 0\n"
    assert sorted(done.stderr.splitlines()) == ["[rank 0] err of 0", "[rank 1] err of 1"]
    assert done.log(1) == "out of 1\nerr of 1\n"


def test_one_worker_speaks_bare_and_its_last_line_needs_no_end(launch_script: Launch) -> None:
    done = launch_script(
        "import sys\nprint('out', end='')\nprint('err', end='', file=sys.stderr)", quiet=True
    )
    assert (done.stdout, done.stderr) == ("out", "err")


def test_bytes_that_are_no_text_and_endless_lines_pass_through(launch_script: Launch) -> None:
    done = launch_script(
        r"""
        import os, shoal
        shoal.rank()
        os.write(1, b"\xff\xfe\n" + b"x" * 3_000_000)
        """,
        workers=2,
    )
    assert done.exit_code == 0
    assert len(done.stdout) == 2 + 1 + 3_000_000
    assert (done.run_dir / "logs" / "worker-0.log").read_bytes().startswith(b"\xff\xfe\n")


def test_workers_share_the_cores_and_say_who_they_are(launch_script: Launch) -> None:
    done = launch_script(
        """
        import os, torch, psutil, shoal
        me = psutil.Process()
        print(torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.getsid(0) == os.getpid(), me.cmdline()[0].strip())
        print(me.parent().cmdline()[0].strip())
        """,
        workers=2,
        name="mine",
    )
    threads = max(1, available_cores() // 2)
    assert done.stdout.splitlines() == [
        f"{threads} {threads} True shoal worker 0 [mine]",
        "shoal warm-parent [tests]",
    ]
    assert json.loads((done.run_dir / "config.json").read_text())["threads"] == threads


def test_a_worker_inherits_no_descriptor_of_another(launch_script: Launch) -> None:
    done = launch_script(
        """
        import os, shoal
        shoal.rank()
        fds = [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
        print(*sorted(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).split(":")[0] for fd in fds), sep="\\n")
        """,
        workers=2,
    )
    # stdin, the way to the coordinator, stdout and stderr, the connection to the coordinator and to the supervisor,
    # rank 0's MASTER_PORT, and the file of its own spans.
    expected = [
        "null",
        "coordinator (deleted)",
        "pipe",
        "pipe",
        "socket",
        "socket",
        "socket",
        "worker-0.0.bin",
    ]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


def test_what_a_run_was_and_what_came_of_it_is_written_down(launch_script: Launch, tmp_path: Path) -> None:
    source = """
        from shoal.cluster.worker import session
        number = session.begin_call("fit", "epochs=1")
        session.saved("somewhere/step-4", 4)
        session.summary(metrics={"loss": 0.5}, samples=100, seconds=2.0, steps=4)
        print("call", number)
    """
    first, second = launch_script(source, workers=2), launch_script(source, workers=2, seed=7)
    assert (first.run_dir, second.run_dir) == (tmp_path / "runs" / "script-1", tmp_path / "runs" / "script-2")
    assert first.stdout == "call 1\n"
    expected = {
        "strategy": "ddp",
        "workers": 2,
        "servers": 0,
        "samples": 100,
        "seconds": 2.0,
        "samples_per_s": 50.0,
    }
    expected |= {
        "metrics": {"loss": 0.5},
        "restarts": 0,
        "exit": 0,
        "checkpoint": "somewhere/step-4",
        "error": None,
    }
    assert expected.items() <= first.summary.items()
    config = json.loads((second.run_dir / "config.json").read_text())
    assert config["script"] == str(tmp_path / "script.py")
    assert (config["strategy"], config["workers"], config["seed"]) == ("ddp", 2, 7)
    assert set(config["versions"]) == {"python", "torch", "shoal"}
    kinds = [event["event"] for event in second.events]
    assert kinds[:3] == ["coordinator-started", "worker-started", "worker-started"]
    assert kinds[-1] == "job-ended"


def test_progress_is_shown_on_stderr_and_not_among_the_scripts_output(launch_script: Launch) -> None:
    done = launch_script(
        """
        from shoal.cluster.worker import session
        session.begin_call("fit", "")
        for step in range(1, 2001):
            session.report(phase="fit", epoch=1, num_epochs=1, step=step, num_steps=2000, loss=1 / step, metrics={},
                           samples=step, samples_per_s=71_300.0, eta_s=9.0)
        print("done")
        """,
        workers=2,
    )
    assert done.stdout == "done\n"
    assert done.stderr.splitlines()[1:] == [
        "fit  epoch 1/1  step 1/2000  loss 1.0000  71.3 k samples/s  ETA 9 s",
        "fit  epoch 1/1  step 2000/2000  loss 5.000e-04  71.3 k samples/s  ETA 9 s",
    ]


@pytest.mark.parametrize(("leave", "code"), [("3", 3), ("None", 0), ("'no data'", 1)])
def test_sys_exit_is_honoured(launch_script: Launch, leave: str, code: int) -> None:
    done = launch_script(f"import sys\nsys.exit({leave})", workers=2)
    assert done.exit_code == code
    assert done.summary["exit"] == code
    assert ("no data" in done.stderr) == (code == 1)


def test_a_dataloaders_workers_leave_with_their_worker(launch_script: Launch) -> None:
    done = launch_script(
        """
        import torch
        from torch.utils.data import DataLoader
        import shoal; shoal.rank()
        loader = DataLoader(list(range(64)), batch_size=4, num_workers=2, persistent_workers=True)
        print(sum(int(batch.sum()) for batch in loader))
        """,
        workers=2,
    )
    assert (done.exit_code, done.stdout) == (0, "2016\n")


def test_what_a_script_starts_and_forgets_is_ended(launch_script: Launch) -> None:
    done = launch_script(
        "import shoal, subprocess\nshoal.rank()\nsubprocess.Popen(['sleep', '600'])", workers=2
    )
    assert done.exit_code == 0  # and the leak check finds no `sleep`


def test_launching_works_from_a_thread_of_its_own(launch_script: Launch) -> None:
    results: list[Launched] = []
    thread = threading.Thread(target=lambda: results.append(launch_script("print('here')", workers=2)))
    thread.start()
    thread.join()
    assert results[0].stdout == "here\n"


def test_a_warm_parent_serves_one_launch_at_a_time(launch_script: Launch, warm_parent: WarmParent) -> None:
    with warm_parent.in_use():
        done = launch_script("print('never')")
    assert isinstance(done.error, ClusterError)
    assert "one at a time" in str(done.error)
    assert launch_script("print('now')").stdout == "now\n"


def test_run_gives_the_result_or_raises_the_jobs_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warm_parent: WarmParent
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = api.launch
    monkeypatch.setattr(api, "launch", lambda config: whole(config, warm=warm_parent))
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("import shoal, sys\nassert sys.argv[1:] == ['a'] and shoal.num_workers() == 2")
    bad.write_text("1 / 0")
    assert shoal.run("good.py", workers=2, args=["a"], quiet=True).exit_code == 0
    with pytest.raises(ScriptFailed, match="ZeroDivisionError"):
        shoal.run(bad, quiet=True)
    with pytest.raises(ConfigError, match="no_such_option"):
        shoal.run(good, no_such_option=1)
