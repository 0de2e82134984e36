"""Launching a job from Python: what to run, and what came of it.

`launch` answers with a RunResult whatever happens once a job has started, and
raises ConfigError for what cannot be started; it does not print the error of
a job, which is its caller's to show. `run` raises it. The processes are the
supervisor's business.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from setproctitle import setproctitle

import shoal
from shoal.cluster.display import Display, binary, open_display
from shoal.cluster.fate import Fate, Patience
from shoal.cluster.outcome import Outcome, error_of, summary_of
from shoal.cluster.run_directory import RunConfig, RunDirectory, Versions, read_config
from shoal.cluster.supervisor import Supervisor
from shoal.cluster.threads import available_cores, threads_per_worker
from shoal.cluster.warm_client import WarmParent
from shoal.cluster.worker import WorkerSpec
from shoal.core import strategy_names
from shoal.core.errors import ClusterError, ConfigError, ScriptNotFound, ShoalError
from shoal.core.job import Job, VerifyPlan

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

    cwd: str | None = None
    """Folder the script runs in. None: where we are."""

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
        try:
            "\0".join([self.script, *self.args, self.name or "", self.run_dir]).encode()
        except UnicodeEncodeError:
            raise ConfigError(
                "a path or an argument of this job is not valid UTF-8, so it cannot be written down in config.json. "
                "Nothing was started; rename it."
            ) from None
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


def launch(
    config: LaunchConfig,
    *,
    warm: WarmParent | None = None,
    stdout: BinaryIO | None = None,
    stderr: BinaryIO | None = None,
    set_title: bool = False,
) -> RunResult:
    """Run a job to its end, with this process as its supervisor.

    Raises ConfigError for what cannot be started. Once started, whatever
    happens to the job is in the result, and none of its processes is left.
    `warm` is a warm parent to use and to leave alive; `stdout` and `stderr`
    are where output goes instead of this process's own. `set_title` renames
    this process, for a command line that is nothing else.
    """
    cores = available_cores()
    described = _describe(config, cores)
    with _open_run(config, described) as run:
        display = open_display(stdout or binary(sys.stdout), stderr or binary(sys.stderr), quiet=config.quiet)
        if set_title:
            setproctitle(f"shoal supervisor [{run.name}]")
        if not config.quiet:
            display.note(_first_words(run, described, cores))
        return _run_job(config, described, run, display, warm)


def run(
    script: str | os.PathLike[str],
    *,
    workers: int = 1,
    strategy: str | None = None,
    args: Sequence[str] = (),
    **options: Any,
) -> RunResult:
    """Run a script as a job and return what came of it: `shoal run`, from Python.

    `options` are the other fields of LaunchConfig. Raises the ShoalError
    that ended the job, if one did.
    """
    try:
        config = LaunchConfig(
            script=os.fspath(script), workers=workers, strategy=strategy, args=tuple(args), **options
        )
    except TypeError as error:  # an option that LaunchConfig does not have
        raise ConfigError(f"shoal.run: {error}. Nothing was started.") from None
    result = launch(config)
    if result.error is not None:
        raise result.error
    return result


def resume_config(run: str | os.PathLike[str], *, workers: int | None = None) -> LaunchConfig:
    """How to go on with the job of a run directory, with other workers where a number is given."""
    path = Path(run).absolute()
    before = read_config(path)
    num_workers = before.workers if workers is None else workers
    return LaunchConfig(
        script=before.script,
        args=tuple(before.args),
        workers=num_workers,
        # What was chosen by the number of workers is chosen again.
        strategy=None if before.strategy == "single" else before.strategy,
        name=path.name,
        run_dir=str(path.parent),
        seed=before.seed,
        step_timeout_s=before.step_timeout_s,
        join_timeout_s=before.join_timeout_s,
        grace_s=before.grace_s,
        resume=True,
        cwd=before.cwd,
    )


def _run_job(
    config: LaunchConfig, described: RunConfig, run: RunDirectory, display: Display, warm: WarmParent | None
) -> RunResult:
    """Supervise the job, and write down what came of it, whatever that is."""
    spec = WorkerSpec(
        job=Job(
            name=run.name,
            run_dir=run.path,
            num_workers=described.workers,
            strategy=described.strategy,
            launched=True,
            resume=config.resume,
            seed=described.seed,
            step_timeout_s=described.step_timeout_s,
            join_timeout_s=described.join_timeout_s,
            verify=config.verify,
        ),
        env=dict(os.environb),
        cwd=described.cwd,
        script=described.script,
        args=described.args,
        num_threads=described.threads,
    )
    patience = Patience(grace_s=config.grace_s)
    outcome = Outcome(Fate(num_workers=described.workers, patience=patience))
    error: ShoalError | None = None
    exit_code = ShoalError.exit_code
    try:
        with contextlib.nullcontext(warm) if warm else WarmParent(run.name) as parent:
            supervisor = Supervisor(spec, patience=patience, run=run, display=display, warm=parent)
            outcome = supervisor.outcome
            supervisor.supervise()
        error = error_of(outcome, num_workers=described.workers, run=_shown(run.path))
        exit_code = outcome.fate.exit_code
    except ClusterError as failed:  # of the launching itself: nothing of the script's
        error = failed
    finally:
        display.close()
        summary = summary_of(
            outcome,
            strategy=described.strategy,
            workers=described.workers,
            servers=described.servers,
            exit=exit_code,
            error=str(error) if error else None,
            started=described.started,
            ended=time.time(),
        )
        run.event("job-ended", exit=exit_code)
        run.write_summary(summary)
    return RunResult(exit_code=exit_code, run_dir=run.path, summary=summary, error=error)


def _describe(config: LaunchConfig, cores: int) -> RunConfig:
    """The job with everything settled that the config left open."""
    script = os.path.abspath(config.script)
    if not os.path.isfile(script):
        folder, name = os.path.split(script)
        scripts = [entry for entry in _entries(folder) if entry.endswith(".py")]
        guess = get_close_matches(name, scripts, n=1)
        here = os.path.dirname(config.script)
        raise ScriptNotFound(script=config.script, guess=os.path.join(here, guess[0]) if guess else None)
    cwd = os.path.abspath(config.cwd or os.getcwd())
    if not os.path.isdir(cwd):
        raise ConfigError(f"the folder the script is to run in, {cwd}, does not exist. Nothing was started.")
    return RunConfig(
        script=script,
        args=list(config.args),
        cwd=cwd,
        strategy=strategy_names.choose(config.strategy, config.workers),
        workers=config.workers,
        seed=secrets.randbits(32) if config.seed is None else config.seed,
        threads=threads_per_worker(config.workers, cores=cores, env=os.environ),
        step_timeout_s=config.step_timeout_s,
        join_timeout_s=config.join_timeout_s,
        grace_s=config.grace_s,
        versions=Versions(
            python=platform.python_version(), torch=metadata.version("torch"), shoal=shoal.__version__
        ),
        started=time.time(),
        resumed=config.resume,
    )


def _open_run(config: LaunchConfig, described: RunConfig) -> RunDirectory:
    if config.resume:
        if config.name is None:
            raise ConfigError("resume needs the name of the run to go on with. Nothing was started.")
        return RunDirectory.reopen(Path(config.run_dir).absolute() / config.name, described)
    return RunDirectory.claim(Path(config.run_dir), name=config.name, config=described)


def _first_words(run: RunDirectory, described: RunConfig, cores: int) -> str:
    workers, threads = _count(described.workers, "worker"), _count(described.threads, "thread")
    each = " each" if described.workers > 1 else ""
    words = f"{_shown(run.path)}: {workers}, {described.strategy}, {threads}{each}"
    if described.workers > cores:
        words += f"; they share {_count(cores, 'core')} and take turns"
    return words


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _shown(path: Path) -> str:
    """As short as it can be typed from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
