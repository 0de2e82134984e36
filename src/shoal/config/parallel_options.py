"""Parallel options: the settings beside a strategy, and the one place that refuses combinations of them.

`LaunchConfig` (the user's request), `RunConfig` (the launch, flat in
config.json) and `Job` (a worker's view) inherit `ParallelOptions`. A new option
is a field here, a rule in `check` where it does not go with everything, and a
flag in `shoal.cli.options`. Torch-free: a launch is refused before
torch is imported.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any

from shoal import system
from shoal.config import placement
from shoal.config import strategy as strategies
from shoal.config.choices import (
    BATCHNORMS,
    COMPRESSORS,
    EXCHANGES,
    OUTERS,
    SCHEDULES,
    check_shard,
    compressor_keeps_state,
)
from shoal.config.strategy import Axes
from shoal.errors import ConfigError

KEPT = ("shard", "device", "soft_placement", "accumulate")
"""Options kept when a run is resumed under another strategy; the others belong to the strategy it had."""

DEFAULT_SCHEDULE = "1f1b"

MAX_SYNC_EVERY = 1_000_000
"""Beyond it the workers never sync within any run, and a number is a slip of the hand."""

MAX_EVERY = 4096
"""Steps of --push-every and --pull-every, parts of --accumulate. Beyond it a worker trains alone, and a number is a slip of the hand."""

MIN_ROW_CACHE, MAX_ROW_CACHE = 8, 1 << 30

MAX_SNAPSHOT_EVERY = 1_000_000
"""Beyond it a number is a slip of the hand, or means 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """The options beside a strategy. `check` refuses combinations that mean nothing."""

    shard: str | None = None
    """Cut of batches over the workers, where the script does not say: see `SHARD_FORMS`."""

    exchange: str = "auto"
    """Sum of gradients where no servers do it: a name in EXCHANGES."""

    tls: bool = False
    """With the exchange "ring", between hosts: over encrypted connections of our own instead of gloo's."""

    exchange_rule: str = ""
    """The meaning of "auto": see `shoal.config.exchange_rule`. Empty: as was measured on this machine, or is built in."""

    compress: str = "none"
    """Compression of gradients before they are summed: a name in COMPRESSORS, with settings."""

    sync_every: int | None = None
    """Steps that each worker of ddp makes with its own optimizer before their models are averaged. None: sync at every step."""

    tasks: int = 0
    """Of mapreduce: parts into which each batch is cut, and tasks of a round. As many as -n asks for; 0 under other strategies."""

    tasks_on: str = ""
    """Of mapreduce: engine that runs the tasks, as --on names it; empty: processes of the driver's host."""

    outer: str = "average"
    """With `sync_every`: the outer optimizer, a name in OUTERS, with settings."""

    schedule: str = DEFAULT_SCHEDULE
    """Order of a pipeline's forwards and backwards: a name in SCHEDULES."""

    batchnorm: str = "local"
    """Statistics of BatchNorm: of each worker's slice, or with "sync" of the whole batch."""

    sequence_parallel: bool = False
    """With tp: activations between the layers that are cut hold a part of the sequence."""

    accumulate: int | None = None
    """Parts in which a worker runs its slice of a batch, where the script does not say. None: 1."""

    checkpoint_activations: bool = False
    """Blocks of the model keep their inputs only, and run again within backward: less memory, more time."""

    offload: bool = False
    """With fsdp: shards and the optimizer's state stay in the host's memory."""

    staleness_lr: bool = False
    """With ps:ssp, ps:async and ps:hybrid: a push's learning rate is divided by 1 + the updates it has missed."""

    push_norm: float | None = None
    """With the same: bound of a push's gradient norm, on each server. None: no bound."""

    push_every: int | None = None
    """With ps:ssp and ps:async: steps whose gradients a worker adds up before it pushes them as one. None: each is pushed."""

    pull_every: int | None = None
    """With the same: steps for which a worker uses the weights that it pulled, within the staleness bound. None: 1."""

    row_cache: int | None = None
    """With ps:ssp, ps:async and ps:hybrid: rows of each table that a worker keeps, within the staleness allowed. With ps and one
    worker: rows that it keeps on its device and updates there. None: none."""

    fan_in: int | None = None
    """With ps:ssp and ps:async: workers of one host whose pushes are merged before the servers, at most. None: none are."""

    table_memory: str | None = None
    """With ps: bytes of rows (values and optimizer state) that each server keeps in memory, as "2G"; others are on disk. None: no limit."""

    table_dir: str | None = None
    """With `table_memory`: directory of the rows on disk. None: the run's, or where a host has none the system's for temporary files."""

    server_device: str = "cpu"
    """With ps: where servers keep dense parameters and their optimizer. "auto": on an accelerator where the host has one."""

    table_keep: str | None = None
    """With `table_memory`: which rows stay in memory, one of TABLE_KEEP. None: "balanced"."""

    snapshot_every: int | None = None
    """Steps between two snapshots, where ranks hold state of their own: see `shoal.train.checkpoint.saving`; or between two recovery
    points of exact ps with `row_cache`. 0: none. None: the default."""

    device: str = "auto"
    """Devices of the workers: see `shoal.config.placement`."""

    soft_placement: bool = False
    """Whether a worker whose device is missing computes on the CPU instead."""


