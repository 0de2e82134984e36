"""Strategies by name: the registry, the grammar of names, and the axes of a mesh.

Torch-free, so that the command line refuses a misspelt name, or degrees that do not multiply to the
number of workers, before anything starts; `shoal.parallel.create` builds a strategy. Axes are
ordered `pp, dp, fsdp, tp` from the outside in: ranks that communicate most are neighbours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import NamedTuple

from shoal.config.choices import Choice, Registry
from shoal.errors import ConfigError, UnknownStrategy


@dataclass(frozen=True, slots=True)
class StrategyChoice(Choice):
    """A strategy, or a family of them: K in its form is a number."""

    base: str = ""
    """"single", "ddp", "mapreduce", "mesh" or "ps"."""

    mode: str = ""
    """Of ps: "exact", "ssp", "async", "hybrid", "drop" or "stale"; of mapreduce: "rounds"."""

    also: str = ""
    """Another form of the same strategy, with a bound."""

    @property
    def name(self) -> str:
        return self.form


_MESH = "shoal.parallel.mesh:MeshParallel"
_PS = "shoal.parallel.ps"

STRATEGIES = Registry(
    "strategy",
    StrategyChoice("single", "one process", "shoal.parallel.single:for_job", base="single"),
    StrategyChoice(
        "ddp",
        "data parallel: every worker holds the model, gradients are summed by all-reduce",
        "shoal.parallel.ddp:Ddp",
        base="ddp",
    ),
    StrategyChoice("fsdp", "data parallel, parameters sharded over the workers", _MESH, base="mesh"),
    StrategyChoice("tp", "tensor parallel: each layer cut over the workers", _MESH, base="mesh"),
    StrategyChoice(
        "pp",
        "pipeline parallel: the layers cut into stages, one after the other over the workers",
        _MESH,
        base="mesh",
    ),
    StrategyChoice(
        "dp=K,fsdp=K",
        "replicas and shards together; any product of dp, fsdp, tp and pp that gives the workers",
        _MESH,
        base="mesh",
    ),
    StrategyChoice(
        "ps",
        "parameter server: servers hold the weights, every step is exact",
        f"{_PS}.cached:for_job",
        base="ps",
        mode="exact",
    ),
    StrategyChoice(
        "ps:ssp=K",
        "parameter server, bounded staleness: nobody is more than K steps ahead of the slowest",
        f"{_PS}.relaxed:PsRelaxed",
        base="ps",
        mode="ssp",
    ),
    StrategyChoice(
        "ps:async",
        "parameter server, asynchronous: nobody waits for anybody",
        f"{_PS}.relaxed:PsRelaxed",
        base="ps",
        mode="async",
    ),
    StrategyChoice(
        "ps:hybrid",
        "rows from the servers and asynchronous, dense parameters by all-reduce; or with ,ssp=K",
        f"{_PS}.hybrid:PsHybrid",
        base="ps",
        mode="hybrid",
        also="ps:hybrid,ssp=K",
    ),
    StrategyChoice(
        "ps:drop=K",
        "parameter server, exact but for the K slowest workers of a step, whose part is left out",
        f"{_PS}.partial:PsDrop",
        base="ps",
        mode="drop",
    ),
    StrategyChoice(
        "ps:stale-ok",
        "parameter server: a straggler's part counts in a later step",
        f"{_PS}.partial:PsDrop",
        base="ps",
        mode="stale",
    ),
    StrategyChoice(
        "mapreduce",
        "rounds of local training as tasks, here or on Ray or Spark, whose models are averaged",
        "shoal.parallel.mapreduce:for_job",
        base="mapreduce",
        mode="rounds",
    ),
)
"""An implementation is called with the Job and gives a Strategy."""

MAX_BOUND = 1_000_000
"""Largest K. Beyond it a bound is none, and the name for that is ps:async."""


# ---- meshes -----------------------------------------------------------------------------------------

_PART = re.compile(r"(?P<axis>pp|dp|fsdp|tp)=(?P<degree>\d{1,6})")
_MEANING = {
    "pp": "stages of a pipeline",
    "dp": "replicas of the model",
    "fsdp": "shards of the parameters",
    "tp": "parts of each layer",
}


@dataclass(frozen=True, slots=True)
class Axes:
    """The number of ranks along each axis of a mesh."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.fsdp * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Slices of a batch; ranks that differ in tp or pp alone compute the same one."""
        return self.dp * self.fsdp

    def coordinates(self, rank: int) -> Axes:
        """The place of a rank, counted from 0 along each axis."""
        rest, tp = divmod(rank, self.tp)
        rest, fsdp = divmod(rest, self.fsdp)
        pp, dp = divmod(rest, self.dp)
        return Axes(pp, dp, fsdp, tp)

    def data_rank(self, rank: int) -> int:
        at = self.coordinates(rank)
        return at.dp * self.fsdp + at.fsdp

    def speakers(self) -> list[int]:
        """One rank for each slice of a batch, in their order: the first along tp, in the last stage, which has the loss."""
        return [
            rank
            for rank in range(self.num_ranks)
            if self.coordinates(rank).tp == 0 and self.coordinates(rank).pp == self.pp - 1
        ]

    def __str__(self) -> str:
        return ",".join(
            f"{each.name}={getattr(self, each.name)}" for each in fields(self) if getattr(self, each.name) > 1
        )


