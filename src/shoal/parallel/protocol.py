"""Protocol between the Trainer and every strategy.

The Trainer never calls `backward()` or `step()`. It passes slices to a Strategy and asks it to
commit; how the strategy does it (one process, buckets, shards, stages, servers) is its own matter.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from shoal.collectives.compression import Traffic
from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.parallel.loss import LossRule
from shoal.parallel.loss_scale import LossScale
from shoal.ps.client.bulk_transfer import RowStamps
from shoal.recovery.state_transfer import register_result_type

if TYPE_CHECKING:
    from shoal.recovery.replay_log import ReplayLog


@dataclass(slots=True)
class ControlFlags:
    """Requests of this rank for the next commit. The StepResult holds the decision, equal on all ranks."""

    stop: bool = False
    """End this fit after the step."""

    checkpoint: bool = False
    """Save after the step."""

    leave: bool = False
    """Save after the step and end the script: Ctrl-C or SIGTERM."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One of several optimizers that update a model in turn, on one batch."""

    name: str
    others: tuple[nn.Parameter, ...]
    """Parameters of the other optimizers: no gradient is computed for them, or it is dropped."""


@dataclass(slots=True, kw_only=True)
class TrainJob:
    """Everything a strategy is given to train."""

    model: nn.Module
    loss: LossRule
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None
    """Builds the user's optimizer on the parameters as the strategy left them; None for evaluate and predict alone."""

    given_optimizer: torch.optim.Optimizer | None = None
    """The user's own, if it is an instance and no function: a strategy that partitions parameters rebinds it."""

    training_step: Callable[..., Any] | None = None
    """The user's own: the loss of a batch, by `(model, batch)` or `(model, batch, name of the optimizer)`."""

    turn: Turn | None = None
    """Whose turn it is, where a model has several optimizers; set before each forward_backward."""

    clip_norm: float | None = None
    """Largest global norm of the gradient."""

    num_micro: int = 1
    """Parts into which a slice is divided, with gradients accumulated."""

    on_nonfinite: str = "raise"
    """"raise", or "skip": leave a step with a loss or gradient that is not finite out, and count it."""

    autocast: torch.dtype | None = None
    """Run forward in this precision."""

    loss_scale: LossScale | None = None
    """Loss scale of fp16: backward begins with the loss times its value, and the commit divides by it."""

    cast_inputs: torch.dtype | None = None
    """Floating inputs and targets are cast to this; set by `shoal verify`."""

    tensor_plan: Mapping[str, str] | None = None
    """The user's plan: pattern of layer names to "colwise", "rowwise" or "replicated"; for tp."""

    pipeline_cut: Sequence[str] | None = None
    """User's choice for pp: names of the layers at which stages begin, without the first."""

    first_slice: Callable[[], Slice] | None = None
    """Reads data like those the model will receive, to measure it with; None if there are none yet."""

    checkpoint_activations: bool | Sequence[str] = False
    """Whether blocks of the model run again within backward; or patterns of the names of those that do."""

    checks_every_loss: bool = False
    """Check at every step that the loss recombines, not only at the first; set by `shoal verify`."""

    compile: bool = False
    """Compile the model."""

    is_own_loop: bool = False
    """Whether the user's own loop calls backward."""

    number: int = 0
    """Number of this Trainer or loop in the script, from 0: it identifies the state in transfers."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    control: ControlFlags = field(default_factory=ControlFlags)

    @property
    def measures_norm(self) -> bool:
        """Whether a step needs the norm of its gradient: to clip it, or to leave out what is not finite."""
        return self.clip_norm is not None or self.may_skip

    @property
    def may_skip(self) -> bool:
        """Whether a step that is not finite is left out, and training goes on."""
        return self.on_nonfinite == "skip" or self.loss_scale is not None

    @property
    def scale(self) -> float:
        """Factor of the loss that backward begins with."""
        return self.loss_scale.value if self.loss_scale is not None else 1.0

    def scaled(self, total: torch.Tensor) -> torch.Tensor:
        """The loss that backward begins with."""
        if self.loss_scale is None:
            return total
        return (total.float() if total.dtype is torch.float16 else total) * self.scale  # it may exceed fp16


@dataclass(frozen=True, slots=True)
class LossSum:
    """Contribution of a slice: loss sum, its count, and the model's outputs for the metrics."""

    total: torch.Tensor
    count: float
    outputs: Tree | None
    """Outputs in the order of the slice; None when all of it was borrowed."""

    on_its_way: tuple[torch.Tensor, torch.Event] | None = None
    """A total on a device: its place in host memory, and the event of its arrival."""

    named: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By name: sum and count of the loss's parts beside its total."""

    def read(self) -> float:
        """The total as a number. On a device this waits for the forward only: backward may still run."""
        if self.on_its_way is None:
            return float(self.total)
        there, event = self.on_its_way
        event.synchronize()
        return float(there)


