"""`shoal stack`: where every process of a run stands, by py-spy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import RunDir, complete_run

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal stack click                 every process of a run that hangs\n"
    "  shoal stack click worker-2        one of them\n"
    "  shoal stack click --locals        with the values of local variables"
)

DUMP_TIMEOUT_S = 30.0


def stack(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name or directory of a run.", autocompletion=complete_run)
    ],
    processes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROCESS]...", help="worker-0, server-1, coordinator.", show_default="all of them"
        ),
    ] = None,
    run_dir: RunDir = Path("runs"),
    show_locals: Annotated[bool, typer.Option("--locals", help="Show local variables, too.")] = False,
) -> None:
    """Show the Python stack of every process of a running job on this host. Nothing is stopped for longer than a moment."""
    from shoal.cli.verb import did_you_mean
    from shoal.errors import ConfigError
    from shoal.observe import runs

    path = runs.find(run, run_dir)
    if runs.state(path, runs.read_json(path / "summary.json")) is not runs.RunState.ALIVE:
        raise ConfigError(
            f"{path.name} is not running, so there is no process to look at; its logs are in {path / 'logs'}."
        )
    spy = _spy()
    pids = _pids(runs.read_events(path))
    for name in processes or ():
        if name not in pids:
            raise ConfigError(
                f"{path.name} has no process '{name}' on this host.{did_you_mean(name, [*pids])} There are {', '.join(pids) or 'none'}."
            )
    if not pids:
        raise ConfigError(
            f"{path.name} is running, and none of its processes is on this host: {path / 'events.jsonl'} names none that began and did not "
            "end. On several hosts, run this on the one where the processes are."
        )
    wanted = {name: pid for name, pid in pids.items() if not processes or name in processes}
    failed = []
    for name, pid in wanted.items():
        typer.echo(f"== {name}, process {pid}")
        command = [*spy, "dump", "--pid", str(pid), *(["--locals"] if show_locals else [])]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DUMP_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            failed.append(f"{name}: no answer within {DUMP_TIMEOUT_S:g} s")
            continue
        if done.returncode:
            failed.append(f"{name}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
        else:
            typer.echo(done.stdout.rstrip() + "\n")
    if failed:
        raise ConfigError(
            f"py-spy could not attach to {len(failed)} of {len(wanted)} processes ({'; '.join(failed)}). The job was not touched. Reading "
            "another process's memory needs the same user and ptrace: run it with sudo, in a container with --cap-add SYS_PTRACE, or "
            "after `sysctl kernel.yama.ptrace_scope=0`."
        )


def _spy() -> list[str]:
    """The command of py-spy, beside this interpreter or on the path."""
    from shoal.errors import ConfigError

    found = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if found is None:
        raise ConfigError(
            "`shoal stack` needs py-spy, which is not installed. Nothing was done; install it with `pip install py-spy`."
        )
    return [found]


def _pids(events: list[dict[str, object]]) -> dict[str, int]:
    """Processes of this host that live, by name; the supervisor itself is the terminal's."""
    pids: dict[str, int] = {}
    for event in events:
        what, pid = str(event.get("event")), event.get("pid")
        role, _, happened = what.partition("-")
        number = event.get("rank", event.get("server"))
        name = role if role == "coordinator" else f"{role}-{number}"
        if role not in ("worker", "server", "coordinator"):
            continue
        if happened in ("started", "replaced", "restarted") and isinstance(pid, int):
            pids.pop(name, None)
            if not event.get("host"):  # else its number means another process here
                pids[name] = pid
        elif happened == "exited":
            pids.pop(name, None)
    return dict(sorted(pids.items()))
