"""What goes with what of the options beside a strategy: the one place that refuses a `Spread`.

Names only, so that a launch can be refused before torch is imported;
`shoal.parallel` does what is asked.
"""

from __future__ import annotations

from difflib import get_close_matches

from shoal.config import compress_names, exchange_names, outer_names, placement, schedule_names, shard_names
from shoal.config import strategy_spec as strategy_names
from shoal.config.mesh import Axes
from shoal.config.parallel_options import Spread
from shoal.errors import ConfigError

BATCHNORMS = {
    "local": "each worker normalises its own slice; running statistics are averaged at every step",
    "sync": "mean and variance are those of the whole batch, as in one process",
}

MAX_SNAPSHOT_EVERY = 1_000_000
"""Beyond it a number is a slip of the hand, or means 0."""


def check(spread: Spread, *, strategy: str, num_workers: int, num_hosts: int) -> None:
    """Refuse wishes that mean nothing, or nothing under this strategy."""
    name = strategy_names.parse(strategy)
    exchange_names.check(spread.exchange, num_hosts)
    schedule_names.check(spread.schedule)
    _check_batchnorm(spread, strategy)
    _check_cuts(spread, strategy)
    outer_names.check(spread.sync_every, spread.outer, strategy=strategy)
    placement.check(spread.device, num_workers=num_workers, strategy=strategy, is_mesh=name.base == "mesh")
    _check_sums(spread, strategy)
    _check_snapshots(spread, strategy)
    if spread.shard is not None:
        is_relaxed = name.mode in ("ssp", "async")
        shard_names.check(spread.shard, num_workers=num_workers, strategy=strategy, is_relaxed=is_relaxed)


def holds_parts(spread: Spread, strategy: str) -> bool:
    """Whether every worker holds something that no other has, so that none can be replaced from the others alone."""
    return (
        strategy_names.parse(strategy).base == "mesh"
        or compress_names.remembers(spread.compress)
        or spread.sync_every is not None
    )


def _check_snapshots(spread: Spread, strategy: str) -> None:
    if spread.snapshot_every is None:
        return
    if not 0 <= spread.snapshot_every <= MAX_SNAPSHOT_EVERY:
        raise ConfigError(
            f"--snapshot-every {spread.snapshot_every} is no number of steps between two snapshots: give one from 1 to "
            f"{MAX_SNAPSHOT_EVERY}, or 0 for none. Nothing was started."
        )
    if not holds_parts(spread, strategy):
        raise ConfigError(
            f"--snapshot-every {spread.snapshot_every} keeps what all workers go back to where each holds a part of its own, and under "
            f"'{strategy}' one that dies is replaced from the others, at the step at which they are. Nothing was started; leave it out."
        )


def _check_batchnorm(spread: Spread, strategy: str) -> None:
    if spread.batchnorm not in BATCHNORMS:
        guess = get_close_matches(spread.batchnorm, BATCHNORMS, n=1)
        hint = f"Did you mean '{guess[0]}'? " if guess else ""
        raise ConfigError(
            f"there is no BatchNorm '{spread.batchnorm}'. {hint}Nothing was started; there are {', '.join(BATCHNORMS)}."
        )
    if spread.batchnorm != "sync":
        return
    if strategy_names.parse(strategy).has_servers:
        raise ConfigError(
            f"--batchnorm sync adds up over all workers within a forward, and the workers of '{strategy}' have no connection to "
            "each other. Nothing was started; use --strategy ddp or fsdp, or leave --batchnorm out: then each worker normalises "
            "its own slice."
        )
    if spread.sync_every is not None:
        raise ConfigError(
            "--batchnorm sync adds up over all workers in every forward, and with --sync-every they train apart. Nothing was started; "
            "leave one of the two out."
        )


def _check_cuts(spread: Spread, strategy: str) -> None:
    """What is said of an axis is for whoever has it."""
    axes = strategy_names.parse(strategy).axes or Axes()
    if spread.sequence_parallel and axes.tp == 1:
        raise ConfigError(
            f"--sequence-parallel cuts what lies between the layers that tp cuts, and '{strategy}' has no tp. Nothing was started; "
            "use --strategy tp, or leave it out."
        )
    if spread.offload and axes.fsdp == 1:
        raise ConfigError(
            f"--offload keeps the shards of fsdp in the host's memory, and '{strategy}' has no fsdp. Nothing was started; use "
            "--strategy fsdp, or leave it out."
        )
    if spread.schedule != schedule_names.DEFAULT and axes.pp == 1:
        raise ConfigError(
            f"--schedule {spread.schedule} orders what the stages of a pipeline do, and '{strategy}' has no pp. Nothing was started; use "
            "--strategy pp, or leave it out."
        )
    if spread.checkpoint_activations and axes.pp != 1 and spread.schedule == "zero-bubble":
        raise ConfigError(
            "--checkpoint-activations runs a forward again within backward, and --schedule zero-bubble takes backward apart. "
            "Nothing was started; use another schedule, or leave one of the two out."
        )


def _check_sums(spread: Spread, strategy: str) -> None:
    """How gradients are summed, and made smaller before, is for whoever sums them so."""
    sums_them = strategy in ("ddp", "single") or strategy.startswith("ps:hybrid")
    if spread.exchange != "auto" and not sums_them:
        raise ConfigError(
            f"--exchange {spread.exchange} sums the gradients of ddp, and this is --strategy {strategy}, which sums them "
            "another way. Nothing was started; leave one of the two out."
        )
    if compress_names.parse(spread.compress)[0] != "none" and strategy not in ("ddp", "single"):
        raise ConfigError(
            f"--compress {spread.compress} makes the gradients of ddp smaller, and this is --strategy {strategy}, which "
            "sums them another way. Nothing was started; leave one of the two out."
        )