DERIVED = ("exchange_rule", "tasks", "tasks_on")
"""Settled at launch from what was typed elsewhere: the meaning of "auto", -n and --on of mapreduce."""


def options_of(options: ParallelOptions) -> dict[str, Any]:
    """The options as keywords for another config that carries them."""
    return {option.name: getattr(options, option.name) for option in fields(ParallelOptions)}


def kept_of(options: ParallelOptions) -> dict[str, Any]:
    """The options that still hold under another strategy."""
    return {name: getattr(options, name) for name in KEPT}


def as_typed(options: ParallelOptions) -> str:
    """Differences from the defaults, as they are typed behind a strategy: " --exchange ring --offload"."""
    words = []
    for option in fields(ParallelOptions):
        value = getattr(options, option.name)
        if value != option.default and option.name not in DERIVED:
            flag = f" --{option.name.replace('_', '-')}"
            words.append(flag if value is True else f"{flag} {value}")
    return "".join(words)


def has_rank_local_state(options: ParallelOptions, strategy: str) -> bool:
    """Whether every worker holds state that no other has, so that none can be replaced from the others alone."""
    return (
        strategies.parse(strategy).base == "mesh"
        or (compressor_keeps_state(options.compress) and not strategies.parse(strategy).has_servers)
        or (options.sync_every is not None and not options.tasks)
    )


# ---- checks -----------------------------------------------------------------------------------------


def check(options: ParallelOptions, *, strategy: str, num_workers: int, num_hosts: int) -> None:
    """Refuse options that mean nothing, or nothing under this strategy."""
    name = strategies.parse(strategy)
    EXCHANGES.parse(options.exchange)
    if options.exchange == "shm" and num_hosts > 1:
        raise ConfigError(
            f"the exchange 'shm' sums through memory that all workers share, and they are on {num_hosts} hosts. Nothing was "
            "started; use --exchange native."
        )
    if options.exchange == "shm" and not system.IS_LINUX:
        raise ConfigError(
            "the exchange 'shm' opens the memory of another worker through /proc, which only Linux has. Nothing was started; use "
            "--exchange native."
        )
    if options.tls and options.exchange != "ring":
        raise ConfigError(
            f"--tls encrypts the exchange 'ring', and this is --exchange {options.exchange}. Nothing was started; use --exchange "
            "ring --tls; the connections of --strategy ps are encrypted anyway."
        )
    SCHEDULES.parse(options.schedule)
    _check_batchnorm(options, strategy)
    _check_axes(options, strategy)
    _check_local_sgd(options, strategy)
    placement.check(options.device, num_workers=num_workers, strategy=strategy, is_mesh=name.base == "mesh")
    _check_sums(options, strategy)
    _check_push_filters(options, strategy)
    _check_intervals(options, strategy)
    _check_row_cache(options, strategy, num_workers)
    _check_fan_in(options, strategy, num_workers)
    _check_table_memory(options, strategy)
    _check_server_device(options, strategy, num_hosts)
    _check_snapshots(options, strategy)
    if options.accumulate is not None and not 1 <= options.accumulate <= MAX_EVERY:
        raise ConfigError(
            f"--accumulate {options.accumulate} is no number of parts of a slice: give one from 1 to {MAX_EVERY}. Nothing was started."
        )
    if options.shard is not None:
        is_relaxed = name.mode in ("ssp", "async")
        check_shard(options.shard, num_workers=num_workers, strategy=strategy, is_relaxed=is_relaxed)


