"""`shoal resume`: go on with a run that ended before it was done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import Oversubscribe, RunDir, Shard, complete_run
from shoal.cli.verb import leave

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal resume click            with as many workers as before\n"
    "  shoal resume click -n 2       with two\n"
    "  shoal resume click -n 4 --strategy fsdp   spread another way: every strategy reads every checkpoint\n"
    "  shoal resume out/runs/click   by its directory"
)


def resume(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name or directory of the run.", autocompletion=complete_run)
    ],
    workers: Annotated[
        int | None,
        typer.Option(
            "-n", "--workers", metavar="WORKERS", min=1, help="Worker processes.", show_default="as before"
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="STRATEGY",
            help="How to spread training from now on, without the options of the former strategy.",
            show_default="as before",
        ),
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option(
            "--servers", metavar="N", min=1, help="Server processes of ps.", show_default="as before"
        ),
    ] = None,
    shard: Shard = None,
    oversubscribe: Oversubscribe = False,
    run_dir: RunDir = Path("runs"),
) -> None:
    """Go on with a run from its newest checkpoint. Script and arguments are its own."""
    from shoal.cli.runs import find, newest_checkpoint
    from shoal.cluster.launch.api import launch, resume_config

    path = find(run, run_dir)
    config = resume_config(
        path, workers=workers, shard=shard, strategy=strategy, servers=servers, oversubscribe=oversubscribe
    )
    if newest_checkpoint(path) is None:
        # A script may give its checkpoints another place; only the script knows.
        typer.echo(
            f"{path} holds no checkpoint: unless the script keeps them elsewhere, it begins anew", err=True
        )
    leave(launch(config, set_title=True))
