"""Named choices of the command line: exchanges, compressors, outer optimizers, schedules, BatchNorm modes, shardings.

One `Choice` holds everything about a name: its syntax, its line of help, its settings and its
implementation. Parser, help text, checks and the documentation's tables derive from it. Torch-free:
the implementation is "module:name", imported when the choice is used, so a new compressor is one
new file and one line here (docs/adr/0017).
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from shoal.errors import ConfigError


class Setting(NamedTuple):
    """A number that a choice may be given, as in `topk:ratio=0.01`."""

    default: float
    least: float
    most: float
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One name that an option takes."""

    form: str
    """The choice as it is typed, with its settings: `topk:ratio=0.01`."""

    summary: str
    """One line of help."""

    implementation: str = ""
    """`module:name`; empty where the choice is the absence of something."""

    settings: Mapping[str, Setting] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.form.partition(":")[0]

    def load(self) -> Any:
        module, _, name = self.implementation.partition(":")
        return getattr(importlib.import_module(module), name)


C = TypeVar("C", bound=Choice)


class Registry(dict[str, C], Generic[C]):
    """The choices of one option, by name, in the order of the help."""

    def __init__(self, what: str, *choices: C) -> None:
        """`what` names the kind of choice in errors."""
        super().__init__((choice.name, choice) for choice in choices)
        self._what = what

    @property
    def forms(self) -> str:
        """The choices as they are typed, for help and errors."""
        return ", ".join(choice.form for choice in self.values())

    @property
    def table(self) -> str:
        """The choices as a Markdown table, for docs/guides/strategies.md."""
        rows = [f"| `{choice.form}` | {choice.summary} |" for choice in self.values()]
        return "\n".join([f"| {self._what} | |", "|---|---|", *rows])

    def parse(self, text: str) -> tuple[C, dict[str, float]]:
        """The choice and its settings, defaults filled in; ConfigError for an unknown name or setting."""
        name, _, rest = text.partition(":")
        if name not in self:
            from difflib import get_close_matches  # imported only for a misspelt name: it takes milliseconds

            guess = get_close_matches(name, self, n=1)
            hint = f"Did you mean '{guess[0]}'? " if guess else ""
            raise ConfigError(
                f"there is no {self._what} '{text}'. {hint}Nothing was started; there are {self.forms}."
            )
        choice = self[name]
        settings = {key: setting.default for key, setting in choice.settings.items()}
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            try:
                number = float(value)
                _, least, most, is_whole = choice.settings[key]
                if not least <= number <= most or (is_whole and number != int(number)):
                    raise ValueError
            except (KeyError, ValueError):
                meant = ", ".join(
                    f"{key} from {one.least:g} to {one.most:g}" for key, one in choice.settings.items()
                )
                raise ConfigError(
                    f"'{part}' is no setting of the {self._what} {name}. Nothing was started; its settings: {meant or 'none'}."
                ) from None
            settings[key] = int(number) if is_whole else number
        return choice, settings


# ---- --exchange -------------------------------------------------------------------------------------


class ExchangeCost(NamedTuple):
    """Messages of an exchange, as functions of the number of workers n, and of w workers on each of h hosts."""

    rounds: Callable[[int], float]
    """Messages one after the other."""

    sent: Callable[[int], float]
    """Sizes of the tensor that each worker sends."""

    leaving: Callable[[int, int], float]
    """Sizes of the tensor that leave a host."""


def ring_share(n: int) -> float:
    return 2 * (n - 1) / n


def _levels(n: int) -> float:
    return 2 * math.ceil(math.log2(n))


@dataclass(frozen=True, slots=True)
class ExchangeChoice(Choice):
    """A sum of gradients over all workers."""

    cost: ExchangeCost | None = field(kw_only=True)
    """Its messages, for `shoal plan`. None: a combination of others."""


_SCHEMES = "shoal.collectives.schemes"

