"""The seam between the Trainer and every way of spreading a model.

The Trainer never calls `backward()` or `step()`. It hands slices to a
Strategy and asks it to commit; what happens in between (one process, buckets,
shards, stages, servers) is the strategy's own business.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

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
    """The user's own, where it is an instance and no function: a strategy that cuts parameters lets it follow them."""

    training_step: Callable[..., Any] | None = None
    """Of the user's: the loss of a batch, by `(model, batch)` or `(model, batch, name of the optimizer)`."""

    turn: Turn | None = None
    """Whose turn it is, where a model has several optimizers; set before each forward_backward."""

    clip_norm: float | None = None
    """Largest global norm of the gradient."""

    num_micro: int = 1
    """Parts in which a slice is run, its gradients accumulated."""

    on_nonfinite: str = "raise"
    """"raise", or "skip": leave a step with a loss or gradient that is not finite out, and count it."""

    autocast: torch.dtype | None = None
    """Run forward in this precision."""

    loss_scale: LossScale | None = None
    """Of fp16: backward begins with the loss times its value, and the commit divides by it."""

    cast_inputs: torch.dtype | None = None
    """Floating inputs and targets are cast to this; set by `shoal verify`."""

    tensor_plan: Mapping[str, str] | None = None
    """Of the user's: pattern of layer names to "colwise", "rowwise" or "replicated"; for tp."""

    pipeline_cut: Sequence[str] | None = None
    """Of the user's: names of the layers at which a stage begins, but for the first; for pp."""

    first_inputs: Callable[[], Tree] | None = None
    """Reads inputs such as the model will be given, to measure it with; None where there are none yet."""

    checkpoint_activations: bool | Sequence[str] = False
    """Whether blocks of the model run again within backward; or patterns of the names of those that do."""

    checks_every_loss: bool = False
    """Check at every step that the loss recombines, not at the first alone; set by `shoal verify`."""

    compile: bool = False
    """Compile the model."""

    is_own_loop: bool = False
    """Whether the user's own loop calls backward."""

    number: int = 0
    """Which Trainer or loop of the script this is, counted from 0: ranks hand its state over by it."""

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
        return (total.float() if total.dtype is torch.float16 else total) * self.scale  # it may be past fp16


@dataclass(frozen=True, slots=True)
class LossSum:
    """Contribution of a slice: loss sum, its count, and the model's outputs for the metrics."""

    total: torch.Tensor
    count: float
    outputs: Tree | None
    """In the order of the slice; None when all of it was borrowed."""

    on_its_way: tuple[torch.Tensor, torch.Event] | None = None
    """Of a total on a device: where in the host's memory it will be, and when."""

    named: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By name: sum and count of what the loss gave beside its total."""

    def read(self) -> float:
        """The total as a number. On a device this waits for the forward alone: backward may still run."""
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
    """Some rank wished to stop: every rank stops after this step."""

    checkpoint: bool
    """Some rank wished for a checkpoint after this step."""

    leave: bool
    """Some rank was asked to leave: every rank saves and ends its script."""

    nonfinite: tuple[tuple[int, float], ...] = ()
    """(rank, loss) of every rank whose loss was not finite."""

    named: tuple[tuple[str, float], ...] = ()
    """Means over the batch of what the loss gave by name beside its total."""

    num_skipped: int = 0
    """Slices left out, of those that workers trained apart since they last met."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor, or one part of one, of the state: what checkpoints are made of."""

    name: str
    """"model/<key of state_dict>" or "optimizer/<parameter name>/<key>"."""

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Where this part begins in the whole tensor; all zeros when it is whole."""

    changed_keys: str = ""
    """Of a table of which only rows that changed are given: the piece with their keys."""


@runtime_checkable
class TracksRows(Protocol):
    """A strategy with tables whose servers know which rows changed."""

    def state_with_changes(self, changes: RowStamps) -> Iterator[Piece]:
        """`state()`, with changed rows alone where `changes` says since when."""
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
    """What of the optimizer is not a tensor; None when only weights were saved."""

    path: str = ""
    """Where it comes from, for messages."""


@runtime_checkable
class HoldsParts(Protocol):
    """A strategy whose ranks hold different parts of the state."""

    def parts(self) -> Iterator[Piece]:
        """What this rank writes of a checkpoint: all ranks together write every number once. Not collective."""
        ...


class Strategy(Protocol):
    """One way of spreading a job over workers."""

    optimizer: torch.optim.Optimizer | None
    """The user's optimizer as built on the prepared parameters; schedulers and callbacks read it."""

    step: int
    """Steps committed so far; seeds are drawn from it."""

    replay_log: ReplayLog | None
    """Where a strategy's exchanges survive the death of a rank: what it needs to hand over; None in one process."""

    def prepare(self, job: TrainJob) -> None:
        """Take over model and optimizer; refuse, by layer, what cannot be run."""

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
        """Take over what `state` gave, under any strategy, at any number of workers."""


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
    """Of a pipeline. What goes from one stage to another is sent."""

    sends: tuple[tuple[str, dict[str, float]], ...] = ()
    """What is sent, and its bytes as multiples of the layer's "parameters", "input" or "output"; {}: known only when it runs."""


