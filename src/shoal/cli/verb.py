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
    from rich.table import Table

    from shoal.cluster.launch.api import RunResult

VERBS_ELSEWHERE = {"launch": "run", "train": "run"}
"""Verbs of other launchers, and ours."""

OPTIONS_ELSEWHERE = {
    **dict.fromkeys(("--nproc-per-node", "--num-processes", "--np"), "-n"),
    "--num-workers": "--workers",  # nearer to --min-workers by its letters
}
"""Options of other launchers (torchrun, accelerate, mpirun), and ours. They have them with underscores too."""

MANY_OPTIONS = 15

NEARLY = 0.85
"""Likeness of a misspelt option to the one that was meant: --step and --steps, not --lr and --tls."""

GROUPS = {
    "Launch": (
        "workers",
        "module",
        "name",
        "again",
        "overwrite",
        "run_dir",
        "seed",
        "device",
        "soft_placement",
        "oversubscribe",
        "dashboard",
        "dashboard_port",
    ),
    "Strategy": (
        *(
            "strategy",
            "servers",
            "replicas",
            "exchange",
            "tls",
            "compress",
            "sync_every",
            "outer",
            "schedule",
            "batchnorm",
        ),
        *(
            "sequence_parallel",
            "accumulate",
            "checkpoint_activations",
            "offload",
            "staleness_lr",
            "push_norm",
        ),
        *("push_every", "pull_every", "row_cache", "fan_in"),
        *("table_memory", "table_dir", "table_keep", "server_device"),
    ),
    "Data": ("shard",),
    "Recovery": ("max_restarts", "snapshot_every", "step_timeout", "grace", "min_workers"),
    "Hosts": (
        *(
            "on",
            "resources",
            "hosts",
            "bind",
            "interface",
            "connections",
            "cluster",
            "join_key_file",
            "join_timeout",
            "ssh",
            "advertise",
            "plaintext",
            "ship",
            "journal",
        ),
    ),
    "Testing": ("faults", "debug_rank", "profile", "steps", "tolerance"),
}
"""Options of a verb with many, by heading. What is in none is about the launch."""

PIPE_WIDTH = 1000
"""Columns of a table that is not shown on a terminal."""


class Verb(TyperCommand):
    """One verb of `shoal`. A misspelt option is answered with the one that was meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _suggesting_options(list(args), self.get_params(ctx)):
            return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Options under headings, where there are many: by what they are about."""
        shown = [(param, record) for param in self.get_params(ctx) if (record := param.get_help_record(ctx))]
        if len(shown) < MANY_OPTIONS:
            super().format_options(ctx, formatter)
            return
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in ("Arguments", *GROUPS)}
        for param, (name, about) in shown:
            if param.param_type_name == "argument":
                groups["Arguments"].append((param.metavar or name, about))
            else:
                heading = next(
                    (heading for heading, names in GROUPS.items() if param.name in names), "Launch"
                )
                groups[heading].append((name, about))
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Usage in the notation of the README: `[OPTIONS] SCRIPT [ARGS]...`."""
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(param.metavar or param.name.upper() for param in arguments)]


class ScriptVerb(Verb):
    """A verb with a SCRIPT: options of shoal before it, the script's own behind it, as in `shoal run`.

    Behind it too, options that shoal has are shoal's, unless -- stands before them.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ours, script_and_more = self._split(ctx, list(args))
        return super().parse_args(ctx, [*ours, *script_and_more])

    def _split(self, ctx: Any, args: list[str]) -> tuple[list[str], list[str]]:
        options = [param for param in self.get_params(ctx) if param.param_type_name == "option"]
        takes_value = {name: not getattr(param, "is_flag", False) for param in options for name in param.opts}
        ours: list[str] = []
        script: list[str] = []
        while args:
            word = args.pop(0)
            name = word.split("=")[0]
            if word == "--":
                return ours, [*script, *args]
            # Behind the script, what is nearly an option of ours is more likely that than the script's.
            if name in takes_value or (
                word.startswith("-")
                and (not script or get_close_matches(name, takes_value, n=1, cutoff=NEARLY))
            ):
                ours.append(word)
                if takes_value.get(name) and "=" not in word and args:
                    ours.append(args.pop(0))
            else:
                script.append(word)
        return ours, script


class LaterVerb(TyperCommand):
    """A verb that was not typed: name and one line for the help. Its callback loads the verb with its options."""


class Verbs(TyperGroup):
    """All of them. Every ShoalError of a verb ends here, as its paragraph and its exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _suggesting_options(list(args), self.get_params(ctx)):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that was typed; ours, where it is another launcher's."""
        if args and args[0] in VERBS_ELSEWHERE:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{VERBS_ELSEWHERE[args[0]]}'?")
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, LaterVerb) and command.callback is not None:
            command = typer.main.get_command(command.callback())
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ShoalError as error:
            fail(error)


def fail(error: ShoalError, exit_code: int | None = None) -> NoReturn:
    """Say what went wrong on stderr and leave with the error's exit code, or the job's own."""
    typer.echo(paragraph(error), err=True)
    raise typer.Exit(error.exit_code if exit_code is None else exit_code)


def leave(result: RunResult) -> NoReturn:
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


REMARK_WIDTH = 12
"""Room that remarks are given before columns are left out for them."""


def fitted_table(columns: dict[str, list[Any]], width: int, *, expendable: tuple[str, ...]) -> Table:
    """Cells by column, numbers to the right. A narrow terminal gets fewer columns, and those whole; the first is wrapped, never cut."""
    from rich import box
    from rich.table import Table

    kept = dict(columns)
    widths = {name: max(len(name), *map(len, cells)) + 3 for name, cells in columns.items()}
    if "" in widths:  # remarks: wrapped as well, or one of them would cost every row its figures
        widths[""] = min(widths[""], REMARK_WIDTH + 3)
    for name in expendable:
        if sum(widths[each] for each in kept) > width:
            del kept[name]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, (name, cells) in enumerate(kept.items()):
        is_number = any(str(cell)[:1].isdigit() for cell in cells) and name not in ("started", "")
        table.add_column(
            name,
            justify="right" if index and is_number else "left",
            no_wrap=bool(index and name),
            overflow="fold",
        )
    for row in zip(*kept.values(), strict=True):
        table.add_row(*row)
    return table


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
