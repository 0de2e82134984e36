"""Options that several commands share, written once: names, units, help, completion.

Names and defaults of the options beside a strategy are those of
`shoal.config.parallel_options.ParallelOptions`; combinations are checked at launch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer

from shoal.config import placement
from shoal.config.choices import COMPRESSORS, EXCHANGES, OUTERS, SCHEDULES, SHARD_FORMS
from shoal.config.parallel_options import ParallelOptions
from shoal.config.strategy import STRATEGIES


def complete_strategy(incomplete: str) -> list[tuple[str, str]]:
    """Strategies for the shell's completion, with a line of help each."""
    return [
        (choice.form, choice.summary.partition(":")[0])
        for choice in STRATEGIES.values()
        if choice.form.startswith(incomplete)
    ]


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of runs for the shell's completion."""
    from shoal.observe.runs import names

    return [name for name in names(Path(ctx.params.get("run_dir") or "runs")) if name.startswith(incomplete)]


Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The Python file to run.", show_default=False)]

Workers = Annotated[
    int,
    typer.Option("-n", "--workers", metavar="WORKERS", min=1, help="Worker processes that share each batch."),
]

Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="STRATEGY",
        help=f"How the model is spread: {STRATEGIES.forms}; with `shoal run` also auto, the quickest by two short runs.",
        show_default="single for one worker, ddp for more",
        autocompletion=complete_strategy,
    ),
]

Servers = Annotated[
    int | None,
    typer.Option(
        "--servers",
        metavar="N",
        min=0,
        help="Server processes that hold the weights, for the strategies ps and ps:...",
        show_default="1 with ps, else 0",
    ),
]

Replicas = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        metavar="N",
        min=1,
        help="Servers that hold a copy of each row and weight.",
        show_default="2 with two servers or more",
    ),
]

RunDir = Annotated[Path, typer.Option("--run-dir", metavar="DIR", help="Where the directories of runs are.")]

StepTimeout = Annotated[
    float,
    typer.Option(
        "--step-timeout", metavar="SECONDS", help="How long a worker waits for the others within one step."
    ),
]

Grace = Annotated[
    float,
    typer.Option(
        "--grace",
        metavar="SECONDS",
        help="How long workers asked to leave may take to finish their step and save.",
    ),
]

MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        metavar="N",
        min=0,
        help="How often a worker that dies is replaced without the job getting ahead; 0: its death ends the job.",
    ),
]

