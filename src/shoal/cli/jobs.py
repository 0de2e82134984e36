"""`shoal jobs`: a queue of `shoal run` commands for one machine or a set of hosts, or an engine's own queue."""

from __future__ import annotations

import getpass
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.options import AsJson
from shoal.cli.run import RESERVED, parse_words
from shoal.cli.verb import Verb, Verbs, console
from shoal.config.parallel_options import parse_size
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.cluster.jobqueue.scheduler import Amount

EXAMPLES = {
    "submit": (
        "\b\n"
        "Examples:\n"
        "  shoal jobs submit -- -n 2 train.py --lr 0.1      as many cores as workers\n"
        "  shoal jobs submit --cores 4 --memory 4GB --priority 5 -- -n 2 train.py"
    ),
    "run": (
        "\b\n"
        "Examples:\n"
        "  shoal jobs run                          take jobs until Ctrl-C, with all of this machine\n"
        "  shoal jobs run --until-empty            until none is left\n"
        "  shoal jobs run --quota cores=2 --quota ann:cores=4,gpus=1\n"
        "  shoal jobs run --host node2:cores=8 --bind 10.0.0.1   with another machine, reached by ssh"
    ),
    "list": (
        "\b\nExamples:\n  shoal jobs list\n  shoal jobs list --on slurm      what Slurm's own queue holds"
    ),
    "cancel": "\b\nExamples:\n  shoal jobs cancel 7",
}

app = typer.Typer(
    cls=Verbs, no_args_is_help=True, help="A queue of jobs.", rich_markup_mode=None, add_completion=False
)

QueueDir = Annotated[
    Path,
    typer.Option("--queue", metavar="DIR", envvar="SHOAL_QUEUE", help="Folder of the queue and its runs."),
]
QUEUE = Path("runs/queue")