def _check_snapshots(options: ParallelOptions, strategy: str) -> None:
    if options.snapshot_every is None:
        return
    if not 0 <= options.snapshot_every <= MAX_SNAPSHOT_EVERY:
        raise ConfigError(
            f"--snapshot-every {options.snapshot_every} is no number of steps between two snapshots: give one from 1 to "
            f"{MAX_SNAPSHOT_EVERY}, or 0 for none. Nothing was started."
        )
    is_written_back = strategies.parse(strategy).mode == "exact" and options.row_cache is not None
    if not has_rank_local_state(options, strategy) and not is_written_back:
        raise ConfigError(
            f"--snapshot-every {options.snapshot_every} keeps what all workers go back to where each holds a part of its own, and under "
            f"'{strategy}' one that dies is replaced from the others, at the step at which they are. Nothing was started; leave it out."
        )


def _check_batchnorm(options: ParallelOptions, strategy: str) -> None:
    BATCHNORMS.parse(options.batchnorm)
    if options.batchnorm != "sync":
        return
    if strategies.parse(strategy).has_servers:
        raise ConfigError(
            f"--batchnorm sync adds up over all workers within a forward, and the workers of '{strategy}' have no connection to "
            "each other. Nothing was started; use --strategy ddp or fsdp, or leave --batchnorm out: then each worker normalises "
            "its own slice."
        )
    if options.sync_every is not None:
        raise ConfigError(
            "--batchnorm sync adds up over all workers in every forward, and with --sync-every they train apart. Nothing was started; "
            "leave one of the two out."
        )


def _check_axes(options: ParallelOptions, strategy: str) -> None:
    """Refuse options of an axis that the strategy does not have."""
    axes = strategies.parse(strategy).axes or Axes()
    if options.sequence_parallel and axes.tp == 1:
        raise ConfigError(
            f"--sequence-parallel cuts what lies between the layers that tp cuts, and '{strategy}' has no tp. Nothing was started; "
            "use --strategy tp, or leave it out."
        )
    if options.offload and axes.fsdp == 1:
        raise ConfigError(
            f"--offload keeps the shards of fsdp in the host's memory, and '{strategy}' has no fsdp. Nothing was started; use "
            "--strategy fsdp, or leave it out."
        )
    if options.schedule != DEFAULT_SCHEDULE and axes.pp == 1:
        raise ConfigError(
            f"--schedule {options.schedule} orders what the stages of a pipeline do, and '{strategy}' has no pp. Nothing was started; use "
            "--strategy pp, or leave it out."
        )
    if options.checkpoint_activations and axes.pp != 1 and options.schedule == "zero-bubble":
        raise ConfigError(
            "--checkpoint-activations runs a forward again within backward, and --schedule zero-bubble takes backward apart. "
            "Nothing was started; use another schedule, or leave one of the two out."
        )


def _check_sums(options: ParallelOptions, strategy: str) -> None:
    """Refuse --exchange and --compress for strategies that do not all-reduce their gradients."""
    sums_them = strategy in ("ddp", "single") or strategy.startswith("ps:hybrid")
    if options.exchange != "auto" and not sums_them:
        raise ConfigError(
            f"--exchange {options.exchange} sums the gradients of ddp, and this is --strategy {strategy}, which sums them "
            "another way. Nothing was started; leave one of the two out."
        )
    compressor = COMPRESSORS.parse(options.compress)[0]
    if strategies.parse(strategy).has_servers and compressor.name != "none":
        _check_codec(options, strategy)
    elif compressor.name != "none" and strategy not in ("ddp", "single"):
        raise ConfigError(
            f"--compress {options.compress} makes the gradients of ddp smaller, and this is --strategy {strategy}, which "
            "sums them another way. Nothing was started; leave one of the two out."
        )


