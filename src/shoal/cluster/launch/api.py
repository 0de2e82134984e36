"""Launch of a job from Python.

`launch` returns a RunResult whatever happens once a job has started, and raises
ConfigError for what cannot be started; it does not print the error of a job,
which its caller shows. `run` raises it. The supervisor runs the processes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from setproctitle import setproctitle

import shoal
from shoal.cluster.launch.preflight import refuse_without_room
from shoal.cluster.launch.roles import preload_for
from shoal.cluster.launch.run_directory import RunDirectory, read_config
from shoal.cluster.launch.threads import available_cores, threads_per_worker
from shoal.cluster.supervisor.display import Display, binary, open_display
from shoal.cluster.supervisor.job_lifecycle import JobLifecycle, RestartConfig
from shoal.cluster.supervisor.outcome import JobOutcome, error_of, summary_of
from shoal.cluster.supervisor.supervisor import SignalInbox, Supervisor
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.cluster.worker.process import WorkerSpec
from shoal.config import exchange_rule, launchers, parallel_options
from shoal.config import strategy as strategies
from shoal.config.job import Job
from shoal.config.launch import LaunchConfig, RunConfig, Versions
from shoal.config.parallel_options import as_typed, kept_of, options_of
from shoal.errors import ClusterError, ConfigError, ScriptFailed, ScriptNotFound, ShoalError
from shoal.runtime import scratch

__all__ = ["LaunchConfig", "RunResult", "launch", "resume_config", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a job."""

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

    Raises ConfigError for what cannot be started, and ScriptFailed for a
    script that cannot be compiled. Once started, whatever
    happens to the job is in the result, and none of its processes is left.
    `warm` is a warm parent to use and to leave alive; `stdout` and `stderr`
    are where output goes instead of this process's own. `set_title` renames
    this process, for a command line that is nothing else.
    """
    launchers.refuse_others()
    cores = available_cores()
    described = _describe(config, cores)
    refuse_without_room(config, cores)
    with _open_run(config, described) as run:
        display = open_display(stdout or binary(sys.stdout), stderr or binary(sys.stderr), quiet=config.quiet)
        if set_title:
            setproctitle(f"shoal supervisor [{run.name}]")
        if not config.quiet:
            display.note(_first_words(run, described, cores))
            for note in config.notes():
                display.note(note)
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


def resume_config(
    run: str | os.PathLike[str],
    *,
    workers: int | None = None,
    shard: str | None = None,
    strategy: str | None = None,
    servers: int | None = None,
    oversubscribe: bool = False,
) -> LaunchConfig:
    """LaunchConfig to continue the job of a run directory: as before, but for the arguments given."""
    path = Path(run).absolute()
    before = read_config(path)
    num_workers = before.workers if workers is None else workers
    if strategy is None or strategy.lower() == before.strategy:
        said = {
            # What was chosen by the number of workers is chosen again.
            "strategy": None if before.strategy == "single" else before.strategy,
            "servers": before.servers or None,
            "replicas": before.replicas if before.servers else None,
            **options_of(before),
        }
        if num_workers != before.workers:
            said["exchange_rule"] = ""  # other workers make the sums, so the order they had need not be kept
    else:
        said = {"strategy": strategy, **kept_of(before)}
    if shard is not None:
        said["shard"] = shard
    if servers is not None:
        said["servers"] = servers
    # What ran before may run again, however full it makes the machine.
    is_larger = num_workers > before.workers or (servers or 0) > before.servers
    return LaunchConfig(
        script=before.script,
        args=tuple(before.args),
        workers=num_workers,
        name=path.name,
        run_dir=str(path.parent),
        seed=before.seed,
        step_timeout_s=before.step_timeout_s,
        join_timeout_s=before.join_timeout_s,
        grace_s=before.grace_s,
        max_restarts=before.max_restarts,
        pretend_hosts=min(before.pretend_hosts, num_workers),
        resume=True,
        oversubscribe=oversubscribe or not is_larger,
        cwd=before.cwd,
        **said,
    )


def _run_job(
    config: LaunchConfig, described: RunConfig, run: RunDirectory, display: Display, warm: WarmParent | None
) -> RunResult:
    """Supervise the job, and write its summary, whatever happens."""
    spec = WorkerSpec(
        job=Job(
            name=run.name,
            run_dir=run.path,
            launch=run.launch,
            num_workers=described.workers,
            num_servers=described.servers,
            num_replicas=described.replicas,
            strategy=described.strategy,
            launched=True,
            resume=config.resume,
            seed=described.seed,
            liveness=config.liveness,
            can_recover=described.max_restarts > 0,
            num_hosts=described.pretend_hosts,
            verify=config.verify,
            faults=config.faults.planned if config.faults else (),
            fingerprints=config.fingerprints,
            **options_of(described),
        ),
        env=dict(os.environb),
        cwd=described.cwd,
        script=described.script,
        args=described.args,
        num_threads=described.threads,
        master_port=0,
    )
    restart = RestartConfig(
        grace_s=config.grace_s,
        max_restarts=config.max_restarts,
        all_hold_parts=parallel_options.has_rank_local_state(described, described.strategy),
    )
    outcome = JobOutcome(JobLifecycle(num_workers=described.workers, restart=restart))
    error: ShoalError | None = None
    exit_code = ShoalError.exit_code
    scratch_path = run.path / scratch.NAME
    shutil.rmtree(scratch_path, ignore_errors=True)  # of a job whose supervisor was killed
    try:
        # The inbox first: from the first process on, Ctrl-C is a wish and not an exception.
        with (
            SignalInbox() as inbox,
            contextlib.nullcontext(warm) if warm else _warm_parent(run, described) as parent,
        ):
            supervisor = Supervisor(spec, restart=restart, run=run, display=display, warm=parent)
            outcome = supervisor.outcome
            supervisor.supervise(inbox)
        error = error_of(outcome, num_workers=described.workers, run=_shown(run.path))
        exit_code = outcome.lifecycle.exit_code
    except ClusterError as failed:  # of the launching itself: nothing of the script's
        error = failed
    except OSError as failed:
        error = ClusterError(
            f"the supervisor of {_shown(run.path)} was refused something it needs: {failed}. Its processes were ended. "
            f"What was saved is safe: once that is put right, go on with `shoal resume {_shown(run.path)}`."
        )
    finally:
        shutil.rmtree(scratch_path, ignore_errors=True)
        summary = summary_of(
            outcome,
            strategy=described.strategy,
            workers=described.workers,
            servers=outcome.num_servers or described.servers,
            exit=exit_code,
            error=str(error) if error else None,
            started=described.started,
            ended=time.time(),
        )
        run.event("job-ended", exit=exit_code)
        run.write_summary(summary)
        display.close()  # last: it waits for whoever reads the output
    return RunResult(exit_code=exit_code, run_dir=run.path, summary=summary, error=error)


def _describe(config: LaunchConfig, cores: int) -> RunConfig:
    """RunConfig with everything settled that the LaunchConfig left open."""
    cwd = os.path.abspath(config.cwd) if config.cwd else _here()
    if not os.path.isdir(cwd):
        raise ConfigError(f"the folder the script is to run in, {cwd}, does not exist. Nothing was started.")
    script = os.path.abspath(config.script)
    if not os.path.isfile(script):
        folder, name = os.path.split(script)
        scripts = [entry for entry in _entries(folder) if entry.endswith(".py")]
        guess = get_close_matches(name, scripts, n=1)
        here = os.path.dirname(config.script)
        raise ScriptNotFound(script=config.script, guess=os.path.join(here, guess[0]) if guess else None)
    _refuse_syntax_error(script)
    return RunConfig(
        script=script,
        args=list(config.args),
        cwd=cwd,
        strategy=strategies.choose(config.strategy, config.workers),
        workers=config.workers,
        servers=config.num_servers,
        replicas=config.num_replicas,
        seed=secrets.randbits(32) if config.seed is None else config.seed,
        threads=threads_per_worker(config.workers, cores=cores, env=os.environ),
        step_timeout_s=config.step_timeout_s,
        join_timeout_s=config.join_timeout_s,
        grace_s=config.grace_s,
        max_restarts=config.max_restarts,
        pretend_hosts=config.pretend_hosts,
        versions=Versions(
            python=platform.python_version(), torch=metadata.version("torch"), shoal=shoal.__version__
        ),
        started=time.time(),
        resumed=config.resume,
        **(options_of(config) | {"exchange_rule": _exchange_rule(config)}),
    )


def _refuse_syntax_error(script: str) -> None:
    """Found here it costs milliseconds; found by a worker, the import of torch and a run directory."""
    if not script.endswith(".py"):
        return
    try:
        with open(script, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the worker shows them
            compile(file.read(), script, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        told = "".join(traceback.format_exception_only(error))
        raise ScriptFailed(rank=0, traceback=told) from None
    except OSError:
        return  # the worker says why it cannot be read


def _exchange_rule(config: LaunchConfig) -> str:
    if config.exchange != "auto":
        return ""
    if config.exchange_rule:
        return config.exchange_rule
    return exchange_rule.for_job(num_workers=config.workers, num_hosts=config.pretend_hosts)


def _open_run(config: LaunchConfig, described: RunConfig) -> RunDirectory:
    if config.resume:
        if config.name is None:
            raise ConfigError("resume needs the name of the run to go on with. Nothing was started.")
        return RunDirectory.reopen(Path(config.run_dir).absolute() / config.name, described)
    return RunDirectory.claim(
        Path(config.run_dir),
        name=config.name,
        config=described,
        again=config.again,
        overwrite=config.overwrite,
    )


def _first_words(run: RunDirectory, described: RunConfig, cores: int) -> str:
    workers, threads = _count(described.workers, "worker"), _count(described.threads, "thread")
    each = " each" if described.workers > 1 else ""
    servers = f"{_count(described.servers, 'server')}, " if described.servers else ""
    words = (
        f"{_shown(run.path)}: {workers}, {servers}{described.strategy}{as_typed(described)}, {threads}{each}"
    )
    if described.workers > cores:
        words += f"; they share {_count(cores, 'core')} and take turns"
    return words


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _shown(path: Path) -> str:
    """Path relative to the current folder, where it is below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the folder we are in no longer exists. Nothing was started; cd to another."
        ) from None


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _warm_parent(run: RunDirectory, described: RunConfig) -> WarmParent:
    is_mesh = strategies.parse(described.strategy).base == "mesh"
    modules = preload_for(described.script, with_servers=bool(described.servers), with_mesh=is_mesh)
    return WarmParent(run.name, preload=modules)
