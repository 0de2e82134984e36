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

import dataclasses
import functools
import gc
import inspect
import os
import sys
import time
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from shoal.cluster.supervisor import failure
from shoal.cluster.worker import session
from shoal.config import job as jobs
from shoal.config import placement
from shoal.config import strategy as strategies
from shoal.config.faults import BEFORE_FORWARD
from shoal.config.parallel_options import refuse_own_loop
from shoal.data.batches import Batches
from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.errors import CheckpointError, ConfigError, Interrupted, TrainingError
from shoal.parallel import create, gathering, own_gradients, parameter_loss
from shoal.parallel.compute import place as place_on
from shoal.parallel.compute import seed_all
from shoal.parallel.gathering import GatherScope
from shoal.parallel.loss import loss_rule
from shoal.parallel.protocol import (
    AcceptsGradients,
    ControlFlags,
    HoldsStages,
    Leased,
    PeriodicSync,
    Strategy,
    TrainJob,
    has_diverged,
)
from shoal.parallel.state import norm_of, whole
from shoal.runtime import events, recorder
from shoal.runtime.failpoints import failpoint
from shoal.runtime.seeds import mix
from shoal.runtime.user_frames import calling_line, is_ours
from shoal.train.calls import (
    Call,
    asked_to_leave,
    batches_of,
    described,
    device_of,
    first_slice,
    next_number,
    refuse_hooks,
    refuse_lookups,
)
from shoal.train.custom import counted_share, loop_shape
from shoal.train.custom.counted_share import LossCounts, LossWeight
from shoal.train.custom.progress import LoopProgress
from shoal.train.custom.script_state import DataPlace, Recovery
from shoal.train.custom.weight_watch import (
    WeightWatch,
    act_on_sums,
    digest,
    inner_optimizers,
    refuse_different,
)
from shoal.train.load_balance import refuse
from shoal.train.profiling import PROFILER
from shoal.train.progress import Position
from shoal.train.reports import LedgerReport
from shoal.train.verification import Verification, fingerprint_at_end

if TYPE_CHECKING:
    from shoal.train.custom.leases import LeasedEpoch

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Model = TypeVar("Model", bound=nn.Module)
T = TypeVar("T")


class TakenBatch(NamedTuple):
    """A batch that the script took, without its samples."""

    start: int
    num_global: int
    cuts: tuple[int, ...]