def _check_codec(options: ParallelOptions, strategy: str) -> None:
    compressor = COMPRESSORS.parse(options.compress)[0]
    if compressor.pushes_parts and strategies.parse(strategy).mode in ("ssp", "async"):
        if options.fan_in is not None:
            raise ConfigError(
                f"--compress {options.compress} keeps a part of each worker's gradient for its next push, and --fan-in {options.fan_in} makes "
                "one push of several workers'. Nothing was started; leave one of the two out."
            )
        return
    known = ", ".join(choice.name for choice in COMPRESSORS.values() if choice.push)
    if not compressor.push:
        raise ConfigError(
            f"--compress {options.compress} keeps a part of the gradient on each worker for later steps, and a worker of "
            f"'{strategy}' can be replaced at any step. Nothing was started; use {known}"
            + (", ps:async or ps:ssp=K" if compressor.pushes_parts else "")
            + ", or --strategy ddp."
        )


def _check_push_filters(options: ParallelOptions, strategy: str) -> None:
    """Refuse --staleness-lr and --push-norm where a push is not an update of its own."""
    if options.push_norm is not None and not (options.push_norm > 0 and math.isfinite(options.push_norm)):
        raise ConfigError(
            f"--push-norm {options.push_norm:g} is no bound of a gradient's norm: give a number above 0. Nothing was started."
        )
    if strategies.parse(strategy).mode in ("ssp", "async", "hybrid"):
        return
    if options.staleness_lr:
        raise ConfigError(
            f"--staleness-lr divides the learning rate of a push by the updates it has missed, and under '{strategy}' no push is an "
            "update of its own. Nothing was started; use --strategy ps:async or ps:ssp=K, or leave it out."
        )
    if options.push_norm is not None:
        raise ConfigError(
            f"--push-norm {options.push_norm:g} bounds every worker's push, and under '{strategy}' no push is an update of its own. "
            "Nothing was started; bound the gradient of a step with Trainer(clip_norm=...), use --strategy ps:async or ps:ssp=K, or "
            "leave it out."
        )


def _check_intervals(options: ParallelOptions, strategy: str) -> None:
    """Refuse --push-every and --pull-every where every step is pushed and pulled, and intervals that break a bound."""
    name = strategies.parse(strategy)
    for flag, every in (("--push-every", options.push_every), ("--pull-every", options.pull_every)):
        if every is None:
            continue
        if not 1 <= every <= MAX_EVERY:
            raise ConfigError(
                f"{flag} {every} is no number of steps: give one from 1 to {MAX_EVERY}. Nothing was started."
            )
        if name.mode == "hybrid" and flag == "--push-every":
            raise ConfigError(
                f"--push-every {every} keeps gradients on a worker that may die, and under '{strategy}' the dense half of those steps "
                "counts already, so nobody would run them again. Nothing was started; use --strategy ps:async or ps:ssp=K, or leave it "
                "out."
            )
        if name.mode not in ("ssp", "async", "hybrid"):
            what = (
                "pushes the gradients of several steps as one"
                if flag == "--push-every"
                else "trains on weights of an earlier step"
            )
            raise ConfigError(
                f"{flag} {every} {what}, and under '{strategy}' every step is one update of all workers, computed on the weights of "
                "the last. Nothing was started; use --strategy ps:async or ps:ssp=K, or leave it out."
            )
    if name.mode == "ssp" and (options.push_every or 1) > (name.bound or 0) + 1:
        raise ConfigError(
            f"--push-every {options.push_every} keeps the gradients of up to {(options.push_every or 1) - 1} steps on a worker, and "
            f"'{strategy}' lets nobody train on weights without steps that are more than {name.bound} back: the workers would wait for "
            f"each other for ever. Nothing was started; use --push-every {(name.bound or 0) + 1} or ps:ssp={(options.push_every or 1) - 1}."
        )


