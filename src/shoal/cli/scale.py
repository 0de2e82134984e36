"""`shoal scale` and `shoal leave`: more or fewer workers, servers and hosts, while a job trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import RunDir, complete_run

if TYPE_CHECKING:
    from shoal.runtime.transport.messages.supervisor import LeaveHost, ScaleHosts, ScaleWorkers

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal scale click --servers 3   three servers from now on, fewer or more than before\n"
    "  shoal scale click --workers 6   six workers: all save and stop, and six go on from there\n"
    "  shoal scale click --hosts 4     up to four hosts: as many more as that can `shoal join` now"
)

LEAVE_EXAMPLES = "\b\nExamples:\n  shoal leave click --host 2   its workers go on on the other hosts"

MOVE_TIMEOUT_S = 600.0
"""Time for all slots to move, or for the other workers to start. Both continue after this
command gave up waiting.
"""

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="Name or directory of the run.", autocompletion=complete_run)
]


def scale(
    run: Run,
    servers: Annotated[
        int | None,
        typer.Option(
            "--servers", metavar="N", min=1, help="How many servers there shall be.", show_default=False
        ),
    ] = None,
    run_dir: RunDir = Path("runs"),
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", metavar="N", min=1, help="How many workers there shall be.", show_default=False
        ),
    ] = None,
    hosts: Annotated[
        int | None,
        typer.Option(
            "--hosts",
            metavar="N",
            min=1,
            help="How many hosts may join, the head included.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Change how many workers or servers a running job has, or how many hosts may join it.

    What servers hold moves while it trains. Workers finish their step, save a checkpoint and stop; the new number goes on
    from there at the same global batch, with other bits than the undisturbed run. A loop of the script's own is not saved,
    and its workers cannot be scaled.
    """
    from shoal.errors import ConfigError
    from shoal.runtime.transport.messages.supervisor import ScaleHosts, ScaleWorkers

    if sum(number is not None for number in (servers, workers, hosts)) != 1:
        raise ConfigError(
            "shoal scale takes --workers N, --servers N or --hosts N, one of them. Nothing was changed."
        )
    if hosts is not None:
        _resize(run, run_dir, ScaleHosts(hosts))
    if workers is not None:
        _resize(run, run_dir, ScaleWorkers(workers))
    elif servers is not None:
        _scale_servers(run, run_dir, servers)


def leave(
    run: Run,
    host: Annotated[
        int, typer.Option("--host", metavar="K", min=1, help="Number of the host.", show_default=False)
    ],
    run_dir: RunDir = Path("runs"),
) -> None:
    """Let a host leave a running job, on the head. All workers save, and go on on the hosts that stay."""
    from shoal.runtime.transport.messages.supervisor import LeaveHost

    _resize(run, run_dir, LeaveHost(host))


def _resize(run: str, run_dir: Path, request: ScaleWorkers | ScaleHosts | LeaveHost) -> None:
    from shoal.cluster.supervisor import sockets as control
    from shoal.errors import ClusterError, ConfigError
    from shoal.runtime.transport.messages.supervisor import Resized, Resizing, ScaleRefused

    path = _running(run, run_dir)
    for answer in control.ask(path.absolute(), request, timeout_s=MOVE_TIMEOUT_S):
        match answer:
            case ScaleRefused(reason):
                raise ConfigError(f"{path} stays as it is: {reason}.")
            case Resizing(text):
                typer.echo(f"{path}: {text}")
            case Resized(text):
                typer.echo(f"{path}: {text}")
                return
    raise ClusterError(
        f"{path} ended before other workers were started; `shoal status {run}` tells how it stands. What was saved is safe."
    )


def _scale_servers(run: str, run_dir: Path, servers: int) -> None:
    from shoal.cluster.launch.run_directory import read_config
    from shoal.cluster.supervisor import sockets as control
    from shoal.errors import ClusterError, ConfigError
    from shoal.runtime.transport.messages.supervisor import (
        ScaleBegun,
        ScaleRefused,
        ScaleServers,
        ServersScaled,
    )

    path = _running(run, run_dir)
    config = read_config(path)
    if not config.servers:
        raise ConfigError(
            f"{path} runs the strategy '{config.strategy}', which has no servers. Nothing was changed; servers come with "
            "--strategy ps."
        )
    for answer in control.ask(path.absolute(), ScaleServers(servers), timeout_s=MOVE_TIMEOUT_S):
        match answer:
            case ScaleRefused(reason):
                raise ConfigError(f"{path} cannot be scaled: {reason}. Nothing was changed.")
            case ScaleBegun(num_servers):
                typer.echo(f"{path}: {num_servers} servers from now on; what they hold is moving")
            case ServersScaled(view, num_servers):
                typer.echo(f"{path}: {num_servers} servers hold everything (view {view})")
                return
    raise ClusterError(
        f"{path} ended before all was moved; `shoal status {run}` tells how it stands. Nothing is lost by it."
    )


def _running(run: str, run_dir: Path) -> Path:
    """Directory of a run; ConfigError where it is not running."""
    from shoal.cluster.launch.run_directory import is_alive
    from shoal.errors import ConfigError
    from shoal.observe.runs import find

    path = find(run, run_dir)
    if not is_alive(path):
        raise ConfigError(
            f"{path} is not running, so there is nothing to scale. Nothing was changed; `shoal resume {run} -n N` goes on with "
            "other workers."
        )
    return path
