"""Under `ps` a killed worker, server or coordinator leaves no trace: the same weights to the bit, results and output."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import Ended, Launched

from shoal import Faults
from whole_matrix import matrix_only

SCRIPTS = Path(__file__).parent / "scripts"


_undisturbed: dict[tuple[str, str, int, int], Ended] = {}


@pytest.fixture
def run(launch_script: Callable[..., Launched], tmp_path: Path) -> Callable[..., tuple[Launched, Ended]]:
    def run(
        script: str, *, workers: int, servers: int, variant: str, **options: Any
    ) -> tuple[Launched, Ended]:
        out = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
        out.mkdir()
        launched = launch_script(
            SCRIPTS / f"{script}.py",
            workers=workers,
            servers=servers,
            strategy="ps",
            args=(str(out), variant),
            quiet=True,
            **{"step_timeout_s": 20.0, **options},
        )
        assert launched.exit_code == 0, f"{launched.error}\n{launched.stderr}"
        ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(workers)]
        return launched, Ended(ranks, launched.stdout)

    return run


@pytest.fixture
def recovers(run: Callable[..., tuple[Launched, Ended]]) -> Callable[..., Launched]:
    """Run a script under faults, and see that it ends as it does without."""

    def recovers(
        faults: Faults,
        *,
        script: str = "everything",
        workers: int = 2,
        servers: int = 1,
        variant: str = "sparse",
        may_print_again: bool = False,
        **options: Any,
    ) -> Launched:
        key = (script, variant, workers, servers)
        where = {"script": script, "workers": workers, "servers": servers, "variant": variant}
        if key not in _undisturbed:
            launched, _undisturbed[key] = run(**where)
            assert launched.summary["restarts"] == 0
            assert all(rank == _undisturbed[key].ranks[0] for rank in _undisturbed[key].ranks)
        launched, ended = run(**where, faults=faults, **options)
        assert ended.ranks == _undisturbed[key].ranks
        printed = dict.fromkeys(ended.stdout.splitlines()) if may_print_again else ended.stdout.splitlines()
        assert list(printed) == _undisturbed[key].stdout.splitlines()
        return launched

    return recovers


@pytest.mark.parametrize(
    ("workers", "servers", "killed"),
    [
        (
            2,
            1,
            [
                (0, 1, "worker: before forward"),
                (1, 6, "worker: before commit"),
                (0, 7, "worker: before forward"),  # the others are measuring the epoch
                (1, 9, "worker: committed"),  # after a checkpoint
            ],
        ),
        (
            3,
            2,
            [
                (1, 5, "worker: before forward"),
                (2, 6, "worker: exchange begun"),
                (0, 12, "worker: exchange finished, not committed"),
                (1, 14, "worker: committed, not counted"),
            ],
        ),
    ],
)
def test_workers_killed_within_a_step_leave_no_trace(
    recovers: Callable[..., Launched], workers: int, servers: int, killed: list[tuple[int, int, str]]
) -> None:
    faults, lives = Faults(), Counter[int]()
    for rank, step, point in killed:
        faults = faults.kill(f"worker-{rank}", at_step=step, at=point, incarnation=lives[rank])
        lives[rank] += 1
    assert recovers(faults, workers=workers, servers=servers).summary["restarts"] == 4


def test_workers_killed_between_steps_leave_no_trace(recovers: Callable[..., Launched]) -> None:
    faults = Faults()
    lives = [["checkpoint written", "evaluating"], ["a call ended", "predicting", "script ended"]]
    for rank, points in enumerate(lives):
        for life, point in enumerate(points):
            faults = faults.kill(f"worker-{rank}", at=f"worker: {point}", incarnation=life)
    assert recovers(faults).summary["restarts"] == 5


@pytest.mark.parametrize(("variant", "step"), [("adam", 8), ("mixing", 3), ("plain", 10)])
def test_whatever_model_and_optimizer_hold_is_on_the_servers(
    recovers: Callable[..., Launched], variant: str, step: int
) -> None:
    faults = (
        Faults().kill("worker-1", at_step=step, at="worker: before commit").kill("server-0", at_step=step + 2)
    )
    assert recovers(faults, workers=3, servers=2, variant=variant).summary["restarts"] == 2


@pytest.mark.parametrize(
    "faults",
    [
        Faults().kill("server-1", at_step=3).kill("worker-1", at_step=9).kill("server-0", at_step=12),
        Faults().kill("coordinator", at_step=4).kill("server-1", at_step=8).kill("worker-2", at_step=13),
        *matrix_only(
            Faults().kill("server-0", at_step=5),
            Faults().kill("worker-1", at_step=9).kill("server-1", at_step=9),
        ),
    ],
)
def test_a_killed_server_is_taken_over_by_its_replicas(
    recovers: Callable[..., Launched], faults: Faults
) -> None:
    launched = recovers(faults, workers=3, servers=2)
    assert launched.summary.get("went_back", 0) == 0
    assert "going back" not in launched.stderr


def test_without_a_replica_the_job_goes_back_to_its_checkpoint_and_names_the_steps(
    recovers: Callable[..., Launched],
) -> None:
    launched = recovers(Faults().kill("server-0", at_step=7), may_print_again=True)
    assert "going back to" in launched.stderr
    assert "repeated" in launched.stderr
    assert launched.summary["went_back"] == 1


def test_a_step_that_cannot_be_summed_again_takes_the_job_back_to_its_checkpoint_and_names_the_steps(
    run: Callable[..., tuple[Launched, Ended]],
) -> None:
    where = {"workers": 2, "servers": 2, "variant": "sparse"}
    (_, undisturbed), (launched, ended) = run("everything", **where), run("lost_step", **where)
    assert "worker 1 and a server died in the same step" in launched.stderr
    assert "going back to" in launched.stderr
    assert "repeated" in launched.stderr
    assert launched.summary["went_back"] == 1
    assert ended.ranks == undisturbed.ranks


def test_a_loop_of_the_users_own_goes_on(recovers: Callable[..., Launched]) -> None:
    faults = (
        Faults()
        .kill("worker-0", at_step=1, at="worker: before forward")
        .kill("worker-1", at_step=9, at="worker: exchange begun")
        .kill("worker-0", at_step=21, at="worker: committed, not counted", incarnation=1)
    )
    assert recovers(faults, script="own_loop").summary["restarts"] == 3
