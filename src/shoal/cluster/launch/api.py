"""Launch of a job from Python.

Once a job has started, `launch` returns a RunResult, whatever happens, and does not print the job's
error, which its caller shows. It raises ConfigError for a job that cannot be started. `run` raises
the job's error. The supervisor runs the processes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import selectors
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from setproctitle import setproctitle

import shoal
from shoal import system
from shoal.cluster.coordinator import journal_reader
from shoal.cluster.hosts.hosts import Cluster, Hosts
from shoal.cluster.launch.elastic import Elastic, Resize
from shoal.cluster.launch.function_script import write_script
from shoal.cluster.launch.preflight import refuse_without_room
from shoal.cluster.launch.roles import preload_for
from shoal.cluster.launch.run_directory import RunDirectory, read_config
from shoal.cluster.launch.threads import available_cores, threads_per_worker
from shoal.cluster.supervisor import outcome as outcomes
from shoal.cluster.supervisor.display import Display, binary, open_display
from shoal.cluster.supervisor.job_lifecycle import JobLifecycle, RestartConfig
from shoal.cluster.supervisor.outcome import JobOutcome, error_of, summary_of
from shoal.cluster.supervisor.servers import max_servers
from shoal.cluster.supervisor.sockets import Control
from shoal.cluster.supervisor.supervisor import SignalInbox, Supervisor
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.cluster.worker.process import WorkerSpec
from shoal.config import exchange_rule, parallel_options
from shoal.config import strategy as strategies
from shoal.config.hosts import HostsConfig, parse_journal
from shoal.config.job import Job, refuse_others
from shoal.config.launch import LaunchConfig, RunConfig, Versions, overlaid
from shoal.config.parallel_options import as_typed, kept_of, options_of
from shoal.engines import tasks
from shoal.errors import ClusterError, ConfigError, ScriptFailed, ScriptNotFound, ShoalError
from shoal.runtime import scratch
from shoal.runtime.health import Health

if TYPE_CHECKING:  # a job on one host does not import what these need
    from shoal.cluster.hosts.etcd import Etcd
    from shoal.cluster.hosts.headship import Headship, Successor
    from shoal.cluster.hosts.opening import Listening

__all__ = ["LaunchConfig", "RunResult", "launch", "resume_config", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a job."""

    exit_code: int
    """0; 1 the script failed; 2 configuration; 3 the job failed; 130, 143 asked to leave; or the script's own."""

    run_dir: Path
    """`<run-dir>/<name>`."""

    summary: dict[str, Any] = field(default_factory=dict)
    """Contents of summary.json."""

    error: ShoalError | None = None
    """Why the job did not end well; not printed yet."""


def launch(
    config: LaunchConfig,
    *,
    warm: WarmParent | None = None,
    stdout: BinaryIO | None = None,
    stderr: BinaryIO | None = None,
    set_title: bool = False,
    successor: Successor | None = None,
    beside: Callable[[Path], contextlib.AbstractContextManager[str]] | None = None,
    health: Health | None = None,
) -> RunResult:
    """Run a job to its end, with this process as its supervisor.

    Raises ConfigError for a job that cannot be started, and ScriptFailed for a script that cannot
    be compiled. Once started, every outcome of the job is in the result, and none of its processes
    is left. `warm` is a warm parent to use and to leave alive; `stdout` and `stderr` receive the
    output instead of this process's own. `set_title` renames this process, for a dedicated command
    line. `successor` is the state of a host that takes over from a lost head. `beside` accompanies
    the job: entered with its run directory, left when it has ended; it yields a line to print.
    `health` is called in every turn of the supervisor.
    """
    refuse_others()
    if (problem := system.missing_calls()) is not None:
        raise ConfigError(problem)
    cores = available_cores()
    described = _describe(config, cores)
    refuse_without_room(config, cores)
    with (
        _listening(config, described, successor) as listening,
        _headed(config, successor) as head,
        _open_run(config, described) as run,
        beside(run.path) if beside is not None else contextlib.nullcontext("") as beside_said,
    ):
        head.opened(run)
        display = open_display(
            stdout or binary(sys.stdout),
            stderr or binary(sys.stderr),
            quiet=config.quiet,
            plain=config.debug_rank is not None,  # a debugger's prompt has no line end
        )
        if set_title:
            setproctitle(f"shoal supervisor [{run.name}]")
        if not config.quiet:
            display.note(_first_words(run, described, cores))
            for note in (*config.notes(), *filter(None, [beside_said])):
                display.note(note)
        head.result = _run_job(config, described, run, display, warm, head, listening, health)
        return head.result


