"""`shoal resume`: go on with a run that ended before it was done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.hosts import HostOptions, number_of_servers, takes_host_options
from shoal.cli.options import Oversubscribe, RunDir, Shard, TableMemory, complete_run
from shoal.cli.verb import leave

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal resume click            with as many workers as before\n"
    "  shoal resume click -n 2       with two\n"
    "  shoal resume click -n 4 --strategy fsdp   spread another way: every strategy reads every checkpoint\n"
    "  shoal resume out/runs/click   by its directory\n"
    "  shoal resume click --hosts 3 --bind 10.0.0.2   on three hosts; also on another one, that has a copy of the run"
)


@takes_host_options()
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
        str | None,
        typer.Option(
            "--servers",
            metavar="N|colocated",
            help="Server processes of ps; colocated: one on each host that has workers.",
            show_default="as before",
        ),
    ] = None,
    table_memory: TableMemory = None,
    shard: Shard = None,
    oversubscribe: Oversubscribe = False,
    run_dir: RunDir = Path("runs"),
    *,
    hosting: HostOptions,
) -> None:
    """Go on with a run from its newest checkpoint. Script and arguments are its own."""
    from shoal.cluster.launch.api import launch, resume_config
    from shoal.observe.runs import find, newest_checkpoint, read_json

    path = find(run, run_dir)
    described = read_json(path / "config.json")
    before = described.get("hosts") or []
    asked = described.get("hosts_asked") or {}  # of a run whose hosts never all joined
    num_hosts = len(before) or (0 if asked.get("on") else int(asked.get("num_hosts") or 0))
    says_where = (hosting.bind or hosting.interface) is not None
    if num_hosts and says_where and hosting.hosts is None and hosting.cluster is None:
        hosting = hosting._replace(hosts=str(num_hosts))
    on_hosts = hosting.config(num_workers=workers or int(described.get("workers") or 1))
    if before and on_hosts is None:
        names = ", ".join(host["name"] for host in before)
        typer.echo(
            f"{path} had {len(before)} hosts ({names}) and goes on on this machine alone; --bind ADDRESS waits for as many, "
            "--hosts N for another number",
            err=True,
        )
    config = resume_config(
        path,
        workers=sum(on_hosts.workers) if on_hosts and on_hosts.workers and workers is None else workers,
        shard=shard,
        strategy=strategy,
        servers=number_of_servers(servers),
        table_memory=table_memory,
        oversubscribe=oversubscribe,
        hosts=on_hosts,
        journal=hosting.journal,
    )
    if newest_checkpoint(path) is None:
        # A script may give its checkpoints another place; only the script knows.
        typer.echo(
            f"{path} holds no checkpoint: unless the script keeps them elsewhere, it begins anew", err=True
        )
    leave(launch(config, set_title=True))
