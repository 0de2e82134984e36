"""A loop of the user's own, without the Trainer: `optimizer.step()` is the commit.

    model, optimizer, data = shoal.setup(model, optimizer, data)
    for x, y in data:                      # this worker's slice of each batch
        optimizer.zero_grad()
        loss_of(model(x), y).backward()    # a mean over the slice
        optimizer.step()                   # exchange, update: the same on every rank

Gradients are exchanged when `step` is called, or when they are clipped. Each
backward is weighted by the samples of the slice that was taken before it, so
several batches may be accumulated into one step.
"""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shoal.cluster.worker import session
from shoal.config import job as jobs
from shoal.config import placement
from shoal.config.faults import BEFORE_FORWARD
from shoal.config.parallel_options import refuse_own_loop
from shoal.data.batches import Batches
from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.errors import ConfigError, TrainingError
from shoal.parallel import create
from shoal.parallel.compute import place as place_on
from shoal.parallel.compute import seed_all
from shoal.parallel.loss import loss_rule
from shoal.parallel.protocol import AcceptsGradients, ControlFlags, Strategy, TrainJob
from shoal.runtime import events
from shoal.runtime.failpoints import failpoint
from shoal.runtime.seeds import mix
from shoal.runtime.user_frames import calling_line
from shoal.train import loop_shape
from shoal.train.calls import Call, batches_of, described, device_of, next_number
from shoal.train.custom_anchors import Place, Recovery
from shoal.train.foreground import asked_to_leave
from shoal.train.gradient_sums import extend_torch
from shoal.train.load_balance import refuse
from shoal.train.progress import Position
from shoal.train.reports import LedgerReport
from shoal.train.verification import Verification, fingerprint_at_end

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Model = TypeVar("Model", bound=nn.Module)
T = TypeVar("T")


class _Taken(NamedTuple):
    """A batch that the script took, without its samples."""

    start: int
    num_global: int
    cuts: tuple[int, ...]


class WorkerData:
    """This worker's slices; every `for` over it is the next epoch."""

    def __init__(self, loop: CustomLoop, batches: Batches, *, is_inherited: bool = False) -> None:
        self._loop, self._batches = loop, batches
        self.job, self.rank, self.num_workers = loop.job, loop.job.rank, loop.job.num_workers
        self.number = next_number()
        self._seed = torch.initial_seed()
        self.position = Position()
        self._ledger = LedgerReport(self, batches)
        self._ledger.begin(is_inherited=is_inherited, again={})
        self._pending: list[_Taken] = []  # since the last step
        self._num_left_out = 0  # samples, of those
        self.epoch, self.index = 0, -1
        self.num_local = 0
        """Samples of this worker's own in the batch given last; 0 where one was borrowed, which nobody should count."""

    @property
    def data_description(self) -> dict[str, Any]:
        """Which data it is, for the ledger."""
        return self._batches.describe()

    def counted_from(self, start: int) -> Iterator[tuple[int, Tree]]:
        """As `enumerate` does, and from where this worker begins."""
        for batch in self:
            yield start + self.index, batch

    def stepped(self) -> None:
        """A step is committed: what was handed out before it is trained."""
        pending, self._pending, self._num_left_out = self._pending, [], 0
        for part in pending:
            self.position.next_index = part.start + part.num_global
            self._ledger.count(part)
        self._ledger.now_and_then(time.monotonic())

    def __iter__(self) -> Iterator[Tree]:
        job = self.job
        place = _script.recovery.start_of(self.number, self.epoch, self._loop.strategy.replay_log)
        epoch, self.epoch = self.epoch, self.epoch + 1
        is_over = False
        try:
            if place is None:
                return  # the others were through with this data before this worker came to be
            _script.began(place)
            epoch, self.index = place.epoch, place.index - 1
            self.position = Position(epoch=epoch, next_index=place.next_index, stretch=place.stretch)
            _script.open.append(self)
            for part in self._batches.slices(
                epoch=epoch, start=place.next_index, rank=job.rank, num_workers=job.num_workers
            ):
                self.index += 1
                if not _script.is_anchored and _script.open == [self]:
                    _script.anchor(self, part)
                _script.slice, _script.between = part, None
                self._refuse_left_out(part)
                self._pending.append(_Taken(part.start, part.num_global, part.cuts))
                if self not in _script.data:
                    _script.data.append(self)
                self.num_local = part.num_local
                for loop in _script.loops:
                    loop.about_to_run(part)
                if job.num_workers > 1:  # else every worker would draw the same dropout as the others
                    seed_all(mix(self._seed, job.rank, epoch, part.start), self._loop.device)
                failpoint(BEFORE_FORWARD, self._loop.strategy.step + 1)
                yield place_on(part.batch, self._loop.device, self._loop.dtype)
            is_over = True
            for loop in _script.loops:
                loop.epoch_is_over()
        finally:
            if self in _script.open:
                _script.open.remove(self)
            _script.between = f"after epoch {epoch} of {self.number}"
            self._pending.clear()  # nothing was made of them
            self._ledger.reached(is_end=is_over)

    def _refuse_left_out(self, part: Slice) -> None:
        """Backward divides by the samples of a batch, commit corrects it: for one batch, not for the sum of several."""
        self._num_left_out += part.num_local if part.num_asked is None else part.num_asked
        self._num_left_out -= part.num_local
        if self._num_left_out and self._pending:
            raise TrainingError(
                f"{self._num_left_out} bad samples were left out of batches whose gradients are accumulated into one step, and how "
                "much each batch counts is then known too late. Nothing of this step was applied; repair the data, or take "
                "a step after every batch."
            )

    def __len__(self) -> int:
        num_steps = self._batches.num_steps(self._loop.job.num_workers)
        if num_steps is None:
            raise TypeError("a stream has no length")
        return num_steps