def run(
    script: str | os.PathLike[str] | Callable[[], Any],
    *,
    workers: int = 1,
    strategy: str | None = None,
    args: Sequence[str] = (),
    on: str | None = None,
    hosts: int | HostsConfig | None = None,
    resources: str = "",
    **options: Any,
) -> RunResult:
    """Run a script as a job and return its result: `shoal run`, from Python.

    In a notebook, `script` may be a function without arguments: its source, with the notebook's
    names that it uses, is written into a script (see `function_script.py`). `on` is an engine that
    gives `hosts` hosts with `resources`, as for the command line. `options` are the other fields of
    LaunchConfig. Raises the ShoalError that ended the job, if one did.
    """
    if on is not None and strategy is not None and strategies.parse(strategy).base == "mapreduce":
        tasks.parse(on)
        on, options = None, {**options, "tasks_on": on}
    if on is not None:
        from shoal.cluster.hosts.engine_hosts import engine_hosts

        if isinstance(hosts, HostsConfig):
            raise ConfigError(
                "shoal.run: on= has the engine choose the hosts, and hosts= names them. Nothing was started; give hosts= a number, or "
                "leave on= out."
            )
        num_slots = 1 if hosts is None else hosts
        hosts = engine_hosts(on, num_slots=num_slots, num_workers=workers, resources=resources)
    elif isinstance(hosts, int) or resources:
        raise ConfigError(
            "shoal.run: hosts= and resources= are asked of an engine, and none is named. Nothing was started; name it with on=, or "
            "give hosts= a HostsConfig."
        )
    if not isinstance(script, (str, os.PathLike)):
        script = write_script(script, Path(options.get("run_dir", "runs")))
    try:
        config = LaunchConfig(
            script=os.fspath(script),
            workers=workers,
            strategy=strategy,
            args=tuple(args),
            hosts=hosts,
            **options,
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
    servers: int | str | None = None,
    table_memory: str | None = None,
    oversubscribe: bool = False,
    hosts: HostsConfig | None = None,
    journal: str | None = None,
) -> LaunchConfig:
    """LaunchConfig to continue the job of a run directory: as before, except for the arguments given.

    Without `hosts` it continues on this machine alone, if that has the capacity for a job that had
    several. `journal` is "none" for a job that had one and continues without.
    """
    path = Path(run).absolute()
    before = read_config(path)
    num_workers = before.workers if workers is None else workers
    dropped = {"hosts"}  # of the options that were given, as far as they no longer hold
    num_hosts = before.hosts_asked.num_hosts if before.hosts_asked is not None else max(1, len(before.hosts))
    if strategy is None or strategy.lower() == before.strategy:
        said = {
            # Values derived from the number of workers are derived again.
            "strategy": None if before.strategy == "single" else before.strategy,
            "servers": before.servers or None,
            "replicas": before.replicas if before.servers else None,
            **options_of(before),
        }
        if num_workers != before.workers or (hosts.num_hosts if hosts else 1) != num_hosts:
            said["exchange_rule"] = ""  # other workers compute the sums, so their order need not be kept
    else:
        said = {"strategy": strategy, **kept_of(before)}
        dropped |= options_of(before).keys() - said.keys()
    if hosts is None:
        said["tls"] = False  # there is no traffic between hosts to encrypt
    if shard is not None:
        said["shard"] = shard
    if servers is not None:
        said["servers"] = servers
    if table_memory is not None:
        said["table_memory"] = table_memory
    options = overlaid(
        {name: given for name, given in before.options.items() if name not in dropped},
        "command line (resume)",
        workers=workers,
        shard=shard,
        strategy=strategy,
        servers=servers,
        table_memory=table_memory,
        hosts=hosts.num_hosts if hosts is not None else None,
    )
    # A job that ran before may run again, even where it oversubscribes the machine.
    is_larger = num_workers > before.workers or isinstance(servers, str) or (servers or 0) > before.servers
    is_larger |= (hosts.num_hosts if hosts else 1) < num_hosts  # for each machine
    return LaunchConfig(
        script=before.script,
        module=before.module,
        args=tuple(before.args),
        options=options,
        workers=num_workers,
        name=path.name,
        run_dir=str(path.parent),
        seed=before.seed,
        step_timeout_s=before.step_timeout_s,
        join_timeout_s=before.join_timeout_s,
        grace_s=before.grace_s,
        max_restarts=before.max_restarts,
        hosts=hosts,
        journal=None if journal == "none" else journal or before.journal or None,
        resume=True,
        oversubscribe=oversubscribe or not is_larger,
        cwd=before.cwd,
        **said,
    )