def _check_row_cache(options: ParallelOptions, strategy: str, num_workers: int) -> None:
    name, num_rows = strategies.parse(strategy), options.row_cache
    if num_rows is None:
        if name.mode == "hybrid" and options.pull_every is not None:
            raise ConfigError(
                f"--pull-every {options.pull_every} is the age of weights that a worker keeps, and under '{strategy}' it keeps rows only "
                "with --row-cache. Nothing was started; add --row-cache 100000, or leave it out."
            )
        return
    if not MIN_ROW_CACHE <= num_rows <= MAX_ROW_CACHE:
        raise ConfigError(
            f"--row-cache {num_rows} is no number of rows to keep: give one from {MIN_ROW_CACHE} to {MAX_ROW_CACHE}. Nothing was started."
        )
    if name.mode == "exact" and num_workers == 1:
        others = {"--compress": options.compress != "none", "--server-device": options.server_device != "cpu"}
        for flag, is_given in others.items():
            if is_given:
                raise ConfigError(
                    f"--row-cache {num_rows} has the only worker of '{strategy}' update everything itself, and {flag} is about what it would "
                    "push and servers would update. Nothing was started; leave one of the two out."
                )
        return
    if name.mode not in ("ssp", "async", "hybrid"):
        raise ConfigError(
            f"--row-cache {num_rows} has workers train on rows of an earlier step, and under '{strategy}' with {num_workers} workers every "
            "step is computed on the weights of the last. Nothing was started; use -n 1, where the worker updates the rows itself, --strategy "
            "ps:async or ps:ssp=K, or leave it out."
        )
    if not name.bound and options.pull_every is None:
        raise ConfigError(
            f"--row-cache {num_rows} keeps rows for as many steps as the staleness allows, and '{strategy}' does not say how many those "
            "are. Nothing was started; add --pull-every 8, or use ps:ssp=K."
        )


def _check_fan_in(options: ParallelOptions, strategy: str, num_workers: int) -> None:
    if options.fan_in is None:
        return
    if not 2 <= options.fan_in <= MAX_EVERY:
        raise ConfigError(
            f"--fan-in {options.fan_in} is no number of workers whose pushes are merged: give one from 2 to {MAX_EVERY}. Nothing was "
            "started."
        )
    if strategies.parse(strategy).mode not in ("ssp", "async"):
        raise ConfigError(
            f"--fan-in {options.fan_in} adds pushes up in the order in which they come, and under '{strategy}' the servers add them up in "
            "the order of the ranks, so that the result has the same bits every time. Nothing was started; use --strategy ps:async or "
            "ps:ssp=K, or leave it out."
        )
    if options.staleness_lr or options.push_norm is not None:
        flag, by = ("--staleness-lr", "age") if options.staleness_lr else ("--push-norm", "norm")
        raise ConfigError(
            f"--fan-in {options.fan_in} merges the pushes of several workers before the servers, and {flag} goes by the {by} of each: "
            "of a sum the servers know neither. Nothing was started; leave one of the two out."
        )
    if num_workers < 2:
        raise ConfigError(
            f"--fan-in {options.fan_in} merges the pushes of several workers, and there is one. Nothing was started; use -n 2 or more, or "
            "leave it out."
        )


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes of "2G", "512M", "64KiB" or "1000"; 0 for what is none."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _check_server_device(options: ParallelOptions, strategy: str, num_hosts: int) -> None:
    said = options.server_device
    if said == placement.CPU:
        return
    placement.parse(said, 1)
    parsed = strategies.parse(strategy)
    if not parsed.has_servers or parsed.mode == "hybrid":
        why = "keeps dense parameters with its workers" if parsed.has_servers else "has no servers"
        raise ConfigError(
            f"--server-device {said} is for the dense parameters that servers hold, and '{strategy}' {why}. Nothing was started; "
            "use --strategy ps, or leave it out."
        )
    if num_hosts > 1:
        raise ConfigError(
            f"--server-device {said} is for one host: with {num_hosts}, a replica on a host without such a device would compute "
            "other bits. Nothing was started; leave it out."
        )


