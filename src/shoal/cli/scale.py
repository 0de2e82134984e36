"""`shoal scale`: more or fewer servers, while a job trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import RunDir, complete_run

EXAMPLES = (
    "\b\nExamples:\n  shoal scale click --servers 3   three servers from now on, fewer or more than before"
)

MOVE_TIMEOUT_S = 600.0
"""For all slots to have moved. The move goes on when nobody waits for it."""


def scale(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name or directory of the run.", autocompletion=complete_run)
    ],
    servers: Annotated[
        int,
        typer.Option("--servers", metavar="N", min=1, help="How many there shall be.", show_default=False),
    ],
    run_dir: RunDir = Path("runs"),
) -> None:
    """Change how many servers hold the weights of a running job. What they hold moves while it trains."""
    from shoal.cli.runs import find
    from shoal.cluster.launch.run_directory import is_alive, read_config
    from shoal.cluster.supervisor import sockets as control
    from shoal.errors import ClusterError, ConfigError
    from shoal.runtime.transport.messages.supervisor import (
        ScaleBegun,
        ScaleRefused,
        ScaleServers,
        ServersScaled,
    )

    path = find(run, run_dir)
    if not is_alive(path):
        raise ConfigError(
            f"{path} is not running, so there is nothing to scale. Nothing was changed; a new launch takes --servers."
        )
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
