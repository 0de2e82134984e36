"""`shoal run`: train a script in one process or many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import (
    BatchNorm,
    CheckpointActivations,
    Device,
    Exchange,
    Grace,
    MaxRestarts,
    Offload,
    Oversubscribe,
    Replicas,
    RunDir,
    Schedule,
    Script,
    SequenceParallel,
    Servers,
    Shard,
    StepTimeout,
    Strategy,
    Workers,
)
from shoal.cli.verb import leave

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal run train.py                          one process\n"
    "  shoal run -n 4 train.py --lr 0.1            four workers; --lr is the script's\n"
    "  shoal run -n 4 --name click train.py        in runs/click\n"
    "  shoal run -n 2 --servers 2 --strategy ps train.py   two servers hold the weights"
)

BEFORE_SCRIPT = (
    "-n",
    "--workers",
    "--strategy",
    "--shard",
    "--servers",
    "--replicas",
    "--soft-placement",
    "--sync-every",
    "--batchnorm",
    "--sequence-parallel",
    "--checkpoint-activations",
    "--offload",
    "--oversubscribe",
)
"""Options that change what runs. Meant for shoal, and written behind the script, they would silently do nothing."""


def run(
    script: Script,
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Everything after SCRIPT is the script's own, options too."),
    ] = None,
    workers: Workers = 1,
    strategy: Strategy = None,
    shard: Shard = None,
    servers: Servers = None,
    replicas: Replicas = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Name of the run.", show_default="the script's, numbered"
        ),
    ] = None,
    run_dir: RunDir = Path("runs"),
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            min=0,
            help="Seeds the script's global generators alike in every worker.",
            show_default="drawn, and kept in config.json",
        ),
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            "--faults",
            metavar="FAULTS",
            help="What is to go wrong, on purpose: 'kill worker-1 at step 60; kill coordinator after 5 s'.",
        ),
    ] = None,
    exchange: Exchange = "auto",
    sync_every: Annotated[
        int | None,
        typer.Option(
            "--sync-every",
            metavar="K",
            help="For slow networks: each worker of ddp makes K steps with its own optimizer, then their models are averaged.",
            show_default="gradients are summed at every step",
        ),
    ] = None,
    outer: Annotated[
        str,
        typer.Option(
            "--outer",
            metavar="OUTER",
            help="With --sync-every: average, or nesterov:lr=0.7,momentum=0.9 (DiLoCo).",
        ),
    ] = "average",
    schedule: Schedule = "1f1b",
    compress: Annotated[
        str,
        typer.Option(
            "--compress",
            metavar="COMPRESS",
            help="Make gradients smaller before they are summed: none, bf16, fp16, int8, topk:ratio=0.01, powersgd:rank=4.",
        ),
    ] = "none",
    device: Device = "auto",
    soft_placement: Annotated[
        bool,
        typer.Option(
            "--soft-placement",
            help="A worker whose device is missing computes on the CPU, and says so; else the job is refused.",
        ),
    ] = False,
    batchnorm: BatchNorm = "local",
    sequence_parallel: SequenceParallel = False,
    checkpoint_activations: CheckpointActivations = False,
    offload: Offload = False,
    oversubscribe: Oversubscribe = False,
    pretend_hosts: Annotated[
        int,
        typer.Option(
            "--pretend-hosts",
            metavar="N",
            help="Treat this machine as N hosts, each with some of the workers and a cache of its own: to try out data that "
            "not every host has.",
        ),
    ] = 1,
    step_timeout: StepTimeout = 300.0,
    grace: Grace = 60.0,
    max_restarts: MaxRestarts = 3,
) -> None:
    """Train a script in one process or many. Options of shoal come before SCRIPT."""
    from shoal.cluster.api import LaunchConfig, launch
    from shoal.cluster.faults import Faults

    config = LaunchConfig(
        script=script,
        args=tuple(args or ()),
        workers=workers,
        strategy=strategy,
        shard=shard,
        servers=servers,
        replicas=replicas,
        name=name,
        run_dir=str(run_dir),
        seed=seed,
        step_timeout_s=step_timeout,
        grace_s=grace,
        max_restarts=max_restarts,
        pretend_hosts=pretend_hosts,
        oversubscribe=oversubscribe,
        exchange=exchange,
        sync_every=sync_every,
        outer=outer,
        schedule=schedule,
        batchnorm=batchnorm,
        sequence_parallel=sequence_parallel,
        checkpoint_activations=checkpoint_activations,
        offload=offload,
        compress=compress,
        device=device,
        soft_placement=soft_placement,
        faults=Faults.parse(faults) if faults else None,
    )
    misplaced = [option for option in BEFORE_SCRIPT if option in config.args]
    if misplaced and workers == 1 and strategy is None:
        typer.echo(
            f"note: {misplaced[0]} stands after {script} and so goes to the script; shoal's own options come before it.",
            err=True,
        )
    leave(launch(config, set_title=True))
