"""The command line: one file per verb, registered here.

What a verb needs it imports when it runs, so that help and completion answer
at once and never import torch.
"""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

import shoal
from shoal.cli import chaos, doctor, hosts, init, jobs, map_reduce, render, resume, run, scale, sweep, verify
from shoal.cli.bench import command as bench
from shoal.cli.inspect import dashboard, graph, report, stack, status, trace
from shoal.cli.verb import ScriptVerb, Verb, Verbs

app = typer.Typer(
    name="shoal",
    cls=Verbs,
    help="Train a PyTorch script in one process or many, with the same result.",
    epilog=(
        "\b\n"
        "Examples:\n"
        "  shoal run -n 4 train.py --lr 0.1            four workers, data parallel\n"
        "  shoal verify -n 3 train.py --lr 0.1         is it what one process computes?\n"
        "  shoal status                                runs of this directory\n"
        "  shoal dashboard                             the same in the browser, while they train\n"
        "  shoal resume click                          go on from the newest checkpoint\n"
        "  shoal scale click --servers 3               more servers, while it trains\n"
        "  shoal chaos -n 3 --rate 15s train.py        random kills and pauses: same result?"
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

# What follows SCRIPT belongs to the script, options included.
app.command("run", cls=Verb, epilog=run.EXAMPLES, context_settings={"allow_interspersed_args": False})(
    run.run
)
app.command(
    "verify", cls=ScriptVerb, epilog=verify.EXAMPLES, context_settings={"allow_interspersed_args": False}
)(verify.verify)
app.command("init", cls=Verb, epilog=init.EXAMPLES)(init.init)
app.command("join", cls=Verb, epilog=hosts.EXAMPLES)(hosts.join)
app.command("resume", cls=Verb, epilog=resume.EXAMPLES)(resume.resume)
app.command("status", cls=Verb, epilog=status.EXAMPLES)(status.status)
app.command("stack", cls=Verb, epilog=stack.EXAMPLES)(stack.stack)
app.command("report", cls=Verb, epilog=report.EXAMPLES)(report.report)
app.command("trace", cls=Verb, epilog=trace.EXAMPLES)(trace.trace)
app.command("dashboard", cls=Verb, epilog=dashboard.EXAMPLES)(dashboard.dashboard)
app.command(
    "graph", cls=ScriptVerb, epilog=graph.EXAMPLES, context_settings={"allow_interspersed_args": False}
)(graph.graph)
app.command("scale", cls=Verb, epilog=scale.EXAMPLES)(scale.scale)
app.command("leave", cls=Verb, epilog=scale.LEAVE_EXAMPLES)(scale.leave)
app.command(
    "chaos", cls=ScriptVerb, epilog=chaos.EXAMPLES, context_settings={"allow_interspersed_args": False}
)(chaos.chaos)
app.command("sweep", cls=Verb, epilog=sweep.EXAMPLES, context_settings={"allow_interspersed_args": False})(
    sweep.sweep
)
app.add_typer(jobs.app, name="jobs")
app.command("map-reduce", cls=Verb, epilog=map_reduce.EXAMPLES)(map_reduce.map_reduce)
app.command("doctor", cls=Verb)(doctor.doctor)
app.command("bench", cls=Verb, epilog=bench.EXAMPLES)(bench.bench)

for _name, _render, _examples in (
    ("kubernetes", render.kubernetes, render.KUBERNETES_EXAMPLES),
    ("cloud", render.cloud, render.CLOUD_EXAMPLES),
):
    _files = typer.Typer(
        cls=Verbs, no_args_is_help=True, help=f"Files of a job for {_name.title()}.", rich_markup_mode=None
    )
    _files.callback()(lambda: None)  # else a group of one verb is that verb
    _files.command("render", cls=Verb, epilog=_examples, context_settings={"allow_interspersed_args": False})(
        _render
    )
    app.add_typer(_files, name=_name)


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
