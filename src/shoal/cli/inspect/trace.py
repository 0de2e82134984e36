"""`shoal trace`: one timeline of all processes of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import RunDir, complete_run

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal trace click                 runs/click/trace.json, for https://ui.perfetto.dev\n"
    "  shoal trace click -o out.json     somewhere else\n"
    "  shoal run --profile -n 2 train.py && shoal trace train-1    with torch's own operators"
)


def trace(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name or directory of a run.", autocompletion=complete_run)
    ],
    run_dir: RunDir = Path("runs"),
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to write it.", show_default="RUN/trace.json"
        ),
    ] = None,
) -> None:
    """Write a timeline of all processes of a run: what each did when, for Perfetto or chrome://tracing."""
    from shoal.cluster.launch.run_directory import write_atomically
    from shoal.errors import ConfigError
    from shoal.observe import runs
    from shoal.observe.trace import timeline

    path = runs.find(run, run_dir)
    found, problems = timeline(path)
    spans = sum(event.get("cat") == "shoal" for event in found["traceEvents"])
    if not spans:
        raise ConfigError(" ".join(problems) + " Nothing was written.")
    target = output or path / "trace.json"
    try:
        # In a run directory, which may be another user's, never through a link.
        write = write_atomically if output is None else Path.write_bytes
        write(target, json.dumps(found).encode())
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror}. Choose another place with -o."
        ) from None
    for problem in problems:
        typer.echo(f"note: {problem}", err=True)
    rows = len({event["pid"] for event in found["traceEvents"] if event.get("cat") == "shoal"})
    typer.echo(
        f"{target}: {spans:,} spans of {rows} processes; open it at https://ui.perfetto.dev (nothing is uploaded)"
    )
