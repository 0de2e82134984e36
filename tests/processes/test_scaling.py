"""`shoal scale --workers`: the job goes on with other workers, and no sample is trained twice or lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched

from shoal.cli.scale import scale
from shoal.cluster.launch.api import launch, resume_config
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.errors import ConfigError
from shoal.observe import runs

SCRIPT = Path(__file__).parent / "scripts" / "scaled_epochs.py"
Launch = Callable[..., Launched]
AtFile = Callable[[Path, Callable[[], object]], None]
HELD = """
    import pathlib, time, shoal
    pathlib.Path(f"at-work-{shoal.rank()}").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
"""


def losses(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ps"])
def test_workers_are_scaled_up_and_down_in_the_middle_of_a_fit(
    launch_script: Launch,
    warm_parent: WarmParent,
    at_file: AtFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    strategy: str,
) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    out.mkdir()
    again.mkdir()
    at_file(out / "at-7", lambda: scale("click", run_dir=tmp_path / "runs", workers=3))
    at_file(out / "at-22", lambda: scale("click", run_dir=tmp_path / "runs", workers=2))
    done = launch_script(SCRIPT, workers=2, strategy=strategy, name="click", args=(str(out), "7", "22"))
    assert done.exit_code == 0, (done.error, done.stderr)
    scaled = [event for event in done.events if event["event"] == "resized"]
    assert [(each["before"], each["workers"]) for each in scaled] == [(2, 3), (3, 2)]
    options = json.loads((done.run_dir / "config.json").read_text())["options"]
    assert options["workers"] == {"value": 2, "origin": "resized"}
    assert "3 workers from step 8 on: the bits are no longer those of the undisturbed run" in done.stderr
    said = capsys.readouterr().out
    assert "the workers save and stop, then 3 go on" in said
    assert "2 workers from step 23 on" in said

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    at_file(again / "at-7", stop)
    at_file(again / "at-22", stop)
    first = launch_script(SCRIPT, workers=2, strategy=strategy, name="by-hand", args=(str(again), "7", "22"))
    assert first.exit_code == 130
    assert launch(resume_config(first.run_dir, workers=3), warm=warm_parent).exit_code == 130
    assert launch(resume_config(first.run_dir, workers=2), warm=warm_parent).exit_code == 0
    assert losses(done.run_dir) == losses(first.run_dir)
    told = json.loads((out / "told.json").read_text())
    assert told == json.loads((again / "told.json").read_text())
    if strategy != "fsdp":  # of which rank 0 has a part
        assert (
            sum(next(values for name, values in told.items() if name.endswith("times.weight"))) == 3 * 8 * 15
        )
    epochs = runs.read_ledger(done.run_dir, is_alive=False)["epochs"]
    assert [(epoch["is_exact"], epoch["trained"], epoch["repeated"]) for epoch in epochs] == [
        (True, 120, 0)
    ] * 3
    assert not any(epoch["again"] for epoch in epochs)


@pytest.mark.parametrize(
    ("script", "options", "num_workers", "reason"),
    [
        (HELD, {}, 2, "it has 2 workers already"),
        (HELD, {}, 3, "it is not in a fit"),
        (HELD, {}, 9999, "9999 workers cannot be started"),
        (HELD, {"strategy": "tp=2"}, 3, "tp"),
        (
            "import torch\nimport shoal\nnet = torch.nn.Linear(1, 1)\n"
            "shoal.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), shoal.Dataset.from_arrays(torch.ones(4, 1)).batch(2))\n"
            + HELD.replace("\n    ", "\n"),
            {},
            3,
            "loop of its own, which has not called shoal.resume",
        ),
    ],
)
def test_a_number_of_workers_that_cannot_be_is_refused_and_the_job_goes_on(
    launch_script: Launch,
    at_file: AtFile,
    tmp_path: Path,
    script: str,
    options: dict[str, str],
    num_workers: int,
    reason: str,
) -> None:
    said: list[str] = []

    def refused() -> None:
        try:
            scale("click", run_dir=tmp_path / "runs", workers=num_workers)
        except ConfigError as error:
            said.append(str(error))
        (tmp_path / "go").touch()

    at_file(tmp_path / "at-work-1", refused)
    done = launch_script(script, workers=2, name="click", **options)
    assert done.exit_code == 0, done.error
    assert reason in said[0]
    assert "Nothing was changed" in said[0]
    refused()
    assert "is not running" in said[1]
