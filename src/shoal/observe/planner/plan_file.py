"""plan.json: what `shoal plan` found, and what `shoal run --plan` starts.

A plan holds for one script with its arguments and for one model. Which parameters that model had is in the file; rank 0
compares them before anything is trained (`train/planned.py`). A loop of the script's own records no model, so its plan holds
for the text of the script.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import ConfigError
from shoal.observe.planner.cost_model import ClusterShape, Dropped, PlanCandidate, Prediction, Workload

VERSION = 1
MAX_BYTES = 64 << 20


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """The part of plan.json that a run needs; the rest is for its reader."""

    version: int
    script: str
    """As it was given; `cwd` says from where."""

    cwd: str
    args: list[str]
    script_sha256: str
    workers: int
    hosts: int
    strategy: str
    servers: int = 0
    exchange: str = "auto"
    compress: str = "none"
    schedule: str = "1f1b"
    sync_every: int | None = None
    why: str = ""
    model: dict[str, list[int]] = {}
    """Shapes of its parameters by name; empty where they are not known."""

    @property
    def script_path(self) -> Path:
        return Path(self.cwd, self.script)

    @property
    def candidate(self) -> PlanCandidate:
        return PlanCandidate(
            workers=self.workers,
            strategy=self.strategy,
            servers=self.servers,
            exchange=self.exchange,
            compress=self.compress,
            schedule=self.schedule,
            sync_every=self.sync_every,
        )

    def options(self) -> dict[str, Any]:
        """Options of `shoal run`, by the names of its parameters."""
        found: dict[str, Any] = {
            "script": str(self.script_path),
            "args": self.args,
            "workers": self.workers,
            "strategy": self.strategy,
            "exchange": self.exchange,
            "compress": self.compress,
            "schedule": self.schedule,
        }
        if self.servers:
            found["servers"] = str(self.servers)
        if self.sync_every is not None:
            found["sync_every"] = self.sync_every
        if self.hosts > 1:
            found["hosts"] = str(self.hosts)
        return found

    def refuse_other_script(self, file: Path) -> None:
        """Refuse a script that is gone, or whose model cannot be compared and whose text is another one."""
        path = self.script_path
        if not path.is_file():
            raise ConfigError(
                f"{file} is a plan for {path}, and there is no such script. Nothing was started; plan the script where it is now."
            )
        if not self.model and digest(path) != self.script_sha256:
            raise ConfigError(
                f"{file} was made for another text of {path}: the script has a loop of its own, so its model is not in the plan, and the "
                "script has changed since. Nothing was started; make the plan again with `shoal plan`."
            )


def digest(script: Path) -> str:
    return hashlib.sha256(script.read_bytes()).hexdigest()


def read_plan(file: Path) -> PlanFile:
    """Read a plan; ConfigError for what is none."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"the plan {file} cannot be read: {error.strerror or error}. Nothing was started; `shoal plan` writes one."
        ) from None
    try:
        if len(text) > MAX_BYTES:
            raise msgspec.DecodeError("it is larger than a plan can be")
        plan = msgspec.json.decode(text, type=PlanFile)
        if plan.version != VERSION:
            raise msgspec.DecodeError(
                f"it is of version {plan.version}, and this shoal reads version {VERSION}"
            )
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} is no plan of `shoal plan`: {error}. Nothing was started; make it again."
        ) from None
    return plan


def written(
    *,
    script: str,
    cwd: Path,
    args: Sequence[str],
    chosen: Prediction,
    why: str,
    stops: str,
    model: Mapping[str, Any],
    objective: str,
    predictions: Sequence[Prediction],
    dropped: Sequence[Dropped],
    measured: Mapping[PlanCandidate, float],
    workload: Workload,
    cluster: ClusterShape,
) -> str:
    """Text of plan.json."""
    c = chosen.candidate
    plan = PlanFile(
        version=VERSION,
        script=script,
        cwd=str(cwd),
        args=list(args),
        script_sha256=digest(Path(cwd, script)),
        workers=c.workers,
        hosts=chosen.hosts,
        strategy=c.strategy,
        servers=c.servers,
        exchange=c.exchange,
        compress=c.compress,
        schedule=c.schedule,
        sync_every=c.sync_every,
        why=why,
        model={str(name): list(shape) for name, shape in model.items()},
    )
    more = {
        "stops_paying": stops,
        "objective": objective,
        "command": f"shoal run {' '.join(c.flags())} {script}",
        "cluster": msgspec.to_builtins(cluster),
        "workload": msgspec.to_builtins(workload),
        "candidates": [_line(each, measured.get(each.candidate)) for each in predictions],
        "dropped": [
            {"way": each.candidate.name, "workers": each.candidate.workers, "reason": each.reason}
            for each in dropped
        ],
    }
    return json.dumps(msgspec.to_builtins(plan) | more, indent=1) + "\n"


def _line(found: Prediction, measured_s: float | None) -> dict[str, Any]:
    return {
        "way": found.candidate.name,
        "workers": found.candidate.workers,
        "hosts": found.hosts,
        "is_exact": found.candidate.is_exact,
        "predicted_s": found.step_s,
        "measured_s": measured_s,
        "terms": dict(found.terms),
        "memory_bytes": found.memory_bytes,
        "cost_per_million": found.cost_per_million,
    }
