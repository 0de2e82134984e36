"""Progress as text: numbers with three digits, durations, and one line per job.

Pure; `display.py` decides when a line is shown and where.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.runtime.transport.messages.supervisor import Progress


def rate(per_s: float) -> str:
    """Samples per second with three digits: "71.3 k"."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_s >= 0.9995 * factor:
            return f"{_three_digits(per_s / factor)} {unit}"
    return _three_digits(per_s) if per_s else "0"


def duration(seconds: float) -> str:
    """Rounded: "9 s", "4 min 10 s", "3 h 20 min"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def value(number: float) -> str:
    """A loss or a metric: four digits behind the point, or four significant ones where those would be zeros."""
    if number != number or number in (float("inf"), float("-inf")):
        return str(number)
    return f"{number:.4f}" if 1e-3 <= abs(number) < 1e6 or number == 0 else f"{number:.3e}"


def of(number: int, total: int | None) -> str:
    """ "200/800", or "200" where the end is unknown."""
    return f"{number}/{total}" if total is not None else str(number)


def line(progress: Progress) -> str:
    parts = [progress.phase]
    if progress.epoch:  # evaluate and predict have none
        parts.append(f"epoch {of(progress.epoch, progress.num_epochs)}")
    parts.append(f"step {of(progress.step, progress.num_steps)}")
    if progress.loss is not None:
        parts.append(f"loss {value(progress.loss)}")
    if progress.samples_per_s > 0:
        parts.append(f"{rate(progress.samples_per_s)} samples/s")
    if progress.eta_s is not None:
        parts.append(f"ETA {duration(progress.eta_s)}")
    return "  ".join(parts)


def epoch_line(progress: Progress) -> str:
    """The means of an epoch that is over: over its steps for the training data, after it for the validation data."""
    names = {"loss": "mean loss"}  # "loss" alone is that of the newest step
    means = "  ".join(f"{names.get(name, name)} {value(number)}" for name, number in progress.metrics.items())
    return f"epoch {of(progress.metrics_epoch, progress.num_epochs)} done  {means}"


def wrapped(text: str, width: int) -> str:
    """Lines of at most `width` columns: values that two spaces divide stay whole, a sentence breaks between words."""
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    if len(line) <= width or line[:1].isspace():  # lines of a table and of code keep their form
        return line
    glued = [part.replace(" ", "\xa0") for part in line.split("  ")] if "  " in line else [line]
    filled = textwrap.fill(
        "  ".join(glued), width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return filled.replace("\xa0", " ")


def _three_digits(number: float) -> str:
    digits = 0 if number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f}"


def tables(facts: dict[str, Any]) -> str:
    """Rows of all servers over memory and disk; `facts` as in summary.json."""
    memory, disk = (rate(facts[f"{tier}_bytes"]) for tier in ("memory", "disk"))
    return (
        f"{facts['num_rows']:,} rows with their copies, {memory}B in memory and {disk}B on disk; {facts['hit_rate']:.1%} of lookups "
        "found their row in memory"
    )


def row_cache(facts: dict[str, Any]) -> str:
    """Lookups in the workers' row caches; `facts` as in summary.json."""
    return f"{facts['hit_rate']:.1%} of {facts['hits'] + facts['misses']:,} rows were in the worker's cache"


def exchanged(facts: dict[str, Any]) -> str:
    """Gradient traffic of a fit, and the path of its loss curve; `facts` as in summary.json."""
    raw, sent = (rate(facts[f"{kind}_bytes_per_step"]) for kind in ("raw", "sent"))
    less = f" instead of {raw}B" if facts["ratio"] != 1 else ""
    if facts["ratio"] > 1:
        less += f", {facts['ratio']:g} times less"
    elif facts["ratio"] < 1:
        less += f", {1 / facts['ratio']:.3g} times as much"
    how = f"{facts['compress']} over " if facts["compress"] != "none" else ""
    return f"{sent}B a step{less}, by {how}{facts['exchange']}; the loss of every step is in {facts['loss_curve']}"
