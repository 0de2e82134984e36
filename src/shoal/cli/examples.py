"""`shoal examples`: the scripts that came with the package, copied to where they can be changed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

import shoal
from shoal.cli.verb import fail
from shoal.errors import ConfigError

EXAMPLES = "\b\nExamples:\n  shoal examples\n  shoal examples tried && shoal run -n 2 tried/spirals.py"


def examples(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where to; must not exist yet.")] = Path(
        "examples"
    ),
) -> None:
    """Copy the examples into a folder. README.md there has the commands and what they print."""
    package = Path(shoal.__file__).parent
    # A wheel has them inside the package, a checkout beside it.
    source = next(
        (each for each in (package / "_examples", package.parents[1] / "examples") if each.is_dir()), None
    )
    if source is None:
        fail(
            ConfigError("this installation came without the examples. Nothing was copied; install the wheel.")
        )
    if folder.exists():
        fail(
            ConfigError(f"{folder} exists. Nothing was copied; name another folder: `shoal examples FOLDER`.")
        )
    try:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__", "runs", "out"))
    except OSError as error:
        fail(ConfigError(f"the examples could not be copied to {folder}: {error.strerror or error}."))
    scripts = sorted(path.name for path in folder.glob("*.py"))
    typer.echo(f"{len(scripts)} examples in {folder}; begin with: shoal run -n 2 {folder / 'spirals.py'}")
