"""`shoal status`: the runs of a directory, or one of them closely. Reads, never writes."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.options import AsJson, RunDir, complete_run
from shoal.cli.verb import console, fitted_table
from shoal.cluster.supervisor import progress_text
from shoal.observe import runs

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal status            every run in runs/\n"
    "  shoal status click      one run: progress, workers, checkpoint, what happened last\n"
    "  shoal status click --ledger   which worker trained which samples\n"
    "  shoal status --json     for a script"
)

NUM_EVENTS = 8


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Name or directory of a run.",
            show_default="all of them",
            autocompletion=complete_run,
        ),
    ] = None,
    run_dir: RunDir = Path("runs"),
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Of one run: every range of samples and who trained it.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Of a running job: show it once, and do not follow it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the runs and how they stand, or show one of them closely; one that runs is followed until Ctrl-C."""
    if run is None:
        found = sorted(
            (runs.read(run_dir / name) for name in runs.names(run_dir)),
            key=lambda run: (run.started or 0.0, run.name),
        )
        if as_json:
            _print_json([run.facts() for run in found])
        elif found:
            screen = console()
            screen.print(_list_table(found, screen.width))
        else:
            typer.echo(f"no runs in {run_dir}")
        return
    path = runs.find(run, run_dir)
    details = _details(path)
    if ledger and as_json:
        _print_json(details["ledger"])
    elif ledger:
        lines = list(runs.ledger_ranges(details["ledger"]))
        typer.echo("\n".join(lines) if lines else f"nothing of {details['name']} is in its ledger yet")
    elif as_json:
        _print_json(details)
    else:
        from shoal.cli.inspect import live
        from shoal.observe.live import look

        _show(details)
        screen = console()
        if details["state"] is runs.RunState.ALIVE and screen.is_terminal and not once:
            live.watch(path, screen)
        else:
            screen.print(live.draw(look(path), has_colours=screen.is_terminal, width=screen.width))


def _details(path: Path) -> dict[str, Any]:
    from shoal.observe.live import look

    run = runs.read(path)
    metrics, summary = runs.last_lines(path / "metrics.jsonl", 1), runs.read_json(path / "summary.json")
    events = runs.read_events(path)
    config = runs.read_json(path / "config.json")
    workers = runs.processes(events, run.state, num_workers=run.workers)
    servers = runs.servers(events, run.state)
    return {
        **run.facts(),
        "config": config,
        "params": runs.read_json(path / "params.json"),
        "progress": runs.last_step(metrics, summary),
        "hosts": runs.hosts(config, events, run.state, workers=workers, servers=servers),
        "processes": workers,
        "servers": servers,
        "leases": runs.leases(events),
        "ledger": runs.read_ledger(path, is_alive=run.state is runs.RunState.ALIVE),
        "logs": str(path / "logs"),
        "checkpoint": runs.newest_checkpoint(path),
        "events": events[-NUM_EVENTS:],
        "activity": {each.name: each.newest for each in look(path).processes},
        "summary": summary,
    }


def _list_table(found: list[runs.Run], width: int) -> Table:
    columns: dict[str, list[Any]] = {
        "run": [run.name for run in found],  # typed again, so never cut
        "state": [_styled(run.state) for run in found],
        "strategy": [run.strategy or "-" for run in found],
        "workers": [_shown(run.workers) for run in found],
        "step": [_shown(run.step) for run in found],
        "loss": [_shown(run.loss) for run in found],
        "samples/s": [_rate(run.samples_per_s) for run in found],
        "started": [_when(run.started) for run in found],
    }
    expendable = ("started", "samples/s", "workers", "strategy", "loss", "step")
    return fitted_table(columns, width, expendable=expendable)


def _show(details: dict[str, Any]) -> None:
    from rich.table import Table

    config, progress = details["config"], details["progress"]
    table = Table.grid(padding=(0, 2))
    table.add_row("run", f"{details['name']}  ({details['path']})")
    table.add_row("state", _styled(details["state"]).append(_exit(details["summary"])))
    table.add_row("script", " ".join([config.get("script", "-"), *config.get("args", [])]))
    servers = f", {_count(config['servers'], 'server')}" if config.get("servers") else ""
    workers = _count(details["workers"], "worker")
    table.add_row("strategy", f"{details['strategy'] or '-'}, {workers}{servers}")
    if given := _given(config):
        table.add_row("options", given)
    if details["params"]:
        table.add_row(
            "params", ", ".join(f"{name} {_shown(each)}" for name, each in details["params"].items())
        )
    table.add_row("seed", _shown(config.get("seed")))
    table.add_row("started", _when(details["started"]))
    table.add_row("progress", _progress(progress) or "no step yet")
    table.add_row("samples/s", _rate(details["samples_per_s"]))
    if exchanged := details["summary"].get("exchange"):
        table.add_row("exchange", progress_text.exchanged(exchanged))
    if tables := details["summary"].get("tables"):
        table.add_row("tables", progress_text.tables(tables))
    if cached := details["summary"].get("row_cache"):
        table.add_row("row cache", progress_text.row_cache(cached))
    table.add_row(
        "checkpoint",
        details["checkpoint"] or ("none yet" if details["state"] is runs.RunState.ALIVE else "none"),
    )
    everybody = [*details["processes"], *details["servers"]]
    table.add_row("restarts", str(sum(process["restarts"] for process in everybody)))
    for index, host in enumerate(details["hosts"]):
        table.add_row("hosts" if index == 0 else "", _host(host))
    for index, process in enumerate(details["processes"]):
        table.add_row("workers" if index == 0 else "", _process(process) + _had(details, process["rank"]))
    for line in runs.ledger_before(details["ledger"]):
        table.add_row("", line)
    for index, server in enumerate(details["servers"]):
        table.add_row("servers" if index == 0 else "", _server(server))
    for index, line in enumerate(runs.ledger_lines(details["ledger"])):
        table.add_row("ledger" if index == 0 else "", line)
    table.add_row("logs", details["logs"])
    for index, event in enumerate(details["events"]):
        table.add_row("events" if index == 0 else "", _event(event))
    console().print(table)