class CustomLoop:
    """What `setup` keeps between the steps of a loop it does not own."""

    def __init__(self) -> None:
        self.job = jobs.current()
        self.strategy: Strategy = create(self.job)
        self.device = torch.device("cpu")
        self.dtype: torch.dtype | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self._control = ControlFlags()
        self._verification: Verification | None = None
        if self.job.verify:
            self._verification = Verification(self.job.verify, rank=self.job.rank, is_own_loop=True)
        self.is_committing = False
        self._number = next_number()

    def about_to_run(self, part: Slice) -> None:
        """A slice is handed to the script: models will run on it, up to the next commit."""
        if self.optimizer is not None:
            self._stepping.about_to_run()
            self._stepping.weigh(part)

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has left any that no step has used."""
        return self.optimizer is not None and any(p.grad is not None for p in self.model.parameters())

    def sum_gradients(self) -> None:
        """Have sums over the workers in `.grad`; the commit that follows only updates."""
        if _script.slice is None:
            raise _no_batch_yet("the gradients were to be summed")
        self._stepping.sum_gradients(_script.slice)

    def epoch_is_over(self) -> None:
        """The script may end with it, before the steps that a verification asked for."""
        if self._verification is not None:
            self._verification.write(self.strategy)

    @property
    def _stepping(self) -> AcceptsGradients:
        return self.strategy  # type: ignore[return-value]  # the strategies there are can all do it

    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Hand model and optimizer to the strategy and make `optimizer.step` its commit."""
        if self.job.batchnorm == "sync" and len(self.job.batch_ranks) > 1:
            raise ConfigError(
                "--batchnorm sync adds up over the workers within a forward, and a forward of a loop of your own cannot be run again "
                "when a worker dies in it. Nothing was trained; use shoal.Trainer, or leave --batchnorm out."
            )
        if self._verification is not None:
            self._verification.cast(model)
            self.dtype = self._verification.dtype
        if self.job.device == placement.AUTO:  # where the script has put it
            self.device = next((p.device for p in model.parameters()), self.device)
        else:
            self.device = device_of(self.job, None)
        self.model, self.optimizer = model, optimizer
        events.emit(events.OWN_LOOP)
        self.parameter_ids = {id(parameter) for parameter in model.parameters()}
        if self.job.num_workers > 1:
            extend_torch(_sum_gradients_of, _owners_of_gradients)
        fingerprint_at_end(model)
        self.strategy.prepare(
            TrainJob(
                model=model,
                loss=loss_rule(nn.MSELoss()),  # never called: the loss is the loop's own
                build_optimizer=lambda _: optimizer,
                device=self.device,
                number=self._number,
                is_own_loop=True,
                checkpoint_activations=self.job.checkpoint_activations,
                control=self._control,
            )
        )
        update = optimizer.step

        def step(_: torch.optim.Optimizer, closure: Any = None) -> Any:
            if self.is_committing:
                return update()
            if closure is not None:
                raise ConfigError(
                    "optimizer.step(closure) runs the model several times per update, which no strategy can cut. Use "
                    "an optimizer that steps without a closure."
                )
            return self._commit()

        # Schedulers mark the step they have seen, and look for a bound method.
        step.__dict__.update(getattr(update, "__dict__", {}))
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def _commit(self) -> None:
        if _script.slice is None:
            raise _no_batch_yet("optimizer.step() was called")
        _script.about_to_commit(self)
        self._control.leave = asked_to_leave() is not None
        self._stepping.adopt(_script.slice)
        self.is_committing = True
        try:
            verdict = self.strategy.commit()
        finally:
            self.is_committing = False
        _script.ended = _script.ended or verdict.leave
        for data in _script.data:
            data.stepped()
        if self._verification is not None:
            self._verification.count(self.strategy, verdict.loss)