def takeover_config(
    run: Path, *, bind: str, interfaces: tuple[str, ...], advertise: str, journal: str
) -> LaunchConfig:
    """LaunchConfig to continue a job of several hosts on one of them: as before, with this one as the head."""
    before = read_config(run)
    if before.hosts_asked is None:
        raise ConfigError(f"{run} is not a run of several hosts. Nothing was started.")
    # Numbers and names of hosts are not kept: the head is host 0, the others are numbered as they join.
    hosts = replace(
        before.hosts_asked, bind=bind, interfaces=interfaces, advertise=advertise, names=(), by_ssh=False
    )
    config = resume_config(run, hosts=hosts)
    return replace(
        config, journal=journal, min_workers=before.min_workers, oversubscribe=before.oversubscribe
    )


class _Head:
    """Headship of a job, while it is launched; empty without --journal."""

    def __init__(self, config: LaunchConfig, successor: Successor | None) -> None:
        self._config, self.successor = config, successor
        self.headship: Headship | None = successor.headship if successor is not None else None
        self.result: RunResult | None = None
        self._etcd: Etcd | None = None
        if config.journal is None or successor is not None:
            return
        from shoal.cluster.hosts import headship

        self._etcd = headship.open_journal(parse_journal(config.journal), config.liveness)
        if config.resume and config.name is not None:
            # Before the first write: a run that continued elsewhere must not begin another launch here.
            self._claim(Path(config.run_dir).absolute() / config.name)

    def opened(self, run: RunDirectory) -> None:
        if self.headship is None:
            self._claim(run.path)
        if self.headship is not None:
            self.headship.launched(journal_reader.launch_times(run.path))
            # Before training starts: only a host that has this launch may continue from it.
            self.headship.wait_until_written()

    def _claim(self, run: Path) -> None:
        launches = journal_reader.launch_times(run)
        if self._etcd is not None and launches:
            from shoal.cluster.hosts import headship

            lease_s = self._config.liveness.head_lease_s
            self.headship = headship.become_head(self._etcd, job=run.name, launches=launches, lease_s=lease_s)


@contextlib.contextmanager
def _headed(config: LaunchConfig, successor: Successor | None) -> Iterator[_Head]:
    head = _Head(config, successor)
    try:
        yield head
    finally:
        if head.headship is not None:
            head.headship.close(head.result.exit_code if head.result is not None else None)


def _run_job(
    config: LaunchConfig,
    described: RunConfig,
    run: RunDirectory,
    display: Display,
    warm: WarmParent | None,
    head: _Head,
    listening: Listening | None,
    health: Health | None,
) -> RunResult:
    """Supervise the job, and write its summary, whatever happens."""
    outcome = JobOutcome(JobLifecycle(num_workers=described.workers, restart=RestartConfig()))
    error: ShoalError | None = None
    exit_code = ShoalError.exit_code
    scratch_path = run.path / scratch.NAME
    shutil.rmtree(scratch_path, ignore_errors=True)  # left by a job whose supervisor was killed
    try:
        # The inbox first: from the first process on, Ctrl-C is a request and not an exception.
        with (
            SignalInbox() as inbox,
            contextlib.nullcontext(warm) if warm else _warm_parent(run, described) as parent,
        ):
            hosts = Hosts(
                parent,
                _open_cluster(config, run, described, display, head, listening),
                num_workers=described.workers,
                server_numbers=range(max_servers(described.servers)),
                liveness=config.liveness,
                headship=head.headship,
                health=health,
            )
            elastic = Elastic(config, described, run.name, hosts)
            begun = ""
            with (
                hosts.in_use(),
                selectors.DefaultSelector() as selector,
                Control(run.path, selector) as control,
            ):
                selector.register(inbox, selectors.EVENT_READ, inbox)
                hosts.register(selector)
                while True:
                    spec, restart = _spec(config, described, run), _restart(config, described)
                    supervisor = Supervisor(
                        spec,
                        restart=restart,
                        run=run,
                        display=display,
                        hosts=hosts,
                        selector=selector,
                        control=control,
                        elastic=elastic,
                    )
                    supervisor.outcome.checkpoint, supervisor.outcome.lasting = (
                        outcome.checkpoint,
                        outcome.lasting,
                    )
                    outcome = supervisor.outcome
                    supervisor.supervise(begun)
                    resize = supervisor.resize
                    if resize is None or not outcome.lifecycle.is_resizing:
                        break
                    begun = outcomes.resized(described.workers, resize.config.workers, outcome.checkpoint)
                    config, described = _relaunch(resize, described, outcome, run, hosts)
                    elastic.current = config
        error = error_of(outcome, num_workers=described.workers, run=_shown(run.path))
        exit_code = outcome.lifecycle.exit_code
    except ClusterError as failed:  # an error of the launch itself, not of the script
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
        display.close()  # last: it waits for the reader of the output
    return RunResult(exit_code=exit_code, run_dir=run.path, summary=summary, error=error)


