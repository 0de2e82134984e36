"""`shoal dashboard`: runs in the browser, while they train and afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from shoal.errors import RunDirectoryError

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal dashboard                    every run in runs/\n"
    "  shoal dashboard runs/click         one run\n"
    "  shoal run -n 4 --dashboard train.py     beside a run, for as long as it trains\n"
    "  shoal dashboard --port 9000 --bind 10.0.0.5     for other machines: HTTP, not encrypted"
)

DashboardPort = Annotated[
    int | None,
    typer.Option(
        "--dashboard-port",
        metavar="PORT",
        min=0,
        max=65535,
        help="Port of --dashboard; where it is in use, the next free one.",
        show_default="8265",
    ),
]
WithDashboard = Annotated[
    bool,
    typer.Option("--dashboard", help="Show the run in the browser while it trains; the address is printed."),
]


def dashboard(
    path: Annotated[
        Path, typer.Argument(metavar="[RUNS]", help="A directory of runs, or one run.", show_default="runs")
    ] = Path("runs"),
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="PORT",
            min=0,
            max=65535,
            help="Port to listen on; where it is in use, the next free one.",
            show_default="8265",
        ),
    ] = None,
    bind: Annotated[
        str,
        typer.Option(
            "--bind", metavar="ADDRESS", help="Address to listen on; others than this machine need it."
        ),
    ] = "127.0.0.1",
) -> None:
    """Show runs in the browser: curves, workers, servers, data, events, the model's graph."""
    from shoal.observe import runs
    from shoal.observe.dashboard import process

    if not path.is_dir() and (Path("runs") / path / "config.json").is_file():
        path = Path("runs") / path
    if not path.is_dir():
        raise RunDirectoryError(
            f"there is no directory {path}. Nothing was started; give a directory of runs, or one run: shoal dashboard runs.",
            path=str(path),
        )
    address = process.listen(bind, port)
    if address.note:
        typer.echo(address.note, err=True)
    is_one = (path / "config.json").is_file()
    num_runs = len(runs.names(path))
    what = f"run {path}" if is_one else f"{num_runs} run{'s' if num_runs != 1 else ''} in {path}"
    page = f"/run/{quote(path.resolve().name, safe='')}" if is_one else "/"
    typer.echo(f"{what}: {address.url(page)}")
    typer.echo("Ctrl-C ends it.", err=True)
    process.serve(path, address)
