"""Launching a job from Python: what to run, and what came of it.

`launch` answers with a RunResult whatever happens once a job has started, and
raises ConfigError for what cannot be started; it does not print the error of
a job, which is its caller's to show. `run` raises it. The processes are the
supervisor's business.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

from shoal.cluster.warm_client import WarmParent
from shoal.core import strategy_names
from shoal.core.errors import ConfigError, ScriptNotFound, ShoalError
from shoal.core.job import VerifyPlan

MAX_WORKERS = 1024
"""On one host. Beyond it a number is a slip of the hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """One job, as its user asked for it. Refuses at birth what cannot be meant."""

    script: str
    """Path of the Python file to run."""

    args: tuple[str, ...] = ()
    """What the script finds in sys.argv[1:]."""

    workers: int = 1
    """How many workers share one global batch."""

    strategy: str | None = None
    """How the model is spread. None: "single" for one worker, "ddp" for more."""

    name: str | None = None
    """Name of the run. None: the script's name and the first free number."""

    run_dir: str = "runs"
    """Where run directories are made."""

    seed: int | None = None
    """Seeds the script's global generators alike on every rank. None: drawn, and written in config.json."""

    step_timeout_s: float = 300.0
    """How long a rank waits for the others within one step before it gives up and names them."""

    join_timeout_s: float = 120.0
    """How long ranks wait for each other at a call into shoal."""

    grace_s: float = 60.0
    """How long workers that were asked to leave may take to finish their step and save."""

    resume: bool = False
    """Go on from the newest checkpoint of the run directory, which must exist. See `resume_config`."""

    verify: VerifyPlan | None = None
    """What `shoal verify` asks of the run."""

    quiet: bool = False
    """No progress; the script's own output stays."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(
                f"{self.workers} workers cannot be started: give a number from 1 to {MAX_WORKERS} with -n. "
                "Nothing was started."
            )
        for name in ("step_timeout_s", "join_timeout_s", "grace_s"):
            if not 0 < getattr(self, name) < 1e9:
                raise ConfigError(f"{name} must be a positive number of seconds, got {getattr(self, name)}.")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed must be from 0 to 2^63-1, got {self.seed}.")
        if self.name is not None and (not self.name or "/" in self.name or self.name in (".", "..")):
            raise ConfigError(
                f"'{self.name}' cannot name a run: it becomes a folder's name. Nothing was started; use --run-dir for "
                "the place and --name for the name."
            )
        strategy_names.choose(self.strategy, self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What came of a job."""

    exit_code: int
    """0; 1 the script failed; 2 configuration; 3 the job failed; 130, 143 asked to leave; or the script's own."""

    run_dir: Path
    """`<run-dir>/<name>`."""

    summary: dict[str, Any] = field(default_factory=dict)
    """What summary.json holds."""

    error: ShoalError | None = None
    """Why the job did not end well; nobody has printed it yet."""
