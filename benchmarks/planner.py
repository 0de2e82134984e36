"""The planner: predicted beside measured step time, for several models by several strategies on this machine.

Aims: a median error under 15 % over at least 12 combinations, and a chosen plan within 10 % of the best that was
measured. A prediction is made from four runs of the model (one worker, one with a worker's share of the threads, the same
with its batch in parts, all workers under ddp), the times of the exchanges, and what was measured of other ways of the
same kind before; each combination is then run on its own. `cpu_share` is the least that the workers of a run had of
a core while they computed: under 0.75 other processes had the machine, and the figures are as much theirs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ddp_step import SCRIPTS
from benchmarks.harness import RESULTS, Report
from shoal.cli.bench.command import measure_links
from shoal.cluster.launch.threads import available_cores
from shoal.errors import ClusterError, ConfigError
from shoal.observe.planner import measuring
from shoal.observe.planner.cost_model import (
    ClusterShape,
    PlanCandidate,
    enumerate_candidates,
    learned,
    predict,
    refusal,
    sift,
)
from shoal.parallel.pipeline import stage
from shoal.parallel.tensor_parallel import dtensor_fixes

MODELS = ("mlp", "gpt", "clicks", "conv")
MAX_WORKERS = 4
SECONDS = 3.0
CALIBRATION_S = 60.0


def ways(workers: int) -> list[PlanCandidate]:
    """Every family, the exchanges and compressors that differ most, and fewer workers or products where there are more than two."""
    n = workers
    found = [
        {"strategy": "ddp"},
        {"strategy": "ps", "servers": 1},
        {"strategy": "fsdp"},
        {"strategy": "tp"},
        {"strategy": "pp"},
        {"strategy": "ddp", "exchange": "native"},
        {"strategy": "ddp", "compress": "int8"},
        {"strategy": "pp", "schedule": "gpipe"},
        {"strategy": "ps:async", "servers": 1},
    ]
    if n > 2:
        found += [
            {"strategy": "ddp", "workers": n // 2},
            {"strategy": "pp", "workers": n // 2},
            {"strategy": f"dp={n // 2},tp=2"},
            {"strategy": "ps", "servers": 2},
        ]
    return [
        candidate
        for each in found
        if _has_torch_for(candidate := PlanCandidate(**{"workers": n, **each}))  # type: ignore[arg-type]  # a table of keywords
    ]


def _has_torch_for(candidate: PlanCandidate) -> bool:
    try:
        if candidate.axes.tp > 1:
            dtensor_fixes.refuse_old_torch()
        if candidate.axes.pp > 1:
            stage.refuse_old_torch()
    except ConfigError:
        return False
    return True


def main(
    quick: bool = False, minutes: float | None = None, parts: Sequence[str] = (), odd: str | None = None
) -> None:
    """`parts`: only these models; the others' figures stay. `odd`: a folder in which the runs are kept."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # one worker would take a device that several cannot share
    cores, until = available_cores(), time.monotonic() + 60 * (minutes or 60)
    name = "planner" if cores <= 2 else f"planner_{cores}_cores"
    report, workers = Report(name, keeps_others=True), min(MAX_WORKERS, cores)
    cluster = ClusterShape(per_host=workers, cores=cores)
    times = measure_links(1.0 if quick else 2.9, workers)
    cluster = measuring.with_links(cluster, times, workers)
    cluster = replace(cluster, copy_bytes_per_s=measuring.copy_bytes_per_s())
    print(json.dumps({"links": times._asdict(), "tensors": cluster.tensors._asdict()}), file=sys.stderr)
    if odd:
        Path(odd).mkdir(parents=True, exist_ok=True)
        Path(odd, "links.json").write_text(json.dumps([*times, cluster.copy_bytes_per_s]))
    for model in parts or MODELS:
        if time.monotonic() > until - CALIBRATION_S:
            print(f"{model}: left out, no time", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            runs = measuring.ScriptRuns(
                script=str(SCRIPTS / "planned_models.py"),
                args=(model,),
                folder=Path(odd or folder, model),
                seconds=1.0 if quick else SECONDS,
                repeats=0 if quick else 1,
                say=lambda line: print(line, file=sys.stderr, flush=True),
            )
            one_model(report, model, runs, cluster, until, quick=quick)
    report.save()
    _all(report, RESULTS / f"{name}.jsonl")


def one_model(
    report: Report,
    model: str,
    runs: measuring.ScriptRuns,
    cluster: ClusterShape,
    until: float,
    *,
    quick: bool,
) -> None:
    workers = cluster.per_host
    workload = measuring.workload_of(measuring.calibrate(runs, workers), cluster)
    found = {measuring.SINGLE: (sum(workload.alone.values()), sum(workload.alone.values()))}
    for candidate in ways(workers)[: 1 if quick else None]:
        reason = refusal(candidate, workload, cluster)
        if reason is not None or time.monotonic() > until:
            print(f"{model}, {candidate.name}: left out, {reason or 'no time'}", file=sys.stderr)
            continue
        # As the planner does: what was measured of a way tells something of the others of its kind.
        known = {each: took_s for each, (_, took_s) in found.items()}
        alone = predict(candidate, workload, cluster)
        predicted = learned([*(predict(each, workload, cluster) for each in known), alone], known)[-1]
        try:
            measured = runs.run(f"tried-{len(found)}", candidate)
        except ClusterError as error:
            print(f"{model}, {candidate.name}: {str(error)[-1500:]}", file=sys.stderr)
            continue
        found[candidate] = (predicted.step_s, measured.step_s)
        report.add(
            f"{model}, {candidate.name}",
            {
                "predicted_ms": round(predicted.step_s * 1e3, 3),
                "measured_ms": round(measured.step_s * 1e3, 3),
                "error": round(predicted.step_s / measured.step_s - 1, 3),
                "error_of_the_model_alone": round(alone.step_s / measured.step_s - 1, 3),
                "terms_ms": {term: round(s * 1e3, 3) for term, s in predicted.terms.items()},
                "measured_terms_ms": {term: round(s * 1e3, 3) for term, s in measured.terms.items()},
                "cpu_share": round(measured.cpu_share, 2),
            },
            workers=candidate.workers,
            model=model,
            batch=workload.batch,
            load_average=os.getloadavg()[0],
        )
    _choice(report, model, found, workers)
    able, _ = sift(enumerate_candidates(cluster), workload, cluster)
    print(f"{model}: {len(able)} ways can run", file=sys.stderr)


def _choice(
    report: Report, model: str, found: dict[PlanCandidate, tuple[float, float]], workers: int
) -> None:
    """What the planner takes (the best measured of the three best predicted kinds) against the best of all that ran."""
    exact = {each: times for each, times in found.items() if each.is_exact}
    ranked = sorted(exact, key=lambda each: exact[each][0])
    kinds: dict[tuple[str, int], PlanCandidate] = {}
    for each in ranked:
        kinds.setdefault((each.family, each.workers), each)
    tried = [*kinds.values()][:3]
    chosen = min(tried, key=lambda each: exact[each][1])
    best = min(exact, key=lambda each: exact[each][1])
    report.add(
        f"{model}, chosen plan / best measured",
        {"ratio": round(exact[chosen][1] / exact[best][1], 3), "chosen": chosen.name, "best": best.name},
        aim="ratio <= 1.10",
        workers=workers,
        model=model,
    )


def _all(report: Report, path: Path) -> None:
    """The median over all models, those of earlier parts too."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ways_ = [line for line in lines if "error_of_the_model_alone" in line]
    if ways_:
        report.add(
            "all combinations",
            {
                "median_abs_error": _median(ways_, "error"),
                "of_the_model_alone": _median(ways_, "error_of_the_model_alone"),
                "combinations": len(ways_),
                "median_cpu_share": round(statistics.median(line["cpu_share"] for line in ways_), 2),
            },
            aim="median_abs_error < 0.15 over at least 12 combinations",
        )
        report.save()


def _median(lines: Sequence[dict[str, Any]], key: str) -> float:
    return round(statistics.median(abs(line.get(key, line["error"])) for line in lines), 3)


if __name__ == "__main__":
    main()