def _given(config: dict[str, Any]) -> str:
    """Options that were given, by who said so; config.json has the defaults too."""
    by_origin: dict[str, list[str]] = {}
    options = config.get("options")
    for name, option in options.items() if isinstance(options, dict) else ():
        if isinstance(option, dict) and option.get("origin") not in (None, "default"):
            by_origin.setdefault(str(option["origin"]), []).append(f"{name} {_shown(option.get('value'))}")
    return "; ".join(f"{', '.join(given)} ({origin})" for origin, given in by_origin.items())


def _progress(line: dict[str, Any]) -> str:
    """The last step in words: epochs counted from one, as while it trains; not how large this one batch was."""
    if isinstance(line.get("epoch"), int):
        line = line | {"epoch": line["epoch"] + 1}
    return ", ".join(
        f"{key} {_shown(value)}" for key, value in line.items() if key not in ("time", "samples")
    )


def _event(event: dict[str, Any]) -> str:
    # Tables (such as the holders of slots) are shown above, in their present state.
    said = {k: v for k, v in event.items() if k not in _NOT_FACTS and not isinstance(v, dict)}
    if event.get("event") == "view-formed" and said.get("donor") == -1:
        # Nobody had any state: how much was finished, and in which call, says nothing then.
        said = {key: value for key, value in said.items() if key not in ("finished", "call")}
        said["donor"] = "none: all begin"
    facts = ", ".join(f"{key} {_shown(value)}" for key, value in said.items())
    if event.get("event") == "leases" and isinstance(event.get("by_rank"), dict):
        facts = "; ".join(
            _finished(rank, done)
            for rank, done in sorted(event["by_rank"].items(), key=lambda item: (len(item[0]), item))
        )
    at = event.get("time")
    clock = time.strftime("%H:%M:%S", time.localtime(at)) if isinstance(at, float) else "-"
    return f"{clock}  {event.get('event', '-')}  {facts}"


def _host(host: dict[str, Any]) -> str:
    head = ", the head" if host["number"] == 0 else ""
    said = f"host {host['number']}, {host['name']} ({host['address']}){head}: {host['state']}"
    for key, one in (("workers", "worker"), ("servers", "server")):
        if numbers := host[key]:
            said += f"; {one if len(numbers) == 1 else key} {_numbers(numbers)}"
    return said + (f"; {host['reason']}" if host["reason"] else "")


def _numbers(numbers: list[int]) -> str:
    """`0-3, 6`: neighbours together."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] + 1 == number:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in found)


def _process(process: dict[str, Any]) -> str:
    how = f"exited with code {process['code']}" if process["state"] == "exited" else process["state"]
    return f"rank {process['rank']}{_where(process)}: {how}"


def _where(process: dict[str, Any]) -> str:
    """The process, as its host numbers it."""
    pid = f", process {process['pid']}" if process["pid"] is not None else ""
    return pid + (f" on host {process['host']}" if process.get("host") else "")


def _had(details: dict[str, Any], rank: int) -> str:
    """Samples a worker has trained: by the ledger or, without one, by the coordinator's newest event."""
    if said := runs.ledger_of_worker(details["ledger"], rank):
        return said
    done = details["leases"].get(str(rank))
    return f"; {_leases(done)}" if isinstance(done, list) and len(done) == 2 else ""


def _finished(rank: str, done: Any) -> str:
    return f"rank {rank} {_leases(done) if isinstance(done, list) and len(done) == 2 else _shown(done)}"


def _leases(done: list[int]) -> str:
    return f"{_count(done[0], 'lease')}, {_count(done[1], 'sample')}"


def _server(server: dict[str, Any]) -> str:
    how = f"exited with code {server.get('code')}" if server["state"] == "exited" else server["state"]
    is_over = server["state"] == "gone"
    how = "ended with the job" if is_over else how
    name = f"server {server['server']}{_where(server)}"
    name += f", incarnation {server['restarts']}" if server["restarts"] else ""
    said = f"{name}: {how}; {'answered' if is_over else 'answers'} for {_count(server['primary'], 'slot')}"
    said += f", {'kept' if is_over else 'keeps'} {server['replica']} more" if server["replica"] else ""
    return said + (f", is being filled with {server['filling']}" if server["filling"] else "")


_NOT_FACTS = {"time", "monotonic", "event"}


def _exit(summary: dict[str, Any]) -> str:
    return f", exit code {summary['exit']}" if summary.get("exit") else ""


_STYLES = {
    runs.RunState.ALIVE: "green",
    runs.RunState.FAILED: "red",
    runs.RunState.DEAD: "red",
    runs.RunState.INTERRUPTED: "yellow",
}


def _styled(state: runs.RunState) -> Text:
    from rich.text import Text

    return Text.assemble((state, _STYLES.get(state, "")))


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _count(number: int | None, one: str) -> str:
    return f"{_shown(number) if number is None else f'{number:,}'} {one if number == 1 else one + 's'}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _when(at: float | None) -> str:
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(finite(value), indent=2))


def finite(value: Any) -> Any:
    """JSON has no NaN: a loss that is one becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value
