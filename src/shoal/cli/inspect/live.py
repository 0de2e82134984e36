"""The live table of `shoal status RUN`: progress in one line, a row per process with a bar of where its time goes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.verb import fitted_table
from shoal.cluster.supervisor.progress_text import duration
from shoal.observe.live import ProcessNow, RunNow, look
from shoal.observe.page import in_bytes
from shoal.observe.record import BUSY
from shoal.observe.runs import RunState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
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
"""Letters of activities, for a terminal or a file without colours."""

MAX_ROWS = 40


def watch(path: Path, console: Console) -> None:
    """Draw until the run ends, or Ctrl-C."""
    from rich.live import Live

    try:
        with Live(console=console, auto_refresh=False, transient=False) as screen:
            while True:
                now = look(path)
                screen.update(draw(now, has_colours=True, width=console.width), refresh=True)
                if now.state is not RunState.ALIVE:
                    return
                time.sleep(1.0)
    except KeyboardInterrupt:
        return


def draw(now: RunNow, *, has_colours: bool, width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(_headline(now))]
    workers = [each for each in now.processes if each.name.startswith("worker-")]
    servers = [each for each in now.processes if each.name.startswith("server-")]
    if workers:
        rows = [
            {
                "worker": each.name.removeprefix("worker-"),
                "step": "-" if each.step is None else f"{each.step:,}",
                "samples/s": f"{each.per_s(each.totals.samples):,.0f}",
                "where the time goes": bar(each, has_colours=has_colours),
                "comm": f"{each.totals.share('exchange', 'push', 'pull', 'wait'):.0%}",
                "cpu": f"{each.per_s(each.totals.cpu_s):.0%}",
                "memory": in_bytes(each.newest.get("rss_bytes")),
                "": _remarks(each),
            }
            for each in workers[:MAX_ROWS]
        ]
        parts.append(_table(rows, width, ("comm", "cpu", "memory", "samples/s", "step")))
    if servers:
        rows = [_server(each) for each in servers[:MAX_ROWS]]
        parts.append(_table(rows, width, ("slots", "queue", "rows", "in", "out", "memory")))
    if workers:
        parts.append(_legend(workers, has_colours=has_colours))
    hidden = max(0, len(workers) - MAX_ROWS) + max(0, len(servers) - MAX_ROWS)
    if hidden:
        parts.append(Text(f"{hidden} more processes; --json has all of them"))
    parts += [Text(f"note: {said}") for said in now.missing]
    return Group(*parts)


def _server(server: ProcessNow) -> dict[str, Any]:
    working = server.totals.busy_s - server.totals.seconds.get("wait", 0.0)
    rows = server.newest.get("rows")
    return {
        "server": server.name.removeprefix("server-"),
        "busy": f"{server.per_s(working):.0%}",
        "calls/s": f"{server.newest.get('requests', 0) / (server.newest.get('interval_s') or 1):,.0f}",
        "queue": f"{server.newest.get('queue_s', 0.0) * 1e3:.2f} ms",
        "in": in_bytes(server.per_s(server.totals.received_bytes)) + "/s",
        "out": in_bytes(server.per_s(server.totals.sent_bytes)) + "/s",
        "slots": _slots(server.newest),
        "rows": f"{sum(rows.values()):,}" if isinstance(rows, dict) and rows else "-",
        "memory": in_bytes(server.newest.get("rss_bytes")),
        "": _remarks(server),
    }


def _table(rows: list[dict[str, Any]], width: int, expendable: tuple[str, ...]) -> Table:
    return fitted_table({name: [row[name] for row in rows] for name in rows[0]}, width, expendable=expendable)


def _slots(newest: Mapping[str, Any]) -> str:
    """Slots of a primary, and after "+" those of a replica."""
    replicas = newest.get("replicas")
    return f"{newest.get('slots', '-')}{f'+{replicas}' if replicas else ''}"


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
