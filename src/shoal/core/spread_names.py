"""What may be asked beside a strategy: BatchNorm over all workers, cut sequences, activations computed again, offload.

Names and what goes with what, so that a launch can be refused before torch is
imported; `shoal.strategies` does it.
"""

from __future__ import annotations

from difflib import get_close_matches

from shoal.core import schedule_names, strategy_names
from shoal.core.errors import ConfigError
from shoal.core.mesh_names import Axes

BATCHNORMS = {
    "local": "each worker normalises its own slice; running statistics are averaged at every step",
    "sync": "mean and variance are those of the whole batch, as in one process",
}


def check(
    *,
    strategy: str,
    schedule: str,
    batchnorm: str,
    sequence_parallel: bool,
    activations: bool,
    offload: bool,
    is_apart: bool = False,
) -> None:
    """Refuse wishes that mean nothing under this strategy; `is_apart` where workers train apart for some steps."""
    if batchnorm not in BATCHNORMS:
        guess = get_close_matches(batchnorm, BATCHNORMS, n=1)
        hint = f"Did you mean '{guess[0]}'? " if guess else ""
        raise ConfigError(
            f"there is no BatchNorm '{batchnorm}'. {hint}Nothing was started; there are {', '.join(BATCHNORMS)}."
        )
    name = strategy_names.parse(strategy)
    axes = name.axes or Axes()
    if batchnorm == "sync" and name.has_servers:
        raise ConfigError(
            f"--batchnorm sync adds up over all workers within a forward, and the workers of '{strategy}' have no connection to "
            "each other. Nothing was started; use --strategy ddp or fsdp, or leave --batchnorm out: then each worker normalises "
            "its own slice."
        )
    if batchnorm == "sync" and axes.pp != 1:
        raise ConfigError(
            f"--batchnorm sync adds up over all workers within a forward, and the stages of '{strategy}' run theirs at different "
            "times. Nothing was started; use dp, fsdp or tp, or leave --batchnorm out: pp alone gives a batch to BatchNorm "
            "whole anyway."
        )
    if batchnorm == "sync" and is_apart:
        raise ConfigError(
            "--batchnorm sync adds up over all workers in every forward, and with --sync-every they train apart. Nothing was started; "
            "leave one of the two out."
        )
    if sequence_parallel and axes.tp == 1:
        raise ConfigError(
            f"--sequence-parallel cuts what lies between the layers that tp cuts, and '{strategy}' has no tp. Nothing was started; "
            "use --strategy tp, or leave it out."
        )
    if sequence_parallel and axes.pp != 1:
        raise ConfigError(
            f"--sequence-parallel cuts what passes between layers, and the stages of '{strategy}' send it whole. Nothing was "
            "started; use tp with dp and fsdp, or leave it out."
        )
    if offload and axes.fsdp == 1:
        raise ConfigError(
            f"--offload keeps the shards of fsdp in the host's memory, and '{strategy}' has no fsdp. Nothing was started; use "
            "--strategy fsdp, or leave it out."
        )
    if schedule != schedule_names.DEFAULT and axes.pp == 1:
        raise ConfigError(
            f"--schedule {schedule} orders what the stages of a pipeline do, and '{strategy}' has no pp. Nothing was started; use "
            "--strategy pp, or leave it out."
        )
    if activations and axes.pp != 1 and schedule == "zero-bubble":
        raise ConfigError(
            "--checkpoint-activations runs a forward again within backward, and --schedule zero-bubble takes backward apart. "
            "Nothing was started; use another schedule, or leave one of the two out."
        )
