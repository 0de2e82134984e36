"""Killed at any moment, a job ends as if nothing had happened: the same weights to the bit, results and output.

A launch with its faults planned is compared with the undisturbed job, which
runs once for each script and number of workers. Several deaths in one launch
are several recoveries: the end is the same only if each of them was exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import Ended, Launched

from shoal import Faults
from shoal.config.faults import POINTS
from shoal.errors import ScriptFailed, WorkerDied
from shoal.observe import runs
from whole_matrix import matrix_only

SCRIPTS = Path(__file__).parent / "scripts"


Run = Callable[..., tuple[Launched, Ended]]
_undisturbed: dict[tuple[str, str, int], Ended] = {}


@pytest.fixture
def run(launch_script: Callable[..., Launched], tmp_path: Path) -> Run:
    def run(script: str, *, workers: int, variant: str = "plain", **options: Any) -> tuple[Launched, Ended]:
        out = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
        out.mkdir()
        launched = launch_script(
            SCRIPTS / f"{script}.py",
            workers=workers,
            args=(str(out), variant),
            quiet=True,
            **{"step_timeout_s": 30.0, **options},
        )
        assert launched.exit_code == 0, f"{launched.error}\n{launched.stderr}\n{launched.events}"
        ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(workers)]
        return launched, Ended(ranks, launched.stdout)

    return run


@pytest.fixture
def undisturbed(run: Run) -> Callable[[str, str, int], Ended]:
    """What a script ends with where nothing fails; each is run once."""

    def undisturbed(script: str, variant: str, workers: int) -> Ended:
        key = (script, variant, workers)
        if key not in _undisturbed:
            launched, _undisturbed[key] = run(script, workers=workers, variant=variant)
            assert launched.summary["restarts"] == 0
            assert all(rank == _undisturbed[key].ranks[0] for rank in _undisturbed[key].ranks)
        return _undisturbed[key]

    return undisturbed


@pytest.fixture
def recovers(run: Run, undisturbed: Callable[[str, str, int], Ended]) -> Callable[..., Launched]:
    """Run a script under faults, and see that it ends as it does without."""

    def recovers(
        faults: Faults,
        *,
        script: str = "everything",
        workers: int = 2,
        variant: str = "plain",
        printed_twice: str = "",
        **options: Any,
    ) -> Launched:
        expected = undisturbed(script, variant, workers)
        launched, ended = run(script, workers=workers, variant=variant, faults=faults, **options)
        assert ended.ranks == expected.ranks
        assert ended.stdout == expected.stdout + printed_twice
        return launched

    return recovers


def num_deaths(launched: Launched) -> int:
    return sum(event["event"] == "worker-exited" and event["code"] != 0 for event in launched.events)


AT_A_STEP = [
    "worker: before forward",
    "worker: before commit",
    "worker: exchange begun",
    "worker: exchange finished, not committed",
    "worker: committed, not counted",
    "worker: committed",
]
ONCE = [
    point
    for point in POINTS
    if point.startswith("worker")
    and point not in AT_A_STEP
    and not any(word in point for word in ("state", "view", "part of"))
]


@pytest.mark.parametrize("workers", [3, *matrix_only(2, 4)])
def test_workers_killed_at_every_point_of_a_step_leave_no_trace(
    recovers: Callable[..., Launched], workers: int
) -> None:
    """One after the other, in one job: each point with another step and rank at each number of workers."""
    faults = Faults()
    for number, step in enumerate((1, 4, 6, 9, 12, 16)):
        life, rank = divmod(number, workers)
        point = AT_A_STEP[(number + 2 * workers) % len(AT_A_STEP)]
        faults = faults.kill(f"worker-{rank}", at_step=step, at=point, incarnation=life)
    launched = recovers(faults, workers=workers)
    assert num_deaths(launched) == 6
    assert "begin anew" not in launched.stderr


@pytest.mark.parametrize("point", matrix_only(*AT_A_STEP))
@pytest.mark.parametrize(("workers", "rank", "step"), [(2, 0, 1), (2, 1, 6), (3, 1, 12), (4, 3, 16)])
def test_a_worker_killed_within_a_step_leaves_no_trace(
    recovers: Callable[..., Launched], point: str, workers: int, rank: int, step: int
) -> None:
    launched = recovers(Faults().kill(f"worker-{rank}", at_step=step, at=point), workers=workers)
    assert num_deaths(launched) == 1


BY_RANK = {
    0: [
        [
            "not joined",
            "checkpoint not written",
            "checkpoint written",
            "evaluating",
            "a call ended",
            "predicting",
        ],
        ["a call begins", "epoch ended", "script ended"],
    ],
    1: [
        ["a call begins", "epoch ended"],
        ["not joined", "checkpoint not written", "evaluating", "a call ended", "predicting"],
    ],
}
"""Where ranks 0 and 1 die again and again, in the order in which the script comes there. Rank 0 alone writes."""


@pytest.mark.parametrize("job", BY_RANK)
def test_workers_killed_at_every_point_between_steps_leave_no_trace(
    recovers: Callable[..., Launched], job: int
) -> None:
    faults = Faults()
    for rank, points in enumerate(BY_RANK[job]):
        for life, point in enumerate(points):
            faults = faults.kill(f"worker-{rank}", at=f"worker: {point}", incarnation=life)
    assert num_deaths(recovers(faults, workers=3)) == len(faults.planned)


@pytest.mark.parametrize(
    ("rank", "point"),
    [
        (0, "worker: script ended"),
        *matrix_only(*((rank, point) for point in ONCE for rank in (0, 1) if (rank, point) != (0, ONCE[-1]))),
    ],
)
def test_a_worker_killed_between_steps_leaves_no_trace(
    recovers: Callable[..., Launched], point: str, rank: int
) -> None:
    # What was printed after the last call that is over cannot be told from what was not yet printed.
    twice = "predicted: [-0.596551, -1.919637]\n" if (rank, point) == (0, "worker: script ended") else ""
    launched = recovers(Faults().kill(f"worker-{rank}", at=point), printed_twice=twice)
    # Only rank 0 writes, so nobody else comes to that point.
    assert num_deaths(launched) == (0 if rank and point == "worker: checkpoint written" else 1)


@pytest.mark.parametrize(
    "point", ["worker: view left", "worker: before taking state", "worker: after taking state"]
)
def test_a_replacement_that_dies_while_it_catches_up_is_replaced(
    recovers: Callable[..., Launched], point: str
) -> None:
    incarnation = 0 if point == "worker: view left" else 1
    rank = 2 if point == "worker: view left" else 1  # a survivor leaves its view
    faults = Faults().kill("worker-1", at_step=7).kill(f"worker-{rank}", at=point, incarnation=incarnation)
    assert num_deaths(recovers(faults, workers=3)) == 2


def test_a_replacement_that_dies_in_its_first_step_is_replaced(recovers: Callable[..., Launched]) -> None:
    faults = Faults().kill("worker-1", at_step=7).kill("worker-1", at_step=8, incarnation=1)
    assert num_deaths(recovers(faults.kill("worker-0", at_step=10), workers=3)) == 3


@pytest.mark.parametrize("dying", [(0, 1), *matrix_only(((1, 2),), ((0, 2),))])
def test_two_workers_may_die_in_one_step(recovers: Callable[..., Launched], dying: tuple[int, int]) -> None:
    first, second = (f"worker-{rank}" for rank in dying)
    faults = Faults().kill(first, at_step=5).kill(second, at_step=5, at="worker: before commit")
    assert num_deaths(recovers(faults, workers=3)) == 2


def test_all_workers_dead_at_once_begin_again_from_the_newest_checkpoint(
    run: Run, undisturbed: Callable[[str, str, int], Ended]
) -> None:
    faults = Faults().kill("worker-0", at_step=7).kill("worker-1", at_step=7)
    launched, ended = run("everything", workers=2, faults=faults)
    assert ended.ranks == undisturbed("everything", "plain", 2).ranks
    assert "going on from" in launched.stderr
    note = "no worker is left that has what was trained; all begin anew from the checkpoint of step 4, "
    assert launched.stderr.count(note) == 1


def test_all_workers_dead_before_a_checkpoint_begin_again_from_the_start_and_say_so(
    run: Run, undisturbed: Callable[[str, str, int], Ended]
) -> None:
    faults = Faults().kill("worker-0", at_step=3).kill("worker-1", at_step=3)
    launched, ended = run("everything", workers=2, faults=faults)
    assert ended.ranks == undisturbed("everything", "plain", 2).ranks
    assert launched.stderr.count("all begin anew from where this launch began") == 1


@pytest.mark.parametrize(("variant", "rank", "step"), [("sparse", 1, 6), ("adam", 0, 8), ("mixing", 1, 3)])
def test_whatever_the_model_and_its_optimizer_hold_is_handed_over(
    recovers: Callable[..., Launched], variant: str, rank: int, step: int
) -> None:
    point = "worker: exchange finished, not committed"
    faults = Faults().kill(f"worker-{rank}", at_step=step, at=point).kill("worker-1", at_step=13)
    assert num_deaths(recovers(faults, workers=3, variant=variant)) == (1 if rank == 1 else 2)


def test_a_loop_of_the_users_own_goes_on(recovers: Callable[..., Launched]) -> None:
    faults = (
        Faults()
        .kill("worker-0", at_step=1, at="worker: before forward")
        .kill("worker-1", at_step=9, at="worker: exchange begun")
        .kill("worker-1", at_step=14, at="worker: exchange finished, not committed", incarnation=1)
        .kill("worker-0", at_step=21, at="worker: committed, not counted", incarnation=1)
        .kill("worker-1", at="worker: script ended", incarnation=2)
    )
    launched = recovers(faults, script="own_loop")
    assert num_deaths(launched) == 5
    epochs = runs.read_ledger(launched.run_dir, is_alive=False)["epochs"]
    assert [(epoch["trained"], epoch["is_exact"], epoch["again"]) for epoch in epochs] == [(70, True, [])] * 3


def test_a_paused_worker_is_killed_after_the_step_timeout_and_replaced(
    recovers: Callable[..., Launched],
) -> None:
    launched = recovers(Faults().pause("worker-1", at_step=6), step_timeout_s=3.0)
    assert num_deaths(launched) == 1
    assert any(event["event"] == "suspect" and event["killed"] for event in launched.events)


def test_a_short_pause_is_waited_for(recovers: Callable[..., Launched]) -> None:
    launched = recovers(Faults().pause("worker-1", at_step=6, for_s=0.3))
    assert num_deaths(launched) == 0


@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("coordinator")])
def test_a_coordinator_killed_while_it_writes_comes_back(
    recovers: Callable[..., Launched], point: str
) -> None:
    launched = recovers(Faults().kill("coordinator", at=point).kill("worker-1", at_step=9))
    assert any(event["event"] == "coordinator-restarted" for event in launched.events)


def test_worker_and_coordinator_may_die_together(recovers: Callable[..., Launched]) -> None:
    launched = recovers(Faults().kill("worker-1", at_step=3).kill("coordinator", at_step=1))
    assert num_deaths(launched) == 1


def test_an_exception_is_not_retried(launch_script: Callable[..., Launched], tmp_path: Path) -> None:
    launched = launch_script(
        SCRIPTS / "everything.py",
        workers=2,
        args=(str(tmp_path),),
        faults=Faults().fail("worker-1", at_step=6),
    )
    assert isinstance(launched.error, ScriptFailed)
    assert launched.summary["restarts"] == 0


def test_a_crash_loop_ends_with_who_died_and_how_often(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = launch_script(
        SCRIPTS / "everything.py",
        workers=2,
        args=(str(tmp_path),),
        max_restarts=2,
        faults=Faults().kill("worker-1", at_step=3, incarnation=-1),
    )
    assert isinstance(launched.error, WorkerDied)
    assert launched.exit_code == 3
    assert launched.summary["restarts"] in (
        2,
        3,
    )  # the first death came after a step, and was forgotten with it


def test_a_worker_that_leaves_without_a_word_is_replaced_too(recovers: Callable[..., Launched]) -> None:
    assert num_deaths(recovers(Faults().exit("worker-0", at_step=11))) == 1
