"""`shoal sweep`: one `shoal run` per combination of options and script arguments, compared by a metric.

Lists are tried in full, in order. Ranges, and lists with --trials, are sampled by
Optuna's TPE, an extra that is imported only then.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.options import RunDir
from shoal.cli.verb import console, did_you_mean
from shoal.errors import ConfigError

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal sweep --arg lr=0.1,0.01 --arg epochs=2,4 --minimize val_loss -- -n 2 train.py\n"
    "  shoal sweep --option workers=1,2,4 --option strategy=ddp,ps --maximize samples_per_s -- train.py\n"
    "  shoal sweep --arg lr=log:1e-4..1e-1 --arg hidden=32..256 --trials 20 --minimize val_loss -- train.py"
)

MAX_GRID = 1000
"""Combinations of lists. Beyond it somebody meant --trials."""


Suggestions = Generator[dict[str, str], float | None, None]
"""Values of one run after the other; what came of each is sent back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One option or argument that a sweep varies."""

    name: str
    is_option: bool
    """An option of `shoal run`; else an argument of the script."""

    choices: tuple[str, ...] = ()
    """The values to try; empty for a range."""

    low: float = 0.0
    high: float = 0.0
    is_integer: bool = False
    is_log: bool = False

    def words(self, value: str) -> list[str]:
        return [f"--{self.name}", value] if value != "" else [f"--{self.name}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a sweep."""

    number: int
    values: dict[str, str]
    run: str
    exit: int
    objective: float | None
    """None: it failed, or has no such metric."""


def parse_dimension(said: str, *, is_option: bool) -> Dimension:
    """`lr=0.1,0.01`, `hidden=32..256` or `lr=log:1e-4..1e-1`."""
    flag = "--option" if is_option else "--arg"
    name, equals, values = said.partition("=")
    name = name.strip().lstrip("-")
    if not name or not equals or not values:
        raise ConfigError(
            f"{flag} {said} names no values. Nothing was started; write {flag} lr=0.1,0.01 or {flag} lr=log:1e-4..1e-1."
        )
    if ".." not in values:
        return Dimension(name=name, is_option=is_option, choices=tuple(values.split(",")))
    is_log, values = values.startswith("log:"), values.removeprefix("log:")
    low, _, high = values.partition("..")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = math.nan, math.nan
    if not bounds[0] < bounds[1] or not all(map(math.isfinite, bounds)) or (is_log and bounds[0] <= 0):
        raise ConfigError(
            f"{flag} {said} is no range: it has two numbers, the smaller first{', both above 0' if is_log else ''}. Nothing was "
            "started; write 32..256 or log:1e-4..1e-1."
        )
    is_integer = all(part.strip().lstrip("+-").isdecimal() for part in (low, high))
    return Dimension(
        name=name, is_option=is_option, low=bounds[0], high=bounds[1], is_integer=is_integer, is_log=is_log
    )


def grid(dimensions: list[Dimension]) -> list[dict[str, str]]:
    """Every combination of the lists, the last one changing fastest."""
    count = math.prod(len(each.choices) for each in dimensions)
    if count > MAX_GRID:
        raise ConfigError(
            f"the lists have {count:,} combinations, and a sweep tries at most {MAX_GRID:,}. Nothing was started; shorten them, or "
            "sample some with --trials N."
        )
    names = [each.name for each in dimensions]
    return [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(each.choices for each in dimensions))
    ]