@dataclass(slots=True)
class _Script:
    """What the loops of a script share: one model may be trained after another, or two in turn on one batch."""

    loops: list[CustomLoop] = field(default_factory=list)
    slice: Slice | None = None
    """The one taken last, from whichever data."""

    data: list[WorkerData] = field(default_factory=list)
    """From which any was taken."""

    every: list[WorkerData] = field(default_factory=list)
    open: list[WorkerData] = field(default_factory=list)
    """In the middle of an epoch."""

    ended: bool = False
    between: str | None = ""
    """Where the script is while it is not in an epoch of its data; None while it is."""

    recovery: Recovery = field(default_factory=Recovery)
    is_anchored: bool = False
    """Whether the step that is under way has been noted for a replacement."""

    committed: CustomLoop | None = None
    """Took a step since then."""

    def anchor(self, data: WorkerData, part: Slice) -> None:
        """The first batch since the last step is about to be handed out: a replacement runs the step from here."""
        self.is_anchored, self.committed = True, None
        self.recovery.note(
            self.loops[-1].strategy.replay_log,
            Place(
                data=data.number,
                epoch=part.epoch,
                next_index=part.start,
                index=data.index,
                stretch=data.position.stretch,
                epochs={each.number: each.epoch for each in self.every},
            ),
        )

    def began(self, place: Place) -> None:
        """A replacement goes on where the others are."""
        for data in self.every:
            data.epoch = place.epochs.get(data.number, data.epoch)

    def about_to_commit(self, loop: CustomLoop) -> None:
        """A replacement has weights of after a step: it cannot compute gradients again that were computed before it."""
        replay_log = loop.strategy.replay_log
        waiting = [other for other in self.loops if other is not loop and other.has_gradients]
        if self.committed is not None or waiting:
            self.recovery.give_up(
                replay_log, f"{calling_line()}: more than one optimizer step is taken on a batch"
            )
        if replay_log is None or not replay_log.next_is_known:
            self.committed = loop
        self.is_anchored = False


_script = _Script()


def setup(model: Model, optimizer: Optimizer, data: Any) -> tuple[Model, Optimizer, WorkerData]:
    """ParallelOptions an ordinary training loop: returns the same model and optimizer, and this worker's part of the data.

    May be called again: for another model, or with the same two for other data.
    """
    batches = batches_of(data, what="setup", seed=jobs.current().seed, may_be_endless=True)
    job = jobs.current()
    refuse_own_loop(job.sync_every)
    _script.recovery.set_up()
    if job.incarnation:
        _catch_up_quietly()
    refuse(batches, num_workers=job.num_workers, strategy=job.strategy, what="shoal.setup")
    number = session.begin_call("setup", described(batches))
    loop = next((loop for loop in _script.loops if loop.optimizer is optimizer), None)
    if loop is None:
        loop = CustomLoop()
        call = Call(number, loop.strategy.replay_log)
        loop.take(model, optimizer)
        _script.loops.append(loop)
        _script.recovery.models.append(model)
        _script.recovery.optimizers.append(optimizer)
    elif loop.model is not model:
        raise ConfigError(
            "shoal.setup was given an optimizer that it already has, with another model. Nothing was changed; build an "
            "optimizer for each model."
        )
    else:
        call = Call(number, loop.strategy.replay_log)
    is_inherited = call.is_over  # a replacement passes here, where the others were before
    if not call.is_over:
        call.end(None)
    mine = WorkerData(loop, batches.for_device(loop.device), is_inherited=is_inherited)
    _script.every.append(mine)
    return model, optimizer, mine


