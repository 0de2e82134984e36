"""The command line: one file per verb, put together here.

What a verb needs it imports when it runs, so that help and completion answer
at once and never import torch.
"""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

import shoal
from shoal.cli import bench, chaos, doctor, resume, run, scale, status, verify
from shoal.cli.verb import Verb, Verbs

app = typer.Typer(
    name="shoal",
    cls=Verbs,
    help="Train a PyTorch script in one process or many, with the same result.",
    epilog=(
        "\b\n"
        "Examples:\n"
        "  shoal run -n 4 train.py --lr 0.1            four workers, data parallel\n"
        "  shoal verify train.py -n 3 --strategy ddp   is it what one process computes?\n"
        "  shoal status                                runs of this directory\n"
        "  shoal resume click                          go on from the newest checkpoint\n"
        "  shoal scale click --servers 3               more servers, while it trains\n"
        "  shoal chaos train.py -n 3 --rate 15s        random kills and pauses: same result?"
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

# What follows SCRIPT belongs to the script, options included; of the other verbs every option is ours.
app.command("run", cls=Verb, epilog=run.EXAMPLES, context_settings={"allow_interspersed_args": False})(
    run.run
)
app.command("verify", cls=Verb, epilog=verify.EXAMPLES)(verify.verify)
app.command("resume", cls=Verb, epilog=resume.EXAMPLES)(resume.resume)
app.command("status", cls=Verb, epilog=status.EXAMPLES)(status.status)
app.command("scale", cls=Verb, epilog=scale.EXAMPLES)(scale.scale)
app.command("chaos", cls=Verb, epilog=chaos.EXAMPLES)(chaos.chaos)
app.command("doctor", cls=Verb)(doctor.doctor)
app.command("bench", cls=Verb, epilog=bench.EXAMPLES)(bench.bench)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"shoal {shoal.__version__}")
        raise typer.Exit


@app.callback()
def _shoal(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave."),
    ] = False,
) -> None:
    pass


def main() -> NoReturn:
    """Run the command line of this process and leave with its exit code."""
    app(prog_name="shoal")
    raise AssertionError("typer leaves the process")