class WorkerData:
    """This worker's slices; every `for` over it is the next epoch."""

    def __init__(self, loop: CustomLoop, batches: Batches) -> None:
        self._loop, self._batches = loop, batches
        self.job, self.rank = loop.job, loop.job.rank
        self.num_workers = loop.job.num_data_ranks  # ranks of tp and pp compute the same part of a batch
        self.number = next_number()
        self._seed = torch.initial_seed()
        self.position = Position()
        self._ledger = LedgerReport(self, batches)
        self._has_begun = False
        self._resumed: DataPlace | None = None
        self._pending: list[TakenBatch] = []  # since the last step
        self._num_left_out = 0  # skipped samples among them
        self.epoch, self.index = 0, -1
        self.taken: Slice | None = None
        """The slice taken last."""

        self.is_trained_on = True
        """Whether it was taken to compute gradients of it."""

        self._lease: LeasedEpoch | None = None  # in relaxed strategies, while an epoch runs
        self.num_local = 0
        """Samples of this worker's own in the last batch; 0 if one was borrowed, which must not be counted."""

    @property
    def data_description(self) -> dict[str, Any]:
        return self._batches.describe()

    def counted_from(self, start: int) -> Iterator[tuple[int, Tree]]:
        """As `enumerate`, from this worker's starting index."""
        for batch in self._epoch():
            yield start + self.index, batch

    def stepped(self) -> int:
        """Mark batches taken before the commit as trained; returns their number of samples."""
        pending, self._pending, self._num_left_out = self._pending, [], 0
        if self._lease is not None:
            return self._lease.trained(script.slice) if pending and script.slice is not None else 0
        for part in pending:
            self.position.next_index = part.start + part.num_global
            self._ledger.count(part)
        self._ledger.now_and_then(time.monotonic())
        return sum(part.num_global for part in pending)

    def state(self) -> dict[str, Any]:
        """Position after the last step, for a checkpoint."""
        is_inside = self in script.open
        return {
            "epoch": self.position.epoch if is_inside else self.epoch,
            "next_index": self.position.next_index if is_inside else 0,
            "index": self.index + 1 - len(self._pending) if is_inside else 0,
            "stretch": self.position.stretch if is_inside else None,
            "num_samples": self._batches.num_samples,
            "streams": self._batches.export_streams(self.position.next_index),
        }

    def resume_at(self, state: dict[str, Any], path: str) -> None:
        """Begin the next `for` over this data at the position of a checkpoint."""
        if state["num_samples"] != self._batches.num_samples:
            raise CheckpointError(
                f"the checkpoint {path} stands in a dataset of {state['num_samples']} samples, and shoal.setup was given one of "
                f"{self._batches.num_samples}. Nothing was trained; resume with the same data."
            )
        self._batches.import_streams(state.get("streams", ()))
        self.epoch = state["epoch"]
        self._resumed = DataPlace(
            self.number, state["epoch"], state["next_index"], state["index"], state["stretch"]
        )

    def reached(self) -> None:
        """Report progress to the ledger: it is saved."""
        if self in script.open:
            self._ledger.reached()

    def __iter__(self) -> Iterator[Tree]:
        for loop in script.loops:
            loop.epoch_begins()
        return self._epoch()

    def _epoch(self) -> Iterator[Tree]:
        job = self.job
        start, self._resumed = self._resumed or DataPlace(self.number, self.epoch), None
        place = script.recovery.start_of(start, self._loop.strategy.replay_log)
        epoch, self.epoch = self.epoch, self.epoch + 1
        is_over = False
        try:
            if place is None:
                return  # the others had finished this data before this worker started
            script.began(place)
            epoch, self.index = place.epoch, place.index - 1
            self.position = Position(epoch=epoch, next_index=place.next_index, stretch=place.stretch)
            if isinstance(self._loop.strategy, Leased):
                self._lease = self._begin_leases(epoch)
            elif not self._has_begun:
                self._has_begun = True
                self._ledger.begin(is_inherited=place is not start, again={})
            if self.job.num_workers > 1 and not script.open and (epoch + 1).bit_count() == 1:
                watch_optimizers()
            script.open.append(self)
            recorder.RECORDER.base(recorder.READ)
            for part in self._parts(epoch, place.next_index):
                self.index += 1
                script.progress.batch_taken()
                if not script.is_anchored and script.open == [self]:
                    script.anchor(self, part)
                self.taken, self.is_trained_on = part, torch.is_grad_enabled()
                script.slice, script.between = part, None
                self._refuse_left_out(part)
                if self._lease is not None and self._pending:
                    raise ConfigError(
                        f"the loop took a batch without an optimizer.step() on the one before, and under '{job.strategy}' each batch is pushed "
                        "as one update. Nothing of the two was applied; take a step after every batch, or accumulate under an "
                        "exact strategy (ps, ddp)."
                    )
                self._pending.append(TakenBatch(part.start, part.num_global, part.cuts))
                if self not in script.data:
                    script.data.append(self)
                self.num_local = part.num_local
                _check_weights()
                for loop in script.loops:
                    loop.about_to_run(part)
                for loop in script.loops:  # a strategy pulls the weights of several models at once
                    loop.accept_weights()
                if job.num_workers > 1:  # else every worker would draw the same dropout
                    seed_all(mix(self._seed, job.data_rank, epoch, part.start), self._loop.device)
                failpoint(BEFORE_FORWARD, self._loop.strategy.step + 1)
                recorder.RECORDER.base(recorder.COMPUTE)  # forward and backward are the script's own
                yield place_on(part.batch, self._loop.device, self._loop.dtype)
                recorder.RECORDER.base(recorder.READ)
            is_over = True
            self._sync_loops()
            for loop in script.loops:
                loop.epoch_is_over()
        except GeneratorExit:
            if loop_shape.is_left_by_break(loop_shape.script_frames()):
                self._leave_early()
            raise
        finally:
            if self in script.open:
                script.open.remove(self)
            if script.open:  # an evaluation, within the epoch of other data
                script.go_on_with(script.open[-1])
            else:
                script.between = f"after epoch {epoch} of {self.number}"
                script.progress.flush()
                gathering.enter(None)
                recorder.RECORDER.base(None)
                PROFILER.finish()
            self._pending.clear()  # they were not used
            if self._lease is None:
                self._ledger.reached(is_end=is_over)
            self._lease = None

    def _parts(self, epoch: int, start: int) -> Iterator[Slice]:
        if self._lease is not None:
            return self._lease.slices()
        return self._batches.slices(
            epoch=epoch, start=start, rank=self.job.data_rank, num_workers=self.num_workers
        )

    def _begin_leases(self, epoch: int) -> LeasedEpoch:
        from shoal.train.custom.leases import LeasedEpoch

        return LeasedEpoch(
            self._loop.strategy,  # type: ignore[arg-type]  # leased ones are relaxed
            self._batches,
            epoch=epoch,
            step=script.progress.step,
            num_workers=self.job.num_workers,
            number=self._loop.number,
        )

    @property
    def has_pending(self) -> bool:
        """Whether batches were taken since the last step."""
        return bool(self._pending)

    @property
    def updates(self) -> int | None:
        """Steps of all workers, if each takes batches of its own; None if all take each batch together."""
        return self._lease.position.step if self._lease is not None else None

    def _sync_loops(self) -> None:
        """Make the models equal on all workers, if they trained apart."""
        if self._lease is not None:
            self._lease.end()
            script.progress.step = self._lease.position.step
        for loop in script.loops:
            loop.sync()
        _check_weights()
        for loop in script.loops:  # a call between two epochs may pull weights again
            loop.weights_are_equal()
        refuse_different_weights(self._loop.strategy.gather)

    def _leave_early(self) -> None:
        """As at the end of the data. A generator that is being closed cannot propagate exceptions:
        they end the process here.
        """
        try:
            if self._lease is not None:
                self._lease.give_back()
            self._sync_loops()
        except Exception as error:
            told = failure.describe(
                error, rank=self.rank, stop=session.stop_requested(), meets_peers=session.meets_peers()
            )
            session.failed(told)
            os._exit(told.exit_code)

    def give_back(self) -> None:
        """The job leaves: no worker waits for this one's batches."""
        if self._lease is not None:
            self._lease.give_back()

    def _refuse_left_out(self, part: Slice) -> None:
        """Refuse skipped samples with accumulation: commit corrects the divisor for one batch, not for
        the sum of several.
        """
        self._num_left_out += part.num_local if part.num_asked is None else part.num_asked
        self._num_left_out -= part.num_local
        if self._num_left_out and self._pending:
            raise TrainingError(
                f"{self._num_left_out} bad samples were left out of batches whose gradients are accumulated into one step, and how "
                "much each batch counts is then known too late. Nothing of this step was applied; repair the data, or take "
                "a step after every batch."
            )

    def __len__(self) -> int:
        num_steps = self._batches.num_steps(self.num_workers)
        if num_steps is None:
            raise TypeError("a stream has no length")
        return num_steps