def _catch_up_quietly() -> None:
    """Let the script of a replacement enter its loops where the others are, and write no files before it is there."""

    def count(data: Any, start: int = 0) -> Any:
        return data.counted_from(start) if isinstance(data, WorkerData) else enumerate(data, start)

    loop_shape.use_enterable(loop_shape.script_frames(), {"range": loop_shape.Range, "enumerate": count})
    save = torch.save

    @functools.wraps(save)
    def save_when_live(*args: Any, **kwargs: Any) -> None:
        if session.is_live():
            save(*args, **kwargs)

    if not hasattr(torch.save, "__wrapped__"):
        torch.save = save_when_live


def reduce(value: Tensor | float) -> Any:
    """The sum of `value` over all workers, in rank order; a number gives a number."""
    strategy, remembered = present_moment()
    tensor = value if isinstance(value, Tensor) else torch.tensor([value], dtype=torch.float64)
    summed = remembered("reduce", lambda: strategy.reduce(tensor))
    return summed if isinstance(value, Tensor) else float(summed)


def present_moment() -> tuple[Strategy, Callable[[str, Callable[[], T]], T]]:
    """The strategy to exchange through, and how: where a replaced worker passes without the others, what came of it is kept."""
    strategy = _current_loop().strategy
    replay_log, between = strategy.replay_log, _script.between
    if replay_log is None or between is None or replay_log.is_inside_call:
        return strategy, lambda what, run: run()
    return strategy, lambda what, run: replay_log.remembered(f"{what} {between}", run)


def sum_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Have the sum over all workers in `.grad` of the parameters of this optimizer, before its step.

    Between backward and step a gradient is only this worker's part; after this it is the whole, the same on every worker,
    and may be read and changed. Call it after the last backward of a step; `optimizer.step()` then only updates.
    """
    loop = next((loop for loop in _script.loops if loop.optimizer is optimizer), None)
    if loop is None:
        raise ConfigError("shoal.sum_gradients was given an optimizer that shoal.setup does not know.")
    loop.sum_gradients()


def _sum_gradients_of(parameters: list[Tensor]) -> None:
    """Of every loop that one of these belongs to; while one commits, its gradients are what they should be."""
    given = {id(parameter) for parameter in parameters}
    for loop in _script.loops:
        if loop.optimizer is not None and not given.isdisjoint(loop.parameter_ids) and not loop.is_committing:
            loop.sum_gradients()


def _owners_of_gradients() -> dict[int, Tensor]:
    return {
        id(parameter.grad): parameter
        for loop in _script.loops
        if loop.optimizer is not None
        for parameter in loop.model.parameters()
        if parameter.grad is not None
    }


def mean(total: Tensor, count: Tensor | float) -> Tensor:
    """A loss over something other than samples: its local sum and local count, as a mean over all workers.

    Use it where slices count differently, as under a mask:
    `shoal.mean((losses * mask).sum(), mask.sum()).backward()`.
    """
    part = _script.slice
    if part is None:
        raise ConfigError("shoal.mean was called before the first batch was taken from shoal.setup's data.")
    # What was borrowed is counted where it belongs.
    mine = torch.tensor([float(count) if part.num_local else 0.0, part.num_local], dtype=torch.float64)
    everywhere, num_samples = reduce(mine).tolist()
    # optimizer.step weights this rank by its share of the samples; take that out again.
    share = part.num_local / num_samples if num_samples else 0.0
    return total / (everywhere * share) if share and everywhere else total * 0.0


def should_stop() -> bool:
    """True once somebody asked the job to leave; decided with a step, so it turns true on all ranks at once."""
    return _script.ended


def _no_batch_yet(what: str) -> ConfigError:
    return ConfigError(
        f"{what} before the first batch was taken from the data that shoal.setup returned. Loop over that data: "
        "`for x, y in data:`."
    )


def _current_loop() -> CustomLoop:
    if not _script.loops:
        _script.loops.append(CustomLoop())  # a script may reduce before it trains
    return _script.loops[-1]
