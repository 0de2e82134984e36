"""`shoal coordinator`, `shoal worker` and `shoal server`: each role of a job as a service under another supervisor."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.config_file import ConfigFile, given_options, script_args
from shoal.cli.hosts import (
    Advertise,
    HostOptions,
    Interface,
    JoinKeyFile,
    MinWorkers,
    number_of_servers,
    takes_host_options,
)
from shoal.cli.options import (
    Grace,
    MaxRestarts,
    Replicas,
    RunDir,
    Script,
    Servers,
    StepTimeout,
    Strategy,
    Workers,
    takes_parallel_options,
)
from shoal.cli.verb import fail, leave
from shoal.config.parallel_options import ParallelOptions, options_of
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.cluster.launch.api import LaunchConfig
    from shoal.observe.dashboard.prometheus import Figure
    from shoal.observe.health import More

COORDINATOR_EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  export SHOAL_JOIN_KEY=$(openssl rand -hex 16)       the same for all services\n"
    "  shoal coordinator -n 2 --bind 10.0.0.1 --health 127.0.0.1:9090 train.py\n"
    "  shoal worker --join shoal://10.0.0.1:7070 --health 127.0.0.1:9091      twice\n"
    "  shoal coordinator -n 2 --servers 1 --strategy ps --bind 10.0.0.1 train.py     and `shoal server` once"
)
WORKER_EXAMPLES = "\b\nExamples:\n  shoal worker --join shoal://10.0.0.1:7070 --health 127.0.0.1:9091"
SERVER_EXAMPLES = "\b\nExamples:\n  shoal server --join shoal://10.0.0.1:7070 --health 127.0.0.1:9092"

NOT_OURS = ("on", "hosts", "cluster", "ssh", "journal")
"""Host options that say where hosts come from: those of a coordinator are services that join."""

HealthAddress = Annotated[
    str | None,
    typer.Option(
        "--health",
        metavar="ADDRESS:PORT",
        help="Where /healthz, /readyz and /metrics answer: an address or interface of this machine, or a port of loopback.",
        show_default="nowhere",
    ),
]
Join = Annotated[
    str, typer.Option("--join", metavar="shoal://HOST:PORT", help="The coordinator.", show_default=False)
]
CopyDir = Annotated[
    Path,
    typer.Option(
        "--run-dir", metavar="DIR", help="Where files of this service go that the run directory cannot hold."
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        help="Time to reach the coordinator, at the start or once it was lost; then the service ends.",
    ),
]


@takes_host_options(without=NOT_OURS)
@takes_parallel_options()
def coordinator(
    ctx: typer.Context,
    script: Script,
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Everything after SCRIPT is the script's own, options too."),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
    config: ConfigFile = None,
    workers: Workers = 1,
    worker_services: Annotated[
        int | None,
        typer.Option(
            "--worker-services",
            metavar="N",
            min=1,
            help="Services that share the workers.",
            show_default="one for each worker",
        ),
    ] = None,
    strategy: Strategy = None,
    servers: Servers = None,
    replicas: Replicas = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of the run; an unfinished run of this name is continued.",
            show_default="the script's",
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Start anew; the former run of the name is kept as NAME.1 ...")
    ] = False,
    run_dir: RunDir = Path("runs"),
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", min=0, help="As for `shoal run`.", show_default="drawn"),
    ] = None,
    *,
    parallel: ParallelOptions,
    hosting: HostOptions,
    min_workers: MinWorkers = None,
    step_timeout: StepTimeout = 300.0,
    grace: Grace = 60.0,
    max_restarts: MaxRestarts = 3,
    health: HealthAddress = None,
) -> None:
    """Coordinate a job whose workers and servers are services. Started again, it goes on from the newest checkpoint."""
    from shoal.cluster.hosts.engine_hosts import service_hosts
    from shoal.cluster.launch.api import LaunchConfig, launch
    from shoal.observe.health import serving
    from shoal.runtime.health import Health

    num_servers = LaunchConfig(script=script, workers=workers, strategy=strategy, servers=servers).num_servers
    if hosting.interface is not None:
        from shoal.runtime.transport import interfaces

        named = interfaces.named(hosting.interface)
        hosting = hosting._replace(bind=hosting.bind or next(iter(named.values())))
    asked = LaunchConfig(
        script=script,
        module=script if module else "",
        args=tuple(script_args(ctx, script, args)),
        options=given_options(ctx),
        workers=workers,
        hosts=service_hosts(
            num_workers=workers,
            num_servers=num_servers,
            num_worker_services=worker_services,
            bind=hosting.bind,
            resources=hosting.resources,
            interfaces=tuple(hosting.interface.split(",")) if hosting.interface else (),
            connections=hosting.connections or 0,
            key_file=str(hosting.join_key_file) if hosting.join_key_file else None,
            advertise=hosting.advertise or "",
            plaintext=hosting.plaintext,
            ship=hosting.ship,
            **hosting.given_join_timeout,
        ),
        strategy=strategy,
        servers=number_of_servers(str(servers)) if servers is not None else None,
        replicas=replicas,
        name=name or (script if module else Path(script).stem),
        again=again,
        run_dir=str(run_dir),
        seed=seed,
        step_timeout_s=step_timeout,
        grace_s=grace,
        max_restarts=max_restarts,
        min_workers=min_workers,
        **options_of(parallel),
    )
    path = run_dir / str(asked.name)
    if not again and (path / "config.json").exists():
        asked = _continued(path, asked)
    state = Health("coordinator")
    with serving(state, health, _figures_of(path)) as url:
        _print_health_url(url)
        result = launch(asked, set_title=True, health=state)
    leave(result)


def worker(
    join: Join,
    health: HealthAddress = None,
    join_key_file: JoinKeyFile = None,
    timeout: Timeout = 600.0,
    run_dir: CopyDir = Path("runs"),
    interface: Interface = None,
    advertise: Advertise = None,
) -> None:
    """Run workers of a job, as a service: until the job is over, whatever becomes of its coordinator."""
    serve("worker", join, health, join_key_file, timeout, run_dir, interface, advertise)


def server(
    join: Join,
    health: HealthAddress = None,
    join_key_file: JoinKeyFile = None,
    timeout: Timeout = 600.0,
    run_dir: CopyDir = Path("runs"),
    interface: Interface = None,
    advertise: Advertise = None,
) -> None:
    """Run a parameter server of a job, as a service: until the job is over, whatever becomes of its coordinator."""
    serve("server", join, health, join_key_file, timeout, run_dir, interface, advertise)


def serve(
    role: str,
    address: str,
    health: str | None,
    join_key_file: Path | None,
    timeout_s: float,
    run_dir: Path,
    interface: str | None,
    advertise: str | None,
) -> None:
    from shoal.cluster.hosts import opening
    from shoal.observe.health import serving
    from shoal.runtime.health import Health

    state = Health(role)
    with serving(state, health) as url:
        _print_health_url(url)
        code, error = opening.join(
            address,
            key_file=str(join_key_file) if join_key_file else None,
            run_dir=run_dir,
            timeout_s=timeout_s,
            interface=interface,
            advertise=advertise,
            role=role,
            health=state,
        )
    if error is not None:
        fail(error, code)
    raise typer.Exit(code)


def _print_health_url(url: str) -> None:
    if url:
        typer.echo(f"shoal: health at {url}/healthz, /readyz and /metrics", err=True)


def _continued(path: Path, asked: LaunchConfig) -> LaunchConfig:
    """The run that this coordinator left unfinished, as by a restart of its service; one that has finished ends it."""
    from shoal.cluster.launch.api import resume_config
    from shoal.observe.runs import read_json

    before = read_json(path / "config.json")
    is_same = before.get("script") == str(Path(asked.script).absolute())
    if asked.module:
        is_same = before.get("module") == asked.module
    if not is_same:
        raise ConfigError(
            f"{path} is a run of {before.get('module') or before.get('script')}, and not of {asked.script}. Nothing was started; give --name of another, or "
            "--again, which keeps the former as NAME.1."
        )
    if read_json(path / "summary.json").get("exit") == 0:
        typer.echo(f"shoal: {path} has finished; --again starts it anew", err=True)
        raise typer.Exit(0)
    typer.echo(
        f"shoal: {path} is gone on with; options beside -n, --strategy and --servers are its own", err=True
    )
    config = resume_config(
        path, workers=asked.workers, strategy=asked.strategy, servers=asked.servers, hosts=asked.hosts
    )
    return replace(config, min_workers=asked.min_workers)


def _figures_of(path: Path) -> More:
    """Figures of the run, as the dashboard has them; none before there is one."""
    from shoal.observe.dashboard import prometheus
    from shoal.observe.dashboard.feed import RunFeed

    feed: list[RunFeed] = []
    lock = threading.Lock()

    def read() -> list[Figure]:
        if not (path / "config.json").exists():
            return []
        with lock:
            if not feed:
                feed.append(RunFeed(path))
            feed[0].poll()
            return prometheus.figures(feed[0])

    return read
