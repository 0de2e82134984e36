"""Options that several verbs share, written once: names, units, help, completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
        help="On how many servers everything is kept.",
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
        help="Start the job also where this machine seems too small for it: over 32 processes per core, or too little memory.",
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