class CustomLoop:
    """State that `setup` keeps between the steps of a user's loop."""

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
        self.inner: list[torch.optim.Optimizer] = []
        """Optimizers that the given one wraps."""

        self._watch: WeightWatch | None = None
        self._has_stepped = False
        self._shares: list[float] = []  # counted by each backward since the last commit
        self._has_new = True  # gradients that no step has used, unless they are gone
        self._num_taken = self._num_run_back = 0  # batches since the last commit
        self._is_run_back = self._has_borrowed = False  # the newest batch; any of them
        self.beside: list[torch.optim.Optimizer] = []
        """Optimizers that step some of the model's parameters beside the given one."""

        self.number = next_number()

    def about_to_run(self, part: Slice) -> None:
        """A slice is given to the script: models will run on it, up to the next commit."""
        if self.optimizer is not None:
            self._refuse_uneven()
            if torch.is_grad_enabled():
                self._num_taken += 1
                self._is_run_back = False
                self._has_borrowed |= part.borrowed
            self._stepping.about_to_run()
            self.weigh(part)

    def weigh(self, part: Slice) -> None:
        """From here on the script computes with this slice."""
        if self.optimizer is not None:
            self._stepping.weigh(part)
            # On a mesh the loss is weighted before backward, otherwise the gradients after it.
            is_mesh = strategies.parse(self.job.strategy).base == "mesh"
            gathering.enter(GatherScope(part.num_local, 1.0 if is_mesh else part.num_local / part.num_global))

    @property
    def has_gradients(self) -> bool:
        """Whether backward has left gradients that no step has used."""
        return (
            self.optimizer is not None
            and self._has_new
            and any(p.grad is not None for p in self.model.parameters())
        )

    def _note_gradient(self, parameter: Tensor) -> None:
        if not own_gradients.rests():
            self._has_new = True

    def sum_gradients(self) -> None:
        """Put sums over the workers into `.grad`; the following commit only updates."""
        part = script.trained
        if part is None:
            raise _no_batch_yet("the gradients were to be summed")
        self.check_weights()
        self._stepping.sum_gradients(self._with_share(part))
        self._shares.clear()
        self.weights_are_equal()

    @property
    def _takes_shares(self) -> bool:
        """Whether gradients are weighted by what their loss counts: not where a worker steps by its own gradient."""
        return self.job.num_workers > 1 and not isinstance(self.strategy, (Leased, PeriodicSync))

    def backward_begins(self, part: Slice, share: float) -> None:
        if self.optimizer is None or not self._takes_shares:
            return
        if not self.has_gradients:
            self._shares.clear()  # the script has dropped them
        if self._watch is not None:
            self._watch.was_reached = False
        self._stepping.weigh(dataclasses.replace(part, counted_share=share))

    def backward_ended(self, share: float) -> None:
        if self.optimizer is None or not self._takes_shares:
            return
        was_reached = self._watch is None or self._watch.was_reached
        if was_reached or len(script.loops) == 1:  # a zero in the place of a loss reaches nothing
            self._num_run_back += not self._is_run_back
            self._is_run_back = True
        if was_reached:
            self._has_new = True  # fsdp has no hooks on parameters
            self._shares.append(share)
            self._refuse_uneven(most=1)

    def _refuse_uneven(self, most: int = 0) -> None:
        """Refuse to add up gradients whose losses count a slice differently: one divisor is exchanged with a step."""
        if len(self._shares) > most and any(share != 1.0 for share in self._shares) and self.has_gradients:
            raise ConfigError(
                "gradients of several losses or batches are accumulated into one step, and one of the losses left out labels, weighted classes or "
                "averaged over a mask: how much each counts is only known at the step. Nothing of this step was applied; "
                f"{counted_share.CURE}."
            )

    def _with_share(self, part: Slice) -> Slice:
        return dataclasses.replace(part, counted_share=self._shares[0]) if len(self._shares) == 1 else part

    def _with_batches(self, part: Slice) -> Slice:
        """The slice with the batches of this step, which are the same on every worker; but borrowed samples need not be run back."""
        is_new = self.job.incarnation > 0 and not self._has_stepped  # it began within what this step is of
        if not self._takes_shares or self._has_borrowed or is_new:
            return part
        return dataclasses.replace(part, run_back=(self._num_taken, self._num_run_back))

    def check_weights(self) -> None:
        """Refuse weights that were changed from gradients of this worker alone."""
        if self._watch is not None:
            self._watch.check()

    def accept_weights(self) -> None:
        """The strategy itself has written the weights."""
        if self._watch is not None:
            self._watch.accept()

    def weights_are_equal(self) -> None:
        """No gradient of this worker alone is left from which the script could change them."""
        if self._watch is not None:
            self._watch.forget()

    @property
    def digest(self) -> int | None:
        """Of weights that every worker has to the bit; None where it has not."""
        job, name = self.job, strategies.parse(self.job.strategy)
        if self._watch is None or name.axes is not None or job.num_hosts > 1 or "," in job.device:
            return None  # other processors round differently
        if name.has_servers and self._has_stepped:
            return None  # a copy of the servers'
        return digest(self.model)

    def epoch_begins(self) -> None:
        """Refuse a loop whose end shoal cannot detect, if workers have to meet there."""
        if not isinstance(self.strategy, (Leased, PeriodicSync)):
            return
        try:
            loop_shape.check_for_loop(loop_shape.script_frames())
        except loop_shape.CannotEnter as reason:
            raise ConfigError(
                f"under '{self.how_apart}' workers train apart and meet where a `for` over the data ends, which shoal cannot see here: {reason}. "
                "Nothing was trained; write `for x, y in data:`, or use an exact strategy (ddp, ps)."
            ) from None

    @property
    def how_apart(self) -> str:
        """Option that makes workers train apart, as the user wrote it."""
        return self.job.strategy if self.job.sync_every is None else f"--sync-every {self.job.sync_every}"

    @property
    def has_diverged(self) -> bool:
        """Whether weights differ between workers at present."""
        return has_diverged(self.strategy)

    def sync(self) -> None:
        """Make the models equal on all workers now. Collective if they have trained apart."""
        if isinstance(self.strategy, PeriodicSync):
            result = self.strategy.sync()
            script.ended = script.ended or (result is not None and result.leave)

    def epoch_is_over(self) -> None:
        """The epoch is over: the script may end with it, before the steps that a verification asked for."""
        if self._verification is not None:
            self._verification.write(self.strategy)

    @property
    def _stepping(self) -> AcceptsGradients:
        return self.strategy  # type: ignore[return-value]  # the strategies there are can all do it

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
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
        if self.job.num_workers > 1:
            extend_torch(_sum_gradients_of, _owners_of_gradients)
        fingerprint_at_end(model)
        refuse_hooks(self.job, model)
        refuse_lookups(self.job, model)
        self.inner = inner_optimizers(optimizer)
        self._uncut = parameter_loss.Uncut(model)
        self.parameter_ids = {id(parameter) for parameter in model.parameters()}
        if self.job.num_workers > 1:
            self._num_groups = len(optimizer.param_groups)
            self._refuse_shared(model)
            refuse_foreign(optimizer, self.parameter_ids)
        axes = strategies.parse(self.job.strategy).axes
        is_cut, in_stages = axes is not None, axes is not None and axes.pp != 1
        self.strategy.prepare(
            TrainJob(
                model=model,
                loss=loss_rule(nn.MSELoss()),  # never called: the loss is the loop's own
                build_optimizer=lambda _: optimizer,
                given_optimizer=optimizer if is_cut else None,
                device=self.device,
                number=self.number,
                is_own_loop=True,
                checkpoint_activations=self.job.checkpoint_activations,
                first_slice=first_slice(batches, self.job.num_data_ranks) if in_stages else None,
                control=self._control,
            )
        )
        for parameter in () if is_cut else model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
        if is_cut or self.job.sync_every is not None:
            script.recovery.stop_noting()  # no worker is replaced alone
        if isinstance(self.strategy, Leased):
            self._begin_apart()
        if self._takes_shares:
            watch_backward()
        self.parameter_ids = {
            id(parameter) for parameter in model.parameters()
        }  # a strategy may have cut them
        for inner in self.inner if is_cut else ():
            if any(id(p) not in self.parameter_ids for group in inner.param_groups for p in group["params"]):
                raise ConfigError(
                    f"'{self.job.strategy}' partitions the parameters, and the {type(inner).__name__} within the {type(optimizer).__name__} holds "
                    "them in groups of its own. Nothing was trained; let both have the same param_groups, or use --strategy ddp."
                )
        trains_apart = isinstance(self.strategy, (Leased, PeriodicSync))
        if not is_cut and not trains_apart and (self.job.num_workers > 1 or self.job.verify):
            self._watch = WeightWatch(model)
        if not script.checks_at_end:
            script.checks_at_end = True
            session.at_end(_check_weights)
        # With a fused optimizer a GradScaler would look for infinities in this worker's gradients alone,
        # and skip within its kernel: make the scaler use `unscale_`, which sums first.
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        for each in (optimizer, *self.inner):
            self._commit_at_step_of(each)
        if self.job.num_workers > 1:
            act_on_sums(optimizer, self.sum_gradients)
        if self.inner:
            script.recovery.give_up(
                self.strategy.replay_log,
                f"a {type(optimizer).__name__} holds another optimizer, whose state is not handed to a new worker",
            )

    def _refuse_shared(self, model: nn.Module) -> None:
        """Refuse two models that share parameters: each would weigh their gradients."""
        for name, parameter in model.named_parameters():
            if any(
                loop is not self and id(parameter) in loop.parameter_ids
                for loop in script.loops
                if loop.optimizer is not None
            ):
                raise ConfigError(
                    f"the model that shoal.setup was given shares '{name}' with one that it was given before, and their gradients would be summed "
                    "twice. Nothing was trained; give shoal.setup one module that has both, nn.ModuleList([one, other]), with each optimizer."
                )

    def has_given(self, parameter: Tensor) -> bool:
        """Whether a parameter is one of this model's, as it was before a strategy partitioned it, or now."""
        return id(parameter) in self.parameter_ids or self._uncut.name_of(parameter) is not None

    def step_beside(self, optimizer: torch.optim.Optimizer) -> None:
        """Another optimizer is about to step parameters of this model: on the sum of their gradients."""
        if not any(optimizer is known for known in self.beside):
            self.beside.append(optimizer)
            script.recovery.give_up(
                self.strategy.replay_log,
                f"a second optimizer ({type(optimizer).__name__}) trains the model, whose state is not handed to a new worker",
            )
        if strategies.parse(self.job.strategy).base != "ddp" or self.job.sync_every is not None:
            raise ConfigError(
                f"a second optimizer ({type(optimizer).__name__}) steps parameters of a model that shoal.setup was given, and under '{self.how_apart}' "
                f"only the step of one ({type(self.optimizer).__name__}) is exchanged. Nothing of this step was applied; give one optimizer all "
                "parameters, in groups, or use --strategy ddp."
            )
        if self.has_gradients:  # else those of the last step, which are summed
            self.sum_gradients()

    def _commit_at_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        update = optimizer.step

        def step(_: torch.optim.Optimizer, closure: Any = None) -> Any:
            if self.is_committing:
                return self._update() if optimizer is self.optimizer else update()
            if closure is not None:
                raise ConfigError(
                    "optimizer.step(closure) runs the model several times per update, which no strategy can cut. Use "
                    "an optimizer that steps without a closure."
                )
            self._update: Callable[[], Any] = (
                update  # of the wrapper, or of an optimizer that it steps by itself
            )
            return self._commit()

        # Schedulers mark the step function they have seen, and expect a bound method.
        step.__dict__.update(getattr(update, "__dict__", {}))
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def _begin_apart(self) -> None:
        """Record the loop's data for leases, if each worker trains batches of its own."""
        how = self.job.strategy
        if any(loop.optimizer is not None for loop in script.loops):
            raise ConfigError(
                f"'{how}' hands each batch to one worker, which pushes it as one update of one model, and shoal.setup was given "
                "a second one. Nothing was trained; use an exact strategy (ps, ddp)."
            )
        script.recovery.stop_noting()
        if self.strategy.replay_log is not None:
            self.strategy.replay_log.drop_results(
                f"note: under '{how}' each worker takes whole batches of its own: the loop's counters, and a scheduler that is stepped in "
                "it, count this worker's batches; shoal.log is of them; shoal.checkpoint saves between two epochs. A worker that dies "
                "takes all of them back to the newest checkpoint where the script calls shoal.resume, else to its beginning"
            )

    def _commit(self) -> None:
        part = script.trained
        if part is None:
            raise _no_batch_yet("optimizer.step() was called")
        assert self.optimizer is not None
        if self.job.num_workers > 1 and len(self.optimizer.param_groups) != self._num_groups:
            self._num_groups = len(self.optimizer.param_groups)
            refuse_foreign(self.optimizer, {id(parameter) for parameter in self.model.parameters()})
        self.check_weights()
        script.about_to_commit(self)
        self._control.leave = asked_to_leave() is not None
        self._stepping.adopt(self._with_batches(self._with_share(part)))
        self._shares.clear()
        self._num_taken = self._num_run_back = 0
        self._is_run_back, self._has_borrowed = False, part.borrowed
        self.is_committing = True
        try:
            result = self.strategy.commit()
        finally:
            self.is_committing = False
        self._has_stepped = True
        self._has_new = False
        for loop in script.loops:  # a step of one model may end with a change of another's weights
            loop.weights_are_equal()
        script.ended = script.ended or result.leave
        num_samples = sum(data.stepped() for data in script.data)
        updates = max((each.updates for each in script.open if each.updates is not None), default=None)
        recorder.RECORDER.done(self.strategy.step, part.num_local)
        PROFILER.after_step()
        script.progress.committed(epoch=part.epoch, samples=num_samples, step=updates)
        if self._verification is not None:
            self._verification.count(self.strategy, result.loss)
        if script.ended:
            for each in script.open:
                each.give_back()
        if script.ended and not script.progress.ends_itself:
            raise Interrupted(
                signal_name=asked_to_leave() or "SIGINT", step=script.progress.step, checkpoint=None
            )