@app.command(
    "submit", cls=Verb, epilog=EXAMPLES["submit"], context_settings={"allow_interspersed_args": False}
)
def submit(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="-- [OPTIONS] SCRIPT [ARGS]...", help="What follows -- is given to `shoal run` as it is."
        ),
    ],
    cores: Annotated[
        int | None,
        typer.Option(
            "--cores", metavar="N", min=1, help="Cores, on each host.", show_default="as many as workers"
        ),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", min=0, help="GPUs, on each host.")] = 0,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="Memory to set aside on each host: 4GB.", show_default="none"
        ),
    ] = None,
    hosts: Annotated[
        int, typer.Option("--hosts", metavar="N", min=1, help="Hosts, the queue's own machine among them.")
    ] = 1,
    priority: Annotated[
        int,
        typer.Option(
            "--priority", metavar="N", min=-(1 << 31), max=(1 << 31) - 1, help="The higher starts first."
        ),
    ] = 0,
    user: Annotated[
        str | None,
        typer.Option("--user", metavar="NAME", help="Whose quota it counts for.", show_default="yours"),
    ] = None,
    queue: QueueDir = QUEUE,
) -> None:
    """Put a job into the queue; prints its number."""
    from shoal.cluster.jobqueue.queue import Queue
    from shoal.cluster.jobqueue.runner import machine
    from shoal.cluster.jobqueue.scheduler import Amount, JobRequest, Pool

    _, given = parse_words(words)
    if taken := [name for name in (*RESERVED, "hosts", "on", "cluster") if name.replace("-", "_") in given]:
        raise ConfigError(
            f"--{taken[0]} stands behind --, and the queue names its runs, their folder and their hosts itself. Nothing was "
            "submitted; leave it out, and give `shoal jobs submit` --hosts N before --."
        )
    script = given.get("script")
    if script is None and "config" not in given:
        raise ConfigError(
            "what follows -- names no script. Nothing was submitted; name it after the options."
        )
    if script is not None and "module" not in given and not Path(script).is_file():
        raise ConfigError(
            f"there is no script {script} in {Path.cwd()}. Nothing was submitted; check the path."
        )
    if cores is None and ("config" in given or "plan" in given):
        raise ConfigError(
            "a file behind -- says how many workers there are, and the queue does not read it. Nothing was submitted; give the cores it "
            "needs: --cores N."
        )
    said = str(given.get("workers") or 1)
    if not said.isdecimal() or not int(said):
        raise ConfigError(
            f"-n {said} is no number of workers. Nothing was submitted; give one of at least 1."
        )
    need = Amount(cores=cores or -(-int(said) // hosts), gpus=gpus, memory=_size("--memory", memory))
    request = JobRequest(id=0, need=need, hosts=hosts, user=user or getpass.getuser(), priority=priority)
    there = Queue(queue)
    pool = there.pool or Pool(hosts={"": machine()})
    if refusal := pool.refusal(request):
        raise ConfigError(f"the job could never run: {refusal}. Nothing was submitted; ask for less.")
    id = there.submit(request, list(words), str(Path.cwd()))
    typer.echo(id)
    if not there.has_runner:
        typer.echo("nobody takes jobs from this queue yet: start `shoal jobs run`", err=True)


@app.command("run", cls=Verb, epilog=EXAMPLES["run"])
def run(
    cores: Annotated[
        int | None,
        typer.Option(
            "--cores", metavar="N", min=1, help="Cores to share out.", show_default="this machine's"
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=0, help="GPUs to share out.", show_default="this machine's"),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="Memory to share out.", show_default="this machine's"),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME:cores=N,...",
            help="One more host for jobs of several, with its cores, gpus and memory; reached by ssh.",
        ),
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(
            "--bind", metavar="ADDRESS", help="With --host: address of this machine that the others reach."
        ),
    ] = None,
    ssh: Annotated[
        str,
        typer.Option("--ssh", metavar="COMMAND", help="With --host: command that starts `shoal join` there."),
    ] = "",
    quota: Annotated[
        list[str] | None,
        typer.Option(
            "--quota",
            metavar="[USER:]cores=N,...",
            help="Most that the running jobs of a user, or of each user, have together: cores, gpus, memory.",
        ),
    ] = None,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="End when no job waits or runs any more.")
    ] = False,
    queue: QueueDir = QUEUE,
) -> None:
    """Run the jobs of a queue as room comes free. Killed and started again, it finds what runs."""
    from shoal.cluster.jobqueue.queue import Queue
    from shoal.cluster.jobqueue.runner import Runner, free_port, machine
    from shoal.cluster.jobqueue.scheduler import Amount, Pool

    if bind is not None:
        try:
            free_port(bind)
        except OSError as error:
            raise ConfigError(
                f"--bind {bind} is no IPv4 address of this machine ({error.strerror}). Nothing was started; give the address alone, "
                "each job gets a port of its own."
            ) from None
    here = machine()
    own = Amount(
        cores=cores or here.cores,
        gpus=here.gpus if gpus is None else gpus,
        memory=_size("--memory", memory) or here.memory,
    )
    if host and bind is None:
        raise ConfigError(
            "--host names other machines, and no address of this one that they reach. Nothing was started; add --bind ADDRESS."
        )
    pool = Pool(
        hosts={bind or "": own, **dict(_amount("--host", each, Amount()) for each in host or ())},
        # Resources missing in a quota are not limited.
        quotas=dict(_amount("--quota", each, own * (1 + len(host or ()))) for each in quota or ()),
    )
    Runner(
        Queue(queue),
        pool,
        say=lambda line: typer.echo(f"{time.strftime('%H:%M:%S')} {line}", err=True),
        bind=bind or "",
        ssh=ssh,
    ).run(until_empty=until_empty)