EXCHANGES = Registry(
    "exchange",
    ExchangeChoice(
        "auto",
        "the fastest at each size by `shoal bench exchange`; unmeasured: shm, or hierarchical on several hosts",
        cost=None,
    ),
    ExchangeChoice(
        "native",
        "torch's own: gloo, NCCL",
        "shoal.collectives.reducer:Native",
        cost=ExchangeCost(lambda n: 2 * (n - 1), ring_share, lambda w, h: ring_share(w * h)),
    ),
    ExchangeChoice(
        "shm",
        "through memory that the workers of one host share",
        "shoal.collectives.shm:Shm",
        cost=ExchangeCost(_levels, ring_share, lambda w, h: math.inf),
    ),
    ExchangeChoice(
        "ring",
        "around a ring: what a worker sends does not grow with their number",
        f"{_SCHEMES}.ring:all_reduce",
        cost=ExchangeCost(lambda n: 2 * (n - 1), ring_share, lambda w, h: ring_share(w * h)),
    ),
    ExchangeChoice(
        "hierarchical",
        "shm inside each host, a ring between the hosts",
        f"{_SCHEMES}.hierarchical:Hierarchical",
        cost=None,
    ),
    ExchangeChoice(
        "tree",
        "up a binary tree and down again: few steps",
        f"{_SCHEMES}.tree:all_reduce",
        cost=ExchangeCost(_levels, _levels, lambda w, h: _levels(h)),
    ),
    ExchangeChoice(
        "halving",
        "recursive halving and doubling: few steps, few bytes",
        f"{_SCHEMES}.halving:all_reduce",
        cost=ExchangeCost(_levels, ring_share, lambda w, h: 2 * w * (1 - 1 / h)),
    ),
    ExchangeChoice(
        "broadcast",
        "everyone sends everything to everyone",
        f"{_SCHEMES}.broadcast:all_reduce",
        cost=ExchangeCost(lambda n: n - 1, lambda n: n - 1, lambda w, h: w * w * (h - 1)),
    ),
    ExchangeChoice(
        "allgather",
        "everyone gathers all parts and adds them up",
        f"{_SCHEMES}.allgather:all_reduce",
        cost=ExchangeCost(lambda n: n - 1, lambda n: n - 1, lambda w, h: w * h - 1),
    ),
    ExchangeChoice(
        "chain",
        "relayed from neighbour to neighbour and back, in chunks",
        f"{_SCHEMES}.chain:all_reduce",
        cost=ExchangeCost(lambda n: 2 * (n - 1), lambda n: 2.0, lambda w, h: 2.0),
    ),
    ExchangeChoice(
        "mapreduce",
        "each worker owns a part of the gradient: shuffle, reduce, all-gather",
        f"{_SCHEMES}.mapreduce:all_reduce",
        cost=ExchangeCost(lambda n: 2 * (n - 1), ring_share, lambda w, h: 2 * w * w * (h - 1) / (w * h)),
    ),
)
"""An implementation is a scheme `all_reduce(p2p, flat)`, or a class whose `open` builds a Reducer for a view."""


# ---- --compress -------------------------------------------------------------------------------------


class GradientSize(NamedTuple):
    """The gradients of a model, as far as `shoal plan` knows them."""

    num_bytes: float
    num_workers: int
    matrices: Sequence[tuple[int, int, int]] = ()
    """Layers with weights: number of parameters, outputs, inputs. Empty where the layers are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushCodec:
    """A compressor's codec for pushes to servers. On the wire it has the compressor's name."""

    implementation: str
    """`module:name`, called without arguments, gives a Codec; with the compressor's settings, a PartialCodec where it keeps state."""

    pull: str = ""
    """Name of the compressor whose codec weights are pulled in. 8 bits are too few for them."""

    share: Callable[[Mapping[str, float]], float]
    """Bytes of a dense gradient in this codec, by its settings, in those of float32."""

    def load(self) -> Any:
        module, _, name = self.implementation.partition(":")
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, slots=True)
class CompressorChoice(Choice):
    """A gradient compressor."""

    keeps_state: bool = False
    """Whether each rank keeps state between steps (error feedback): then checkpoints and snapshots hold it."""

    sum_bytes: Callable[[GradientSize, Mapping[str, float]], float] = field(kw_only=True)
    """Bytes that a sum of gradients moves, by its settings, in those of an all-reduce without compression."""

    slower_from: float = field(kw_only=True, default=math.inf)
    """Bytes per second of a link from which on steps of ddp over several hosts were slower than without it. Infinite: not measured.

    benchmarks/results/README.md, "Several hosts": slower on that link and faster on the next slower one.
    """

    codec: PushCodec | None = field(kw_only=True, default=None)
    """Codec of pushes to servers. None: the compressor is for all-reduce alone."""

    @property
    def push(self) -> str:
        """Codec of every push, "" for none. One that keeps a part for the next push is for dense gradients of relaxed strategies."""
        return self.name if self.codec is not None and not self.keeps_state else ""

    @property
    def pushes_parts(self) -> bool:
        return self.codec is not None and self.keeps_state