@dataclass(slots=True)
class Script:
    """State shared by the loops of a script: one model trained after another, or two in turn on one batch."""

    loops: list[CustomLoop] = field(default_factory=list)
    slice: Slice | None = None
    """Slice taken last, from any data."""

    data: list[WorkerData] = field(default_factory=list)
    """Data from which a batch was taken."""

    every: list[WorkerData] = field(default_factory=list)
    open: list[WorkerData] = field(default_factory=list)
    """Data in the middle of an epoch."""

    ended: bool = False
    """The job was asked to leave, and all ranks know it."""

    saves: bool = False
    """The script calls shoal.checkpoint, which saves when it leaves."""

    resumes: bool = False
    """The script has called shoal.resume."""

    between: str | None = ""
    """Position of the script outside of epochs of its data; None inside."""

    recovery: Recovery = field(default_factory=Recovery)
    progress: LoopProgress = field(default_factory=LoopProgress)
    is_anchored: bool = False
    """Whether the step in progress has an anchor for a replacement."""

    committed: CustomLoop | None = None
    """Took a step since then."""

    checks_at_end: bool = False
    loss_counts: LossCounts = field(default_factory=LossCounts)
    has_unknown_loss: bool = False
    backward: tuple[weakref.ref[Tensor], float, float] | None = None
    """Loss of the newest backward, the share of its targets that it counted, and its multiple that stands for the batch."""

    def counts_of(self, losses: list[Tensor], part: Slice) -> LossWeight:
        """How the losses of a backward count the slice; an operation that nothing is known of is reported once."""
        scope = gathering.current()
        if (scope is not None and scope.is_used) or part.num_local == part.num_global:
            return LossWeight(1.0, [])  # rows of the whole batch
        different = self._different_shares()
        parts = [(max(each.num_local, 1), each.num_global) for each in (part, *self._trained_parts())]
        try:
            counted = self.loss_counts.read(losses, *dict.fromkeys(parts))
        except ConfigError as error:
            raise different or error from None
        if different is not None and not counted.is_exact:
            raise different
        if counted.unknown is not None and not self.has_unknown_loss:
            self.has_unknown_loss = True
            if jobs.rank() == 0:
                print(
                    f"note: the loss is computed by {counted.unknown}, which shoal does not look into: it is taken for a mean over the samples of "
                    "each worker's slice; `shoal verify` shows whether it is one",
                    file=sys.stderr,
                    flush=True,
                )
        return counted

    def weight_of(self, value: Any) -> tuple[float, float]:
        """The share of a slice that a logged value counts, and its multiple that stands for the batch."""
        known = self.backward
        return known[1:] if known is not None and known[0]() is value else (1.0, 1.0)

    @property
    def takes_whole_batches(self) -> bool:
        """Whether the running epoch has whole batches per worker."""
        return any(data.updates is not None for data in self.open)

    @property
    def trained(self) -> Slice | None:
        """The slice that gradients are computed of: not one that was taken to evaluate."""
        parts = self._trained_parts()
        return self.slice if not parts or any(part is self.slice for part in parts) else parts[-1]

    def _different_shares(self) -> ConfigError | None:
        """Refusal of gradients of several data, if this worker's slices are different parts of their batches."""
        parts = self._trained_parts()
        if len({part.num_local / part.num_global for part in parts}) < 2:
            return None
        return ConfigError(
            f"batches of {len(parts)} data were taken for one step, and this worker's slices are different shares of them "
            f"({', '.join(f'{part.num_local} of {part.num_global} samples' for part in parts)}), so no weight is right for the gradients of "
            "all. Nothing of this step was applied; let every batch be a multiple of the number of workers, or divide each loss by itself: "
            f"{counted_share.CURE}."
        )

    def _trained_parts(self) -> list[Slice]:
        return [data.taken for data in self.open if data.has_pending and data.is_trained_on and data.taken]

    def go_on_with(self, data: WorkerData) -> None:
        """The script is back at the batch that it took before it went through other data."""
        self.slice = data.taken
        if data.taken is not None:
            for loop in self.loops:
                loop.weigh(data.taken)
        recorder.RECORDER.base(recorder.COMPUTE)

    def anchor(self, data: WorkerData, part: Slice) -> None:
        """Set an anchor before the first batch since the last step: a replacement runs the step from here."""
        self.is_anchored, self.committed = True, None
        self.recovery.note(
            self.loops[-1].strategy.replay_log,
            DataPlace(
                data=data.number,
                epoch=part.epoch,
                next_index=part.start,
                index=data.index,
                stretch=data.position.stretch,
                epochs={each.number: each.epoch for each in self.every},
                progress=self.progress.state(),
            ),
        )

    def began(self, place: DataPlace) -> None:
        if place.progress:
            self.progress.restore(place.progress)
        for data in self.every:
            data.epoch = place.epochs.get(data.number, data.epoch)

    def about_to_commit(self, loop: CustomLoop) -> None:
        """Refuse gradients computed before a step whose later weights a replacement received: it cannot recompute them."""
        replay_log = loop.strategy.replay_log
        waiting = [other for other in self.loops if other is not loop and other.has_gradients]
        if self.committed is not None or waiting:
            self.recovery.give_up(
                replay_log, f"{calling_line()}: more than one optimizer step is taken on a batch"
            )
        if replay_log is None or not replay_log.next_is_known:
            self.committed = loop
        self.is_anchored = False


