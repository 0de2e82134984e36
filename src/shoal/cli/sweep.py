"""`shoal sweep`: one `shoal run` per combination of options and script arguments, compared by a metric.

Lists are tried in full, in order. Ranges, and lists with --trials, are sampled by Optuna's TPE, an
optional dependency imported only then.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.options import RunDir
from shoal.cli.run import RESERVED, parse_words
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
"""Combinations of lists. Beyond it --trials was probably meant."""


_NUMBER = r"([+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf|nan))"
_RANGE = re.compile(rf"(log:)?{_NUMBER}\.\.{_NUMBER}", re.IGNORECASE)


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
    is_flag: bool = False
    """An option without a value: given where it is "true"."""

    def words(self, value: str) -> list[str]:
        if self.is_flag:
            return [f"--{self.name}"] if value == "true" else []
        return [f"--{self.name}", value] if value != "" else [f"--{self.name}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTrial:
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
    found = _RANGE.fullmatch(values)
    if found is None and not values.lower().startswith("log:"):  # ../data is a value, too
        return Dimension(name=name, is_option=is_option, choices=tuple(values.split(",")))
    is_log = values.lower().startswith("log:")
    low, high = (found[2], found[3]) if found is not None else ("nan", "nan")
    bounds = float(low), float(high)
    if not bounds[0] < bounds[1] or not all(map(math.isfinite, bounds)) or (is_log and bounds[0] <= 0):
        raise ConfigError(
            f"{flag} {said} is no range: it has two numbers, the smaller first{', both above 0' if is_log else ''}. Nothing was "
            "started; write 32..256 or log:1e-4..1e-1."
        )
    is_integer = all(part.lstrip("+-").isdecimal() for part in (low, high))
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
            help="Runs to sample with Optuna (pip install optuna); needed for ranges.",
            show_default="every combination of the lists",
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the sweep.")] = "sweep",
    run_dir: RunDir = Path("runs"),
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="Of Optuna's sampler, with --trials.", show_default="0"),
    ] = None,
) -> None:
    """Run a script with several values of options and arguments, one run after the other, and compare a metric."""
    dimensions = [parse_dimension(each, is_option=True) for each in option or ()]
    dimensions += [parse_dimension(each, is_option=False) for each in arg or ()]
    _check(dimensions, minimize, maximize, trials, seed)
    dimensions = _as_options(dimensions, words)
    folder = run_dir / name
    if folder.exists():
        raise ConfigError(f"{folder} exists. Nothing was started; give the sweep another --name.")
    is_better: Callable[[float, float], bool] = (
        (lambda new, old: new < old) if minimize else (lambda new, old: new > old)
    )
    metric = minimize or maximize or ""
    done: list[SweepTrial] = []
    best: SweepTrial | None = None
    suggested = (
        _sampled(dimensions, trials, bool(minimize), seed or 0) if trials else _listed(grid(dimensions))
    )
    values: dict[str, str] | None = next(suggested)  # what is refused there leaves no folder
    folder.mkdir(parents=True)
    with _Signals() as signals:
        while values is not None:
            trial = _run(folder, len(done), dimensions, values, words, metric, signals)
            if signals.exit_code and trial.exit:
                break  # it was ended, and says nothing
            done.append(trial)
            if trial.objective is not None and (
                best is None or is_better(trial.objective, best.objective or 0.0)
            ):
                best = trial
            _write(folder / "sweep.json", metric, done, best)
            values = _next(suggested, trial.objective) if not signals.exit_code else None
    if signals.exit_code:
        typer.echo(f"stopped after {len(done)} runs", err=True)
    if done:
        _show(done, best, dimensions, metric)
    if signals.exit_code:
        raise typer.Exit(signals.exit_code)
    if best is None:
        raise ConfigError(
            f"none of {len(done)} runs gave '{metric}'.{_metrics_there(folder, done)} Their output is in {folder}/trial-*/logs."
        )


class _Signals:
    """Ctrl-C and SIGTERM, which end the run under way and then the sweep."""

    def __init__(self) -> None:
        self.exit_code = 0
        """Not 0: the sweep was asked to end."""

        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Signals:
        self._before = {
            number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, words: list[str]) -> int:
        """Exit code of a command, which is ended in order when a signal comes."""
        self._process = subprocess.Popen(words)
        if self.exit_code:
            self._process.terminate()
        code = self._process.wait()
        self._process = None
        if code in (-signal.SIGINT, 128 + signal.SIGINT):  # it had the Ctrl-C
            self.exit_code = self.exit_code or 128 + signal.SIGINT
        return code

    def _take(self, number: int, _: object) -> None:
        # The first Ctrl-C of a terminal reaches the run, too, which finishes its step and saves.
        has_it = number == signal.SIGINT and not self.exit_code and os.isatty(0)
        self.exit_code = 128 + number
        if self._process is not None and not has_it:
            self._process.terminate()


def _next(suggested: Suggestions, answer: float | None) -> dict[str, str] | None:
    try:
        return suggested.send(answer)
    except StopIteration:
        return None


def _check(
    dimensions: list[Dimension],
    minimize: str | None,
    maximize: str | None,
    trials: int | None,
    seed: int | None,
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
    if seed is not None and trials is None:
        raise ConfigError(
            "--seed is of the sampler, and without --trials every combination is tried. Nothing was started; add --trials 20, or "
            "leave --seed out (that of the runs is `-- --seed N train.py`)."
        )
    for each in dimensions:
        if not each.choices and trials is None:
            raise ConfigError(
                f"{each.name} is a range, of which a number of values has to be drawn. Nothing was started; add --trials 20, or list "
                "the values."
            )


def _as_options(dimensions: list[Dimension], words: list[str]) -> list[Dimension]:
    """The dimensions, with flags of `shoal run` marked as such; refuses options that `shoal run` would not accept."""
    command, given = parse_words(words)
    params = {opt[2:]: param for param in command.params for opt in param.opts if opt.startswith("--")}
    known = [name for name in params if name not in RESERVED and name != "config"]
    found = []
    for each in dimensions:
        if not each.is_option:
            found.append(each)
            continue
        if each.name in params and each.name not in known:
            raise ConfigError(
                f"--option {each.name} cannot be varied: a sweep names its runs and their folder itself, and has one file of options. "
                "Nothing was started."
            )
        if each.name not in known:
            raise ConfigError(
                f"--option {each.name} is no option of `shoal run`.{did_you_mean(each.name, known)} Nothing was started; arguments "
                "of the script are varied with --arg."
            )
        is_flag = bool(getattr(params[each.name], "is_flag", False))
        if is_flag and not (each.choices and set(each.choices) <= {"true", "false"}):
            raise ConfigError(
                f"--option {each.name} is a flag, which is given or not. Nothing was started; write --option {each.name}=true,false."
            )
        found.append(replace(each, is_flag=is_flag))
    if taken := [name for name in RESERVED if name.replace("-", "_") in given]:
        raise ConfigError(
            f"--{taken[0]} stands behind --, and a sweep names its runs and their folder itself. Nothing was started; give the sweep "
            "its own --name and --run-dir, before --."
        )
    if both := [each.name for each in found if each.is_option and params[each.name].name in given]:
        raise ConfigError(
            f"--{both[0]} is varied and stands behind --, too, where it would hold for all runs. Nothing was started; keep one of them."
        )
    if given.get("script") is None and ("config" not in given or any(not each.is_option for each in found)):
        raise ConfigError(
            "what follows -- names no script, and the values of --arg stand behind it. Nothing was started; name the script after "
            "the options, also where a file of --config has it: -- --config run.toml train.py."
        )
    return found


def _listed(combinations: list[dict[str, str]]) -> Suggestions:
    for values in combinations:  # noqa: UP028  # a list takes no answers, as `yield from` would have it
        yield values


def _sampled(dimensions: list[Dimension], trials: int, is_minimum: bool, seed: int) -> Suggestions:
    """Values that Optuna suggests; the result of each run is sent back before the next ones are drawn."""
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "--trials samples with Optuna, which is not installed. Nothing was started; `pip install optuna`, or list all "
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
    signals: _Signals,
) -> SweepTrial:
    """One `shoal run`, a process of its own, so that its death is not the sweep's."""
    options = [word for each in dimensions if each.is_option for word in each.words(values[each.name])]
    args = [word for each in dimensions if not each.is_option for word in each.words(values[each.name])]
    run = folder / f"trial-{number}"
    shown = ", ".join(f"{name} {value}" for name, value in values.items())
    typer.echo(f"trial {number}: {shown}", err=True)
    code = signals.run(
        [
            *(sys.executable, "-m", "shoal", "run", "--run-dir", str(folder), "--name", run.name),
            *options,
            *words,
            *args,
        ]
    )
    found = _metrics(run).get(metric) if code == 0 else None
    is_number = isinstance(found, int | float) and math.isfinite(found)
    return SweepTrial(
        number=number, values=values, run=str(run), exit=code, objective=found if is_number else None
    )


def _metrics(run: Path) -> dict[str, Any]:
    """Numbers of a finished run: its metrics, and what else its summary measures."""
    from shoal.observe.runs import read_json

    summary = read_json(run / "summary.json")
    measured: dict[str, Any] = {key: summary[key] for key in ("samples_per_s", "seconds") if key in summary}
    metrics = summary.get("metrics")
    return measured | (metrics if isinstance(metrics, dict) else {})


def _metrics_there(folder: Path, done: list[SweepTrial]) -> str:
    finished = next((trial for trial in done if trial.exit == 0), None)
    if finished is None:
        return " All of them failed."
    return f" There are {', '.join(_metrics(folder / f'trial-{finished.number}'))}."


def _write(file: Path, metric: str, done: list[SweepTrial], best: SweepTrial | None) -> None:
    """Written atomically: an interrupted sweep keeps its results."""
    text = json.dumps(
        {"metric": metric, "best": best.number if best else None, "trials": [asdict(each) for each in done]},
        indent=1,
    )
    beside = file.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, file)


def _show(done: list[SweepTrial], best: SweepTrial | None, dimensions: list[Dimension], metric: str) -> None:
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
