"""The command line: one line per verb in `VERBS`, one file per verb beside it.

A verb's module is loaded when the verb is typed, and what it runs when it runs: `shoal --help` reads this table only, and
no help imports torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, NamedTuple, NoReturn

import typer

import shoal
from shoal.cli.verb import LaterVerb, ScriptVerb, Verb, Verbs

app = typer.Typer(
    name="shoal",
    cls=Verbs,
    help="Train a PyTorch script in one process or many, with the same result.",
    epilog=(
        "\b\n"
        "Examples:\n"
        "  shoal run -n 4 train.py --lr 0.1            four workers, data parallel\n"
        "  shoal verify -n 3 train.py --lr 0.1         is it what one process computes?\n"
        "  shoal plan train.py                         how to spread it here, and how many workers pay\n"
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


class VerbSpec(NamedTuple):
    """A verb: where its function is, and its line in `shoal --help`."""

    where: str
    about: str
    cls: type[Verb] = Verb
    epilog: str = "EXAMPLES"
    """Name of its examples in the module; empty: it has none."""

    ends_at_script: bool = False
    """Arguments after SCRIPT belong to the script, options included."""

    is_group: bool = False
    """The function is `shoal NAME render`; or there are several, and it is a Typer of them."""


VERBS = {
    "run": VerbSpec("run:run", "Train a script in one process or many.", ends_at_script=True),
    "verify": VerbSpec(
        "verify:verify",
        "Check that workers compute what one process does.",
        cls=ScriptVerb,
        ends_at_script=True,
    ),
    "plan": VerbSpec(
        "plan:plan",
        "Find how to spread a script over a cluster: measures it, predicts every way, runs the best few.",
        cls=ScriptVerb,
        ends_at_script=True,
    ),
    "init": VerbSpec("init:init", "Write a training script and a file of options to start from."),
    "examples": VerbSpec("examples:examples", "Copy the examples into a folder."),
    "join": VerbSpec(
        "hosts:join", "Join a job as one of its hosts: runs its processes here until the job is over."
    ),
    "coordinator": VerbSpec(
        "services:coordinator",
        "Coordinate a job whose workers and servers are services.",
        epilog="COORDINATOR_EXAMPLES",
        ends_at_script=True,
    ),
    "worker": VerbSpec(
        "services:worker",
        "Run workers of a job, as a service: until the job is over, whatever becomes of its coordinator.",
        epilog="WORKER_EXAMPLES",
    ),
    "server": VerbSpec(
        "services:server",
        "Run a parameter server of a job, as a service: until the job is over, whatever becomes of its coordinator.",
        epilog="SERVER_EXAMPLES",
    ),
    "resume": VerbSpec("resume:resume", "Go on with a run from its newest checkpoint."),
    "status": VerbSpec(
        "inspect.status:status",
        "List the runs and how they stand, or show one of them closely; one that runs is followed until Ctrl-C.",
    ),
    "stack": VerbSpec(
        "inspect.stack:stack", "Show the Python stack of every process of a running job on this host."
    ),
    "report": VerbSpec(
        "inspect.report:report",
        "Write what a run did, how fast, and what limits it: one HTML page without scripts or network, and JSON.",
    ),
    "trace": VerbSpec(
        "inspect.trace:trace",
        "Write a timeline of all processes of a run: what each did when, for Perfetto or chrome://tracing.",
    ),
    "dashboard": VerbSpec(
        "inspect.dashboard:dashboard",
        "Show runs in the browser: curves, workers, servers, data, events, the model's graph.",
    ),
    "graph": VerbSpec(
        "inspect.graph:graph",
        "Draw a script's model: layers, where each lives, what the strategy sends.",
        cls=ScriptVerb,
        ends_at_script=True,
    ),
    "scale": VerbSpec(
        "scale:scale", "Change how many workers or servers a running job has, or how many hosts may join it."
    ),
    "leave": VerbSpec("scale:leave", "Let a host leave a running job, on the head.", epilog="LEAVE_EXAMPLES"),
    "chaos": VerbSpec(
        "chaos:chaos",
        "Kill and pause processes of a job at random, and compare its result with an undisturbed run.",
        cls=ScriptVerb,
        ends_at_script=True,
    ),
    "sweep": VerbSpec(
        "sweep:sweep",
        "Run a script with several values of options and arguments, one run after the other, and compare a metric.",
        ends_at_script=True,
    ),
    "jobs": VerbSpec("jobs:app", "A queue of jobs.", epilog="", is_group=True),
    "map-reduce": VerbSpec(
        "map_reduce:map_reduce",
        "Run a mapper and a reducer over the lines of files, by Hadoop Streaming's contract.",
    ),
    "doctor": VerbSpec("doctor:doctor", "Say what this machine can do.", epilog=""),
    "bench": VerbSpec("bench.command:bench", "Measure how fast shoal is on this machine, in real processes."),
    "kubernetes": VerbSpec(
        "render:kubernetes",
        "Files of a job for Kubernetes.",
        epilog="KUBERNETES_EXAMPLES",
        ends_at_script=True,
        is_group=True,
    ),
    "cloud": VerbSpec(
        "render:cloud",
        "Files of a job for Cloud.",
        epilog="CLOUD_EXAMPLES",
        ends_at_script=True,
        is_group=True,
    ),
}
"""Verbs in the order of the help. `about` is the first sentence of the function's docstring; tests/cli keeps them equal."""


def load(name: str) -> typer.Typer:
    """The verb with its options, out of its module."""
    spec = VERBS[name]
    module_name, _, function = spec.where.partition(":")
    module = importlib.import_module(f"shoal.cli.{module_name}")
    if isinstance(group := getattr(module, function), typer.Typer):
        return group
    verb = typer.Typer(
        cls=Verbs, help=spec.about, no_args_is_help=True, rich_markup_mode=None, add_completion=False
    )
    if spec.is_group:
        verb.callback()(lambda: None)  # else a group of one verb is that verb
    verb.command(
        "render" if spec.is_group else name,
        cls=spec.cls,
        epilog=getattr(module, spec.epilog) if spec.epilog else None,
        context_settings={"allow_interspersed_args": not spec.ends_at_script},
    )(getattr(module, function))
    return verb


def _loader(name: str) -> Callable[[], typer.Typer]:
    return lambda: load(name)


for _name, _spec in VERBS.items():
    app.command(_name, cls=LaterVerb, help=_spec.about)(_loader(_name))


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