script = Script()


def setup(model: Model, optimizer: Optimizer, data: Any) -> tuple[Model, Optimizer, WorkerData]:
    """Distribute an ordinary training loop: returns the same model and optimizer, and this worker's part of the data.

    May be called again: for another model, or with the same two for other data.
    """
    if not isinstance(model, nn.Module) or not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            "shoal.setup takes a module, an optimizer and data, in this order, and got "
            f"{', '.join(type(each).__name__ for each in (model, optimizer, data))}. Nothing was changed; write "
            "shoal.setup(model, optimizer, data)."
        )
    batches = batches_of(data, what="setup", seed=jobs.current().seed, may_be_endless=True)
    job = jobs.current()
    refuse_own_loop(job.tasks, job.accumulate)
    script.recovery.set_up()
    if job.incarnation:
        _catch_up_quietly()
    refuse(batches, num_workers=job.num_workers, strategy=job.strategy, what="shoal.setup")
    number = session.begin_call("setup", described(batches))
    loop = next((loop for loop in script.loops if loop.optimizer is optimizer), None)
    if loop is None:  # a second optimizer of the same model steps beside the first
        loop = next(
            (loop for loop in script.loops if loop.optimizer is not None and loop.model is model), None
        )
    if loop is None:
        loop = CustomLoop()
        call = Call(number, loop.strategy.replay_log)
        loop.attach(model, optimizer, batches)
        script.loops.append(loop)
        script.recovery.models.append(model)
        script.recovery.optimizers.append(optimizer)
    elif loop.model is not model:
        raise ConfigError(
            "shoal.setup was given an optimizer that it already has, with another model. Nothing was changed; build an "
            "optimizer for each model."
        )
    else:
        call = Call(number, loop.strategy.replay_log)
    if not call.is_over:  # a replacement skips this, as the others have done it before
        call.end(None)
    mine = WorkerData(loop, batches.for_device(loop.device))
    script.every.append(mine)
    return model, optimizer, mine