@register_result_type
@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Outcome of a committed step; equal on every rank."""

    loss: float
    """Global mean loss of the step."""

    loss_total: float
    """Global sum, and `count`, its divisor: what an epoch's mean is made of."""

    count: float
    applied: bool
    """False where the step was left out because it was not finite."""

    grad_norm: float | None
    """Norm of the gradient before clipping, where clipping asked for it."""

    stop: bool
    """Some rank set its stop flag: every rank stops after this step."""

    checkpoint: bool
    """Some rank asked for a checkpoint after this step."""

    leave: bool
    """Some rank was asked to leave: every rank saves and ends its script."""

    nonfinite: tuple[tuple[int, float], ...] = ()
    """(rank, loss) of every rank whose loss was not finite."""

    named: tuple[tuple[str, float], ...] = ()
    """Means over the batch of the loss's named parts beside its total."""

    num_skipped: int = 0
    """Slices skipped by workers that trained apart since the last sync."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor, or one part of one, of the state: the unit of checkpoints."""

    name: str
    """"model/<key of state_dict>" or "optimizer/<parameter name>/<key>"."""

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Offset of this part in the whole tensor; all zeros if it is whole."""

    changed_keys: str = ""
    """A table with only changed rows: the piece with their keys."""


@runtime_checkable
class TracksRows(Protocol):
    """A strategy with tables whose servers know which rows changed."""

    def state_with_changes(self, changes: RowStamps) -> Iterator[Piece]:
        """`state()`, with only changed rows where `changes` gives a starting point."""
        ...


class PartReader(Mapping[str, torch.Tensor]):
    """Whole tensors by piece name, of which parts can be read alone."""

    @abc.abstractmethod
    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the whole tensor, without reading it."""

    @abc.abstractmethod
    def part(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The part of a tensor that begins at `offset`, in fresh memory."""


@dataclass(frozen=True, slots=True)
class PieceReader:
    """A saved state to take over."""

    tensors: Mapping[str, torch.Tensor]
    """Whole tensors by piece name, read when asked for."""

    optimizer_settings: dict[str, Any] | None
    """Non-tensor settings of the optimizer; None if only weights were saved."""

    path: str = ""
    """Where it comes from, for messages."""


@runtime_checkable
class HoldsOwnState(Protocol):
    """A strategy whose ranks may hold state that no other rank has."""

    holds_parts: bool


def holds_parts(strategy: Strategy) -> bool:
    return isinstance(strategy, HoldsOwnState) and strategy.holds_parts


@runtime_checkable
class HoldsParts(Protocol):
    """A strategy whose ranks hold different parts of the state."""

    def parts(self) -> Iterator[Piece]:
        """This rank's part of a checkpoint: all ranks together write every number once. Not collective."""
        ...


class Strategy(Protocol):
    """One way of distributing a job over workers."""

    optimizer: torch.optim.Optimizer | None
    """The user's optimizer as built on the prepared parameters; schedulers and callbacks read it."""

    step: int
    """Steps committed so far; seeds are drawn from it."""

    replay_log: ReplayLog | None
    """Log by which a strategy's exchanges survive the death of a rank; None in one process."""

    def prepare(self, job: TrainJob) -> None:
        """Take over model and optimizer; refuse, by layer, a model that cannot be run."""

    def forward_backward(self, batch: Slice) -> LossSum:
        """Compute the gradients of one slice. May exchange them already; changes no state."""

    def commit(self) -> StepResult:
        """Exchange, clip, decide, update: the only moment at which state changes."""

    def forward(self, batch: Slice) -> Tree:
        """The model's outputs for a slice, without gradients."""

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in rank order, the same bits on every rank."""

    def gather(self, value: torch.Tensor | None) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order; shapes may differ and a rank may have none (an empty tensor then)."""

    def state(self) -> Iterator[Piece]:
        """Model and optimizer, piece by piece. Collective where ranks hold parts."""

    def load(self, pieces: PieceReader) -> None:
        """Load the result of `state`, of any strategy and any number of workers."""


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Placement of a layer of the user's model under a strategy, and its communication per step."""

    layer: str
    """Path of the module, or of one that it is in."""

    where: str
    """Processes that hold it: "each worker", "servers 0-1", "workers 2, 3"."""

    how: str = ""
    is_cut: bool = False
    """Whether each of them holds a part."""

    stage: int | None = None
    """Stage of a pipeline. Values that go from one stage to another are sent."""

    sends: tuple[tuple[str, dict[str, float]], ...] = ()
    """Traffic, as multiples of the layer's "parameters", "input" or "output" in bytes; {}: known only at run time."""


@runtime_checkable
class Places(Protocol):
    """A strategy that knows where its layers are."""

    def places(self) -> Iterator[LayerPlace]:
        """Layers with parameters, once the first step is done."""
        ...


class AcceptsGradients(Protocol):
    """A strategy that also serves loops of the user's own."""

    def about_to_run(self) -> None:
        """The user's loop takes a slice: from here it runs the model, up to the next commit."""

    def weigh(self, batch: Slice) -> None:
        """Slice of the next backward: gradients are weighted by its share of the global batch."""

    def sum_gradients(self, batch: Slice) -> None:
        """Put the sum over the ranks into `.grad`, before the commit; a loop clips it, or reads it."""

    def adopt(self, batch: Slice) -> None:
        """Take the gradients of the user's own backward; `batch` is the slice that was taken last."""


@runtime_checkable
class CountsTraffic(Protocol):
    """A strategy that counts the bytes of its gradients."""

    @property
    def traffic(self) -> Traffic | None:
        """Bytes that this rank has sent; None where nothing is counted."""


@runtime_checkable
class RunsMicroBatches(Protocol):
    """A strategy that may cut a slice further than the job asks for."""

    @property
    def num_micro(self) -> int | None:
        """Parts of a slice; None for those of the job."""


@runtime_checkable
class HoldsStages(Protocol):
    """A strategy whose ranks may hold gradients of different parameters."""

    def norm_over_stages(self) -> float | None:
        """Norm of the whole gradient; None if every rank can compute it from its parameters. Collective."""


@runtime_checkable
class LooksAhead(Protocol):
    """A strategy that benefits from knowing the next batch."""

    def prefetch(self, batch: Slice) -> None:
        """The batch after the one that is run next."""


@runtime_checkable
class WeightsFollow(Protocol):
    """A strategy whose weights may arrive while the next step already runs."""

    def followed(self) -> contextlib.AbstractContextManager[None]:
        """Context for consecutive steps; at its end all weights have arrived."""
        ...


@runtime_checkable
class HoldsCopy(Protocol):
    """A strategy whose weights are kept elsewhere: this process has a copy."""

    def refresh_copy(self) -> None:
        """Pull the newest weights into this process's model, rows of embeddings too. Not collective."""


@runtime_checkable
class ReplaysSteps(Protocol):
    """A strategy whose replaced worker replays steps that are applied to the weights already."""

    @property
    def weights_are_ahead(self) -> bool:
        """Whether the weights are of a later step than this process has come to."""
        ...


def weights_are_ahead(strategy: Strategy) -> bool:
    return isinstance(strategy, ReplaysSteps) and strategy.weights_are_ahead


@runtime_checkable
class Leased(Protocol):
    """A relaxed strategy: each worker trains whole batches of its own, handed out as leases."""

    updates: int
    """Updates of all workers, as far as this one knows."""

    def share_statistics(self) -> None:
        """Average BatchNorm's statistics over all workers. Collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Result of a round whose steps were made elsewhere."""

    num_steps: int
    num_samples: int
    """Samples of all parts together."""

    next_index: int
    """Position in the epoch after its last batch."""

    result: StepResult


@runtime_checkable
class RunsRounds(Protocol):
    """A strategy whose steps are made by tasks, one round at a time; this process reads no data."""

    sync_every: int | None
    """Steps of a round; None: all that are left of the epoch."""

    def run_round(self, num_steps: int) -> Round:
        """Make so many steps."""
        ...


@runtime_checkable
class PeriodicSync(Protocol):
    """A strategy whose workers train apart for some steps: in between, step results are local, and carry no requests."""

    has_diverged: bool
    """Whether weights differ from worker to worker at present."""

    def sync(self) -> StepResult | None:
        """Make the models equal now, as at an epoch's end; None if they are already. Collective."""

    def own_pieces(self) -> Iterator[Piece]:
        """State that no other worker has, even right after a sync."""

    def common_pieces(self) -> Iterator[Piece]:
        """The rest: state that is equal on all workers right after a sync. Collective."""


def has_diverged(strategy: Strategy) -> bool:
    return isinstance(strategy, PeriodicSync) and strategy.has_diverged