@runtime_checkable
class Places(Protocol):
    """A strategy that knows where it has put the layers."""

    def places(self) -> Iterator[LayerPlace]:
        """Layers with parameters, once the first step is done."""
        ...


class AcceptsGradients(Protocol):
    """A strategy that also serves loops of the user's own."""

    def about_to_run(self) -> None:
        """The user's loop takes a slice: what follows runs the model, up to the next commit."""

    def weigh(self, batch: Slice) -> None:
        """The slice that backward is computed on from now on: gradients are weighted by its share of the global batch."""

    def sum_gradients(self, batch: Slice) -> None:
        """Have the sum over the ranks in `.grad`, before the commit; a loop clips it, or looks at it."""

    def adopt(self, batch: Slice) -> None:
        """Take what the user's own backward left in the parameters; `batch` is the slice that was taken last."""


@runtime_checkable
class HoldsStages(Protocol):
    """A strategy whose ranks may hold gradients of different parameters."""

    def norm_over_stages(self) -> float | None:
        """The norm of the whole gradient; None where every rank can tell it from its parameters. Collective."""


@runtime_checkable
class LooksAhead(Protocol):
    """A strategy that can use its time better when it knows the next batch."""

    def prefetch(self, batch: Slice) -> None:
        """The batch after the one that is run next."""


@runtime_checkable
class WeightsFollow(Protocol):
    """A strategy whose weights may come while the next step already runs."""

    def followed(self) -> contextlib.AbstractContextManager[None]:
        """Steps that follow one another belong in this block; at its end all weights are there."""
        ...


@runtime_checkable
class HoldsCopy(Protocol):
    """A strategy whose weights live elsewhere: what this process has of them is a copy."""

    def refresh_copy(self) -> None:
        """Have the newest weights in the model of this process, rows of embeddings too. Not collective."""


@runtime_checkable
class Leased(Protocol):
    """A relaxed strategy: each worker trains whole batches of its own, as they are handed out."""

    updates: int
    """Updates of all workers, as far as this one has heard."""

    def share_statistics(self) -> None:
        """Average what BatchNorm has counted on every worker; all of them call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What came of a round whose steps were made elsewhere."""

    num_steps: int
    num_samples: int
    """Of all parts together."""

    next_index: int
    """Position in the epoch after its last batch."""

    result: StepResult


@runtime_checkable
class RunsRounds(Protocol):
    """A strategy whose steps are made by tasks, a round of them at a time; this process reads no data."""

    sync_every: int | None
    """Steps of a round; None: all that are left of the epoch."""

    def run_round(self, num_steps: int) -> Round:
        """Make so many steps."""
        ...


@runtime_checkable
class PeriodicSync(Protocol):
    """A strategy whose workers train apart for some steps: in between, step results are each worker's own, and ask for nothing."""

    has_diverged: bool
    """Whether weights differ from worker to worker at present."""

    def sync(self) -> StepResult | None:
        """Become of one mind now, as at an epoch's end; None where the workers are already. Collective."""

    def own_pieces(self) -> Iterator[Piece]:
        """What no other worker has, even when they have just met."""

    def common_pieces(self) -> Iterator[Piece]:
        """The rest: what all have alike when they have just met. Collective."""