def _relaunch(
    resize: Resize, before: RunConfig, outcome: JobOutcome, run: RunDirectory, hosts: Hosts
) -> tuple[LaunchConfig, RunConfig]:
    """Begin the next launch of a run that this process continues."""
    config = resize.config
    if outcome.num_servers:
        replicas = min(before.replicas, outcome.num_servers)
        config = replace(config, servers=outcome.num_servers, replicas=replicas)
    if config.workers != before.workers:
        config = replace(config, options=overlaid(config.options, "resized", workers=config.workers))
    described = replace(_describe(config, available_cores()), started=before.started)
    own_parts = run.path / scratch.NAME / "own-parts"
    if described.workers != before.workers and own_parts.exists():
        # Of other workers than the next launch has; what was saved is complete.
        shutil.rmtree(run.path / scratch.NAME)
    run.begin_launch(described)
    launches = journal_reader.launch_times(run.path)
    hosts.resize(config.workers, config.hosts, launches)
    if hosts.headship is not None:
        hosts.headship.launched(launches)
        hosts.tell_saved()  # only a host with this launch may take over
    if resize.leaving is not None:
        hosts.leave(resize.leaving, "its workers go on elsewhere")
    run.event("resized", before=before.workers, workers=described.workers, launch=run.launch)
    return config, described


def _spec(config: LaunchConfig, described: RunConfig, run: RunDirectory) -> WorkerSpec:
    """WorkerSpec of rank 0."""
    return WorkerSpec(
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
            num_hosts=config.num_hosts,
            verify=config.verify,
            faults=config.faults.planned if config.faults else (),
            fingerprints=config.fingerprints,
            profile=config.profile,
            **options_of(described),
        ),
        env=dict(os.environb),
        cwd=described.cwd,
        script=described.script,
        module=described.module,
        args=described.args,
        num_threads=described.threads,
        master_port=0,
        debug_rank=0 if described.workers == 1 else config.debug_rank,
    )


def _restart(config: LaunchConfig, described: RunConfig) -> RestartConfig:
    return RestartConfig(
        grace_s=config.grace_s,
        max_restarts=config.max_restarts,
        host_timeout_s=config.hosts.join_timeout_s if config.hosts is not None else 0.0,
        all_hold_parts=parallel_options.has_rank_local_state(described, described.strategy),
    )


@contextlib.contextmanager
def _listening(
    config: LaunchConfig, described: RunConfig, successor: Successor | None
) -> Iterator[Listening | None]:
    """The head's socket for joining hosts, before there is a run directory; None for a job on this machine alone."""
    if config.hosts is None:
        yield None
        return
    from shoal.cluster.hosts import opening  # needs cryptography, which a job on one host does not

    listening = opening.listen(
        config.hosts,
        script=described.script,
        successor=successor,
        num_workers=described.workers,
        num_servers=described.servers,
    )
    with listening.listener:
        yield listening


def _open_cluster(
    config: LaunchConfig,
    run: RunDirectory,
    described: RunConfig,
    display: Display,
    head: _Head,
    listening: Listening | None,
) -> Cluster | None:
    """Admit the hosts of the job, and say how they join; None for a job on this machine alone."""
    if config.hosts is None or listening is None:
        return None
    from shoal.cluster.hosts import opening

    cluster = opening.open_cluster(
        config.hosts,
        listening,
        run=run,
        script=described.script,
        note=display.note,
        is_oversubscribed=config.oversubscribe,
        journal=config.journal or "",
        successor=head.successor,
        num_workers=described.workers,
        num_servers=described.servers,
    )
    if head.headship is not None:
        head.headship.listens(cluster.join_address)
    return cluster


