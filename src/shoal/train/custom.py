"""A loop of the user's own, without the Trainer: `optimizer.step()` is the commit.

    model, optimizer, data = shoal.setup(model, optimizer, data)
    for x, y in data:                      # this worker's slice of each batch
        optimizer.zero_grad()
        loss_of(model(x), y).backward()    # a mean over the slice
        optimizer.step()                   # exchange, update: the same on every rank

Gradients are exchanged when `step` is called, however many backward passes
came before it, each rank's weighted by the samples of its slice.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from shoal.cluster import session
from shoal.core import job as jobs
from shoal.core.errors import ConfigError
from shoal.core.plain import from_plain, to_plain
from shoal.data.batches import Batches, as_batches
from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.strategies import create
from shoal.strategies.compute import place
from shoal.strategies.loss import loss_rule
from shoal.strategies.protocol import Strategy, TakesGradients, TrainJob, Wishes
from shoal.train.call import Call, next_number
from shoal.train.interrupts import asked_to_leave
from shoal.train.verification import Verification

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Model = TypeVar("Model", bound=nn.Module)

_loop: CustomLoop | None = None


class WorkerData:
    """This worker's slices; every `for` over it is the next epoch."""

    def __init__(self, loop: CustomLoop, batches: Batches) -> None:
        self._loop, self._batches = loop, batches
        self.epoch = 0

    def __iter__(self) -> Iterator[Tree]:
        job = self._loop.job
        epoch, self.epoch = self.epoch, self.epoch + 1
        start = self._loop.skip_to(epoch)
        if start is None:
            return  # the others finished this epoch before this worker came to be
        try:
            for part in self._batches.slices(epoch=epoch, start=start, rank=job.rank, num_workers=job.num_workers):
                self._loop.take_slice(part)
                yield place(part.batch, self._loop.device, self._loop.dtype)
        finally:
            self._loop.end_epoch(epoch)

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
        self.slice: Slice | None = None
        self.device = torch.device("cpu")
        self.dtype: torch.dtype | None = None
        self.ended = False
        self._wishes = Wishes()
        self._verification = Verification(self.job.verify, rank=self.job.rank) if self.job.verify else None
        self._committing = False
        self._number = next_number()
        self._schedulers: list[Any] | None = None
        self._in_epoch = False
        self._moment, self._reduced_at, self._num_reduced = "", "", 0

    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Hand model and optimizer to the strategy and make `optimizer.step` its commit."""
        if self._verification is not None:
            self._verification.cast(model)
            self.dtype = self._verification.dtype
        self.device = next((p.device for p in model.parameters()), self.device)
        self._model = model
        self.strategy.prepare(
            TrainJob(
                model=model,
                loss=loss_rule(nn.MSELoss()),  # never called: the loss is the loop's own
                build_optimizer=lambda _: optimizer,
                device=self.device,
                number=self._number,
                wishes=self._wishes,
            )
        )
        update = optimizer.step

        def step(_: torch.optim.Optimizer, closure: Any = None) -> Any:
            if self._committing:
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

    # ---- where the loop is, for a worker that is replaced ----------------------------------------

    def take_slice(self, part: Slice) -> None:
        """The loop is before a step: a place from which a replacement can run on."""
        self.slice, self._in_epoch = part, True
        self._stepping.about_to_run()
        together, optimizer = self.strategy.together, self.strategy.optimizer
        if together is None or optimizer is None:
            return
        if self._schedulers is None:
            self._schedulers = _schedulers_of(optimizer)
        schedules = [scheduler.state_dict() for scheduler in self._schedulers]
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        together.anchor(
            lambda: {
                "epoch": part.epoch,
                "next_index": part.start,
                "groups": groups,
                "schedulers": [to_plain(schedule, "a scheduler") for schedule in schedules],
            }
        )

    def end_epoch(self, epoch: int) -> None:
        """The loop over an epoch is left."""
        self._in_epoch = False
        self._moment = f"after epoch {epoch}"

    def skip_to(self, epoch: int) -> int | None:
        """Where an epoch begins: at 0; in a replacement at the others' place, or not at all if they are past it."""
        together, optimizer = self.strategy.together, self.strategy.optimizer
        waiting = together.waiting_anchor() if together is not None else None
        if together is None or optimizer is None or waiting is None:
            return 0
        if epoch < waiting["epoch"]:
            self.end_epoch(epoch)
            return None
        given = together.inherited_anchor()
        assert given is not None
        for group, saved in zip(optimizer.param_groups, given["groups"], strict=True):
            group.update(saved)
        for scheduler, saved in zip(_schedulers_of(optimizer), given["schedulers"], strict=False):
            scheduler.load_state_dict(from_plain(saved))
        return int(given["next_index"])

    def reduce(self, value: Tensor) -> Tensor:
        """The sum over the ranks. Between epochs it is kept: a replacement passes there without the others."""
        together = self.strategy.together
        if together is None or self._in_epoch:
            return self.strategy.reduce(value)
        moment = f"call {session.num_calls()} {self._moment}"
        self._num_reduced = self._num_reduced + 1 if moment == self._reduced_at else 0
        self._reduced_at = moment
        summed: Tensor = together.remembered(f"reduce {moment} #{self._num_reduced}", lambda: self.strategy.reduce(value))
        return summed

    @property
    def _stepping(self) -> TakesGradients:
        return self.strategy  # type: ignore[return-value]  # the strategies there are can both do it

    def _commit(self) -> None:
        if self.slice is None:
            raise ConfigError(
                "optimizer.step() was called before the first batch was taken from the data that shoal.setup returned. "
                "Loop over that data: `for x, y in data:`."
            )
        self._wishes.leave = asked_to_leave() is not None
        self._stepping.adopt(self.slice)
        self._committing = True
        try:
            verdict = self.strategy.commit()
        finally:
            self._committing = False
        self.ended = self.ended or verdict.leave
        if self._verification is not None:
            self._verification.count(self._model, verdict.loss)


