"""The tests of other folders, run in a Python that lacks what macOS lacks (`without_linux/sitecustomize.py`).

single, ddp by gloo and ps with killed workers and servers, fork server, reader
processes and signals: through the fallbacks of `shoal.system`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent

CASES = {
    "forking and memory": (
        "runtime/test_forkserver.py",
        "runtime/test_scratch.py",
        "runtime/transport/test_unix.py",
        "data/workers/test_process_pool.py",
        "embedding/test_row_table.py",
        "embedding/test_tiered_rows.py",
    ),
    "single and ddp": (
        "processes/test_launch.py::test_every_rank_knows_its_place_and_starts_from_the_same_seed",
        "processes/test_launch.py::test_a_dataloaders_workers_leave_with_their_worker",
        "processes/test_equality.py::test_many_workers_compute_what_one_process_computes",
        "processes/test_recovery.py::test_two_workers_may_die_in_one_step",
        "processes/test_map_workers.py::test_a_killed_worker_takes_its_readers_along_and_its_replacement_has_its_own",
    ),
    "ps": ("processes/test_ps_recovery.py::test_a_killed_server_is_taken_over_by_its_replicas",),
    "the control socket": (
        "processes/test_scaling.py::test_workers_are_scaled_up_and_down_in_the_middle_of_a_fit",
    ),
    "ends of a job": (
        "processes/test_signals.py::test_asked_once_a_job_saves_and_leaves",
        "processes/test_signals.py::test_a_killed_supervisor_leaves_no_process",
    ),
}


def without_linux() -> dict[str, str]:
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(HERE / "without_linux"), *([before] if before else [])])
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {
        "PYTHONPATH": path
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_tests_pass_without_what_only_linux_has(case: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0"]
    done = subprocess.run(
        [*command, *(f"tests/{each}" for each in CASES[case])],
        cwd=TESTS.parent,
        env=without_linux(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_what_needs_linux_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import shoal\n")
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "run", "-n", "2", "--exchange", "shm", "train.py"],
        cwd=tmp_path,
        env=without_linux(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "which only Linux has. Nothing was started; use --exchange native." in " ".join(
        done.stderr.split()
    )


def test_the_harness_takes_away_what_it_says() -> None:
    asked = "from shoal import system; print(system.IS_LINUX); system._statm(1)"
    done = subprocess.run(
        [sys.executable, "-c", asked], env=without_linux(), capture_output=True, text=True, check=False
    )
    assert done.stdout == "False\n"
    assert "FileNotFoundError" in done.stderr


ONLY_LINUX = re.compile(
    r"memfd_create|pidfd|\beventfd|prctl|O_PATH|O_TMPFILE|SOCK_SEQPACKET|SO_PEERCRED|SO_PASSCRED|sched_getaffinity|POLLRDHUP"
    r"|MADV_HUGEPAGE|CMSG_CLOEXEC\b(?<!system\.CMSG_CLOEXEC)|posix_fallocate"
)


def test_calls_that_only_linux_has_are_in_one_file() -> None:
    package = TESTS.parent / "src/shoal"
    found = [
        f"{path.relative_to(package)}:{number}"
        for path in sorted(package.rglob("*.py"))
        if path != package / "system.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ONLY_LINUX.search(line)
    ]
    # Code for a host of Spark or Ray, whose Python need not have shoal.
    assert [each for each in found if not each.startswith("engines/protocol.py")] == []
