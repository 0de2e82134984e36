"""Public models by every exact strategy: equal to one process, refused for a reason, or failed.

Aim: no failure, nothing that trains something else, at least 85 % equal. Each
strategy is one launch over all models; a model that ends its job is written
down as failed and the rest launched again.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.harness import Report
from benchmarks.public_models import Case, available
from benchmarks.scripts import models_job
from shoal.cluster.launch.api import LaunchConfig, launch
from shoal.config.strategy import Axes, fill_axes, parse_axes

STRATEGIES: tuple[tuple[str, int], ...] = (
    ("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3), ("tp", 2), ("tp", 3), ("pp", 2), ("pp", 3), ("ps", 2), ("ps", 3),
    ("fsdp=2,tp=2", 4), ("dp=2,tp=2", 4), ("dp=2,fsdp=2", 4), ("fsdp=2,pp=2", 4), ("pp=2,tp=2", 4),
)  # fmt: skip


class OneProcess:
    """What one process computes, each model once for every way of running a batch that matters to it."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], dict[str, torch.Tensor]] = {}

    def __call__(self, name: str, case: Case, strategy: str, workers: int) -> dict[str, torch.Tensor]:
        axes = fill_axes(parse_axes(strategy) or Axes(dp=workers), workers, strategy)
        num_slices = axes.num_data_ranks if case.mixes or case.draws else 1
        num_micro = 2 * axes.pp if axes.pp > 1 and case.draws and not case.mixes else 1
        key = name, num_slices, num_micro
        if key not in self._known:
            self._known[key] = models_job.train(case, num_slices=num_slices, num_micro=num_micro)
        return self._known[key]


def run(names: Sequence[str], strategy: str, workers: int, folder: Path) -> dict[str, str]:
    """What each model came to: "" where it trained, else a refusal or a failure."""
    found: dict[str, str] = {}
    left = list(names)
    while left:
        config = LaunchConfig(
            script=models_job.__file__,
            args=(str(folder), *left),
            workers=workers,
            strategy=strategy,
            servers=1 if strategy == "ps" else None,
            run_dir=str(folder / "runs"),
            quiet=True,
        )
        result = launch(config)
        for name in list(left):
            path = folder / f"{name}.json"
            if path.exists():
                refused = json.loads(path.read_text())["refused"]
                found[name] = f"refused: {refused}" if refused else ""
                left.remove(name)
        if left:
            said = _last_line(result)
            found[left.pop(0)] = f"failed: {said}"
    return found


def _last_line(result: Any) -> str:
    lines = [line for line in str(result.error or "ended without a word").splitlines() if line.strip()]
    return lines[-1].strip()[:300]


def compare(found: dict[str, torch.Tensor], alone: dict[str, torch.Tensor], tolerance: float) -> str:
    """ "equal", or by how much and where it differs most."""
    if found.keys() != alone.keys():
        return f"different: only one of the two has {sorted(found.keys() ^ alone.keys())[:3]}"
    worst, where = 0.0, ""
    for key, expected in alone.items():
        if found[key].shape != expected.shape:
            return f"different: {key} has shape {tuple(found[key].shape)}, in one process {tuple(expected.shape)}"
        gap = (found[key].double() - expected.double()).abs().max().item() if expected.numel() else 0.0
        gap /= max(1.0, expected.double().abs().max().item() if expected.numel() else 0.0)
        if not gap <= worst:  # nan too
            worst, where = gap, key
    return "equal" if worst <= tolerance else f"different: by {worst:.1e} in {where}"


def main(quick: bool = False, *, strategies: Sequence[str] = (), models: Sequence[str] = ()) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = {name: case for name, case in available().items() if not models or name in models}
    report, one_process = Report("models", keeps_others=True), OneProcess()
    counts = Counter[str]()
    for strategy, workers in STRATEGIES:
        if (strategies and strategy not in strategies) or (quick and workers > 2):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            outcomes = run(list(cases), strategy, workers, folder)
            for name, case in cases.items():
                outcome = outcomes[name]
                if not outcome:
                    alone = one_process(name, case, strategy, workers)
                    outcome = compare(load_file(folder / f"{name}.safetensors"), alone, case.tolerance)
                counts[outcome.partition(":")[0]] += 1
                report.add(strategy, {"outcome": outcome}, workers=workers, model=name, package=case.package)
    whole = sum(counts.values()) or 1
    report.add(
        "all",
        {**counts, "equal_share": round(counts["equal"] / whole, 4)},
        models=len(cases),
        aim="no failure, nothing different, equal_share >= 0.85",
    )
    report.save()


if __name__ == "__main__":
    main()