def _topk_bytes(gradients: GradientSize, settings: Mapping[str, float]) -> float:
    # Each worker's values and their places (int32) go to all others, and an all-reduce sends everything twice.
    return gradients.num_bytes * settings["ratio"] * 2 * gradients.num_workers / 2


def _powersgd_bytes(gradients: GradientSize, settings: Mapping[str, float]) -> float:
    if not gradients.matrices:
        return gradients.num_bytes / 4
    thin = (min(size, settings["rank"] * (rows + columns)) for size, rows, columns in gradients.matrices)
    return min(gradients.num_bytes, 4 * sum(thin))


_COMPRESSION = "shoal.collectives.compression"
_CODECS = "shoal.ps.codecs"

COMPRESSORS = Registry(
    "compression",
    CompressorChoice(
        "none", "gradients travel as they are", sum_bytes=lambda gradients, settings: gradients.num_bytes
    ),
    CompressorChoice(
        "bf16",
        "half the bytes",
        f"{_COMPRESSION}.casts:bf16",
        sum_bytes=lambda gradients, settings: gradients.num_bytes / 2,
        slower_from=500e6,
        codec=PushCodec(implementation=f"{_CODECS}:bf16", pull="bf16", share=lambda settings: 0.5),
    ),
    CompressorChoice(
        "fp16",
        "half the bytes, more digits, less range",
        f"{_COMPRESSION}.casts:fp16",
        sum_bytes=lambda gradients, settings: gradients.num_bytes / 2,
        codec=PushCodec(implementation=f"{_CODECS}:fp16", pull="bf16", share=lambda settings: 0.5),
    ),
    CompressorChoice(
        "int8",
        "a quarter of the bytes",
        f"{_COMPRESSION}.int8:Int8Compressor",
        sum_bytes=lambda gradients, settings: gradients.num_bytes / 4,
        slower_from=100e6,
        codec=PushCodec(implementation=f"{_CODECS}:Int8", pull="bf16", share=lambda settings: 0.25),
    ),
    CompressorChoice(
        "topk:ratio=0.01",
        "the largest hundredth, the rest is kept for later (error feedback)",
        f"{_COMPRESSION}.topk:TopKCompressor",
        {"ratio": Setting(0.01, 1e-6, 1.0)},
        keeps_state=True,
        sum_bytes=_topk_bytes,
        # A value and its place.
        codec=PushCodec(implementation=f"{_CODECS}:TopK", share=lambda settings: 2 * settings["ratio"]),
    ),
    CompressorChoice(
        "powersgd:rank=4",
        "matrices by thin factors, what they miss is kept for later",
        f"{_COMPRESSION}.powersgd:PowerSgd",
        {"rank": Setting(4, 1, 256, is_whole=True)},
        keeps_state=True,
        sum_bytes=_powersgd_bytes,
    ),
)
"""An implementation is called with its settings and gives a Compressor."""


# ---- --outer ----------------------------------------------------------------------------------------

_LOCAL_SGD = "shoal.parallel.local_sgd"

OUTERS = Registry(
    "outer optimizer",
    Choice(
        "average",
        "the models' average, weighted by what each was trained on (local SGD)",
        f"{_LOCAL_SGD}:average",
    ),
    Choice(
        "nesterov:lr=0.7,momentum=0.9",
        "a step with Nesterov momentum towards that average (DiLoCo)",
        f"{_LOCAL_SGD}:nesterov",
        {"lr": Setting(0.7, 1e-6, 10.0), "momentum": Setting(0.9, 1e-6, 0.9999)},
    ),
)
"""An implementation is called with the trained parameters and its settings and gives a torch optimizer."""


# ---- --schedule -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScheduleChoice(Choice):
    """A pipeline schedule."""

    stages_per_worker: int = 1


_PIPELINING = "torch.distributed.pipelining"