TABLE_KEEP = {"recent": 1, "balanced": 3, "frequent": 63}
"""Uses that the eviction clock counts of a row in memory: one use is as good as many (LRU), some, or as many as there were (LFU)."""


def _check_table_memory(options: ParallelOptions, strategy: str) -> None:
    if options.table_keep is not None and options.table_keep not in TABLE_KEEP:
        raise ConfigError(
            f"--table-keep {options.table_keep} is none of {', '.join(TABLE_KEEP)}. Nothing was started."
        )
    if options.table_memory is None:
        if options.table_keep is not None:
            raise ConfigError(
                f"--table-keep {options.table_keep} chooses the rows that stay in memory, and without --table-memory all do. "
                "Nothing was started; add --table-memory 2G, or leave it out."
            )
        if options.table_dir is not None:
            raise ConfigError(
                f"--table-dir {options.table_dir} is where rows lie that do not fit into memory, and without --table-memory all do. "
                "Nothing was started; add --table-memory 2G, or leave it out."
            )
        return
    if parse_size(options.table_memory) <= 0:
        raise ConfigError(
            f"--table-memory {options.table_memory} is no number of bytes: give one as 2G, 512M or 65536. Nothing was started."
        )
    if not strategies.parse(strategy).has_servers:
        raise ConfigError(
            f"--table-memory {options.table_memory} bounds the rows that a parameter server keeps in memory, and '{strategy}' has no "
            "servers. Nothing was started; use --strategy ps, or leave it out."
        )


def _check_local_sgd(options: ParallelOptions, strategy: str) -> None:
    OUTERS.parse(options.outer)
    sync_every = options.sync_every
    if sync_every is None:
        if options.outer != "average":
            raise ConfigError(
                f"--outer {options.outer} says what becomes of models that workers trained apart for --sync-every steps, and that was not "
                "given. Nothing was started; add --sync-every 10, or leave --outer out."
            )
        return
    if not 1 <= sync_every <= MAX_SYNC_EVERY:
        raise ConfigError(
            f"--sync-every {sync_every} is no number of steps between two averages: give one from 1 to {MAX_SYNC_EVERY}. "
            "Nothing was started."
        )
    if strategy == "mapreduce" and options.outer != "average":
        raise ConfigError(
            f"--outer {options.outer} is for ddp, and mapreduce averages the models of its tasks. Nothing was started; leave it out."
        )
    if strategy not in ("ddp", "mapreduce"):
        others = (
            "one process, which has nobody to average with"
            if strategy == "single"
            else f"--strategy {strategy}, whose workers share what they train at every step"
        )
        raise ConfigError(
            f"--sync-every {sync_every} lets workers train whole models apart and averages them, and this is {others}. Nothing "
            "was started; use it with --strategy ddp and -n 2 or more, or leave it out."
        )


def refuse_own_loop(tasks: int, accumulate: int | None = None) -> None:
    """Refuse what only a fit can do: the rounds of mapreduce, slices in parts."""
    if accumulate is not None:
        raise ConfigError(
            f"--accumulate {accumulate} has a fit run each slice in parts, and a loop of the script's own (shoal.setup) runs them itself. "
            "Nothing was trained; accumulate in the loop, or use shoal.Trainer."
        )
    if tasks:
        raise ConfigError(
            "--strategy mapreduce runs the rounds of a fit as tasks, and a loop of the script's own (shoal.setup) has none. Nothing was "
            "trained; use shoal.Trainer, or another strategy."
        )


def refuse_plateau_of_steps(sync_every: int | None) -> None:
    """Refuse a schedule that follows the loss of every step: it would differ from worker to worker."""
    if sync_every is not None:
        raise ConfigError(
            f"ReduceLROnPlateau with scheduler_every='step' watches the loss of every step, which under --sync-every {sync_every} is each "
            "worker's own: their learning rates would part. Nothing was trained; use scheduler_every='epoch'."
        )
