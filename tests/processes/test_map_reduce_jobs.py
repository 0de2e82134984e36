"""In a launched job the workers share the tasks of a map_reduce; a death costs the task that was running."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launched import Launched

from shoal.errors import DataError, ScriptFailed
from waiting import wait_until

NUM_SAMPLES = 4000
EXPECTED = {str(rest): sum(range(rest, NUM_SAMPLES, 7)) for rest in range(7)}

SCRIPT = """
import json, os, signal, sys, torch
from pathlib import Path
import shoal

HERE = Path(".")
KEYED = sys.argv[1] == "keyed"
DEADLY = int(sys.argv[2])
NUM_DEATHS = int(sys.argv[3])

class Numbers:
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        return index

def look(number):
    if number == DEADLY and len(list(HERE.glob("death-*"))) < NUM_DEATHS:
        (HERE / f"death-{os.getpid()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    with open("seen", "ab") as seen:
        os.write(seen.fileno(), b"%d %d\\n" % (shoal.rank(), number))
    return [(number % 7, number)]

def add(key, values):
    return sum(values)

data = shoal.Dataset.from_torch(Numbers())
if shoal.rank() == 1:  # a call of its own does not disturb the others' numbers
    data.map_reduce(lambda number: [(0, 1)], add)
found = data.map_reduce(look, add, key="numbers" if KEYED else None)
again = data.map_reduce(look, add, key="numbers" if KEYED else None)
Path(f"result-{shoal.rank()}").write_text(json.dumps([found.all_gather(), again.all_gather(), str(found.directory)]))
"""


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("kind", ["keyed", "unknown"])
def test_workers_share_the_tasks_and_have_the_same_result(
    launch_script: Callable[..., Launched], tmp_path: Path, kind: str
) -> None:
    launched = launch_script(SCRIPT, workers=3, args=(kind, "-1", "0"))
    assert launched.exit_code == 0, launched.error
    results = [json.loads((tmp_path / f"result-{rank}").read_text()) for rank in range(3)]
    assert results[0] == results[1] == results[2]
    assert results[0][:2] == [EXPECTED, EXPECTED]
    seen = [tuple(map(int, line.split())) for line in (tmp_path / "seen").read_text().splitlines()]
    times = Counter(number for _, number in seen)
    # What has no key is computed again by the second call, what has one is not; neither by every rank.
    assert times == dict.fromkeys(range(NUM_SAMPLES), 1 if kind == "keyed" else 2)
    assert len({rank for rank, _ in seen}) > 1
    assert Path(results[0][2]).is_relative_to(tmp_path / ("cache" if kind == "keyed" else "runs"))
    assert not (launched.run_dir / "scratch").exists()


@pytest.mark.parametrize(("kind", "deadly"), [("keyed", 0), ("unknown", 1999), ("unknown", 3999)])
def test_a_worker_that_is_killed_within_a_task_costs_that_task(
    launch_script: Callable[..., Launched], tmp_path: Path, kind: str, deadly: int
) -> None:
    launched = launch_script(SCRIPT, workers=3, args=(kind, str(deadly), "1"))
    assert launched.exit_code == 0, launched.error
    for rank in range(3):
        assert json.loads((tmp_path / f"result-{rank}").read_text())[:2] == [EXPECTED, EXPECTED]
    seen = Counter(int(line.split()[1]) for line in (tmp_path / "seen").read_text().splitlines())
    usual = 1 if kind == "keyed" else 2
    assert set(seen) == set(range(NUM_SAMPLES))
    again = [number for number, times in seen.items() if times > usual]
    assert len(again) <= 256, "only what the killed worker had done of its task is done again"
    assert sum(event["event"] == "map-reduce task run again" for event in launched.events) == 1


def test_a_task_that_kills_every_worker_ends_the_job_with_its_name(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = launch_script(SCRIPT, workers=2, args=("unknown", "1999", "9"), max_restarts=5)
    assert launched.exit_code == 3
    assert isinstance(launched.error, ScriptFailed | DataError), launched.error
    assert "was begun 3 times" in str(launched.error)
    assert len(list(tmp_path.glob("death-*"))) == 3


def test_a_function_that_raises_ends_the_job_with_its_traceback_and_the_index(
    launch_script: Callable[..., Launched],
) -> None:
    launched = launch_script(
        """
        import shoal

        def look(number):
            return [(0, 1 // (number - 1234))]

        data = shoal.Dataset.from_torch(list(range(2000)))
        data.map_reduce(look, lambda key, values: sum(values))
        """,
        workers=3,
    )
    assert launched.exit_code == 1
    assert "return [(0, 1 // (number - 1234))]" in str(launched.error)
    assert "for the sample with index 1234" in str(launched.error)


def test_a_worker_that_hangs_in_a_task_is_named_by_those_who_wait(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = launch_script(
        """
        import os, signal
        import shoal

        def look(number):
            if number == 1234:
                signal.pause()
            return [(0, number)]

        data = shoal.Dataset.from_torch(list(range(2000)))
        data.map_reduce(look, lambda key, values: sum(values), timeout_s=1.0)
        """,
        workers=2,
        grace_s=1.0,
    )
    assert launched.exit_code == 3
    assert "without a sign of life" in str(launched.error)
    assert "'map-00004' is held by rank" in str(launched.error)


PLAIN = """
import os, time
from pathlib import Path
import shoal

def look(number):
    with open("seen", "ab") as seen:
        os.write(seen.fileno(), b"%d\\n" % number)
    while number == 999 and Path("slow").exists():  # long enough that nobody is done before he is killed
        time.sleep(0.01)
    return [(number % 7, number)]

if __name__ == "__main__":
    data = shoal.Dataset.from_torch(list(range(4000)))
    print(dict(data.map_reduce(look, lambda key, values: sum(values), key="plain", workers=2)))
"""


def test_a_killed_program_takes_its_processes_along_and_the_next_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    (tmp_path / "plain.py").write_text(PLAIN)
    program = subprocess.Popen([sys.executable, "plain.py"], cwd=tmp_path, stdout=subprocess.PIPE)
    done = tmp_path / "cache" / "shoal" / "map_reduce"
    assert wait_until(lambda: len(list(done.glob("*/map-*"))) >= 1)
    children = psutil.Process(program.pid).children(recursive=True)
    assert len(children) == 3, "the fork server and its two children"
    program.kill()
    program.communicate()
    assert wait_until(lambda: not any(child.is_running() for child in children))
    (tmp_path / "slow").unlink()
    finished = {path.name for path in done.glob("*/map-*")}
    (tmp_path / "seen").rename(tmp_path / "seen before")
    again = subprocess.run(
        [sys.executable, "plain.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert again.stdout == f"{ {int(rest): total for rest, total in EXPECTED.items()} }\n"
    seen = Counter(int(line) for line in (tmp_path / "seen").read_text().split())
    assert set(seen.values()) == {1}
    assert len(finished) >= 1
    assert len(seen) == NUM_SAMPLES - 250 * len(finished), "what was finished is not done again"


def test_a_process_that_is_stopped_is_named_and_ended(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(
        """
import os, signal, shoal

def look(number):
    if number == 700:
        os.kill(os.getpid(), signal.SIGSTOP)
    return [(0, number)]

data = shoal.Dataset.from_torch(list(range(2000)))
data.map_reduce(look, lambda key, values: sum(values), workers=2, timeout_s=1.0)
"""
    )
    ran = subprocess.run(
        [sys.executable, "stuck.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "'map-00002' is held by process" in ran.stderr
    assert "without a sign of life" in ran.stderr
