"""`shoal bench scale`: a script with 1, 2, 4, ... workers, each measured, and its speedup against the ideal."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from shoal.errors import ConfigError

WIDTH = 40


def parse_counts(said: str) -> list[int]:
    """`1,2,4`: numbers of workers, increasing."""
    try:
        counts = sorted({int(each) for each in said.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise ConfigError(
            f"-n {said} is no list of numbers of workers. Nothing was started; give one such as -n 1,2,4."
        )
    return counts


def measure(
    script: str,
    args: Sequence[str],
    *,
    counts: Sequence[int],
    strategy: str | None,
    options: Sequence[str],
    seconds: float,
    run_dir: Path,
    emit: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run the sweep; one line for each number of workers as soon as it is measured, and all of it at the end."""
    from shoal.observe.trials import Trial

    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script}. Nothing was started.")
    folder = run_dir / f"{Path(script).stem}-scale"
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    for workers in counts:
        # One worker has no peers: it is the script by itself, whatever strategy the others use.
        chosen = ("--strategy", strategy) if strategy is not None and workers > 1 else ()
        trial = Trial(
            script=str(Path(script).absolute()),
            args=tuple(args),
            workers=workers,
            options=(*chosen, *(options if workers > 1 else ())),
            name=f"n{workers}",
            run_dir=folder,
        )
        line = trial.run(seconds=seconds)
        first = lines[0] if lines else line
        line["speedup"] = line["samples_per_s"] / first["samples_per_s"]
        line["ideal"] = workers / first["workers"]
        line["efficiency"] = line["speedup"] / line["ideal"]
        lines.append(line)
        emit(line)
    found = {
        "script": script,
        "args": list(args),
        "seconds": seconds,
        "sweep": lines,
        "advice": advice(lines),
    }
    (folder / "scale.json").write_text(json.dumps(found, indent=2) + "\n")
    (folder / "scale.html").write_text(draw(found), encoding="utf-8")
    return found | {"page": str(folder / "scale.html")}


def advice(lines: Sequence[dict[str, Any]]) -> str:
    """How many workers pay, in one sentence."""
    from shoal.observe.planner.cost_model import BEYOND_IDEAL, PAYS_FROM

    if len(lines) < 2:
        return "One number of workers tells nothing of the next: give more with -n 1,2,4."
    alone = lines[0]["samples_per_s"] / lines[0]["workers"]
    beyond = [line for line in lines if line["efficiency"] > BEYOND_IDEAL]
    if beyond:
        return (
            f"{beyond[0]['workers']} workers were {beyond[0]['efficiency']:.0%} of the ideal, which cannot be: the first measurement was disturbed, by "
            "other processes on this machine or by threads that share a core. Measure again while nothing else runs, and for longer (--seconds)."
        )
    paying = lines[0]
    for before, line in itertools.pairwise(lines):
        gained = (line["samples_per_s"] - before["samples_per_s"]) / (line["workers"] - before["workers"])
        if gained < PAYS_FROM * alone:
            return (
                f"{paying['workers']} worker{'s' if paying['workers'] > 1 else ''} pay{'' if paying['workers'] > 1 else 's'}: each of the "
                f"{line['workers'] - before['workers']} beyond {before['workers']} adds {gained:,.0f} samples/s, {gained / alone:.0%} of what one "
                f"alone trains ({alone:,.0f})."
            )
        paying = line
    return (
        f"All {paying['workers']} workers pay: the last ones still add {gained:,.0f} samples/s each, {gained / alone:.0%} of what one alone "
        f"trains ({alone:,.0f}); more were not measured."
    )


def draw(found: dict[str, Any]) -> str:
    """The page: speedup against the ideal."""
    import html

    import numpy as np

    from shoal.observe.page import document, lines

    sweep = found["sweep"]
    workers = np.array([each["workers"] for each in sweep], float)
    chart = lines(
        [
            ("ideal", "#98a2b0-", workers, np.array([each["ideal"] for each in sweep])),
            ("measured", "#2f7ed8", workers, np.array([each["speedup"] for each in sweep])),
        ],
        x_name="workers",
        y_name="speedup",
        from_zero=True,
        dots=True,
        x_ticks=[float(each) for each in workers],
    )
    rows = "".join(
        f"<tr><td>{each['workers']}</td><td>{html.escape(str(each['strategy']))}</td><td>{each['threads']}</td><td>{each['samples_per_s']:,.0f}</td>"
        f"<td>{each['speedup']:.2f}</td><td>{each['efficiency']:.0%}</td></tr>"
        for each in sweep
    )
    heads = "".join(
        f"<th>{name}</th>"
        for name in ("workers", "strategy", "threads each", "samples/s", "speedup", "efficiency")
    )
    return document(
        f"{Path(found['script']).name}: scaling",
        f"<h1>{html.escape(Path(found['script']).name)}: scaling</h1><p class=dim>Each measured for {found['seconds']:g} s from its first step, on "
        f"this machine.</p><p class=verdict>{html.escape(found['advice'])}</p>{chart}<div class=scroll><table><tr>{heads}</tr>{rows}</table></div>",
    )


def show(line: dict[str, Any], widest: float) -> None:
    """One line with a bar; `|` is the ideal."""
    ideal = round(line["ideal"] / widest * WIDTH)
    filled = round(min(line["speedup"] / widest, 1.0) * WIDTH)
    bar = "".join("|" if at == ideal else "█" if at < filled else " " for at in range(WIDTH + 1))
    typer.echo(
        f"{line['workers']:>4} workers  {line['samples_per_s']:>12,.0f} samples/s  speedup {line['speedup']:>5.2f}  efficiency {line['efficiency']:>4.0%}  {bar}"
    )