@app.command("list", cls=Verb, epilog=EXAMPLES["list"])
def list_jobs(
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="ENGINE",
            help="Show the queue of an engine, which decides over its jobs itself: slurm, or ray[:ADDRESS].",
        ),
    ] = None,
    queue: QueueDir = QUEUE,
    as_json: AsJson = False,
) -> None:
    """List the jobs of a queue and how they stand."""
    found = _of_engine(on) if on is not None else _of_queue(queue)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    if not found:
        typer.echo(f"no jobs in {on or queue}")
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [name for name in found[0] if name not in ("folder",)]
    for name in columns:
        table.add_column(name, overflow="fold")
    for job in found:
        table.add_row(*("" if job[name] is None else str(job[name]) for name in columns))
    console().print(table)


@app.command("cancel", cls=Verb, epilog=EXAMPLES["cancel"])
def cancel(
    id: Annotated[int, typer.Argument(metavar="ID", min=1, max=(1 << 63) - 1, help="Number of the job.")],
    queue: QueueDir = QUEUE,
) -> None:
    """Take a waiting job out of the queue; have a running one save and leave."""
    from shoal.cluster.jobqueue.queue import JobState
    from shoal.cluster.jobqueue.runner import stop

    there = _existing(queue)
    job = there.cancel(id)
    if job.state is JobState.WAITING:
        typer.echo(f"job {id} was taken out of the queue")
    elif job.state is JobState.RUNNING:
        if not there.has_runner:
            stop(job)
        typer.echo(
            f"job {id} was asked to save and leave; `shoal resume {there.runs / job.run}` goes on with it"
        )
    else:
        raise ConfigError(f"job {id} is over: {job.state}. Nothing was changed.")


def _existing(folder: Path) -> Any:
    from shoal.cluster.jobqueue.queue import Queue

    if not (folder / "queue.sqlite").is_file():
        raise ConfigError(
            f"there is no queue in {folder.absolute()}. Nothing was changed; name its folder with --queue, or begin one with "
            "`shoal jobs submit`."
        )
    return Queue(folder)


def _of_queue(folder: Path) -> list[dict[str, Any]]:
    from shoal.observe import runs

    if not (folder / "queue.sqlite").is_file():
        return []
    queue, found = _existing(folder), []
    for job in queue.jobs():
        path = queue.runs / job.run
        state = runs.read(path) if (path / "config.json").exists() else None
        found.append(
            {
                "id": job.id,
                "state": str(job.state),
                "user": job.user,
                "priority": job.priority,
                "asks": str(job.request.need) + (f" on {job.hosts} hosts" if job.hosts > 1 else ""),
                "step": state.step if state is not None else None,
                "exit": job.exit,
                "command": " ".join(job.words),
                "note": job.reason,
                "folder": os.path.relpath(path),
            }
        )
    return found


def _of_engine(said: str) -> list[dict[str, Any]]:
    from shoal.engines import registry

    name, detail = registry.parse(said)
    if name not in ("slurm", "ray"):
        raise ConfigError(
            f"--on {said} has no queue that is shown here. Nothing was done; there are slurm and ray."
        )
    return [asdict(job) for job in registry.load(name).queue(detail)]


def _size(option: str, said: str | None) -> int:
    if said is None:
        return 0
    if not (found := parse_size(said)):
        raise ConfigError(f"{option} {said} is no size. Nothing was done; write 4GB or 512MB.")
    return found


def _amount(option: str, said: str, least: Amount) -> tuple[str, Amount]:
    """`ann:cores=4,memory=8GB`: a name, and what it has; `least` for what is not said."""
    from dataclasses import replace

    name, _, settings = said.rpartition(":")
    values: dict[str, int] = {}
    for each in settings.split(","):
        key, _, value = each.partition("=")
        number = parse_size(value) if key == "memory" else int(value) if value.isdecimal() else None
        if key not in ("cores", "gpus", "memory") or number is None or (key != "gpus" and not number):
            raise ConfigError(
                f"{option} {said}: '{each}' is none of cores=N, gpus=N and memory=4GB. Nothing was started."
            )
        values[key] = number
    if option == "--host" and (not name or "cores" not in values):
        raise ConfigError(
            f"--host {said} lacks a name or cores. Nothing was started; write --host node2:cores=8."
        )
    return name, replace(least, **values)
