"""Scripts that never call shoal: with a process group of their own they run as under torchrun, with nothing they are refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched

from shoal.errors import NotDistributed, ScriptFailed, WorkerDied

Launch = Callable[..., Launched]

DDP = """
    import os, signal, torch, torch.distributed as dist
    from pathlib import Path
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (rank, size) == (int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.randn(10 * size, 6, 4).unflatten(0, (10, size))
    for step in range(10):
        {fault}
        optimizer.zero_grad()
        model(samples[step, rank]).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    if rank == 0:
        print(" ".join(f"{{float(w):.6f}}" for w in model.module.weight.detach().flatten()))
"""

KILLED_ONCE = """if step == 5 and rank == 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)"""

PLAIN = """
    import torch
    {first}
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    open("trained", "a").close()
"""


def ddp(fault: str = "pass") -> str:
    return DDP.format(fault=fault)


def by_hand(num_workers: int) -> str:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.randn(10 * num_workers, 6, 4).unflatten(0, (10, num_workers)):
        optimizer.zero_grad()
        model(batch.flatten(0, 1)).square().mean().backward()
        optimizer.step()
    return " ".join(f"{float(w):.6f}" for w in model.weight.detach().flatten())


@pytest.mark.parametrize("workers", [1, 3])
def test_a_script_with_its_own_process_group_runs_as_under_torchrun(
    launch_script: Launch, workers: int
) -> None:
    done = launch_script(ddp(), workers=workers)
    assert (done.exit_code, done.stdout.strip()) == (0, by_hand(workers)), done.error


def test_a_killed_worker_of_such_a_script_starts_all_of_them_from_the_top(launch_script: Launch) -> None:
    done = launch_script(ddp(KILLED_ONCE), workers=3)
    assert (done.exit_code, done.stdout.strip()) == (0, by_hand(3)), done.error
    assert "worker 1 was killed by SIGKILL" in done.stderr
    assert "all workers run the script again from its top (1 of 3 times)" in done.stderr
    assert done.summary["restarts"] == 1
    replaced = [event["rank"] for event in done.events if event["event"] == "worker-replaced"]
    assert replaced == [0, 1, 2]


def test_where_nothing_is_restarted_the_dead_worker_is_named_and_not_what_its_peers_raised(
    launch_script: Launch,
) -> None:
    done = launch_script(ddp(KILLED_ONCE), workers=3, max_restarts=0)
    assert isinstance(done.error, WorkerDied)
    assert (done.exit_code, done.error.rank) == (3, 1)


def test_an_exception_of_such_a_script_is_its_own_and_not_retried(launch_script: Launch) -> None:
    done = launch_script(ddp('assert (step, rank) != (5, 1), "of rank 1"'), workers=3)
    assert isinstance(done.error, ScriptFailed)
    assert done.exit_code == 1
    assert "of rank 1" in str(done.error)


def test_the_last_rank_of_such_a_script_may_be_killed_and_is_not_taken_for_finished(
    launch_script: Launch,
) -> None:
    done = launch_script(
        """
        import os, signal, time, torch.distributed as dist
        from pathlib import Path

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        Path(f"pid-{rank}").write_text(str(os.getpid()))
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:  # nobody waits for the last work of one rank: the others leave
            while any(Path("/proc", Path(f"pid-{other}").read_text()).exists() for other in (1, 2)):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        workers=3,
    )
    assert isinstance(done.error, WorkerDied)
    assert (done.exit_code, done.error.rank) == (3, 0)


def test_asked_to_leave_such_a_script_leaves(
    launch_script: Launch, at_file: Callable[..., None], tmp_path: Path
) -> None:
    at_file(tmp_path / "running", lambda: os.kill(os.getpid(), signal.SIGTERM))
    done = launch_script(
        """
        import torch, torch.distributed as dist
        from pathlib import Path

        dist.init_process_group("gloo")
        while True:
            dist.all_reduce(torch.ones(1))
            Path("running").touch()
        """,
        workers=3,
    )
    assert done.exit_code == 143, done.error


def test_a_script_that_divides_nothing_is_refused_before_its_first_step(
    launch_script: Launch, tmp_path: Path
) -> None:
    done = launch_script(PLAIN.format(first=""), workers=2)
    assert isinstance(done.error, NotDistributed)
    assert done.exit_code == 2
    assert "before their first optimizer step" in str(done.error)
    assert not (tmp_path / "trained").exists()


def test_one_worker_runs_any_script(launch_script: Launch, tmp_path: Path) -> None:
    assert launch_script(PLAIN.format(first="")).exit_code == 0
    assert (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    "reads", ["os.environ['RANK']", "os.environ.get('LOCAL_RANK')", "os.getenv('WORLD_SIZE')"]
)
def test_a_script_that_reads_its_rank_divides_by_itself(launch_script: Launch, reads: str) -> None:
    assert launch_script(PLAIN.format(first=f"import os; {reads}"), workers=2).exit_code == 0


@pytest.mark.parametrize(
    "first",
    [
        "import shoal",
        "import lightning_utilities.core.rank_zero",  # a library that looks for a rank
        "import shoal; list(shoal.Dataset.from_arrays(torch.ones(4)).batch(2))",
    ],
)
def test_a_script_that_divides_nothing_is_refused_at_its_end_at_the_latest(
    launch_script: Launch, first: str
) -> None:
    done = launch_script(PLAIN.format(first=first), workers=2)
    assert isinstance(done.error, NotDistributed)
    assert done.exit_code == 2
    assert done.error.at_end == ("shoal" in first)


def test_a_script_may_train_something_by_itself_before_it_calls_shoal(launch_script: Launch) -> None:
    done = launch_script(PLAIN.format(first="import shoal") + "    print(shoal.num_workers())\n", workers=2)
    assert (done.exit_code, done.stdout) == (0, "2\n")


@pytest.mark.parametrize(("first", "code"), [("raise SystemExit(0)", 0), ("import shoal", 2)])
def test_a_script_that_leaves_before_it_trains_is_not_refused(
    launch_script: Launch, first: str, code: int
) -> None:
    """`--help`, say; one that leaves by sys.exit() after it has trained is."""
    done = launch_script(PLAIN.format(first=first) + "    raise SystemExit(0)\n", workers=2)
    assert done.exit_code == code
