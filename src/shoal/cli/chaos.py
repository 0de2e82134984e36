"""`shoal chaos`: a user's own job under random faults, beside the same job undisturbed.

Draws the faults from a seed, runs the script undisturbed and then with faults, and reports each
fault, how long each recovery took, the remaining speed, and whether the final weights are the same
to the bit.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.options import Replicas, Script, Servers, StepTimeout, Strategy, Workers
from shoal.cli.verb import console, leave
from shoal.cli.verify import temporary_job
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.cluster.launch.api import LaunchConfig
    from shoal.cluster.supervisor.warm_parent import WarmParent

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal chaos -n 3 --seed 7 --rate 15s --for 2m train.py\n"
    "  shoal chaos -n 2 train.py --lr 0.1                        --lr is the script's\n"
    "\n"
    "Exit code 0: the final weights are equal to the bit; 1: they differ; otherwise the job's own."
)

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def chaos(
    script: Script,
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGS]...", help="The script's own arguments, its options after --."),
    ] = None,
    workers: Workers = 2,
    strategy: Strategy = None,
    servers: Servers = None,
    replicas: Replicas = None,
    seed: Annotated[
        int,
        typer.Option("--seed", metavar="N", min=0, help="Draws the faults: the same seed, the same plan."),
    ] = 0,
    rate: Annotated[
        str, typer.Option("--rate", metavar="TIME", help="One fault in so long, on average: 15s, 2m.")
    ] = "15s",
    lasting: Annotated[
        str, typer.Option("--for", metavar="TIME", help="Repeat the script until so long was spent on it.")
    ] = "1m",
    step_timeout: StepTimeout = 5.0,
) -> None:
    """Kill and pause processes of a job at random, and compare its result with an undisturbed run.

    The script runs undisturbed first. Then it runs under faults, again and
    again until the time is over; a run that has begun is run to its end.
    """
    every_s, for_s = seconds(rate, "--rate"), seconds(lasting, "--for")
    job = {
        "script": script,
        "args": tuple(args or ()),
        "workers": workers,
        "strategy": strategy,
        "seed": seed,
    }
    limits = {"step_timeout_s": step_timeout, "max_restarts": 100}
    with temporary_job(**job, servers=servers, replicas=replicas, **limits) as (config, warm):
        warm.wait_ready()
        exit_code = _compare(config, warm, seed=seed, every_s=every_s, for_s=for_s)
    raise typer.Exit(exit_code)


@dataclass(frozen=True, slots=True)
class ChaosRun:
    """Events, commits and final hashes of one run."""

    seconds: float
    steps: int
    hashes: dict[str, dict[str, str]]
    events: list[dict[str, Any]]
    commits: list[float]
    """When each step was committed; empty for a loop of the user's own, which writes no metrics."""