def counted(data: Any, start: int = 0) -> Any:
    """`enumerate` for a process that enters an epoch in its middle."""
    return data.counted_from(start) if isinstance(data, WorkerData) else enumerate(data, start)


def _catch_up_quietly() -> None:
    """Let a replacement's script enter its loops at the others' position, without writing files before it has caught up."""

    loop_shape.use_enterable(loop_shape.script_frames(), {"range": loop_shape.Range, "enumerate": counted})
    save = torch.save

    @functools.wraps(save)
    def save_when_live(*args: Any, **kwargs: Any) -> None:
        if session.is_live():
            save(*args, **kwargs)

    if not hasattr(torch.save, "__wrapped__"):
        torch.save = save_when_live


def reduce(value: Tensor | float) -> Any:
    """The sum of `value` over all workers, in rank order; a number gives a number."""
    if script.takes_whole_batches:
        raise ConfigError(
            f"shoal.reduce is a sum over all workers, who come to it together, and under '{jobs.current().strategy}' each takes as many "
            "batches as it can. Nothing was summed; call it after the loop over the data, or use an exact strategy (ps, ddp)."
        )
    strategy, remembered = present_moment()
    tensor = value if isinstance(value, Tensor) else torch.tensor([value], dtype=torch.float64)
    summed = remembered("reduce", lambda: strategy.reduce(tensor))
    return summed if isinstance(value, Tensor) else float(summed)


def present_moment() -> tuple[Strategy, Callable[[str, Callable[[], T]], T]]:
    """Strategy for an exchange, and how to run it: results that a replacement would need are kept."""
    strategy = _current_loop().strategy
    replay_log, between = strategy.replay_log, script.between
    if replay_log is None or between is None or replay_log.is_inside_call:
        return strategy, lambda what, run: run()
    return strategy, lambda what, run: replay_log.remembered(f"{what} {between}", run)