def setup(model: Model, optimizer: Optimizer, data: Any) -> tuple[Model, Optimizer, WorkerData]:
    """Spread an ordinary training loop: returns the same model and optimizer, and this worker's part of the data."""
    batches = as_batches(data, default_seed=jobs.current().seed)
    number = session.begin_call("setup", f"samples={batches.num_samples}")
    loop = _current_loop()
    call = Call(number, loop.strategy.together)
    loop.take(model, optimizer)
    if not call.is_over:
        call.end(None)
    return model, optimizer, WorkerData(loop, batches)


def reduce(value: Tensor | float) -> Any:
    """The sum of `value` over all workers, in rank order; a number gives a number."""
    loop = _current_loop()
    if isinstance(value, Tensor):
        return loop.reduce(value)
    return float(loop.reduce(torch.tensor([value], dtype=torch.float64)))


def mean(total: Tensor, count: Tensor | float) -> Tensor:
    """A loss over something other than samples: its local sum and local count, as a mean over all workers.

    Use it where slices count differently, as under a mask:
    `shoal.mean((losses * mask).sum(), mask.sum()).backward()`.
    """
    loop = _current_loop()
    part = loop.slice
    if part is None:
        raise ConfigError("shoal.mean was called before the first batch was taken from shoal.setup's data.")
    everywhere = reduce(float(count))
    # optimizer.step weights this rank by its share of the samples; take that out again.
    share = part.num_local / part.num_global
    return total / (everywhere * share) if share and everywhere else total * 0.0


def should_stop() -> bool:
    """True once somebody asked the job to leave; decided with a step, so it turns true on all ranks at once."""
    return _current_loop().ended


def _current_loop() -> CustomLoop:
    global _loop
    if _loop is None:
        _loop = CustomLoop()
    return _loop


def _schedulers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The schedulers the script built on the optimizer, oldest first. They know it, but it does not know them."""
    return [thing for thing in gc.get_objects() if isinstance(thing, LRScheduler) and thing.optimizer is optimizer]
