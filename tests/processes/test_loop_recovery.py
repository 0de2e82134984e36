"""A worker killed in a loop of the user's own: the weights and variables of the undisturbed run, whatever the loop looks like."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import Launched

from shoal import Faults
from whole_matrix import matrix_only

Launch = Callable[..., Launched]
Ended = list[dict[str, Any]]

ENTERED = ["accumulates", "counts", "takes"]
"""Loops that a replacement enters in the middle."""

POINTS = [
    "worker: before forward",
    "worker: exchange begun",
    "worker: exchange finished, not committed",
    "worker: committed, not counted",
]

_undisturbed: dict[tuple[str, str], Ended] = {}


def run(launch: Launch, kind: str, folder: Path, **options: Any) -> tuple[Launched, Ended]:
    folder.mkdir()
    script = Path(__file__).parent / "scripts" / "own_loops.py"
    done = launch(script, workers=3, args=(kind, str(folder)), **options)
    assert done.exit_code == 0, done.error
    return done, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def undisturbed(launch: Launch, kind: str, folder: Path, strategy: str) -> Ended:
    key = kind, strategy
    if key not in _undisturbed:
        done, _undisturbed[key] = run(launch, kind, folder / "undisturbed", strategy=strategy)
        assert done.summary["restarts"] == 0
    return _undisturbed[key]


@pytest.mark.parametrize("kind", ENTERED)
def test_a_replacement_enters_the_loop_with_the_variables_of_its_place(
    launch_script: Launch, tmp_path: Path, kind: str
) -> None:
    expected = undisturbed(launch_script, kind, tmp_path, "ddp")
    faults = Faults()
    for number, (step, point) in enumerate(zip((2, 4, 7, 10), POINTS, strict=True)):
        rank = (number + ENTERED.index(kind)) % 3
        faults = faults.kill(f"worker-{rank}", at_step=step, at=point, incarnation=number // 3)
    done, ended = run(launch_script, kind, tmp_path / "killed", faults=faults)
    assert ended == expected
    exits = [e["code"] for e in done.events if e["event"] == "worker-exited" and e["code"]]
    assert exits == [-9] * 4  # and nobody else had to go
    if kind == "counts":
        saved = [torch.load(tmp_path / "killed" / f"saved-{rank}.pt") for rank in range(3)]
        for name in saved[0]:
            assert all(torch.equal(each[name], saved[0][name]) for each in saved)


@pytest.mark.parametrize("kind", [*ENTERED, "two"])
def test_a_replacement_under_a_parameter_server_does_so_too(
    launch_script: Launch, tmp_path: Path, kind: str
) -> None:
    expected = undisturbed(launch_script, kind, tmp_path, "ps")
    faults = Faults().kill("worker-1", at_step=4, at=POINTS[1]).kill("worker-2", at_step=8, at=POINTS[2])
    done, ended = run(launch_script, kind, tmp_path / "killed", faults=faults, strategy="ps")
    assert ended == expected
    # Two models: all begin anew at the first death, and the second was planned for a life that is over.
    assert done.summary["restarts"] == (1 if kind == "two" else 2)


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        ("zips", POINTS[1]),
        ("two", POINTS[2]),
        ("averages", POINTS[1]),
        *matrix_only(("zips", POINTS[2]), ("two", POINTS[1]), ("averages", POINTS[2])),
    ],
)
def test_a_loop_that_cannot_be_entered_is_told_so_and_begins_anew_at_a_death(
    launch_script: Launch, tmp_path: Path, kind: str, point: str
) -> None:
    expected = undisturbed(launch_script, kind, tmp_path, "ddp")
    faults = Faults().kill("worker-1", at_step=7, at=point)
    done, ended = run(launch_script, kind, tmp_path / "killed", faults=faults)
    assert ended == expected
    assert "takes all of them back to the beginning of the script" in done.stderr
    assert "the job begins anew" in done.stderr


def test_what_only_a_dead_worker_had_is_its_replacements(launch_script: Launch, tmp_path: Path) -> None:
    script = """
    import torch, shoal
    model = torch.nn.Linear(2, 1)
    data = shoal.Dataset.from_arrays(torch.ones(65, 2)).batch(13)
    model, optimizer, data = shoal.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3), data)
    seen, sizes = torch.zeros(1), []
    for _ in range(2):
        for x in data:
            optimizer.zero_grad()
            model(x).mean().backward()
            seen += data.num_local
            sizes.append(data.num_local)
            optimizer.step()
    print(int(shoal.reduce(seen)), int(shoal.reduce(float(sum(sizes)))))
    """
    early = Faults().kill("worker-2", at_step=4, at="worker: exchange begun")
    done = launch_script(script, workers=3, faults=early)
    assert (done.exit_code, done.stdout.strip()) == (0, "130 130")
    # All others have taken the step in which it dies: what it had added in it nobody knows, and that is said.
    late = Faults().kill("worker-2", at_step=4, at="worker: committed, not counted")
    done = launch_script(script, workers=3, faults=late)
    assert done.exit_code == 0
    assert done.stdout.strip() == "130 130" or "`seen`, `sizes`" in done.stderr
