"""Cost model of a training step: the cost of each way to distribute a model, term by term, and which ways cannot run.

Pure: dataclasses in, predictions out; no torch, no clock, no file. A `Workload` is what one and two
workers of the script were measured to do, a `ClusterShape` the target cluster. A sum of gradients
is the usual latency-bandwidth model, with the latency and bandwidth of each exchange as measured
here, and those of the link where it leaves a host. The terms are described in
docs/adr/0045-planner.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shoal.config import exchange_rule, parallel_options
from shoal.config import strategy as strategies
from shoal.config.choices import COMPRESSORS, EXCHANGES, SCHEDULES, ExchangeCost, GradientSize, ring_share
from shoal.config.parallel_options import DEFAULT_SCHEDULE, ParallelOptions
from shoal.config.strategy import Axes
from shoal.errors import ConfigError

TERMS = ("compute", "communication", "bubble", "server", "apply", "read", "other")
"""Terms of a step, in the order in which they are shown. Communication is the exposed part: what compute does not hide."""

BACKWARD_SHARE = 2 / 3
"""Of compute: a backward is two matrix products for each of a forward's. Sums of gradients hide behind it."""

GATHERS_HIDE = 0.5
"""Of what a sum of gradients hides behind backward: a unit's forward waits for its own gather."""

STATE_COPIES = 4
"""Copies of the parameters that a worker holds with Adam: weights, gradients, two moments. Fewer with others: an upper bound."""

MICRO_BATCHES_PER_STAGE = 2
"""As `shoal.parallel.pipeline.runner` cuts a slice."""

BUBBLE_LEFT = {"1f1b": 1.0, "gpipe": 1.0, "interleaved": 0.5, "zero-bubble": 0.25}
"""Of the bubble of 1f1b: what a schedule leaves."""

ASYNC_WAITS = 0.5
"""Share of a server's time for a push that its worker waits for it, without other waiting workers."""

NEAR_FULL = 0.5
"""Of the memory that there is: from here on shapes are too coarse, and a step is run dry."""

FIRST_BUCKET_BYTES, BUCKET_BYTES, BETWEEN_HOSTS_BYTES = 1 << 20, 25 << 20, 4 << 20
"""As ddp cuts its gradients (`collectives/gradients.py`); a compressor is called once for each bucket."""

UNIT_BYTES = 1 << 20
"""Parameters from which on fsdp gathers a layer on its own, as `shoal.parallel.fsdp` does."""

PAYS_FROM = 0.5
"""A further worker pays where it adds at least this share of what one alone trains."""

BEYOND_IDEAL = 1.3
"""A speedup over this share of the ideal is no speedup: caches explain less."""

MANY_WORKERS = 16
"""Of a host: beyond it only powers of two are looked at, and all of them together."""

SSP_BOUNDS = (2, 8)
SYNC_EVERY = (8, 64)
"""Of ps:ssp=K and --sync-every K: a near one and a far one; what lies between is between them."""

CUT_BY_TP = ("Linear",)
ROW_LAYERS = ("Embedding", "EmbeddingBag", "HashEmbedding")


# ---- inputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayer:
    """One layer of the model, in the order of its forward."""

    name: str
    kind: str
    parameters: int = 0
    parameter_bytes: int = 0
    output_bytes: int = 0
    """Of the whole batch."""

    features: int = 0
    """Size of its output's last dimension; 0 where it is not known."""

    @property
    def cost(self) -> float:
        """Share of the model's compute in no unit: multiplications of its weights, and what it writes."""
        written = self.output_bytes / 4
        products = self.parameters * written / self.features if self.features else 0.0
        return written + (products if self.kind not in ROW_LAYERS else 0.0)

    @property
    def inputs(self) -> int:
        """Size of a Linear layer's input."""
        return self.parameters // self.features if self.features else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Memory of one rank in a step that ran on shapes alone, over a group without peers."""

    ranks: int
    """Ranks that share a batch."""

    shards: int
    """Of fsdp."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    """Parameters, gradients, activations and what lives for a moment; without the optimizer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A script as it was measured. Seconds are of one step."""

    batch: int
    """Samples of one update, over all workers."""

    alone: Mapping[str, float]
    """Terms of a step of one worker with all cores of this machine: nothing is predicted of it."""

    compute_s: float
    """Forward and backward of a whole batch by one worker with `threads`, while no other computes."""

    fixed_s: float = 0.0
    """The part of it that a smaller slice does not make shorter: each micro-batch pays it."""

    crowding: float = 1.0
    """Compute of a slice while `crowd` workers compute, against one alone: they share caches and memory."""

    crowd: int = 1
    """Workers of the calibration."""

    apply_s: float = 0.0
    """The optimizer over all parameters, with gradients that several workers summed."""

    apply_alone_s: float = 0.0
    """The same with gradients as one backward leaves them: rows that occur twice are added up first."""

    read_s: float = 0.0
    """Waiting for a batch."""

    other_s: float = 0.0
    """Time between spans."""

    threads: int = 1
    """Of a worker when compute was measured."""

    thread_gain: float = 1.0
    """Exponent of the speedup by threads: 1 is perfect, 0 is none."""

    overlap: float = 0.0
    """Share of a sum of gradients that backward hides, as two workers showed."""

    waiting_s: float = 0.0
    """Time that workers of one step wait for each other beyond the sum itself, measured with two workers."""

    num_tensors: int = 0
    """Parameters by name, where they are known."""

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    """Of dense gradients, as they are summed."""

    row_bytes: int = 0
    """Rows of sparse gradients that a whole batch touches."""

    layers: tuple[ModelLayer, ...] = ()
    """Empty for a loop of the script's own, which records none."""

    is_batch_dependent: bool = False
    """Whether a layer looks at the whole slice (BatchNorm): then a pipeline cannot cut it into micro-batches."""

    peak_bytes: int = 0
    """Memory of one worker at its peak."""

    dry_runs: tuple[DryRun, ...] = ()
    """Memory of a step by ranks that share a batch and shards of fsdp; without one, memory is by shapes."""

    def dry_run(self, num_ranks: int, num_shards: int) -> DryRun | None:
        return next((e for e in self.dry_runs if (e.ranks, e.shards) == (num_ranks, num_shards)), None)

    @property
    def activation_bytes(self) -> int:
        return sum(layer.output_bytes for layer in self.layers)

    @property
    def base_bytes(self) -> int:
        """Memory that no strategy divides: the interpreter, torch, the script's data."""
        if (alone := self.dry_run(1, 1)) is not None:
            return max(0, self.peak_bytes - alone.peak_bytes - alone.optimizer_bytes)
        return max(0, self.peak_bytes - STATE_COPIES * self.parameter_bytes - self.activation_bytes)