Oversubscribe = Annotated[
    bool,
    typer.Option(
        "--oversubscribe",
        help="Start the job even if this machine seems too small for it: over 32 processes per core, or too little memory.",
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


_PARALLEL: dict[str, tuple[str, str, str | bool]] = {
    "shard": (
        "HOW",
        f"How batches are cut over the workers, where the script does not say: {', '.join(SHARD_FORMS)}.",
        "equal; dynamic with relaxed strategies",
    ),
    "exchange": ("EXCHANGE", f"How gradients are summed: {EXCHANGES.forms}.", True),
    "tls": (
        "",
        "With --exchange ring, between hosts: over encrypted connections of shoal's own; torch's are not encrypted.",
        True,
    ),
    "sync_every": (
        "K",
        "For slow networks: each worker of ddp makes K steps with its own optimizer, then their models are averaged.",
        "gradients are summed at every step",
    ),
    "outer": ("OUTER", f"With --sync-every, how the models are averaged: {OUTERS.forms}.", True),
    "schedule": ("SCHEDULE", f"Schedule of a pipeline (pp): {SCHEDULES.forms}.", True),
    "compress": ("COMPRESS", f"Compress gradients before they are summed: {COMPRESSORS.forms}.", True),
    "staleness_lr": (
        "",
        "With ps:ssp, ps:async and ps:hybrid: divide the learning rate of a push by 1 + the updates it has missed.",
        True,
    ),
    "push_norm": (
        "X",
        "With the same: scale a push whose gradient is longer than X down to X, on each server.",
        "no bound",
    ),
    "push_every": (
        "K",
        "With ps:ssp and ps:async: add up the gradients of K steps on each worker and push them as one.",
        "every step is pushed",
    ),
    "pull_every": (
        "K",
        "With the same: train on the weights of one pull for K steps, or as many as the staleness bound allows.",
        "1",
    ),
    "row_cache": (
        "ROWS",
        "With ps:ssp, ps:async and ps:hybrid: rows of each table that a worker keeps, for as many steps as ssp=K or --pull-every "
        "allows. With ps -n 1: rows that live on the worker's device and are updated there, written back behind the steps.",
        "none",
    ),
    "fan_in": (
        "N",
        "With ps:ssp and ps:async: merge the pushes of up to N workers of a host into one before the servers.",
        "pushes are not merged",
    ),
    "table_memory": (
        "SIZE",
        "With ps: rows that each server keeps in memory, as 2G; the ones used least are on disk. The result is the same.",
        "no limit",
    ),
    "server_device": (
        "DEVICE",
        "With ps: keep dense parameters and their optimizer there: cpu, or auto, cuda, cuda:N of the servers' host.",
        True,
    ),
    "table_dir": (
        "DIR",
        "With --table-memory: where the other rows are, on every host that has servers.",
        "the run's directory",
    ),
    "table_keep": (
        "WHICH",
        "With --table-memory: rows that stay in memory: recent (LRU), frequent (LFU), or balanced between the two.",
        "balanced",
    ),
    "snapshot_every": (
        "N",
        "Where each worker holds a part (fsdp, tp, pp, --sync-every): steps between the snapshots to which all go back "
        "when one dies. 0: none, they go back to the newest checkpoint. With ps --row-cache: between two writes of changed rows.",
        "50, or as the script says",
    ),
    "device": ("DEVICE", f"Where workers compute: {', '.join(placement.FORMS)}.", True),
    "soft_placement": (
        "",
        "A worker whose device is missing computes on the CPU, and says so; else the job is refused.",
        True,
    ),
    "batchnorm": (
        "HOW",
        "Over what BatchNorm normalises: local (each worker its own slice) or sync (the whole batch, as one process does).",
        True,
    ),
    "sequence_parallel": (
        "",
        "With tp: norms and dropout between the layers that are cut run on a part of the sequence each.",
        True,
    ),
    "accumulate": (
        "K",
        "Run each worker's slice of a batch in K parts and add their gradients up, where the script does not say: less memory, the same result.",
        "1",
    ),
    "checkpoint_activations": (
        "",
        "Keep only the inputs of the model's blocks, and run them again within backward: less memory, more time.",
        True,
    ),
    "offload": (
        "",
        "With fsdp on GPUs: shards and the optimizer's state stay in the host's memory. Without GPUs they are there anyway.",
        True,
    ),
}
"""Metavar, help and default shown, by field of ParallelOptions, in the order of the help."""


Shard = Annotated[
    str | None,
    typer.Option("--shard", metavar="HOW", help=_PARALLEL["shard"][1], show_default="as before"),
]


TableMemory = Annotated[
    str | None,
    typer.Option(
        "--table-memory", metavar="SIZE", help=_PARALLEL["table_memory"][1], show_default="as before"
    ),
]


def _parallel_flags() -> list[inspect.Parameter]:
    kinds = get_type_hints(ParallelOptions)
    defaults = {option.name: option.default for option in fields(ParallelOptions)}
    found = []
    for name, (metavar, about, shown) in _PARALLEL.items():
        # Named in full: typer would add a --no- to a flag that is only ever set.
        option = typer.Option(
            f"--{name.replace('_', '-')}", metavar=metavar or None, help=about, show_default=shown
        )
        kind: Any = Annotated[kinds[name], option]  # read by typer, not by a type checker
        found.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
        )
    return found


Decorator: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]


def takes_parallel_options(*, but_not: tuple[str, ...] = ()) -> Decorator:
    """Give a verb these flags where its signature has `parallel`, which it is then called with."""
    flags = [flag for flag in _parallel_flags() if flag.name not in but_not]
    return takes_group("parallel", flags, ParallelOptions)


def takes_group(name: str, flags: list[inspect.Parameter], group: Callable[..., Any]) -> Decorator:
    """Give a verb flags in the place of one parameter, which it is called with: the group made of their values."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(verb, eval_str=True)

        @functools.wraps(verb)
        def called(**said: Any) -> None:
            made = group(**{flag.name: said.pop(flag.name) for flag in flags})
            verb(**{name: made}, **said)

        shown: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            shown += flags if parameter.name == name else [parameter]
        called.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]  # what typer reads
        return called

    return decorate
