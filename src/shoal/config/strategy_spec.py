"""Which strategies there are by name, what a name means, and which one a launch means.

Names only, so that the command line can refuse a misspelt one without
importing torch; `shoal.parallel` holds what they stand for.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import NamedTuple

from shoal.config import mesh as mesh_names
from shoal.config.mesh import Axes
from shoal.errors import ConfigError, UnknownStrategy

STRATEGIES = {
    "single": "one process",
    "ddp": "data parallel: every worker holds the model, gradients are summed by all-reduce",
    "fsdp": "data parallel, parameters sharded over the workers",
    "tp": "tensor parallel: each layer cut over the workers",
    "pp": "pipeline parallel: the layers cut into stages, one after the other over the workers",
    "dp=K,fsdp=K": "replicas and shards together; any product of dp, fsdp, tp and pp that gives the workers",
    "ps": "parameter server: servers hold the weights, every step is exact",
    "ps:ssp=K": "parameter server, bounded staleness: nobody is more than K steps ahead of the slowest",
    "ps:async": "parameter server, asynchronous: nobody waits for anybody",
    "ps:hybrid": "rows from the servers and asynchronous, dense parameters by all-reduce; or with ,ssp=K",
    "ps:drop=K": "parameter server, exact but for the K slowest workers of a step, whose part is left out",
    "ps:stale-ok": "parameter server: a straggler's part counts in a later step",
}

MAX_BOUND = 1_000_000
"""Of K. Beyond it a bound is none, and the name for that is ps:async."""

_BOUNDED = re.compile(r"(?P<mode>ssp|drop)=(?P<bound>\d{1,9})|hybrid,ssp=(?P<hybrid_bound>\d{1,9})")


class StrategyName(NamedTuple):
    """A strategy's name, taken apart."""

    base: str
    """"single", "ddp", "mesh" or "ps"."""

    mode: str = ""
    """Of ps: "exact", "ssp", "async", "hybrid", "drop" or "stale"; else empty."""

    bound: int | None = None
    """K of ssp, drop and hybrid; None where there is none."""

    axes: Axes | None = None
    """Of a mesh; a degree of 0 stands for all workers."""

    @property
    def has_servers(self) -> bool:
        """Whether it runs with servers."""
        return self.base == "ps"

    @property
    def is_exact(self) -> bool:
        """Whether it computes what one process would."""
        return self.mode in ("", "exact")


_PLAIN = {
    "single": StrategyName("single"),
    "ddp": StrategyName("ddp"),
    "ps": StrategyName("ps", "exact"),
    "ps:async": StrategyName("ps", "async"),
    "ps:hybrid": StrategyName("ps", "hybrid"),
    "ps:stale-ok": StrategyName("ps", "stale"),
}


def parse(strategy: str) -> StrategyName:
    """What a name means; UnknownStrategy, with a guess, where it means nothing."""
    if strategy in _PLAIN:
        return _PLAIN[strategy]
    axes = mesh_names.parse(strategy)
    if axes is not None:
        return StrategyName("mesh", axes=axes)
    base, _, rest = strategy.partition(":")
    if base == "ps" and (said := _BOUNDED.fullmatch(rest)):
        mode = said["mode"] or "hybrid"
        bound = int(said["bound"] or said["hybrid_bound"])
        if bound > MAX_BOUND:
            raise ConfigError(
                f"the bound of '{strategy}' is at most {MAX_BOUND}. Nothing was started; ps:async has none."
            )
        if mode == "drop" and not bound:
            raise ConfigError(
                "'ps:drop=0' drops nobody. Nothing was started; that strategy's name is ps, and ps:drop=1 does not wait "
                "for the slowest."
            )
        return StrategyName("ps", mode, bound)
    raise UnknownStrategy(strategy=strategy, known=list(STRATEGIES), guess=_guess(strategy))


def _guess(strategy: str) -> str | None:
    """What was probably meant, with the number that was given."""
    number = re.search(r"\d{1,9}", strategy)
    k = number[0] if number else "K"
    names = [name.replace("K", k) for name in STRATEGIES]
    close = get_close_matches(strategy.lower(), [*names, f"ps:hybrid,ssp={k}"], n=1)
    return close[0] if close else None


def num_slices(strategy: str, num_workers: int) -> int:
    """Parts into which a batch is cut: as many as workers, unless some of them compute the same part."""
    axes = parse(strategy).axes
    return mesh_names.fill(axes, num_workers, strategy).num_data_ranks if axes is not None else num_workers


def choose(strategy: str | None, num_workers: int) -> str:
    """The strategy meant by `strategy` at so many workers; None chooses by their number."""
    if strategy is None:
        return "single" if num_workers == 1 else "ddp"
    name = parse(strategy)
    if name.base == "single" and num_workers > 1:
        raise ConfigError(
            f"the strategy 'single' is one process, and {num_workers} workers were asked for. Nothing was started; "
            f"use --strategy ddp with -n {num_workers}, or -n 1."
        )
    if name.mode == "drop" and name.bound is not None and name.bound >= num_workers:
        raise ConfigError(
            f"'{strategy}' leaves out the {name.bound} slowest of {num_workers} workers, and nobody would be left. Nothing "
            f"was started; use more workers, or a smaller K."
        )
    if name.axes is not None:
        mesh_names.fill(name.axes, num_workers, strategy)
    return strategy