def parse_axes(name: str) -> Axes | None:
    """The axes of `dp=2,tp=2`; plain `fsdp`, `tp` or `pp` have the degree 0: all workers. None where it is no mesh."""
    if name in ("fsdp", "tp", "pp"):
        return Axes(**{name: 0})
    parts = [_PART.fullmatch(part) for part in name.split(",")]
    if not all(parts):
        return None
    degrees: dict[str, int] = {}
    for part in parts:
        assert part is not None
        axis, degree = part["axis"], int(part["degree"])
        if axis in degrees:
            raise ConfigError(f"'{name}' says {axis} twice. Nothing was started; give each axis one degree.")
        if degree < 1:
            raise ConfigError(
                f"'{name}' asks for {axis}={degree}. Nothing was started; a degree is 1 or more."
            )
        degrees[axis] = degree
    return Axes(**degrees)


def fill_axes(axes: Axes, num_workers: int, name: str) -> Axes:
    """The axes for so many workers; refuses degrees that do not multiply to their number."""
    if axes.num_ranks == 0:
        [axis] = [each.name for each in fields(axes) if getattr(axes, each.name) == 0]
        return Axes(**{axis: num_workers})
    if axes.num_ranks != num_workers:
        said = [part.partition("=")[0] for part in name.split(",")]
        replicas, rest = divmod(num_workers, axes.num_ranks)
        whole = f" (dp={replicas},{name})" if not rest and replicas > 1 and axes.dp == 1 else ""
        product = " x ".join(f"{getattr(axes, axis)} {_MEANING[axis]}" for axis in said)
        raise ConfigError(
            f"'{name}' is {product}: {axes.num_ranks} workers, and {num_workers} were asked for. Nothing was started; use "
            f"-n {axes.num_ranks}, or degrees that multiply to {num_workers}{whole}."
        )
    return axes


# ---- names ------------------------------------------------------------------------------------------


class StrategyName(NamedTuple):
    """A strategy's name, parsed."""

    base: str
    """"single", "ddp", "mesh" or "ps"."""

    mode: str = ""
    """Of ps: "exact", "ssp", "async", "hybrid", "drop" or "stale"; else empty."""

    bound: int | None = None
    """K of ssp, drop and hybrid; None where there is none."""

    axes: Axes | None = None
    """Axes of a mesh; a degree of 0 stands for all workers."""

    @property
    def has_servers(self) -> bool:
        return self.base == "ps"

    @property
    def is_exact(self) -> bool:
        return self.mode in ("", "exact")


def find(strategy: str) -> tuple[StrategyChoice, int | None]:
    """The registered choice of a name, and its K; UnknownStrategy, with a guess, where there is none."""
    if parse_axes(strategy) is not None:
        return STRATEGIES["dp=K,fsdp=K"], None
    for choice in STRATEGIES.values():
        for form in filter(None, (choice.form, choice.also)):
            found = re.fullmatch(re.escape(form).replace("K", r"(\d{1,9})"), strategy)
            if found:
                return choice, int(found[1]) if found.groups() else None
    raise UnknownStrategy(strategy=strategy, known=list(STRATEGIES), guess=_guess(strategy))


def parse(strategy: str) -> StrategyName:
    """Parts of a name; UnknownStrategy, with a suggestion, for an unknown one."""
    strategy = strategy.lower()  # DDP, FSDP
    choice, bound = find(strategy)
    if choice.base == "mesh":
        return StrategyName("mesh", axes=parse_axes(strategy))
    if bound is not None and bound > MAX_BOUND:
        raise ConfigError(
            f"the bound of '{strategy}' is at most {MAX_BOUND}. Nothing was started; ps:async has none."
        )
    if choice.mode == "drop" and not bound:
        raise ConfigError(
            "'ps:drop=0' drops nobody. Nothing was started; that strategy's name is ps, and ps:drop=1 does not wait "
            "for the slowest."
        )
    return StrategyName(choice.base, choice.mode, bound)


def _guess(strategy: str) -> str | None:
    """The name that was probably meant, with the number that was given."""
    from difflib import get_close_matches

    number = re.search(r"\d{1,9}", strategy)
    k = number[0] if number else "K"
    forms = [form for choice in STRATEGIES.values() for form in (choice.form, choice.also) if form]
    close = get_close_matches(strategy.lower(), [form.replace("K", k) for form in forms], n=1)
    return close[0] if close else None


def num_slices(strategy: str, num_workers: int) -> int:
    """Slices of a batch: as many as workers, unless some of them compute the same one."""
    axes = parse(strategy).axes
    return fill_axes(axes, num_workers, strategy).num_data_ranks if axes is not None else num_workers


def choose(strategy: str | None, num_workers: int) -> str:
    """The strategy of a launch with so many workers; None chooses by their number."""
    if strategy is None:
        return "single" if num_workers == 1 else "ddp"
    strategy = strategy.lower()
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
        fill_axes(name.axes, num_workers, strategy)
    return strategy
