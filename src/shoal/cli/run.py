"""`shoal run`: train a script in one process or many."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.config_file import ConfigFile, given_options, script_args
from shoal.cli.hosts import (
    HostOptions,
    MinWorkers,
    Servers,
    enter_world,
    follow_world,
    leading_world,
    number_of_servers,
    takes_host_options,
)
from shoal.cli.inspect.dashboard import DashboardPort, WithDashboard
from shoal.cli.options import (
    Grace,
    MaxRestarts,
    Oversubscribe,
    Replicas,
    RunDir,
    Script,
    StepTimeout,
    Strategy,
    Workers,
    takes_parallel_options,
)
from shoal.cli.plan import PLANNED, PlanOption, auto, refuse_beside_plan
from shoal.cli.verb import leave
from shoal.config.parallel_options import ParallelOptions, options_of
from shoal.errors import ConfigError

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal run train.py                          one process\n"
    "  shoal run -n 4 train.py --lr 0.1            four workers; --lr is the script's\n"
    "  shoal run -n 4 -m package.train             a module, as by python -m\n"
    "  shoal run -n 4 --debug-rank 2 train.py      breakpoint() stops worker 2\n"
    "  shoal run --config run.toml                 options and script from a file; `shoal init` writes one\n"
    "  shoal run -n 4 --name click train.py        in runs/click\n"
    "  shoal run -n 4 --name click --again train.py        anew; the former run is kept as runs/click.1\n"
    "  shoal run -n 2 --servers 2 --strategy ps train.py   two servers hold the weights\n"
    "  shoal run -n 4 --strategy auto train.py     the quickest by two short runs; `shoal plan` looks closer"
)

A_DAY_S = 86_400.0

PROFILED_STEPS = 3

AUTO = "auto"

BEFORE_SCRIPT = (
    "-n",
    "--workers",
    "--strategy",
    "--shard",
    "--servers",
    "--replicas",
    "--soft-placement",
    "--sync-every",
    "--batchnorm",
    "--sequence-parallel",
    "--checkpoint-activations",
    "--offload",
    "--oversubscribe",
)
"""Options that change what runs. Meant for shoal, and written behind the script, they would silently do nothing."""


RESERVED = ("name", "run-dir", "again", "overwrite")
"""Options of `shoal run` that a command which starts several runs sets itself, to find their output."""


def parse_words(words: list[str]) -> tuple[Any, dict[str, Any]]:
    """The command `shoal run` of typer, and the options and script that words say for it, as they stand."""
    from shoal import cli

    command = typer.main.get_command(cli.load("run"))
    context = typer.Context(command, info_name="shoal run", **command.context_settings)
    given, _, _ = command.make_parser(context).parse_args(args=list(words))
    return command, given


@takes_host_options()
@takes_parallel_options()
def run(
    ctx: typer.Context,
    script: Script,
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Everything after SCRIPT is the script's own, options too."),
    ] = None,
    module: Annotated[
        bool,
        typer.Option("-m", help="SCRIPT is the name of a module, as for python -m: package.train."),
    ] = False,
    config: ConfigFile = None,
    plan: PlanOption = None,
    workers: Workers = 1,
    strategy: Strategy = None,
    servers: Servers = None,
    replicas: Replicas = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Name of the run.", show_default="the script's, numbered"
        ),
    ] = None,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Start anew under a --name that was used; that run is kept as NAME.1, NAME.2 ..."
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Start anew under a --name that was used; that run is removed."),
    ] = False,
    run_dir: RunDir = Path("runs"),
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            min=0,
            help="Seeds the script's global generators alike in every worker.",
            show_default="drawn, and kept in config.json",
        ),
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            "--faults",
            metavar="FAULTS",
            help="Faults to inject: 'kill worker-1 at step 60; kill coordinator after 5 s'.",
        ),
    ] = None,
    debug_rank: Annotated[
        int | None,
        typer.Option(
            "--debug-rank",
            metavar="RANK",
            min=0,
            help="The worker that breakpoint() stops: it has the terminal, and the others wait for a day. With -n 1 none is needed.",
        ),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Record torch's operators for a few steps of every worker, for `shoal trace`."
        ),
    ] = False,
    *,
    parallel: ParallelOptions,
    oversubscribe: Oversubscribe = False,
    hosting: HostOptions,
    min_workers: MinWorkers = None,
    step_timeout: StepTimeout = 300.0,
    grace: Grace = 60.0,
    max_restarts: MaxRestarts = 3,
    dashboard: WithDashboard = False,
    dashboard_port: DashboardPort = None,
) -> None:
    """Train a script in one process or many. Options of shoal come before SCRIPT."""
    from shoal.cluster.launch.api import LaunchConfig, launch
    from shoal.config.faults import Faults
    from shoal.observe.dashboard.process import beside

    if dashboard_port is not None and not dashboard:
        raise ConfigError(
            "--dashboard-port is for --dashboard, which was not given. Nothing was started; add --dashboard."
        )
    words = script_args(ctx, script, args)
    if plan is not None:
        given = ctx.get_parameter_source("args")
        words = list(args or ()) if given is not None and given.name == "DEFAULT_MAP" else words
        refuse_beside_plan(ctx, plan, script, words)
    if strategy == AUTO:
        strategy, servers, parallel = _automatic(
            ctx, script, words, module=module, workers=workers, run_dir=run_dir, parallel=parallel
        )
    tasks_on = ""
    if hosting.on and strategy is not None and strategy.startswith("mapreduce"):
        from shoal.engines import tasks

        tasks_on, hosting = hosting.on, hosting._replace(on=None)
        tasks.parse(tasks_on)
    world = enter_world(hosting.on)
    if world is not None and world.rank > 0:
        raise typer.Exit(follow_world(world, hosting.bind, run_dir))
    if world is not None:
        workers = world.size
    on_hosts = hosting.config(num_workers=workers, world=world)
    asked = LaunchConfig(
        script=script,
        module=script if module else "",
        args=tuple(words),
        options=given_options(ctx),
        debug_rank=debug_rank,
        profile=PROFILED_STEPS if profile else 0,
        workers=sum(on_hosts.workers) if on_hosts and on_hosts.workers and workers == 1 else workers,
        hosts=on_hosts,
        journal=hosting.journal,
        strategy=strategy,
        servers=number_of_servers(servers),
        replicas=replicas,
        name=name,
        again=again,
        overwrite=overwrite,
        run_dir=str(run_dir),
        seed=seed,
        step_timeout_s=step_timeout if debug_rank is None else max(step_timeout, A_DAY_S),
        grace_s=grace,
        max_restarts=max_restarts,
        min_workers=min_workers,
        oversubscribe=oversubscribe,
        faults=Faults.parse(faults) if faults else None,
        **options_of(parallel) | {"tasks_on": tasks_on},
    )
    misplaced = [option for option in BEFORE_SCRIPT if option in asked.args]
    if misplaced and workers == 1 and strategy is None:
        typer.echo(
            f"note: {misplaced[0]} stands after {script} and so goes to the script; shoal's own options come before it.",
            err=True,
        )
    with leading_world(world) as ended:
        result = launch(
            asked,
            set_title=True,
            beside=_beside(plan, partial(beside, port=dashboard_port) if dashboard else None),
        )
        ended.append(result.exit_code)
    leave(result)


Accompanied = Callable[[Path], contextlib.AbstractContextManager[str]]


def _beside(plan: Path | None, dashboard: Accompanied | None) -> Accompanied | None:
    """Leave the plan in the run directory, where rank 0 compares the model with it; then the dashboard."""
    if plan is None:
        return dashboard
    text = plan.read_bytes()

    @contextlib.contextmanager
    def accompany(run: Path) -> Iterator[str]:
        from shoal.cluster.launch.run_directory import write_atomically

        write_atomically(run / "plan.json", text)
        with dashboard(run) if dashboard is not None else contextlib.nullcontext("") as said:
            yield said

    return accompany


def _automatic(
    ctx: typer.Context,
    script: str,
    words: list[str],
    *,
    module: bool,
    workers: int,
    run_dir: Path,
    parallel: ParallelOptions,
) -> tuple[str, str | None, ParallelOptions]:
    """Strategy, servers and options of `--strategy auto`, which says what it takes and why."""
    for name in (*PLANNED, "hosts", "cluster", "on"):
        source = ctx.get_parameter_source(name)
        if name not in ("workers", "strategy", "config") and source is not None and source.name != "DEFAULT":
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"--strategy auto chooses for this machine by itself, and {flag} was given. Nothing was started; leave {flag} out, or plan "
                "the job with `shoal plan`, which takes more into account."
            )
    options, said = auto(script, words, module=module, workers=workers, run_dir=run_dir)
    typer.echo(said, err=True)
    found: dict[str, Any] = {key: options[key] for key in ("schedule",) if key in options}
    return str(options["strategy"]), options.get("servers"), replace(parallel, **found)
