"""Conventions of the command line: did you mean, one paragraph per error, usage lines as the docs write them.

Knows typer, and nothing of what the verbs do.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from shoal.errors import Interrupted, ScriptFailed, ShoalError

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.cluster.launch.api import RunResult

VERBS_ELSEWHERE = {"launch": "run", "train": "run"}
"""Verbs of other launchers, and ours."""

OPTIONS_ELSEWHERE = dict.fromkeys(("--nproc-per-node", "--num-processes", "--np"), "-n")
"""Options of other launchers (torchrun, accelerate, mpirun), and ours. They have them with underscores too."""

PIPE_WIDTH = 1000
"""Columns of a table that is not shown on a terminal."""


class Verb(TyperCommand):
    """One verb of `shoal`. A misspelt option is answered with the one that was meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and turn click's list of possible options into a question."""
        with _suggesting_options(list(args), self.get_params(ctx)):
            return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Usage in the notation of the README: `[OPTIONS] SCRIPT [ARGS]...`."""
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(param.metavar or param.name.upper() for param in arguments)]


class Verbs(TyperGroup):
    """All of them. Every ShoalError of a verb ends here, as its paragraph and its exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As for a verb, with the options that stand before it."""
        with _suggesting_options(list(args), self.get_params(ctx)):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that was typed; ours, where it is another launcher's."""
        if args and args[0] in VERBS_ELSEWHERE:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{VERBS_ELSEWHERE[args[0]]}'?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; no traceback for what a user can cause."""
        try:
            return super().invoke(ctx)
        except ShoalError as error:
            fail(error)


def fail(error: ShoalError, exit_code: int | None = None) -> NoReturn:
    """Say what went wrong on stderr and leave with the error's exit code, or the job's own."""
    typer.echo(paragraph(error), err=True)
    raise typer.Exit(error.exit_code if exit_code is None else exit_code)


def leave(result: RunResult) -> NoReturn:
    """End as the job ended."""
    if result.error is not None:
        fail(result.error, result.exit_code)
    raise typer.Exit(result.exit_code)


def paragraph(error: ShoalError) -> str:
    """`error:` and the message, wrapped to the terminal. A script's own traceback keeps its lines."""
    if isinstance(error, ScriptFailed):
        return str(error)
    width = min(shutil.get_terminal_size().columns, 110)
    label = "" if isinstance(error, Interrupted) else "error: "  # it did what it was asked to
    first, *rest = str(error).splitlines() or [""]
    wrapped = textwrap.fill(label + first, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join([wrapped, *rest])


def console() -> Console:
    """The console for tables. In a pipe nothing is cut or wrapped: the reader is not a screen."""
    from rich.console import Console

    terminal = Console(highlight=False, markup=False)
    return terminal if terminal.is_terminal else Console(highlight=False, markup=False, width=PIPE_WIDTH)


def did_you_mean(word: str, known: list[str]) -> str:
    """ " Did you mean 'ddp'?" for what was probably meant, nothing where nothing is close."""
    close = get_close_matches(word, known, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


@contextmanager
def _suggesting_options(args: list[str], params: list[Any]) -> Iterator[None]:
    """Complete click's "No such option" with the one that was meant. Other errors stay as they are."""
    try:
        yield
    except Exception as error:
        misspelt: str | None = getattr(error, "option_name", None)
        if misspelt is not None and hasattr(error, "possibilities"):
            # `-strategy` is read as `-s -t -r ...`, and the error names only `-s`: go back to what was typed.
            typed = next((arg for arg in args if arg.startswith(misspelt)), misspelt).split("=")[0]
            known = [name for param in params for name in param.opts if param.param_type_name == "option"]
            elsewhere = OPTIONS_ELSEWHERE.get(typed.replace("_", "-"))
            meant = (
                f" Did you mean '{elsewhere}'?"
                if elsewhere
                else did_you_mean("--" + typed.lstrip("-"), known)
            )
            vars(error).update(possibilities=None, message=f"No such option: {typed}.{meant}")
        raise