class LinkSpeed(NamedTuple):
    """Latency and bandwidth: a message of S bytes takes latency_s + S / bytes_per_s."""

    latency_s: float
    bytes_per_s: float


class TensorCost(NamedTuple):
    """Cost of each parameter, independent of its size."""

    copies_s: float = 100e-6
    """Under fsdp in a step: the copies around its gathers and sums."""

    apply_s: float = 30e-6
    """In an update by Adam."""


class ServerCost(NamedTuple):
    """Cost of a step through one server, beside its update."""

    latency_s: float
    bytes_per_s: float
    """Of a copy of dense gradients and weights: a worker makes one, the server one for each worker."""

    row_bytes_per_s: float
    """The same of rows, which are also looked up and merged."""


TEN_GIGABIT = LinkSpeed(50e-6, 1.25e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """Cluster that a job would run on."""

    hosts: int = 1
    per_host: int = 1
    """Workers of a host, at most."""

    cores: int = 1
    """Of a host."""

    memory_bytes: int = 0
    """Of a host, or of a device where `is_device_memory`. 0: not known."""

    is_device_memory: bool = False
    speed: float = 1.0
    """Of a worker's compute, in that of this machine's."""

    between: LinkSpeed = TEN_GIGABIT
    """Between hosts."""

    exchanges: Mapping[str, LinkSpeed] = field(default_factory=dict)
    """Of each exchange within a host, per message and byte that a worker sends; see `fitted`."""

    codecs: Mapping[str, LinkSpeed] = field(default_factory=dict)
    """Of each compressor: what it takes beside the sum of what it sends."""

    rows: Mapping[str, LinkSpeed] = field(default_factory=dict)
    """Of rows of sparse gradients within a host, by "auto" and "native": of a sum, and of the bytes that a worker receives."""

    tensors: TensorCost = field(default_factory=TensorCost)

    copy_bytes_per_s: float = 4e9
    """Of a copy in memory: pushes and pulls at a server of the same host, where `served` was not measured."""

    served: ServerCost | None = None

    price: float | None = None
    """Of a host for an hour."""

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.per_host < 1 or self.cores < 1:
            raise ConfigError(
                f"a cluster of {self.hosts} hosts with {self.per_host} workers and {self.cores} cores each is none."
            )
        if not (self.speed > 0 and self.between.bytes_per_s > 0 and self.between.latency_s >= 0):
            raise ConfigError(
                f"a cluster needs a speed and a bandwidth above 0 and a latency of at least 0, got {self.speed}, "
                f"{self.between.bytes_per_s} and {self.between.latency_s}."
            )

    def hosts_of(self, num_workers: int) -> int:
        return -(-num_workers // self.per_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCandidate:
    """One way to run the script."""

    workers: int
    strategy: str
    servers: int = 0
    exchange: str = "auto"
    compress: str = "none"
    schedule: str = DEFAULT_SCHEDULE
    sync_every: int | None = None

    @property
    def name(self) -> str:
        return f"{self.strategy}{parallel_options.as_typed(self.options)}" + (
            f" --servers {self.servers}" if self.servers else ""
        )

    @property
    def options(self) -> ParallelOptions:
        return ParallelOptions(
            exchange=self.exchange, compress=self.compress, schedule=self.schedule, sync_every=self.sync_every
        )

    @property
    def is_exact(self) -> bool:
        """Whether it computes what one process does."""
        return (
            strategies.parse(self.strategy).is_exact and self.compress == "none" and self.sync_every is None
        )

    @property
    def axes(self) -> Axes:
        axes = strategies.parse(self.strategy).axes
        if axes is not None:
            return strategies.fill_axes(axes, self.workers, self.strategy)
        return Axes(dp=self.workers)

    @property
    def family(self) -> str:
        """ "single", "ddp", "ps", "ps:async", "local sgd", or the axes of a mesh by their names: "fsdp", "dp,tp"."""
        parsed = strategies.parse(self.strategy)
        if self.sync_every is not None:
            return "local sgd"
        if parsed.base != "mesh":
            return parsed.base if parsed.is_exact else f"{parsed.base}:{parsed.mode}"
        return ",".join(part.partition("=")[0] for part in str(self.axes).split(","))

    @property
    def mechanism(self) -> str:
        """The family without its replicas, its exchange and its compressor: ways that a measurement of one of them tells something of."""
        names = [name for name in self.family.split(",") if name != "dp"]
        names += [self.exchange] if self.exchange != "auto" else []
        return ",".join([*names, self.compress] if self.compress != "none" else names)

    def flags(self) -> list[str]:
        """Options of `shoal run`."""
        words = ["-n", str(self.workers), "--strategy", self.strategy]
        words += ["--servers", str(self.servers)] if self.servers else []
        return words + parallel_options.as_typed(self.options).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted cost of a candidate."""

    candidate: PlanCandidate
    batch: int
    hosts: int
    terms: Mapping[str, float]
    """Seconds by term; they add up to the step."""

    memory_bytes: int
    """Of one worker at its peak."""

    price: float | None = None

    @property
    def step_s(self) -> float:
        return sum(self.terms.values())

    @property
    def samples_per_s(self) -> float:
        return self.batch / self.step_s

    @property
    def cost_per_million(self) -> float | None:
        """Price of a million samples."""
        return self.price * self.hosts * 1e6 / self.samples_per_s / 3600 if self.price is not None else None

    def corrected(self, measured_s: float) -> Prediction:
        """The same with a step as it was measured; its terms in proportion."""
        ratio = measured_s / self.step_s
        return replace(self, terms={term: ratio * spent for term, spent in self.terms.items()})


class Dropped(NamedTuple):
    """A candidate that cannot run, and why."""

    candidate: PlanCandidate
    reason: str


# ---- sums of gradients ----------------------------------------------------------------------------


SHARDS = "fsdp"
SUMS: dict[str, ExchangeCost] = {
    **{name: choice.cost for name, choice in EXCHANGES.items() if choice.cost is not None},
    # A unit of fsdp gathers its parameters for forward and for backward, and sums and scatters its gradients.
    SHARDS: ExchangeCost(
        lambda n: 3 * (n - 1), lambda n: 1.5 * ring_share(n), lambda w, h: 1.5 * ring_share(w * h)
    ),
}
"""Without hierarchical, which is shm within a host and a ring between them."""

BESIDE_BYTES = 256
UNMEASURED = LinkSpeed(100e-6, 1e9)


def fitted(name: str, seconds_by_bytes: Mapping[int, float], num_workers: int) -> LinkSpeed:
    """Latency of a message and bandwidth of a worker by which an exchange took these times.

    The latency is that of the smallest tensor; the bandwidth is fitted to what larger ones took
    beyond it, by least squares of relative errors, so that no size counts more than another.
    """
    cost, sizes = SUMS[name], sorted(seconds_by_bytes)
    rounds, sent = cost.rounds(num_workers), cost.sent(num_workers)
    latency_s = seconds_by_bytes[sizes[0]] / rounds
    top = bottom = 0.0
    for size in sizes[1:]:
        taken, volume = seconds_by_bytes[size], sent * size
        top += max(taken - rounds * latency_s, 0.0) * volume / taken**2
        bottom += (volume / taken) ** 2
    return LinkSpeed(latency_s, bottom / top if top > 0 else UNMEASURED.bytes_per_s)


def all_reduce_s(
    name: str,
    num_bytes: float,
    num_workers: int,
    cluster: ClusterShape,
    *,
    hosts: int | None = None,
    sharing: int = 1,
) -> float:
    """Seconds of one sum over so many workers, by an exchange.

    `hosts`: where they are on fewer or more than they could be. `sharing`: groups that sum at once over a host's link.
    """
    if num_workers == 1 or num_bytes <= 0:
        return 0.0
    hosts = cluster.hosts_of(num_workers) if hosts is None else hosts
    each = -(-num_workers // hosts)
    if name == "auto":
        name = auto_exchange(num_workers, hosts)
    if name == "hierarchical":
        inside = all_reduce_s("shm", num_bytes, each, cluster, hosts=1)
        around = 2 * (hosts - 1) * cluster.between.latency_s
        return inside + around + ring_share(hosts) * num_bytes / cluster.between.bytes_per_s
    cost, link = SUMS[name], cluster.exchanges.get(name, UNMEASURED)
    moved = cost.sent(num_workers) * num_bytes / link.bytes_per_s
    if hosts == 1:
        return cost.rounds(num_workers) * link.latency_s + moved
    latency_s = max(link.latency_s, cluster.between.latency_s)
    left = sharing * cost.leaving(each, hosts) * num_bytes / cluster.between.bytes_per_s
    return cost.rounds(num_workers) * latency_s + max(moved, left)


def gradient_sum_s(
    name: str, num_bytes: float, num_workers: int, cluster: ClusterShape, *, hosts: int
) -> float:
    """A step's sum: its gradients, and beside them a few numbers (loss, counts, flags)."""
    return sum(
        all_reduce_s(name, each, num_workers, cluster, hosts=hosts) for each in (num_bytes, BESIDE_BYTES)
    )


def rows_sum_s(name: str, num_bytes: float, num_workers: int, cluster: ClusterShape, *, hosts: int) -> float:
    """Rows of so many bytes go from every worker to all others: through shared memory where the exchange is that, else by torch's gathers."""
    shares = name in ("auto", "shm", "hierarchical") and auto_exchange(num_workers, hosts) != "native"
    found = cluster.rows.get("auto" if shares else "native")
    if found is not None and hosts == 1 and num_workers > 1 and num_bytes > 0:
        return found.latency_s + (num_workers - 1) * num_bytes / found.bytes_per_s
    link = cluster.exchanges.get("shm" if shares else "native", UNMEASURED)
    via = replace(cluster, exchanges={"allgather": link})
    return all_reduce_s("allgather", num_bytes, num_workers, via, hosts=hosts)


def auto_exchange(num_workers: int, hosts: int) -> str:
    return exchange_rule.built_in(
        num_workers=num_workers, num_hosts=hosts, processor=exchange_rule.ORDERED[0]
    )


def compressed(compress: str, num_bytes: float, num_workers: int, layers: Sequence[ModelLayer]) -> float:
    """Bytes that a sum of gradients moves, in those of an all-reduce without compression."""
    choice, settings = COMPRESSORS.parse(compress)
    matrices = [(layer.parameters, layer.features, layer.inputs) for layer in layers if layer.features]
    return choice.sum_bytes(GradientSize(num_bytes, num_workers, matrices), settings)


def served_bytes(compress: str, dense_bytes: float, row_bytes: float) -> float:
    """Bytes that a worker pushes of such gradients, and pulls of the weights."""
    choice, settings = COMPRESSORS.parse(compress)
    codec = choice.codec
    if codec is None:
        return 2 * (dense_bytes + row_bytes)
    pull_codec = COMPRESSORS[codec.pull].codec if codec.pull else None
    pulled = pull_codec.share({}) if pull_codec is not None else 1.0
    pushed = codec.share(settings)
    return dense_bytes * (pushed + pulled) + row_bytes * ((1.0 if choice.pushes_parts else pushed) + pulled)


# ---- one candidate --------------------------------------------------------------------------------


def predict(candidate: PlanCandidate, workload: Workload, cluster: ClusterShape) -> Prediction:
    """Step time by terms, and memory. One worker is what was measured of it, at the cluster's speed."""
    hosts = cluster.hosts_of(candidate.workers)
    if candidate.workers == 1 and not candidate.servers:
        terms = {term: workload.alone.get(term, 0.0) / cluster.speed for term in TERMS}
    else:
        terms = _terms(candidate, workload, cluster, hosts)
    return Prediction(
        candidate=candidate,
        batch=workload.batch,
        hosts=hosts,
        terms=terms,
        memory_bytes=memory_of(candidate, workload),
        price=cluster.price,
    )


def _terms(c: PlanCandidate, w: Workload, cluster: ClusterShape, hosts: int) -> dict[str, float]:
    axes, terms = c.axes, dict.fromkeys(TERMS, 0.0)
    slow = _slowdown(c, w, cluster, hosts)
    crowded = _crowding(c, w, hosts)
    share = 1 / axes.num_data_ranks  # of a batch
    cut = cut_share(w.layers, axes.tp)
    by_tp = 1 - cut + cut / axes.tp
    fixed = w.fixed_s * slow * crowded
    sliding = (w.compute_s - w.fixed_s) * share * by_tp * slow * crowded
    # A sum of ranks in a row waits for the slowest of them.
    imbalance = stage_imbalance(w.layers, axes.pp)
    num_micro = micro_batches(w, axes.pp)
    micro_s = (fixed + sliding / num_micro) / axes.pp * imbalance
    terms["compute"] = num_micro * micro_s
    if axes.pp > 1:
        terms["bubble"] = (axes.pp - 1) * micro_s * BUBBLE_LEFT[c.schedule]
    parts = axes.tp * axes.pp * axes.fsdp
    # Calls for each parameter, and the loop between steps, are Python's: neither threads nor parts make them shorter.
    calling = _turns(c, cluster, hosts) / cluster.speed
    by_tensor_s = min(w.apply_s, w.num_tensors * cluster.tensors.apply_s)
    terms["apply"] = by_tensor_s * calling / axes.pp + (w.apply_s - by_tensor_s) * slow / parts
    if w.row_bytes and parts > 1:
        terms["apply"] = w.apply_alone_s * slow  # rows are not cut: a worker has those of its whole slice
    if axes.fsdp > 1:
        terms["compute"] += w.num_tensors * cluster.tensors.copies_s * calling
    terms["read"], terms["other"] = w.read_s * slow * share, w.other_s * calling
    if c.servers:
        _add_server_terms(terms, c, w, cluster, hosts, slow)
        return terms
    hidden_s = BACKWARD_SHARE * terms["compute"]
    if c.sync_every is not None:
        # Nothing hides behind a backward: whole models are averaged between steps.
        met_s = all_reduce_s("auto", w.parameter_bytes, c.workers, cluster, hosts=hosts) + w.waiting_s
        terms["communication"] = met_s / c.sync_every
        return terms
    terms["communication"] = (
        _exposed(_gradients_s(c, w, cluster, hosts), _overlap(c, w, hosts), hidden_s)
        + _exposed(_gathers_s(axes, w, cluster, hosts), GATHERS_HIDE * w.overlap, hidden_s)
        + _activations_s(axes, w, cluster, num_micro, share)
        + _rows_s(c, w, cluster, hosts)
        + w.waiting_s
        + _codec_s(c, w, cluster, hosts)
    )
    return terms


def _overlap(c: PlanCandidate, w: Workload, hosts: int) -> float:
    """Share of a sum that backward hides: of the exchange that was measured, and of links between hosts.

    Within a host the threads of another exchange take turns with backward on the same cores.
    """
    is_measured = c.exchange in ("auto", auto_exchange(c.workers, hosts))
    return w.overlap if is_measured or hosts > 1 else 0.0


def _codec_s(c: PlanCandidate, w: Workload, cluster: ClusterShape, hosts: int) -> float:
    found = cluster.codecs.get(c.compress.partition(":")[0])
    if found is None:
        return 0.0
    bucket_bytes = BETWEEN_HOSTS_BYTES if hosts > 1 else BUCKET_BYTES
    num_buckets = 1 + math.ceil(max(0, w.gradient_bytes - FIRST_BUCKET_BYTES) / bucket_bytes)
    return num_buckets * found.latency_s + w.gradient_bytes / found.bytes_per_s


def _slowdown(c: PlanCandidate, w: Workload, cluster: ClusterShape, hosts: int) -> float:
    """Factor of compute against what was measured, from threads, cores and the device."""
    each = -(-c.workers // hosts)
    servers = -(-c.servers // hosts)
    threads = max(1, (cluster.cores - servers // 2) // each)
    return math.pow(w.threads / threads, w.thread_gain) * _turns(c, cluster, hosts) / cluster.speed


def _turns(c: PlanCandidate, cluster: ClusterShape, hosts: int) -> float:
    """Workers of a host per core, at least 1: the factor by which more workers than cores slow each other down. Servers take no core
    from their workers: they work while these wait."""
    return max(1.0, -(-c.workers // hosts) / cluster.cores)


def _crowding(c: PlanCandidate, w: Workload, hosts: int) -> float:
    """Factor of compute from the other workers of a host that compute at the same time."""
    if w.crowd == 1:
        return 1.0
    others = -(-c.workers // hosts) - 1
    axes, num_micro = c.axes, micro_batches(w, c.axes.pp)
    busy = num_micro / (num_micro + (axes.pp - 1) * BUBBLE_LEFT[c.schedule])
    return math.pow(w.crowding, busy * others / (w.crowd - 1))


def _exposed(took_s: float, overlap: float, hidden_s: float) -> float:
    return took_s - min(overlap * took_s, hidden_s)


def _gradients_s(c: PlanCandidate, w: Workload, cluster: ClusterShape, hosts: int) -> float:
    """All-reduce over the replicas."""
    axes = c.axes
    num_bytes = w.gradient_bytes / (axes.fsdp * axes.tp * axes.pp)
    if c.family == "ddp":
        sent = compressed(c.compress, num_bytes, c.workers, w.layers)
        return gradient_sum_s(c.exchange, sent, c.workers, cluster, hosts=hosts)
    # Replicas of a mesh are the outer axis: they are on different hosts as soon as there are several.
    span = min(hosts, axes.dp)
    return all_reduce_s(
        "native", num_bytes, axes.dp, cluster, hosts=span, sharing=_sharing(c.workers, hosts, axes.dp, span)
    )


def _sharing(workers: int, hosts: int, group: int, span: int) -> int:
    """Groups of so many ranks over `span` hosts that a host's link serves at once."""
    return max(1, -(-workers // hosts) // -(-group // span))


def _gathers_s(axes: Axes, w: Workload, cluster: ClusterShape, hosts: int) -> float:
    """fsdp: units are gathered and scattered, as `shards_of` measures them."""
    if axes.fsdp == 1:
        return 0.0
    around = axes.fsdp * axes.tp  # ranks from one end of a shard group to the other
    span = min(hosts, -(-around // cluster.per_host), axes.fsdp)
    num_bytes = w.gradient_bytes / (axes.tp * axes.pp)
    units = 1 + sum(layer.parameter_bytes >= UNIT_BYTES for layer in w.layers)
    sharing = _sharing(axes.num_ranks, hosts, axes.fsdp, span)
    return units * all_reduce_s(SHARDS, num_bytes / units, axes.fsdp, cluster, hosts=span, sharing=sharing)


def _activations_s(axes: Axes, w: Workload, cluster: ClusterShape, num_micro: int, share: float) -> float:
    """tp sums activations after each pair of layers that it cuts, forward and backward; pp sends them to the next stage."""
    found = 0.0
    if axes.tp > 1:
        span = min(cluster.hosts, -(-axes.tp // cluster.per_host))
        for closing in cut_layers(w.layers, axes.tp)[1::2] or cut_layers(w.layers, axes.tp)[:1]:
            each = closing.output_bytes * share / num_micro
            found += 2 * num_micro / axes.pp * all_reduce_s("native", each, axes.tp, cluster, hosts=span)
    if axes.pp > 1:
        link = cluster.exchanges.get("ring", UNMEASURED)
        if cluster.hosts > 1:
            link = LinkSpeed(
                max(link.latency_s, cluster.between.latency_s),
                min(link.bytes_per_s, cluster.between.bytes_per_s),
            )
        sizes = [layer.output_bytes for layer in w.layers] or [0]
        each = sorted(sizes)[len(sizes) // 2] * share / num_micro
        found += 2 * num_micro * (link.latency_s + each / link.bytes_per_s)
    return found


def _rows_s(c: PlanCandidate, w: Workload, cluster: ClusterShape, hosts: int) -> float:
    """Rows of sparse gradients, which no compressor makes smaller."""
    ranks = c.axes.num_data_ranks
    exchange = c.exchange if c.family == "ddp" else "native"
    return rows_sum_s(exchange, w.row_bytes / ranks, ranks, cluster, hosts=min(hosts, ranks))


def _add_server_terms(
    terms: dict[str, float], c: PlanCandidate, w: Workload, cluster: ClusterShape, hosts: int, slow: float
) -> None:
    """A worker pushes its gradients and pulls what was made of them; servers apply them in between."""
    cost = cluster.served or ServerCost(0.0, cluster.copy_bytes_per_s, cluster.copy_bytes_per_s)
    rows = w.row_bytes / c.workers
    dense_bytes, moved_rows = (
        served_bytes(c.compress, *each) for each in ((w.gradient_bytes, 0.0), (0.0, rows))
    )
    moved, rows_s = dense_bytes + moved_rows, moved_rows / cost.row_bytes_per_s
    copies_s, link_s = dense_bytes / cost.bytes_per_s + rows_s, cost.latency_s
    if hosts > 1:
        # A server's host takes in what the workers of all other hosts push, and gives out what they pull.
        far = c.workers - -(-c.workers // hosts)
        on_one = -(-c.servers // hosts)
        link_s += max(1, on_one) / c.servers * far * moved / cluster.between.bytes_per_s
        link_s += 2 * cluster.between.latency_s
    replicas = 2 if c.servers > 1 else 1
    parsed = strategies.parse(c.strategy)
    if parsed.mode == "hybrid":
        # Dense gradients are summed between the workers; rows alone are the servers'.
        row_share = rows / (w.gradient_bytes + rows)
        copies_s, link_s = rows_s, link_s * row_share
        dense_s = all_reduce_s("auto", w.gradient_bytes, c.workers, cluster, hosts=hosts)
        terms["communication"] = (
            _exposed(dense_s, w.overlap, BACKWARD_SHARE * terms["compute"]) + copies_s + link_s + w.waiting_s
        )
        # Rows are pushed asynchronously: each push is one pass over its bytes and is added to no sum, half of what an exact one takes.
        served_s = (c.workers * copies_s / 2 + w.apply_s * slow * replicas * row_share) / c.servers
        terms["apply"] *= 1 - row_share
        terms["server"] = max(0.0, served_s - terms["compute"])
        return
    terms["apply"] = 0.0
    # A server applies without neighbours that apply at the same time, and duplicate rows were merged before the
    # push: the shorter of the two measured times.
    apply_s = min(w.apply_alone_s or w.apply_s, w.apply_s)
    if parsed.is_exact:
        # Each push is copied and added to the sum, and the sum is applied once.
        served_s = (c.workers * copies_s + apply_s * slow * replicas) / c.servers
        terms["communication"] = copies_s + link_s + w.waiting_s
        terms["server"] = served_s
    else:
        # No worker waits for another: each push is an update of a slice, so a batch takes as many of them
        # as there are workers.
        served_s = (copies_s / 2 + apply_s * slow * replicas) / c.servers
        own_s = sum(terms.values()) + copies_s + link_s + ASYNC_WAITS * served_s
        terms["communication"] = copies_s + link_s
        if parsed.bound is not None:  # ssp: the quickest waits for the slowest once it is so many steps ahead
            terms["communication"] += w.waiting_s / (parsed.bound + 1)
        terms["server"] = ASYNC_WAITS * served_s + max(0.0, c.workers * served_s - own_s)


# ---- layers ---------------------------------------------------------------------------------------


def cut_layers(layers: Sequence[ModelLayer], degree: int) -> list[ModelLayer]:
    """Layers whose features tp can cut into so many parts."""
    return [
        layer
        for layer in layers
        if layer.kind in CUT_BY_TP
        and (layer.features and (layer.features % degree == 0 or layer.inputs % degree == 0))
    ]


def cut_share(layers: Sequence[ModelLayer], degree: int) -> float:
    """Share of the model's compute that tp divides."""
    whole = sum(layer.cost for layer in layers)
    return sum(layer.cost for layer in cut_layers(layers, degree)) / whole if whole and degree > 1 else 0.0


def micro_batches(w: Workload, num_stages: int) -> int:
    return 1 if num_stages == 1 or w.is_batch_dependent else MICRO_BATCHES_PER_STAGE * num_stages


def stage_imbalance(layers: Sequence[ModelLayer], num_stages: int) -> float:
    """The costliest stage against the mean, where layers are cut as evenly as they can be."""
    costs = [layer.cost for layer in layers]
    if num_stages == 1 or sum(costs) <= 0:
        return 1.0
    low, high = max(costs), sum(costs)
    for _ in range(40):
        limit, stages, filled = (low + high) / 2, 1, 0.0
        for cost in costs:
            stages, filled = (stages, filled + cost) if filled + cost <= limit else (stages + 1, cost)
        low, high = (low, limit) if stages <= num_stages else (limit, high)
    return high / (sum(costs) / num_stages)


def memory_of(c: PlanCandidate, w: Workload) -> int:
    """Peak of one worker; of one worker alone, what was measured."""
    axes = c.axes
    dry = w.dry_run(axes.num_data_ranks, axes.fsdp)
    if dry is not None:
        return round(w.base_bytes + max(_dry_bytes(c, dry), w.parameter_bytes))
    activations = w.activation_bytes / axes.num_data_ranks / axes.tp / axes.pp
    state = STATE_COPIES * w.parameter_bytes
    if c.servers and strategies.parse(c.strategy).mode != "hybrid":
        state = 2 * w.parameter_bytes
    elif c.family == "ddp" and c.workers > 1:
        state += w.gradient_bytes  # buckets
    else:
        state = round(state / (axes.fsdp * axes.tp * axes.pp))
        if axes.fsdp > 1:
            state += max((layer.parameter_bytes for layer in w.layers), default=0)
    # A script builds the whole model before it is cut.
    return round(w.base_bytes + max(state + activations, w.parameter_bytes))


def _dry_bytes(c: PlanCandidate, dry: DryRun) -> float:
    """Memory of a candidate from a dry run: tp and pp divide it, servers hold the optimizer's state, ddp sums in buckets."""
    if c.servers and strategies.parse(c.strategy).mode != "hybrid":
        return dry.peak_bytes
    buckets = dry.gradient_bytes if c.family == "ddp" and c.workers > 1 else 0
    return (dry.peak_bytes + dry.optimizer_bytes + buckets) / (c.axes.tp * c.axes.pp)


def asks_for_dry_run(c: PlanCandidate, w: Workload, cluster: ClusterShape) -> bool:
    """Whether memory decides of a candidate: by shapes it is near to what there is, or beyond."""
    if (
        not cluster.memory_bytes
        or not w.layers
        or refusal(c, w, replace(cluster, memory_bytes=0)) is not None
    ):
        return False
    return _needed_bytes(c, w, cluster) > NEAR_FULL * cluster.memory_bytes


def _needed_bytes(c: PlanCandidate, w: Workload, cluster: ClusterShape) -> int:
    """Memory needed of a device, or of a host by all its workers."""
    if cluster.is_device_memory:
        return memory_of(c, w) - w.base_bytes  # the interpreter is in the host's memory
    return memory_of(c, w) * -(-c.workers // cluster.hosts_of(c.workers))


# ---- all candidates -------------------------------------------------------------------------------


def worker_counts(cluster: ClusterShape) -> list[int]:
    """1 to all workers of a host, then whole hosts."""
    most = cluster.per_host
    within = list(range(1, most + 1))
    if most > MANY_WORKERS:
        within = sorted({*(1 << power for power in range(most.bit_length())), most})
    return [*within, *(most * hosts for hosts in range(2, cluster.hosts + 1))]


def enumerate_candidates(
    cluster: ClusterShape, *, counts: Sequence[int] | None = None
) -> Iterator[PlanCandidate]:
    """Every combination; most of them cannot run, or make no sense, and `refusal` gives the reason."""
    for workers in counts if counts is not None else worker_counts(cluster):
        if workers == 1:
            yield PlanCandidate(workers=1, strategy="single")
            continue
        hosts = cluster.hosts_of(workers)
        for exchange, compress in itertools.product(EXCHANGES, COMPRESSORS.values()):
            if exchange != "hierarchical" or hosts > 1:
                yield PlanCandidate(
                    workers=workers,
                    strategy="ddp",
                    exchange=exchange,
                    compress="none" if compress.name == "none" else compress.form,
                )
        for axes in _factorisations(workers):
            names = [part.partition("=")[0] for part in str(axes).split(",")]
            strategy = names[0] if len(names) == 1 else str(axes)
            for schedule in SCHEDULES if axes.pp > 1 else (DEFAULT_SCHEDULE,):
                yield PlanCandidate(workers=workers, strategy=strategy, schedule=schedule)
        for servers in (1 << power for power in range(min(workers, 64).bit_length())):
            for strategy in ("ps", "ps:async", *(f"ps:ssp={bound}" for bound in SSP_BOUNDS), "ps:hybrid"):
                yield PlanCandidate(workers=workers, strategy=strategy, servers=servers)
        for every in SYNC_EVERY:
            yield PlanCandidate(workers=workers, strategy="ddp", sync_every=every)


def _factorisations(workers: int) -> Iterator[Axes]:
    """Degrees of pp, dp, fsdp and tp that multiply to the workers, at least one of them of a mesh."""
    divisors = [n for n in range(1, workers + 1) if workers % n == 0]
    for pp, fsdp, tp in itertools.product(divisors, repeat=3):
        rest, left = divmod(workers, pp * fsdp * tp)
        if left == 0 and rest >= 1 and pp * fsdp * tp > 1:
            yield Axes(pp=pp, dp=rest, fsdp=fsdp, tp=tp)


def refusal(c: PlanCandidate, w: Workload, cluster: ClusterShape) -> str | None:
    """Why a candidate cannot run; None where it can."""
    axes, hosts = c.axes, cluster.hosts_of(c.workers)
    try:
        parallel_options.check(c.options, strategy=c.strategy, num_workers=c.workers, num_hosts=hosts)
    except ConfigError as error:
        return str(error).partition(" Nothing was started")[0]
    if w.batch < axes.num_data_ranks:
        return f"a batch of {w.batch} samples cannot be cut over {axes.num_data_ranks} workers"
    if (axes.tp > 1 or axes.pp > 1) and not w.layers:
        return "the script has a loop of its own, which records no layers to cut"
    if axes.tp > 1 and not cut_layers(w.layers, axes.tp):
        return f"no Linear layer of the model has features that divide by {axes.tp}"
    if axes.pp > 1:
        stages = axes.pp * SCHEDULES[c.schedule].stages_per_worker
        in_a_row = sum(1 for layer in w.layers if layer.parameters)
        if stages > in_a_row:
            return f"{stages} stages are more than the {in_a_row} layers with parameters"
        micro, slice_size = micro_batches(w, axes.pp), w.batch // axes.num_data_ranks
        if slice_size < micro:
            return f"a slice of {slice_size} samples cannot be cut into {micro} micro-batches"
    if strategies.parse(c.strategy).mode == "hybrid" and not w.row_bytes:
        return "ps:hybrid keeps rows of sparse gradients on servers, and this model has none"
    rows = [layer.name for layer in w.layers if layer.kind in ROW_LAYERS] if w.row_bytes else []
    if axes.fsdp > 1 and rows:
        return f"'{rows[0]}' has sparse gradients, and fsdp shards dense ones only"
    room = cluster.memory_bytes
    if room:
        needed, each = _needed_bytes(c, w, cluster), -(-c.workers // hosts)
        if needed > room:
            of = "a device" if cluster.is_device_memory else f"the {each} workers of a host"
            by = (
                "a dry run of its step"
                if w.dry_run(axes.num_data_ranks, axes.fsdp)
                else "the shapes of its layers"
            )
            return f"{of} would need {needed / 2**30:.3g} GiB by {by}, and there are {room / 2**30:.3g} GiB"
    return None


def sift(
    candidates: Iterator[PlanCandidate], workload: Workload, cluster: ClusterShape
) -> tuple[list[Prediction], list[Dropped]]:
    """Predictions of those that can run, the quickest first; and the others."""
    found, dropped = [], []
    for candidate in candidates:
        reason = refusal(candidate, workload, cluster)
        if reason is None:
            found.append(predict(candidate, workload, cluster))
        else:
            dropped.append(Dropped(candidate, reason))
    return sorted(found, key=lambda each: (each.step_s, each.candidate.workers, each.candidate.name)), dropped


def learned(predictions: Sequence[Prediction], measured: Mapping[PlanCandidate, float]) -> list[Prediction]:
    """Predictions as measured where they were, and by what was measured of the same mechanism and as many workers, or others."""
    ratios: dict[tuple[str, int], float] = {}
    for each in predictions:
        took_s = measured.get(each.candidate)
        if took_s is not None and each.candidate.workers > 1:
            key = each.candidate.mechanism, each.candidate.workers
            ratios[key] = min(ratios.get(key, math.inf), took_s / each.step_s)
    by_mechanism: dict[str, list[float]] = {}
    for (mechanism, _), ratio in ratios.items():
        by_mechanism.setdefault(mechanism, []).append(ratio)
    found = []
    for each in predictions:
        c = each.candidate
        others = by_mechanism.get(c.mechanism)
        took_s = measured.get(c)
        if took_s is None and others:
            took_s = each.step_s * ratios.get((c.mechanism, c.workers), sum(others) / len(others))
        found.append(each.corrected(took_s) if took_s is not None else each)
    return found


# ---- choosing -------------------------------------------------------------------------------------


def value_of(prediction: Prediction, objective: str) -> float:
    """Objective to minimise."""
    return prediction.step_s if objective == "time" else (prediction.cost_per_million or math.inf)


def best_by_workers(predictions: Sequence[Prediction]) -> dict[int, Prediction]:
    """The quickest for each number of workers."""
    found: dict[int, Prediction] = {}
    for each in predictions:
        workers = each.candidate.workers
        if workers not in found or each.step_s < found[workers].step_s:
            found[workers] = each
    return dict(sorted(found.items()))


def stops_paying(best: Mapping[int, Prediction]) -> str:
    """At how many workers the next one stops paying, in one sentence."""
    counts = sorted(best)
    if not counts or counts[0] != 1 or len(counts) < 2:
        return "Other numbers of workers were not looked at."
    alone = best[1].samples_per_s
    beyond = [n for n in counts if best[n].samples_per_s > BEYOND_IDEAL * n * alone]
    if beyond:
        return (
            f"{beyond[0]} workers came to {best[beyond[0]].samples_per_s / alone / beyond[0]:.0%} of the ideal, which cannot be: one worker was "
            "measured while other processes had the machine, or its threads share a core. Plan again while nothing else runs."
        )
    for before, after in itertools.pairwise(counts):
        gained = (best[after].samples_per_s - best[before].samples_per_s) / (after - before)
        if gained < PAYS_FROM * alone:
            term = _grown(best[before], best[after])
            return (
                f"The next worker stops paying at {before}: each of the {after - before} beyond would add {gained:,.0f} samples/s, "
                f"{gained / alone:.0%} of what one alone trains ({alone:,.0f}), because of {term}."
            )
    return (
        f"All {counts[-1]} workers pay: the last ones still add {gained:,.0f} samples/s each, {gained / alone:.0%} of what one alone "
        f"trains ({alone:,.0f})."
    )


_CAUSE = {
    "communication": "what the workers exchange",
    "compute": "compute that a smaller slice does not make shorter",
    "bubble": "the pipeline's bubble",
    "server": "the time of the servers",
    "apply": "the optimizer, which every worker runs over all parameters",
    "read": "waiting for data",
    "other": "the loop between its steps",
}


def _grown(before: Prediction, after: Prediction) -> str:
    """The term that kept the step from becoming shorter in proportion."""
    ideal = before.candidate.workers / after.candidate.workers
    lost = {term: after.terms[term] - ideal * before.terms[term] for term in TERMS}
    return _CAUSE[max(lost, key=lambda term: lost[term])]


def why(chosen: Prediction, predictions: Sequence[Prediction], workload: Workload) -> str:
    """Why this way fits this model, in one sentence."""
    c, terms = chosen.candidate, chosen.terms
    if c.workers == 1:
        others = [each for each in predictions if each.candidate.workers > 1]
        if not others:
            return "One worker: nothing else can run."
        nearest = min(others, key=lambda each: each.step_s)
        worst = max(("communication", "compute", "server", "bubble"), key=lambda term: nearest.terms[term])
        return (
            f"One worker fits this model: {nearest.candidate.workers} workers ({nearest.candidate.name}) would take {_ms(nearest.step_s)} "
            f"for a step that takes {_ms(chosen.step_s)} alone, {_ms(nearest.terms[worst])} of it {_CAUSE[worst]}."
        )
    sizes = f"{workload.gradient_bytes / 1e6:.3g} MB of gradients"
    fact = {
        "ddp": f"{sizes} cost {_ms(terms['communication'])} of a step of {_ms(chosen.step_s)}, the rest is each worker's own",
        "local sgd": f"workers train apart and average {workload.parameter_bytes / 1e6:.3g} MB every {c.sync_every} steps",
        "ps": f"servers take {_ms(terms['server'])} of a step of {_ms(chosen.step_s)} and hold the optimizer and its rows",
    }.get(
        "ps" if c.servers else c.family,
        f"each worker holds a part of the {workload.parameter_bytes / 1e6:.3g} MB of parameters, for {_ms(terms['communication'])} of "
        f"communication and {_ms(terms['bubble'])} of bubble in a step of {_ms(chosen.step_s)}",
    )
    others = [
        each
        for each in predictions
        if each.candidate.family != c.family and each.candidate.workers == c.workers
    ]
    if not others:
        return f"{c.family} fits this model: {fact}; nothing else can run on {c.workers} workers."
    nearest = min(others, key=lambda each: each.step_s)
    if nearest.step_s < chosen.step_s:
        return f"{c.family} fits this model: {fact}; {nearest.candidate.name} is predicted at {_ms(nearest.step_s)}, and was not run."
    term = max(TERMS, key=lambda each: nearest.terms[each] - terms[each])
    return (
        f"{c.family} fits this model: {fact}; the nearest other way, {nearest.candidate.name}, would take {_ms(nearest.step_s)}, "
        f"{_ms(nearest.terms[term])} of it {_CAUSE[term]}."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
