"""`shoal.collectives` in real processes: sums and gathers, a rank that dies between them, one that does not come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched

from whole_matrix import matrix_only

Launch = Callable[..., Launched]

ALL = """
import os, pathlib, torch, shoal
c, me, n = shoal.collectives, shoal.rank(), shoal.num_workers()
for round in range(4):
    x = torch.arange(5.0) + me + round
    everybody = [torch.arange(5.0) + r + round for r in range(n)]
    total = c.all_reduce(x)
    assert torch.equal(total, sum(everybody))
    total.zero_()  # the script's own: a replacement is not given this
    assert torch.equal(c.all_reduce(x, "max"), everybody[-1])
    assert torch.equal(c.all_reduce(x, "mean"), sum(everybody) / n)
    if round == 2 and me == 1 and not pathlib.Path("died").exists() and KILL:
        pathlib.Path("died").touch()
        os.kill(os.getpid(), 9)
    assert torch.equal(c.reduce_scatter(x), sum(everybody)[5 * me // n : 5 * (me + 1) // n])
    gathered = c.all_gather(torch.full((me,), round))
    assert [part.tolist() for part in gathered] == [[round] * r for r in range(n)]
    assert torch.equal(c.broadcast(x, root=n - 1), everybody[-1])
    a, b = torch.arange(35).reshape(7, 5) + round, torch.arange(15).reshape(5, 3)
    assert torch.equal(c.matmul(a, b), a @ b)
    assert torch.equal(c.matmul(a, b, cut="inner"), a @ b)
    assert torch.equal(c.matmul(a, b, mesh=(n, 1), gather=False), (a @ b)[7 * me // n : 7 * (me + 1) // n])
    c.barrier(timeout_s=30)
print("done", me)
"""


@pytest.mark.parametrize("workers", [1, 3, *matrix_only(4)])
def test_every_rank_gets_what_all_brought(launch_script: Launch, workers: int) -> None:
    done = launch_script(ALL.replace("KILL", "False"), workers=workers, quiet=True)
    assert done.exit_code == 0, done.error


@pytest.mark.parametrize("workers", [4, *matrix_only(3)])
def test_a_replaced_worker_is_given_what_it_missed(launch_script: Launch, workers: int) -> None:
    done = launch_script(ALL.replace("KILL", "True"), workers=workers, quiet=True)
    assert done.exit_code == 0, done.error


def test_a_rank_that_does_not_come_is_named_with_the_operation(launch_script: Launch) -> None:
    done = launch_script(
        """
        import torch, shoal
        shoal.collectives.barrier()
        if shoal.rank() != 1:
            shoal.collectives.all_reduce(torch.ones(3), timeout_s=3.0)
        """,
        workers=3,
    )
    assert done.exit_code == 3
    assert "all_reduce(float32 [3], op=sum)" in str(done.error)
    assert "for rank 1." in str(done.error)


def test_ranks_that_call_different_things_are_told(launch_script: Launch) -> None:
    done = launch_script(
        """
        import torch, shoal
        shoal.collectives.all_reduce(torch.ones(3, dtype=torch.float64 if shoal.rank() == 2 else None))
        """,
        workers=3,
    )
    assert done.exit_code == 3
    assert "rank 2 called all_reduce(float64 [3]" in str(done.error)


LARGE = """
import os, pathlib, torch, shoal
from shoal.recovery import elastic_group, replay_log
replay_log.KEPT_BYTES = 60_000
me = shoal.rank()
for round in range(12):
    total = shoal.collectives.all_reduce(torch.full((2_000,), float(me + round)))  # 8 kB
    assert total[0] == sum(rank + round for rank in range(shoal.num_workers()))
    if (round, me) == (DIES, 1) and not pathlib.Path("died").exists():
        pathlib.Path("died").touch()
        os.kill(os.getpid(), 9)
kept = elastic_group.elastic_group()
held = sum(result.nbytes for results in (kept._results, kept._log.results) for result in results.values())
pathlib.Path(f"held-{me}").write_text(str(held))
print("done", int(total[0]))
"""


@pytest.mark.parametrize(("dies", "workers", "takes_all_back"), [(4, 3, False), (11, 4, True)])
def test_results_are_kept_up_to_a_limit_and_beyond_it_a_death_takes_all_back(
    launch_script: Launch, tmp_path: Path, dies: int, workers: int, takes_all_back: bool
) -> None:
    done = launch_script(LARGE.replace("DIES", str(dies)), workers=workers)
    assert done.exit_code == 0, done.error
    assert "done " in done.stdout
    assert [int((tmp_path / f"held-{rank}").read_text()) for rank in range(workers)] == [8_000] * workers
    went_back = [event for event in done.events if event["event"] == "went-back"]
    assert bool(went_back) == takes_all_back
    assert ("did not keep what its replacement would need" in done.stderr) == takes_all_back
    assert "from here on one that dies takes all of them back to the script's begin" in done.stderr