def sweep(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="-- [OPTIONS] SCRIPT [ARGS]...", help="What follows -- is given to `shoal run` as it is."
        ),
    ],
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", metavar="NAME=VALUES", help="An option of `shoal run` to vary: workers=1,2,4."
        ),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            metavar="NAME=VALUES",
            help="An argument of the script to vary, given as --NAME VALUE: a list (0.1,0.01) or a range (32..256, log:1e-4..1e-1).",
        ),
    ] = None,
    minimize: Annotated[
        str | None,
        typer.Option("--minimize", metavar="METRIC", help="What is best where it is smallest: val_loss."),
    ] = None,
    maximize: Annotated[
        str | None,
        typer.Option(
            "--maximize",
            metavar="METRIC",
            help="What is best where it is largest: val_accuracy, samples_per_s.",
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            metavar="N",
            min=1,
            help="Runs to sample with Optuna (pip install 'shoal[sweep]'); needed for ranges.",
            show_default="every combination of the lists",
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the sweep.")] = "sweep",
    run_dir: RunDir = Path("runs"),
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of Optuna's sampler.")] = 0,
) -> None:
    """Run a script with several values of options and arguments, one run after the other, and compare a metric."""
    dimensions = [parse_dimension(each, is_option=True) for each in option or ()]
    dimensions += [parse_dimension(each, is_option=False) for each in arg or ()]
    _check(dimensions, minimize, maximize, trials)
    folder = run_dir / name
    if folder.exists():
        raise ConfigError(f"{folder} exists. Nothing was started; give the sweep another --name.")
    folder.mkdir(parents=True)
    is_better: Callable[[float, float], bool] = (
        (lambda new, old: new < old) if minimize else (lambda new, old: new > old)
    )
    metric = minimize or maximize or ""
    done: list[Trial] = []
    best: Trial | None = None
    suggested = _sampled(dimensions, trials, bool(minimize), seed) if trials else _listed(grid(dimensions))
    answer: float | None = None
    try:
        while True:
            values = suggested.send(answer) if done else next(suggested)
            trial = _run(folder, len(done), dimensions, values, words, metric)
            done.append(trial)
            answer = trial.objective
            if answer is not None and (best is None or is_better(answer, best.objective or 0.0)):
                best = trial
            _write(folder / "sweep.json", metric, done, best)
    except StopIteration:
        pass
    except KeyboardInterrupt:
        typer.echo(f"stopped after {len(done)} runs", err=True)
    _show(done, best, dimensions, metric)
    if best is None:
        raise ConfigError(
            f"none of {len(done)} runs gave '{metric}'.{_metrics_there(folder, done)} Their output is in {folder}/trial-*/logs."
        )


def _check(
    dimensions: list[Dimension], minimize: str | None, maximize: str | None, trials: int | None
) -> None:
    if not dimensions:
        raise ConfigError(
            "nothing varies. Nothing was started; name values with --arg lr=0.1,0.01 or --option."
        )
    names = [each.name for each in dimensions]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{', '.join(sorted(twice))} is varied twice. Nothing was started.")
    if (minimize is None) == (maximize is None):
        raise ConfigError(
            "a sweep compares its runs by one metric. Nothing was started; give --minimize val_loss or --maximize val_accuracy."
        )
    from shoal.cli import app

    known = [
        param.name.replace("_", "-")
        for param in typer.main.get_command(app).commands["run"].params  # type: ignore[attr-defined]
    ]
    for each in dimensions:
        if each.is_option and each.name not in known:
            raise ConfigError(
                f"--option {each.name} is no option of `shoal run`.{did_you_mean(each.name, known)} Nothing was started; arguments "
                "of the script are varied with --arg."
            )
        if not each.choices and trials is None:
            raise ConfigError(
                f"{each.name} is a range, of which a number of values has to be drawn. Nothing was started; add --trials 20, or list "
                "the values."
            )


def _listed(combinations: list[dict[str, str]]) -> Suggestions:
    for values in combinations:  # noqa: UP028  # a list takes no answers, as `yield from` would have it
        yield values


def _sampled(dimensions: list[Dimension], trials: int, is_minimum: bool, seed: int) -> Suggestions:
    """Values that Optuna suggests; the result of each run is sent back before the next ones are drawn."""
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "--trials samples with Optuna, which is not installed. Nothing was started; `pip install 'shoal[sweep]'`, or list all "
            "values and leave --trials out."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="minimize" if is_minimum else "maximize", sampler=optuna.samplers.TPESampler(seed=seed)
    )
    for _ in range(trials):
        trial = study.ask()
        values = {}
        for each in dimensions:
            if each.choices:
                values[each.name] = trial.suggest_categorical(each.name, each.choices)
            elif each.is_integer:
                values[each.name] = str(
                    trial.suggest_int(each.name, int(each.low), int(each.high), log=each.is_log)
                )
            else:
                values[each.name] = (
                    f"{trial.suggest_float(each.name, each.low, each.high, log=each.is_log):.6g}"
                )
        answer = yield values
        if answer is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, answer)


def _run(
    folder: Path,
    number: int,
    dimensions: list[Dimension],
    values: dict[str, str],
    words: list[str],
    metric: str,
) -> Trial:
    """One `shoal run`, a process of its own, so that its death is not the sweep's."""
    options = [word for each in dimensions if each.is_option for word in each.words(values[each.name])]
    args = [word for each in dimensions if not each.is_option for word in each.words(values[each.name])]
    run = folder / f"trial-{number}"
    shown = ", ".join(f"{name} {value}" for name, value in values.items())
    typer.echo(f"trial {number}: {shown}", err=True)
    code = subprocess.run(
        [
            *(sys.executable, "-m", "shoal", "run", "--run-dir", str(folder), "--name", run.name),
            *options,
            *words,
            *args,
        ],
        check=False,
    ).returncode
    if code == -2 or code == 130:
        raise KeyboardInterrupt
    found = _metrics(run).get(metric) if code == 0 else None
    is_number = isinstance(found, int | float) and math.isfinite(found)
    return Trial(
        number=number, values=values, run=str(run), exit=code, objective=found if is_number else None
    )


def _metrics(run: Path) -> dict[str, Any]:
    """Numbers of a finished run: its metrics, and what else its summary measures."""
    from shoal.observe.runs import read_json

    summary = read_json(run / "summary.json")
    measured: dict[str, Any] = {key: summary[key] for key in ("samples_per_s", "seconds") if key in summary}
    metrics = summary.get("metrics")
    return measured | (metrics if isinstance(metrics, dict) else {})


def _metrics_there(folder: Path, done: list[Trial]) -> str:
    finished = next((trial for trial in done if trial.exit == 0), None)
    if finished is None:
        return " All of them failed."
    return f" There are {', '.join(_metrics(folder / f'trial-{finished.number}'))}."


def _write(file: Path, metric: str, done: list[Trial], best: Trial | None) -> None:
    """Whole at any moment: a sweep that is ended keeps what it found."""
    text = json.dumps(
        {"metric": metric, "best": best.number if best else None, "trials": [asdict(each) for each in done]},
        indent=1,
    )
    beside = file.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, file)


def _show(done: list[Trial], best: Trial | None, dimensions: list[Dimension], metric: str) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("trial", *(each.name for each in dimensions), metric, ""):
        table.add_column(column, justify="right" if column else "left")
    for trial in done:
        objective = f"failed, exit code {trial.exit}" if trial.exit else "-"
        if trial.objective is not None:
            objective = f"{trial.objective:.6g}"
        table.add_row(str(trial.number), *trial.values.values(), objective, "best" if trial is best else "")
    console().print(table)
