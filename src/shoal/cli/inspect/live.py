"""The live table of `shoal status RUN`: progress in one line, a row per process with a bar of where its time goes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cluster.supervisor.progress_text import duration
from shoal.observe.live import ProcessNow, RunNow, look
from shoal.observe.page import in_bytes
from shoal.observe.record import BUSY
from shoal.observe.runs import RunState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

BAR = 24
COLOURS = {
    "read": "green",
    "compute": "blue",
    "exchange": "yellow",
    "push": "bright_yellow",
    "pull": "magenta",
    "wait": "red",
    "apply": "cyan",
    "checkpoint": "bright_magenta",
    "other": "bright_black",
}
LETTERS = {kind: kind[0] for kind in BUSY} | {
    "push": "p",
    "pull": "l",
    "exchange": "x",
    "checkpoint": "k",
    "other": ".",
}
"""For a terminal or a file without colours."""

MAX_ROWS = 40


def watch(path: Path, console: Console) -> None:
    """Draw until the run ends, or Ctrl-C."""
    from rich.live import Live

    try:
        with Live(console=console, auto_refresh=False, transient=False) as screen:
            while True:
                now = look(path)
                screen.update(draw(now, has_colours=True), refresh=True)
                if now.state is not RunState.ALIVE:
                    return
                time.sleep(1.0)
    except KeyboardInterrupt:
        return


def draw(now: RunNow, *, has_colours: bool) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(_headline(now))]
    workers = [each for each in now.processes if each.name.startswith("worker-")]
    servers = [each for each in now.processes if each.name.startswith("server-")]
    if workers:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("worker")
        for name in ("step", "samples/s"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("where the time goes", no_wrap=True)
        for name in ("comm", "cpu", "memory"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("")
        for each in workers[:MAX_ROWS]:
            spent = each.totals
            table.add_row(
                each.name.removeprefix("worker-"),
                "-" if each.step is None else f"{each.step:,}",
                f"{each.per_s(spent.samples):,.0f}",
                bar(each, has_colours=has_colours),
                f"{spent.share('exchange', 'push', 'pull', 'wait'):.0%}",
                f"{each.per_s(spent.cpu_s):.0%}",
                in_bytes(each.newest.get("rss_bytes")),
                _remarks(each),
            )
        parts.append(table)
    if servers:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("server")
        for name in ("busy", "requests/s", "queue", "in", "out", "slots", "replicas", "rows", "memory"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("")
        for each in servers[:MAX_ROWS]:
            working = each.totals.busy_s - each.totals.seconds.get("wait", 0.0)
            rows = each.newest.get("rows")
            table.add_row(
                each.name.removeprefix("server-"),
                f"{each.per_s(working):.0%}",
                f"{each.newest.get('requests', 0) / (each.newest.get('interval_s') or 1):,.0f}",
                f"{each.newest.get('queue_s', 0.0) * 1e3:.2f} ms",
                in_bytes(each.per_s(each.totals.received_bytes)) + "/s",
                in_bytes(each.per_s(each.totals.sent_bytes)) + "/s",
                str(each.newest.get("slots", "-")),
                str(each.newest.get("replicas", "-")),
                f"{sum(rows.values()):,}" if isinstance(rows, dict) and rows else "-",
                in_bytes(each.newest.get("rss_bytes")),
                _remarks(each),
            )
        parts.append(table)
    if workers:
        parts.append(_legend(workers, has_colours=has_colours))
    hidden = max(0, len(workers) - MAX_ROWS) + max(0, len(servers) - MAX_ROWS)
    if hidden:
        parts.append(Text(f"{hidden} more processes; --json has all of them"))
    parts += [Text(f"note: {said}") for said in now.missing]
    return Group(*parts)


def _headline(now: RunNow) -> str:
    said = [f"{now.name}: {now.state}"]
    if now.epoch is not None and now.num_epochs:
        said.append(f"epoch {now.epoch}/{now.num_epochs}")
    if now.step is not None:
        said.append(
            f"step {now.step:,}"
            + (f"/{now.num_steps:,} ({now.step / now.num_steps:.0%})" if now.num_steps else "")
        )
    if now.loss is not None:
        said.append(f"loss {now.loss:.4g}")
    if now.samples_per_s is not None:
        said.append(f"{now.samples_per_s:,.0f} samples/s")
    if now.eta_s is not None:
        said.append(f"ETA {duration(now.eta_s)}")
    return "  ".join(said)


def bar(process: ProcessNow, *, has_colours: bool) -> Text:
    """Shares of a worker's time, `BAR` characters wide."""
    from rich.text import Text

    spent = process.totals
    whole = max(spent.interval_s, spent.busy_s) or 1.0
    shares = {kind: spent.seconds.get(kind, 0.0) / whole for kind in BUSY}
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    drawn, text = 0, Text()
    reached = 0.0
    for kind, share in shares.items():
        reached += share
        width = round(reached * BAR) - drawn
        text.append(("█" if has_colours else LETTERS[kind]) * width, COLOURS[kind] if has_colours else "")
        drawn += width
    return text


def _legend(workers: list[ProcessNow], *, has_colours: bool) -> Text:
    from rich.text import Text

    text = Text()
    for kind in (*BUSY, "other"):
        if kind == "other" or any(each.totals.seconds.get(kind) for each in workers):
            text.append("█ " if has_colours else f"{LETTERS[kind]} ", COLOURS[kind] if has_colours else "")
            text.append(f"{kind}  ")
    return text


def _remarks(process: ProcessNow) -> str:
    said = []
    if process.times_slower is not None:
        said.append(f"{process.times_slower:g} times slower")
    if process.incarnation:
        said.append(f"incarnation {process.incarnation}")
    if process.silent_s is not None:
        said.append(f"silent for {process.silent_s:.0f} s")
    return ", ".join(said)
