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
from typing import Annotated, Any

import typer

from shoal.config import placement
from shoal.config.choices import COMPRESSORS, EXCHANGES, OUTERS, SCHEDULES
from shoal.config.parallel_options import ParallelOptions
from shoal.config.shard import FORMS
from shoal.config.strategy import STRATEGIES


def complete_strategy(incomplete: str) -> list[tuple[str, str]]:
    """For the shell: strategies and, up to the colon, what they are."""
    return [
        (choice.form, choice.summary.partition(":")[0])
        for choice in STRATEGIES.values()
        if choice.form.startswith(incomplete)
    ]


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """For the shell: names of the runs there are."""
    from shoal.cli.runs import names

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
        help=f"How the model is spread: {STRATEGIES.forms}.",
        show_default="single for one worker, ddp for more",
        autocompletion=complete_strategy,
    ),
]

Shard = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="HOW",
        help=f"How batches are cut over the workers, where the script does not say: {', '.join(FORMS)}.",
        show_default="equal; dynamic with relaxed strategies",
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


OPTIONS: dict[str, Any] = {
    "shard": Shard,
    "exchange": Annotated[
        str,
        typer.Option(
            "--exchange",
            metavar="EXCHANGE",
            help=f"How gradients are summed: {EXCHANGES.forms}.",
        ),
    ],
    "sync_every": Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="For slow networks: each worker of ddp makes K steps with its own optimizer, then their models are averaged.",
            show_default="gradients are summed at every step",
        ),
    ],
    "outer": Annotated[
        str,
        typer.Option(
            "--outer",
            metavar="OUTER",
            help=f"With --sync-every, how the models are averaged: {OUTERS.forms}.",
        ),
    ],
    "schedule": Annotated[
        str,
        typer.Option(
            "--schedule",
            metavar="SCHEDULE",
            help=f"Schedule of a pipeline (pp): {SCHEDULES.forms}.",
        ),
    ],
    "compress": Annotated[
        str,
        typer.Option(
            "--compress",
            metavar="COMPRESS",
            help=f"Compress gradients before they are summed: {COMPRESSORS.forms}.",
        ),
    ],
    "staleness_lr": Annotated[
        bool,
        typer.Option(
            "--staleness-lr",
            help="With ps:ssp, ps:async and ps:hybrid: divide the learning rate of a push by 1 + the updates it has missed.",
        ),
    ],
    "push_norm": Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="With the same: scale a push whose gradient is longer than X down to X, on each server.",
            show_default="no bound",
        ),
    ],
    "snapshot_every": Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Where each worker holds a part (fsdp, tp, pp, --sync-every): steps between the snapshots to which all go back "
            "when one dies. 0: none, they go back to the newest checkpoint.",
            show_default="50, or as the script says",
        ),
    ],
    "device": Annotated[
        str,
        typer.Option(
            "--device", metavar="DEVICE", help=f"Where workers compute: {', '.join(placement.FORMS)}."
        ),
    ],
    "soft_placement": Annotated[
        bool,
        typer.Option(
            "--soft-placement",
            help="A worker whose device is missing computes on the CPU, and says so; else the job is refused.",
        ),
    ],
    "batchnorm": Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="Over what BatchNorm normalises: local (each worker its own slice) or sync (the whole batch, as one process does).",
        ),
    ],
    "sequence_parallel": Annotated[
        bool,
        typer.Option(
            "--sequence-parallel",
            help="With tp: norms and dropout between the layers that are cut run on a part of the sequence each.",
        ),
    ],
    "checkpoint_activations": Annotated[
        bool,
        typer.Option(
            "--checkpoint-activations",
            help="Keep only the inputs of the model's blocks, and run them again within backward: less memory, more time.",
        ),
    ],
    "offload": Annotated[
        bool,
        typer.Option(
            "--offload",
            help="With fsdp on GPUs: shards and the optimizer's state stay in the host's memory. Without GPUs they are there anyway.",
        ),
    ],
}
"""By field of ParallelOptions, in the order of the help.

A flag that is only ever set has its name, or it would have a --no-; and so has one whose value is called after it, which
some versions of typer take for its name.
"""


def takes_parallel_options(
    *, but_not: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb these flags where its signature has `parallel`, which it is then called with."""
    defaults = {option.name: option.default for option in fields(ParallelOptions)}
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in OPTIONS.items()
        if name not in but_not
    ]

    def give(verb: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(verb, eval_str=True)

        @functools.wraps(verb)
        def called(**said: Any) -> None:
            parallel = ParallelOptions(**{flag.name: said.pop(flag.name) for flag in flags})
            verb(parallel=parallel, **said)

        shown: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            shown += flags if parameter.name == "parallel" else [parameter]
        called.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]  # what typer reads
        return called

    return give