def _describe(config: LaunchConfig, cores: int) -> RunConfig:
    """RunConfig with all defaults of the LaunchConfig resolved."""
    cwd = os.path.abspath(config.cwd) if config.cwd else _here()
    if not os.path.isdir(cwd):
        raise ConfigError(f"the folder the script is to run in, {cwd}, does not exist. Nothing was started.")
    script = _file_of_module(config.module, cwd) if config.module else os.path.abspath(config.script)
    if not os.path.isfile(script):
        folder, name = os.path.split(script)
        scripts = [entry for entry in _entries(folder) if entry.endswith(".py")]
        guess = get_close_matches(name, scripts, n=1)
        here = os.path.dirname(config.script)
        raise ScriptNotFound(script=config.script, guess=os.path.join(here, guess[0]) if guess else None)
    _refuse_syntax_error(script)
    return RunConfig(
        script=script,
        module=config.module,
        args=list(config.args),
        options=config.options,
        cwd=cwd,
        strategy=strategies.choose(config.strategy, config.workers),
        workers=config.workers,
        servers=config.num_servers,
        replicas=config.num_replicas,
        seed=secrets.randbits(32) if config.seed is None else config.seed,
        threads=threads_per_worker(
            config.hosts.most_workers(config.workers) if config.hosts else config.workers,
            cores=config.cores_per_host or cores,
            env=os.environ,
            num_servers=-(-config.num_servers // config.num_hosts) if config.hosts else config.num_servers,
        ),
        step_timeout_s=config.step_timeout_s,
        join_timeout_s=config.join_timeout_s,
        grace_s=config.grace_s,
        max_restarts=config.max_restarts,
        hosts_asked=replace(config.hosts, key_file=None) if config.hosts is not None else None,
        min_workers=config.min_workers,
        oversubscribe=config.oversubscribe,
        journal=parse_journal(config.journal).shown if config.journal else "",
        versions=Versions(
            python=platform.python_version(), torch=metadata.version("torch"), shoal=shoal.__version__
        ),
        started=time.time(),
        resumed=config.resume,
        **(options_of(config) | {"exchange_rule": _exchange_rule(config)}),
    )


def _file_of_module(module: str, cwd: str) -> str:
    """File that `python -m` would run, found without importing the packages around it."""
    parts = module.split(".")
    folders = [cwd, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    for folder in folders:
        base = os.path.join(folder, *parts)
        for file in (f"{base}.py", os.path.join(base, "__main__.py")):
            if os.path.isfile(file):
                return os.path.abspath(file)
    raise ConfigError(
        f"there is no module '{module}': neither {os.path.join(*parts)}.py nor {os.path.join(*parts)}/__main__.py is in {cwd}, in "
        "PYTHONPATH or among the installed packages. Nothing was started; run `shoal run -m` in the folder that holds the package."
    )


def _refuse_syntax_error(script: str) -> None:
    """Compile the script here, in milliseconds; a worker would find the error only after importing torch."""
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
        return  # the worker reports why it cannot be read


def _exchange_rule(config: LaunchConfig) -> str:
    if config.exchange != "auto":
        return ""
    if config.exchange_rule and not (config.num_hosts > 1 and "shm" in config.exchange_rule):
        return config.exchange_rule  # of the run that is resumed
    # Seats without workers take no part in sums.
    homes = sum(map(bool, config.hosts.workers)) if config.hosts is not None else 0
    num_hosts = max(homes, 2) if homes and config.num_hosts > 1 else config.num_hosts
    return exchange_rule.for_job(num_workers=config.workers, num_hosts=num_hosts)


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
    if described.tasks:
        workers = f"{_count(described.tasks, 'task')} a round{f' on {described.tasks_on}' if described.tasks_on else ''}"
    each = " each" if described.workers > 1 else ""
    servers = f"{_count(described.servers, 'server')}, " if described.servers else ""
    words = (
        f"{_shown(run.path)}: {workers}, {servers}{described.strategy}{as_typed(described)}, {threads}{each}"
    )
    if described.hosts_asked is None and described.workers > cores:
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