def sum_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Put the sum over all workers into `.grad` of this optimizer's parameters, before its step.

    Between backward and step a gradient is only this worker's part; after this it is the whole,
    equal on every worker, and may be read and changed. Call it after the last backward of a step;
    `optimizer.step()` then only updates.
    """
    loop = next((loop for loop in script.loops if loop.optimizer is optimizer), None)
    if loop is None:
        raise ConfigError("shoal.sum_gradients was given an optimizer that shoal.setup does not know.")
    loop.sum_gradients()


def _sum_gradients_of(parameters: list[Tensor]) -> None:
    """Sum the gradients of every loop that one of these belongs to; not during a commit, when they are final."""
    given = {id(parameter) for parameter in parameters}
    for loop in script.loops:
        if loop.optimizer is not None and not given.isdisjoint(loop.parameter_ids) and not loop.is_committing:
            loop.sum_gradients()


def _owners_of_gradients() -> dict[int, Tensor]:
    return {
        id(parameter.grad): parameter
        for loop in script.loops
        if loop.optimizer is not None
        for parameter in loop.model.parameters()
        if parameter.grad is not None
    }


def mean(total: Tensor, count: Tensor | float) -> Tensor:
    """A loss over something other than samples: its local sum and local count, as a mean over all workers.

    Use it where slices count differently, as under a mask: `shoal.mean((losses * mask).sum(),
    mask.sum()).backward()`.
    """
    part = script.slice
    if part is None:
        raise ConfigError("shoal.mean was called before the first batch was taken from shoal.setup's data.")
    if script.takes_whole_batches:
        return total / float(count) if count else total * 0.0
    # A borrowed sample is counted by its owner.
    mine = torch.tensor([float(count) if part.num_local else 0.0, part.num_local], dtype=torch.float64)
    everywhere, num_samples = reduce(mine).tolist()
    # optimizer.step weights this rank by its share of the samples; compensate for that.
    share = part.num_local / num_samples if num_samples else 0.0
    loss = total / (everywhere * share) if share and everywhere else total * 0.0
    counted_share.mark_exact(loss)
    return loss


def should_stop() -> bool:
    """True once the job was asked to leave; decided with a step, so it turns true on all ranks at once."""
    script.progress.ends_itself = True
    return script.ended


def log(**values: Any) -> None:
    """Put named values into this step's line of metrics.jsonl, `loss` also on the display: `shoal.log(loss=loss, accuracy=hits / n)`.

    A value is this worker's mean over its slice, and becomes the mean over the batch; or a pair (sum, count). Every worker
    calls it at the same point: it is an exchange.
    """
    part = script.slice if script.between is None else None
    weight = 1.0 if part is None else float(part.num_local)
    pairs = []
    for name, value in values.items():
        try:
            pair = value if isinstance(value, tuple) else (value, 1.0)
            total, count = (float(each.detach() if isinstance(each, Tensor) else each) for each in pair)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"shoal.log was given {name}={value!r:.60}; it takes numbers, tensors of one number, and pairs (sum, count)."
            ) from None
        share, to_batch = script.weight_of(value)
        factor = 1.0 if isinstance(value, tuple) else weight * share
        # A borrowed sample is counted by its owner.
        pairs.append([total * to_batch * factor, count * factor] if factor else [0.0, 0.0])
    sums = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
    sums = sums if script.takes_whole_batches else reduce(sums)
    means = (sums[:, 0] / sums[:, 1]).tolist()
    script.progress.log(dict(zip(values, means, strict=True)))


def _check_weights() -> None:
    for loop in script.loops:
        loop.check_weights()


def refuse_different_weights(gather: Callable[[Tensor], list[Tensor]]) -> None:
    """Refuse models that each worker has trained for itself, or with a learning rate of its own. Collective."""
    loops = [loop for loop in script.loops if loop.optimizer is not None]
    if jobs.num_workers() == 1 or any(isinstance(loop.strategy, (Leased, PeriodicSync)) for loop in loops):
        return
    digests = [found for loop in loops if (found := loop.digest) is not None]
    groups = [
        [_plain_settings(group) for group in loop.optimizer.param_groups] for loop in loops if loop.optimizer
    ]
    settings = [zlib.crc32(repr(each).encode()) for each in groups]
    refuse_different(settings, digests, gather)


def _plain_settings(group: dict[str, Any]) -> list[Any]:
    given = {
        key: float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in group.items()
    }
    return sorted((key, value) for key, value in given.items() if isinstance(value, (int, float, str)))


def _no_batch_yet(what: str) -> ConfigError:
    return ConfigError(
        f"{what} before the first batch was taken from the data that shoal.setup returned. Loop over that data: "
        "`for x, y in data:`."
    )


def _current_loop() -> CustomLoop:
    if not script.loops:
        script.loops.append(CustomLoop())  # a script may reduce before it trains
    return script.loops[-1]


# ---- gradients summed before the step ---------------------------------------------------------------


Sum = Callable[[list[Tensor]], None]
"""Sums the gradients of the models that any of these parameters belongs to."""

_is_extended = False


def extend_torch(sum_of: Sum, owners_of: Callable[[], dict[int, Tensor]]) -> None:
    """Make torch's functions operate on sums; `owners_of` gives parameters by the identity of their gradients."""
    global _is_extended
    if _is_extended:
        return
    _is_extended = True

    def of_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            sum_of(given)
            return _of_parts(function, given, [p.grad for p in given], *args, **kwargs)

        return clip

    def of_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
        def total(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            by_gradient = owners_of()
            owners = [by_gradient.get(id(tensor)) for tensor in given]
            sum_of([owner for owner in owners if owner is not None])
            now = [
                tensor if owner is None or owner.grad is None else owner.grad
                for tensor, owner in zip(given, owners, strict=True)
            ]
            whole = _norm_over_stages(owners)
            if whole is not None:
                return torch.tensor(whole, dtype=now[0].dtype, device=now[0].device)
            return _of_parts(function, now, now, *args, **kwargs)

        return total

    for name in ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_"):
        _extend(name, of_parameters)
    _extend("_get_total_norm", of_gradients)
    unscale = torch.amp.GradScaler.unscale_

    @functools.wraps(unscale)
    def unscale_sums(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the summed gradients: every worker finds the same infinities, so all skip the step or none does."""
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if scaler.is_enabled():
            _refuse_scaler_apart(given)
        if any(isinstance(parameter, DTensor) for parameter in given):
            raise ConfigError(
                "a GradScaler looks for infinities in this worker's part of the model alone, and the others would take a step that it "
                "skips. Nothing of this step was applied; use bf16, which needs no scaler, or --strategy ddp."
            )
        sum_of(given)
        unscale(scaler, optimizer)

    torch.amp.GradScaler.unscale_ = unscale_sums  # type: ignore[method-assign, assignment]


def watch_backward() -> None:
    """Weight each backward of a loop by what its loss counts, until the script ends."""
    inner = torch.autograd.backward
    if getattr(inner, "shoal_counts", False):
        return

    @functools.wraps(inner)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        # Not for a Trainer, nor for a block that runs again within backward.
        if script.slice is None or own_gradients.rests() or torch._C._current_graph_task_id() != -1:
            return inner(tensors, *args, **kwargs)
        part = script.trained
        assert part is not None
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        counted, to_batch = script.counts_of(losses, part), part.num_global / max(part.num_local, 1)
        share = counted.share
        script.backward = (
            (weakref.ref(losses[0]), share, to_batch if counted.is_sum else 1.0) if losses else None
        )
        for loop in script.loops:
            loop.backward_begins(part, share)
        with counted.whole_sums(to_batch):
            inner(losses, *args, **kwargs)
        for loop in script.loops:
            loop.backward_ended(share)

    backward.shoal_counts = True  # type: ignore[attr-defined]
    torch.autograd.backward = backward


def watch_optimizers() -> None:
    """Look at the steps of optimizers that shoal.setup was not given."""
    known = [each for loop in script.loops for each in (loop.optimizer, *loop.inner)]
    for thing in gc.get_objects():
        # Not isinstance: it asks the object itself, and deprecated ones answer with a warning.
        if not issubclass(type(thing), torch.optim.Optimizer) or any(thing is each for each in known):
            continue
        update = thing.step
        if getattr(update, "is_watched", False):
            continue

        def step(optimizer: torch.optim.Optimizer, *args: Any, update: Any = update, **kwargs: Any) -> Any:
            if not is_ours(sys._getframe(1).f_code.co_filename):  # not the outer optimizer of local SGD
                _before_step(optimizer)
            return update(*args, **kwargs)

        step.__dict__.update(getattr(update, "__dict__", {}), is_watched=True)
        thing.step = types.MethodType(step, thing)


def _before_step(optimizer: torch.optim.Optimizer) -> None:
    loops = [loop for loop in script.loops if loop.optimizer is not None]
    is_known = any(optimizer is known for loop in loops for known in (loop.optimizer, *loop.inner))
    if is_known or not script.open or own_gradients.rests() or any(loop.is_committing for loop in loops):
        return
    given = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.grad is not None and not any(loop.has_given(p) for loop in loops) for p in given):
        refuse_foreign(optimizer, set[int]().union(*(loop.parameter_ids for loop in loops)))
    for loop in loops:
        if any(map(loop.has_given, given)):
            loop.step_beside(optimizer)


def refuse_foreign(optimizer: torch.optim.Optimizer, known: set[int]) -> None:
    """Refuse to train parameters that no model given to shoal.setup has: nothing would sum their gradients."""
    shapes = [
        tuple(p.shape)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and id(p) not in known
    ]
    if shapes:
        raise ConfigError(
            f"the {type(optimizer).__name__} trains {len(shapes)} parameter{'s' if len(shapes) > 1 else ''} (the first of shape {shapes[0]}) that the "
            "model given to shoal.setup does not have: nothing sums their gradients, and every worker would train others. Nothing of this step "
            "was applied; give shoal.setup one module that has them, nn.ModuleList([model, other]), or call it for that model and its optimizer, too."
        )


def _refuse_scaler_apart(parameters: list[Tensor]) -> None:
    given = {id(parameter) for parameter in parameters}
    for loop in script.loops:
        if isinstance(loop.strategy, (Leased, PeriodicSync)) and not given.isdisjoint(loop.parameter_ids):
            raise ConfigError(
                f"under '{loop.how_apart}' workers train apart: a GradScaler would skip a step by this worker's own overflow, the others "
                "would not skip the same one, and they would not meet again. Nothing of this step was applied; use bf16, which needs no "
                "scaler, or an exact strategy (ddp, ps) without --sync-every."
            )


def _norm_over_stages(owners: Iterable[Tensor | None]) -> float | None:
    """Norm over the stages of a model, each of whose ranks has the gradients of its own. Collective."""
    known = {id(owner) for owner in owners if owner is not None}
    for loop in script.loops:
        if isinstance(loop.strategy, HoldsStages) and any(id(p) in known for p in loop.model.parameters()):
            return loop.strategy.norm_over_stages()
    return None


def _of_parts(
    function: Callable[..., Any],
    given: list[Tensor],
    gradients: list[Tensor | None],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call one of torch's functions; sharded gradients are passed in separate groups."""
    there = [gradient for gradient in gradients if gradient is not None]
    if not any(isinstance(gradient, DTensor) for gradient in there):
        return function(given, *args, **kwargs)
    given = list(given)
    bound = inspect.signature(function).bind(given, *args, **kwargs)
    bound.apply_defaults()
    bound.arguments["foreach"] = False
    is_plain = not bound.arguments.get("error_if_nonfinite") and bound.arguments.get("norm_type", 2.0) == 2.0
    if function.__name__ == "_get_total_norm" and is_plain:
        return torch.tensor(norm_of(there), dtype=there[0].dtype, device=there[0].device)
    if function.__name__ == "_get_total_norm":  # of norms; torch has none of a rank's empty shard
        given[:] = [torch.linalg.vector_norm(whole(each), bound.arguments["norm_type"]) for each in there]
    return function(*bound.args, **bound.kwargs)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients, summed over all workers, to a norm of at most `max_norm`; gives the norm they had.

    As `torch.nn.utils.clip_grad_norm_`, which under `shoal.setup` does the same. Call it after the last backward of a step.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def _extend(name: str, extended: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    function: Callable[..., Any] | None = getattr(clip_grad, name, None)
    if function is None:  # of another version of torch
        return
    inner = _cell_of(function)
    if inner is not None:
        inner.cell_contents = extended(inner.cell_contents)
        return
    replacement = extended(function)
    for module in (clip_grad, torch.nn.utils):
        for alias in (name, name.removeprefix("_")):
            if getattr(module, alias, None) is function:
                setattr(module, alias, replacement)


def _cell_of(function: Any) -> CellType | None:
    """Cell in which torch's no-grad wrapper holds its function: replacing it there reaches every import."""
    closure = getattr(function, "__closure__", None) or ()
    held = [cell for cell in closure if isinstance(cell.cell_contents, FunctionType)]
    return held[0] if len(held) == 1 else None