def _compare(config: LaunchConfig, warm: WarmParent, *, seed: int, every_s: float, for_s: float) -> int:
    from shoal.config.faults import Faults

    screen = console()
    undisturbed = _run(config, warm, "undisturbed")
    if not undisturbed.hashes:
        raise ConfigError(
            f"the script '{config.script}' ended without training anything with shoal, so there is nothing to "
            "compare. Check that it trains when it is run with these arguments."
        )
    screen.print(f"undisturbed: {undisturbed.steps} steps in {undisturbed.seconds:.1f} s")
    plan = Faults.random(
        seed=seed,
        num_workers=config.workers,
        num_servers=config.num_servers,
        every_s=every_s,
        for_s=for_s,
    )
    began, run, offset_s, equal, steps, seconds_run = time.monotonic(), 0, 0.0, True, 0, 0.0
    recoveries: list[float] = []
    while run == 0 or offset_s < for_s:
        run += 1
        faults = Faults(
            tuple(
                replace(fault, after_s=fault.after_s - offset_s)
                for fault in plan.planned
                if fault.after_s is not None and fault.after_s >= offset_s
            )
        )
        record = _run(replace(config, faults=faults), warm, f"disturbed-{run}")
        steps, seconds_run = steps + record.steps, seconds_run + record.seconds
        differing = _differing(undisturbed.hashes, record.hashes)
        equal = equal and not differing
        for line, took_s in _story(record):
            screen.print(f"  run {run}, {line}")
            if took_s is not None:
                recoveries.append(took_s)
        said = (
            f"{len(differing)} tensors differ, first {differing[0]}"
            if differing
            else "weights equal to the bit"
        )
        screen.print(f"run {run}: {record.steps} steps in {record.seconds:.1f} s, {said}")
        offset_s = time.monotonic() - began
    if recoveries:
        recoveries.sort()
        screen.print(
            f"{len(recoveries)} recoveries: median {recoveries[len(recoveries) // 2]:.2f} s, longest {recoveries[-1]:.2f} s"
        )
    if steps and undisturbed.steps:
        goodput = (steps / seconds_run) / (undisturbed.steps / undisturbed.seconds)
        screen.print(f"goodput: {goodput:.0%} of the undisturbed run's steps per second")
    screen.print("equal" if equal else "not equal: the faults changed what was computed")
    return 0 if equal else 1


def _run(config: LaunchConfig, warm: WarmParent, name: str) -> ChaosRun:
    from shoal.cluster.launch.api import launch

    hashes = Path(config.run_dir) / f"{name}-weights"
    with open(Path(config.run_dir) / "output", "wb") as said:
        began = time.monotonic()
        config = replace(config, name=name, fingerprints=str(hashes))
        result = launch(config, warm=warm, stdout=said, stderr=said)
        took_s = time.monotonic() - began
    if result.exit_code:
        leave(result)
    commits = [float(line["time"]) for line in _lines(result.run_dir / "metrics.jsonl")]
    return ChaosRun(
        seconds=took_s,
        steps=len(commits),
        hashes={path.stem: json.loads(path.read_text()) for path in sorted(hashes.glob("*.json"))},
        events=_lines(result.run_dir / "events.jsonl"),
        commits=commits,
    )


def _story(record: ChaosRun) -> list[tuple[str, float | None]]:
    """Each fault as it was, and how long it was until the next step was committed in a new view."""
    began = record.events[0]["time"] if record.events else 0.0
    story: list[tuple[str, float | None]] = []
    for number, event in enumerate(record.events):
        if event["event"] != "fault":
            continue
        at_s = event["time"] - began
        if not event["hit"]:
            story.append((f"{at_s:6.1f} s: {event['what']}: it was not there", None))
            continue
        later = record.events[number:]
        is_coordinator = "coordinator" in event["what"]
        sign = "coordinator-serves-again" if is_coordinator else "view-formed"
        healed = next((each["time"] for each in later if each["event"] == sign), None)
        if healed is not None and not is_coordinator:
            healed = next((commit for commit in record.commits if commit > healed), healed)
        took_s = healed - event["time"] if healed is not None and "pause" not in event["what"] else None
        after = f"recovered in {took_s:.2f} s" if took_s is not None else "the job did not have to recover"
        story.append((f"{at_s:6.1f} s: {event['what'].split(' after')[0]}: {after}", took_s))
    return story


def _differing(ours: dict[str, dict[str, str]], theirs: dict[str, dict[str, str]]) -> list[str]:
    return [
        f"{name} of {rank}"
        for rank, tensors in ours.items()
        for name, value in tensors.items()
        if theirs.get(rank, {}).get(name) != value
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def seconds(text: str, option: str) -> float:
    """A time as people write it: 15s, 2m, 1.5h; a bare number is seconds."""
    said = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?", text.strip())
    if said is None or float(said[1]) <= 0:
        raise ConfigError(f"{option} takes a time such as 15s, 2m or 1h, got '{text}'. Nothing was started.")
    return float(said[1]) * _UNITS[said[2] or "s"]