SCHEDULES = Registry(
    "schedule",
    ScheduleChoice(
        "1f1b",
        "forwards and backwards by turns: keeps at most as many micro-batches as there are stages",
        f"{_PIPELINING}:Schedule1F1B",
    ),
    ScheduleChoice(
        "gpipe",
        "all forwards, then all backwards: the simplest, and the one that needs most memory",
        f"{_PIPELINING}:ScheduleGPipe",
    ),
    ScheduleChoice(
        "interleaved",
        "1f1b with two stages on every worker: smaller bubbles, more to send",
        f"{_PIPELINING}:ScheduleInterleaved1F1B",
        stages_per_worker=2,
    ),
    ScheduleChoice(
        "zero-bubble",
        "interleaved, and gradients of weights are computed where a worker would have waited",
        f"{_PIPELINING}:ScheduleInterleavedZeroBubble",
        stages_per_worker=2,
    ),
)


# ---- --batchnorm ------------------------------------------------------------------------------------

BATCHNORMS = Registry(
    "BatchNorm",
    Choice("local", "each worker normalises its own slice; running statistics are averaged at every step"),
    Choice(
        "sync",
        "mean and variance are those of the whole batch, as in one process",
        "shoal.collectives.sync_batchnorm:synchronise",
    ),
)


def compressor_keeps_state(compress: str) -> bool:
    return COMPRESSORS.parse(compress)[0].keeps_state


# ---- --shard ----------------------------------------------------------------------------------------

SHARD_FORMS = {
    "equal": "parts that differ by at most one sample",
    "balanced=COST": "the heaviest part as light as can be, by length, bytes or a column",
    "weighted=W,W,...": "by weights, a number for each worker",
    "weighted=measured": "by how fast the workers turn out to be",
    "dynamic": "relaxed strategies: handed out while the epoch runs",
    "dynamic=N": "the same, and a worker N times slower than the others is drained (8 unless said; none: nobody is)",
}

SHARD_KINDS = tuple(dict.fromkeys(form.partition("=")[0] for form in SHARD_FORMS))
"""The kinds of sharding."""

MEASURED = "measured"

DRAIN_SLOWER_THAN = 8.0
"""Slowdown against the others at which a worker is drained. One four times slower still does a quarter
of a worker's work; one eight times slower hardly helps, and its gradients are of outdated weights.
"""


class ShardForm(NamedTuple):
    """A parsed `--shard`."""

    how: str
    cost: str | None = None
    weights: tuple[float, ...] | str | None = None
    drain_slower_than: float | None = DRAIN_SLOWER_THAN


def parse_shard(text: str) -> ShardForm:
    """The kind of sharding and its settings; ConfigError for an unknown form."""
    how, _, option = text.partition("=")
    match how:
        case "equal" | "dynamic" if not option:
            return ShardForm(how)
        case "dynamic" if option == "none":
            return ShardForm(how, drain_slower_than=None)
        case "dynamic":
            with contextlib.suppress(ValueError):
                if 1 < float(option) < math.inf:
                    return ShardForm(how, drain_slower_than=float(option))
        case "balanced" if option:
            return ShardForm(how, cost=option)
        case "weighted" if option == MEASURED:
            return ShardForm(how, weights=MEASURED)
        case "weighted" if option:
            with contextlib.suppress(ValueError):
                return ShardForm(how, weights=tuple(float(weight) for weight in option.split(",")))
    forms = ", ".join(SHARD_FORMS)
    raise ConfigError(
        f"'{text}' is no way to cut batches over workers. Nothing was started; there are: {forms}."
    )


def check_shard(text: str, *, num_workers: int, strategy: str, is_relaxed: bool) -> None:
    """Refuse a form that a job cannot run, before anything starts."""
    form = parse_shard(text)
    if form.how == "dynamic" and not is_relaxed and num_workers > 1:
        raise ConfigError(
            f"--shard dynamic hands whole batches to whichever worker is free, and '{strategy}' computes every batch on all "
            f"{num_workers} workers together. Nothing was started; use a relaxed strategy (ps:async, ps:ssp=K), or --shard "
            "weighted=measured."
        )
    if isinstance(form.weights, tuple) and num_workers not in (1, len(form.weights)):
        raise ConfigError(
            f"--shard {text} has {len(form.weights)} weights, and there are {num_workers} workers. Nothing was started; give one "
            "for each, or --shard weighted=measured."
        )
