"""How a model, its gradients and its batches are spread beside the strategy: the options, once.

Whoever carries them is one: what a user asks (`LaunchConfig`), what was
launched (`RunConfig`, as flat in config.json) and what a worker knows (`Job`).
A new option is a field here, a rule in `spread_names.check` where it does not
go with everything, and a flag in `shoal.cli.parallel_options`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

KEPT = ("shard", "device", "soft_placement")
"""What stays where a run goes on under another strategy; the rest was said of the one it had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What is said beside a strategy. Which of it goes with which is in `spread_names`."""

    shard: str | None = None
    """How batches are cut over the workers, where the script does not say: see `shoal.config.shard_names`."""

    exchange: str = "auto"
    """How gradients are summed where no servers do it: see `shoal.config.exchange_names`."""

    exchange_rule: str = ""
    """What "auto" means: see `shoal.config.exchange_rule`. Empty: as was measured on this machine, or is built in."""

    compress: str = "none"
    """How gradients are made smaller before they are summed: see `shoal.config.compress_names`."""

    sync_every: int | None = None
    """Steps that each worker of ddp makes with its own optimizer before their models are averaged. None: no step apart."""

    outer: str = "average"
    """With `sync_every`: what becomes of the average, see `shoal.config.outer_names`."""

    schedule: str = "1f1b"
    """In which order the stages of a pipeline run forwards and backwards: see `shoal.config.schedule_names`."""

    batchnorm: str = "local"
    """Over what BatchNorm normalises: each worker's slice, or with "sync" the whole batch."""

    sequence_parallel: bool = False
    """With tp: what lies between the layers that are cut holds a part of the sequence."""

    checkpoint_activations: bool = False
    """Blocks of the model keep their inputs only, and run again within backward: less memory, more time."""

    offload: bool = False
    """With fsdp: shards and the optimizer's state stay in the host's memory."""

    snapshot_every: int | None = None
    """Steps between two snapshots, where each worker holds a part: see `shoal.train.checkpoint.snapshots`. 0: none. None: as it has it."""

    device: str = "auto"
    """Where workers compute: see `shoal.config.placement`."""

    soft_placement: bool = False
    """Whether a worker whose device is missing computes on the CPU instead."""


def options_of(spread: Spread) -> dict[str, Any]:
    """What `spread` says, as keywords for another one."""
    return {option.name: getattr(spread, option.name) for option in fields(Spread)}


def kept_of(spread: Spread) -> dict[str, Any]:
    """What of it still holds under another strategy."""
    return {name: getattr(spread, name) for name in KEPT}


def as_typed(spread: Spread) -> str:
    """What differs from the defaults, as it is typed behind a strategy: " --exchange ring --offload"."""
    words = []
    for option in fields(Spread):
        value = getattr(spread, option.name)
        # The rule is what "auto" came to, and nothing that anybody typed.
        if value != option.default and option.name != "exchange_rule":
            flag = f" --{option.name.replace('_', '-')}"
            words.append(flag if value is True else f"{flag} {value}")
    return "".join(words)
