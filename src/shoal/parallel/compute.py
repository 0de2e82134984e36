"""One slice through the user's model and loss: forward, loss sum, backward.

Shared by every strategy that runs the whole model in one process. Decides about seeds, precision
and activation checkpointing; exchanges nothing and updates nothing.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import functools
import inspect
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from shoal.collectives.sync_batchnorm import RanksOfBatch, SyncedBatchNorm
from shoal.config import job as jobs
from shoal.config import strategy as strategies
from shoal.data.slice import LABELS, Slice, split_target, weight_of
from shoal.data.tree import Tree, concatenate, map_tensors, tensors
from shoal.embedding.hash_embedding import HashEmbedding
from shoal.errors import (
    ConfigError,
    ForwardMixesSamples,
    GradientMixesSamples,
    LossComparesSamples,
    LossDoesNotRecombine,
    TrainingError,
)
from shoal.parallel import gathering, own_gradients
from shoal.parallel.batch_dependence import THE_MODEL, draws_numbers, mixing_layers, note_mixing
from shoal.parallel.loss import LossRule, made_before, tolerance_of
from shoal.parallel.pipeline import forward_state
from shoal.parallel.protocol import LossSum, TrainJob
from shoal.parallel.sample_mixing import (
    MAX_NUMEL_RUN_BACK,
    NOTICED,
    NUM_SAMPLES,
    buffers_of_slices,
    can_be_tried,
    refuse_mixed_gradients,
    refuse_mixed_samples,
    unchanged,
)
from shoal.runtime.seeds import mix


class ModelCall:
    """Calls a model with a tensor (one argument), a tuple (positional) or a mapping (keywords).

    A mapping is passed whole if forward takes a single parameter of another name, and so is a list,
    which only a user's collate function makes (samples of different sizes). Labels in a mapping go
    to a forward that takes them. The cache for text generation is off: nothing here generates. The
    signature is read once, which keeps the step cheap.
    """

    def __init__(self, model: nn.Module, *, compile: bool = False) -> None:
        parameters = inspect.signature(model.forward).parameters
        kinds = [each.kind for each in parameters.values()]
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        is_only = len(kinds) == 1 and not takes_any and inspect.Parameter.VAR_POSITIONAL not in kinds
        self._only = next(iter(parameters)) if is_only else None
        self._left_out = () if takes_any else tuple(key for key in LABELS if key not in parameters)
        self._fixed = {"use_cache": False} if "use_cache" in parameters else {}
        if self._fixed:
            _note_caches_off()
        self._run: Callable[..., Any] = model
        if compile:
            from torch.distributed.fsdp import FSDPModule

            units = [module for module in model.modules() if isinstance(module, FSDPModule)]
            for unit in units:  # dynamo stops at fsdp's hooks around them
                unit.forward = torch.compile(unit.forward)
            if not units:
                # Not model.compile(): for a class of torch's own, such as nn.Sequential, dynamo would
                # compile nothing.
                self._run = torch.compile(lambda *args, **kwargs: model(*args, **kwargs))

    def __call__(self, inputs: Tree) -> Any:
        if isinstance(inputs, Mapping):
            named = {key: value for key, value in inputs.items() if key not in self._left_out}
            if self._only is not None and set(named) != {self._only}:
                return self._run(inputs)
            return self._run(**{**self._fixed, **named})
        if isinstance(inputs, tuple) or (isinstance(inputs, list) and self._only is None):
            return self._run(*inputs, **self._fixed)
        return self._run(inputs, **self._fixed)


class StepCall:
    """Calls the user's `training_step` within the model's own call, so that its hooks run: fsdp gathers by them."""

    def __init__(self, job: TrainJob) -> None:
        self._job = job

    def __call__(self, batch: Tree) -> Any:
        job, model = self._job, self._job.model
        assert job.training_step is not None
        own = model.__dict__.get("forward")

        def give_back() -> None:
            model.__dict__.pop("forward", None)
            if own is not None:
                model.__dict__["forward"] = own

        def forward(batch: Tree) -> Any:
            give_back()  # the step may call the model
            assert job.training_step is not None
            names = () if job.turn is None else (job.turn.name,)
            value = job.training_step(model, batch, *names)
            return {"loss": value} if isinstance(value, tuple) and len(value) == 2 else value

        model.__dict__["forward"] = forward
        try:
            return model(batch)
        finally:
            give_back()


_MARK = "_shoal_runs_again"
_TABLES = (nn.Embedding, nn.EmbeddingBag, HashEmbedding)


def run_again(model: nn.Module, wanted: bool | Sequence[str]) -> list[str]:
    """Enable activation checkpointing for blocks of `model`; returns their names. `wanted` may be patterns of names."""
    names = blocks(model) if wanted is True else _named(model, wanted or ())
    for name in names:
        module = model.get_submodule(name)
        if not is_run_again(module):
            module.__dict__[_MARK] = True
            module.forward = _checkpointed(module)
    return names


def is_run_again(module: nn.Module) -> bool:
    return _MARK in module.__dict__


def blocks(model: nn.Module) -> list[str]:
    """Outermost members of lists and sequences that hold layers of their own; else the model's children that do.

    A table lookup keeps nothing but ids, and may be a pull from servers: a block with one is not
    run twice.
    """
    found: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            is_member = isinstance(module, (nn.ModuleList, nn.Sequential))
            if is_member and _can_be(child):
                found.append(path)
            else:
                visit(path, child)

    visit("", model)
    found = found or [name for name, child in model.named_children() if _can_be(child)]
    if not found:
        raise ConfigError(
            f"no part of this {type(model).__name__} can be run again within backward: none of its members holds layers of its own. "
            "Nothing was trained; leave --checkpoint-activations out, or name layers with "
            "Trainer(checkpoint_activations=['encoder.*'])."
        )
    return found


def _can_be(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not list(module.children()):
        return False
    return not any(isinstance(each, _TABLES) for each in module.modules())


def _named(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    modules = {name: module for name, module in model.named_modules() if name}
    found: list[str] = []
    for pattern in patterns:
        matching = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(
                f"checkpoint_activations names '{pattern}', and no layer of the model is called so. Nothing was trained."
            )
        for name in matching:
            if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict, *_TABLES)):
                raise ConfigError(
                    f"checkpoint_activations names '{name}', a {type(modules[name]).__name__}, which has nothing to run again. "
                    "Nothing was trained."
                )
        found += matching
    # A block that runs again as a whole need not do so in parts.
    return [name for name in dict.fromkeys(found) if not any(name.startswith(f"{other}.") for other in found)]


def _checkpointed(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch says nothing of its type
        options: dict[str, Any] = {"use_reentrant": False}
        if norms or modes:
            options["context_fn"] = lambda: (contextlib.nullcontext(), _once_more(norms, modes))
        return checkpoint(forward, *args, **options, **kwargs)

    return run


@contextlib.contextmanager
def _once_more(norms: list[_BatchNorm], modes: list[TorchFunctionMode]) -> Iterator[None]:
    """Restore torch's modes of the first run: within backward they are off."""
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        if norms:
            stack.enter_context(_counted_already(norms))
        yield


@contextlib.contextmanager
def _counted_already(norms: list[_BatchNorm]) -> Iterator[None]:
    """Context in which BatchNorm normalises by its batch and updates no statistics. It must save as
    many tensors as before.
    """
    before = [
        (norm, norm.momentum, None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone())
        for norm in norms
    ]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum = momentum
            if norm.num_batches_tracked is not None and count is not None:
                norm.num_batches_tracked.copy_(count)


M = TypeVar("M", bound=nn.Module)

_EVALUATION = 1 << 40  # keeps the seeds of evaluate and predict apart from those of steps


class Compute:
    """Runs slices of a job's model, with randomness that is a function of (seed, rank, step)."""

    def __init__(
        self,
        job: TrainJob,
        *,
        check_loss: bool,
        check_mixing: str | None = None,
        borrowed_run_back: bool = False,
        ranks: RanksOfBatch | None = None,
        divides_by_count: bool = False,
    ) -> None:
        """`borrowed_run_back`: backward is collective, so a borrowed sample runs it too, for nothing.

        `divides_by_count`: every batch is whole, so its loss is divided by its own count, and hooks on gradients see those of
        the mean.

        `check_mixing`: name of the strategy that divides batches, so that a forward must not mix
        samples; None if none does. `ranks`: BatchNorm is synchronised over them.
        """
        self._job, self._ranks, self._divides_by_count = job, ranks, divides_by_count
        self._borrowed_run_back = borrowed_run_back or ranks is not None
        # In evaluation mode BatchNorm exchanges nothing; a partitioned model does.
        self._forward_is_collective = borrowed_run_back
        self._call = ModelCall(job.model, compile=job.compile)
        self._step_call = StepCall(job) if job.training_step is not None else None
        self._tells_graphs = job.compile
        self._checks_loss = check_loss
        # Not where forward is collective: a rank that stops in the middle of a trial would block the others
        # in theirs.
        is_tried = can_be_tried(job.model) and not self._forward_is_collective
        self._check_mixing = check_mixing if is_tried else None
        self._divides = check_mixing is not None
        if job.is_own_loop and self._check_mixing is not None:
            job.model.register_forward_hook(OwnLoopTrial(job, self._check_mixing), with_kwargs=True)
        # Local, per turn: each optimizer has a loss of its own.
        self._num_steps: Counter[str | None] = Counter()
        self._next_check: dict[str | None, int] = {}
        self.gathers = False
        """Whether the newest loss was computed from rows of all workers: then backward is collective."""
        if job.checkpoint_activations:
            run_again(job.model, job.checkpoint_activations)
        self._batchnorms = [module for module in job.model.modules() if isinstance(module, _BatchNorm)]
        # Unset, torch warns about it at the first update of sparse rows; set explicitly, behaviour stays
        # the same.
        if not torch.sparse.check_sparse_tensor_invariants.is_enabled():  # type: ignore[no-untyped-call]
            torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]

    def forward_backward(
        self, batch: Slice, *, rank: int, step: int, before_backward: Callable[[LossSum], None] | None = None
    ) -> LossSum:
        """Accumulate the gradients of the slice's loss sum, divided by the samples of the global batch.

        That divisor is known on every rank in advance, and is the true one for a plain mean over
        samples; commit corrects it by the exchanged count. `before_backward` is called once, before
        the last backward, when everything but the gradients is known.
        """
        job = self._job
        self._num_steps[self._turn] += 1
        if not job.model.training:
            job.model.train()
        others = job.turn.others if job.turn is not None else ()
        if not self._forward_is_collective:  # fsdp reads these flags once, at its first gather
            for parameter in others:
                parameter.requires_grad_(False)
        try:
            with own_gradients.Resting():
                return self._forward_backward(batch, rank=rank, step=step, before_backward=before_backward)
        finally:
            for parameter in others:
                parameter.requires_grad_(True)
                parameter.grad = None

    def _forward_backward(
        self, batch: Slice, *, rank: int, step: int, before_backward: Callable[[LossSum], None] | None
    ) -> LossSum:
        job = self._job
        pieces = batch.cut(job.num_micro)
        totals: list[Tensor] = []
        outputs: list[Tree] = []
        count = 0.0
        named: dict[str, tuple[float, float]] = {}
        for number, piece in enumerate(pieces):
            seed_all(mix(job.seed, rank, step, number), job.device)
            if self._ranks is not None:
                self._ranks.is_borrowed = piece.borrowed
            placed = self._placed(piece.batch)
            (inputs, target), weight = self._split(placed), weight_of(placed)
            with autocast(self._job), gathering.over(piece, num_micro=job.num_micro) as gathered:
                rests = piece.borrowed and self._ranks is None
                try:
                    with batchnorm_at_rest(self._batchnorms) if rests else _AS_IT_IS:
                        output = self._output(inputs, piece)
                except ValueError as error:
                    explain_batch_of_one(error, piece)
                    raise
                if self._tells_graphs:
                    self._tell_graphs()
                num_samples, is_due = max(piece.num_local, 1), self._is_check_due
                # A loss may write into its target, and `check` asks it once more.
                is_asked_again = self._checks_loss and job.loss.is_checked
                kept_target = map_tensors(Tensor.clone, target) if is_asked_again else target
                # Before a loss writes into them.
                outputs_of = [tensor.grad_fn for tensor in tensors(output)] if is_due else []
                total, piece_count = job.loss(output, target, num_samples, piece.num_global, weight)
            self.gathers = gathered.is_used
            for name, (its_sum, its_count) in job.loss.named.items():
                before, factor = named.get(name, (0.0, 0.0)), float(not piece.borrowed)
                named[name] = before[0] + its_sum * factor, before[1] + its_count * factor
            # One sample has no halves, and those of a loss over the whole batch say nothing.
            must_check = self._checks_loss and job.loss.must_check
            # A worker that has the whole batch (relaxed strategies, local SGD) divides no loss.
            has_part = piece.num_local < piece.num_global
            if (is_due or must_check) and has_part and piece.num_local > 1 and not self.gathers:
                job.loss.check(output, kept_target, piece.num_local, weight)
            if is_due and piece.num_local > 1 and not self.gathers:
                if self._divides and not job.loss.is_in_forward:
                    self._note_read_beside(total, outputs_of)
                if not self._forward_is_collective:
                    self._check_forward(piece)
                self._next_check[self._turn] = 2 * self._num_steps[self._turn]
            if not piece.borrowed:
                totals.append(total.detach())
                count += piece_count
                outputs.append(map_tensors(Tensor.detach, job.loss.predictions(output)))
            if number == len(pieces) - 1:
                whole = _sum(totals, total)
                contributed = LossSum(
                    total=whole,
                    count=count,
                    outputs=concatenate(outputs) if outputs else None,
                    on_its_way=_start_reading(whole),
                    named=named,
                )
                if before_backward is not None:
                    before_backward(contributed)
            if not piece.borrowed:  # a borrowed sample only keeps the ranks in step; its gradient is dropped
                divisor = self.divisor(piece_count, batch.num_global)
                (job.scaled(total) / divisor).backward()  # type: ignore[no-untyped-call]
            elif self._borrowed_run_back or self.gathers:
                (total * 0.0).backward()  # type: ignore[no-untyped-call]
        if (
            self._forward_is_collective
            and self._checks_loss
            and not self.gathers
            and (job.checks_every_loss or self._num_steps[self._turn].bit_count() == 1)
        ):
            # On every rank, whatever its samples, at powers of two; after backward, since fsdp counts
            # forwards.
            self._check_forward(piece)
            let_go_of_gathered(job.model)
        return contributed

    def divisor(self, count: float, num_global: int) -> float:
        """Divisor of a loss sum in backward."""
        return count if self._divides_by_count and count else num_global

    @property
    def _turn(self) -> str | None:
        return self._job.turn.name if self._job.turn is not None else None

    @property
    def _is_check_due(self) -> bool:
        """Due at the first step and ever more rarely: a mask may leave the first batches whole."""
        if not self._checks_loss or self._job.checks_every_loss:
            return self._checks_loss
        return self._num_steps[self._turn] >= self._next_check.get(self._turn, 1)

    def _check_forward(self, piece: Slice) -> None:
        """Run the model's own loss on the slice and on its halves again, in evaluation mode and without side effects.

        A rank that has no halves runs as often as the others, where they wait for it.
        """
        job = self._job
        if not job.loss.is_in_forward:
            if self._check_mixing is not None:
                self._refuse_mixing(piece, self._check_mixing)
                refuse_uneven_terms(job, self._call, piece)
            return
        halves = [piece, piece]
        with contextlib.suppress(TrainingError):  # a batch of a user's collate function, not divided by rows
            halves = piece.cut(2) if piece.num_local > 1 else halves
        if halves[0] is piece and not self._forward_is_collective:
            return
        parts = [
            (self._split(self._placed(part.batch))[0], max(part.num_local, 1)) for part in (piece, *halves)
        ]
        call = self._step_call or self._call
        compares = halves[0] is not piece
        check_loss_in_forward(job, call, parts, piece.num_global, compares=compares)
        if compares and not self._forward_is_collective:
            compare_gradients_in_forward(job, call, parts, piece.num_global)

    def _note_read_beside(self, total: Tensor, outputs: Sequence[Any]) -> None:
        """Name what the loss reads of this forward besides its output and attributes, which `refuse_uneven_terms` compares."""
        nodes = made_before(total, outputs)
        known = {
            id(value.grad_fn)
            for _, (place, _), value in forward_state.attributes_of(self._job.model)
            if isinstance(value, Tensor) and isinstance(place, (list, dict))
        }
        if any(id(node) not in known for node in nodes):
            _note_read()

    def _refuse_mixing(self, piece: Slice, strategy: str) -> None:
        inputs = self._split(self._placed(piece.batch))[0]
        refuse_mixing(self._job, self._call, inputs, piece.num_local, strategy)

    def forward(self, batch: Slice, *, rank: int) -> Tree:
        """The outputs of a slice in evaluation mode, without gradients."""
        seed_all(mix(self._job.seed, rank, _EVALUATION + batch.start), self._job.device)
        with evaluating(self._job.model.modules()), torch.no_grad(), autocast(self._job):
            inputs = split_target(self._placed(batch.batch))[0]
            return self._call(inputs) if self._step_call is not None else self._output(inputs, batch)

    def _output(self, inputs: Tree, piece: Slice) -> Tree:
        num_samples, call = max(piece.num_local, 1), self._step_call or self._call
        return self._job.loss.run(lambda: call(inputs), inputs, num_samples, piece.num_global)

    def _split(self, placed: Tree) -> tuple[Tree, Tree]:
        """Inputs and target; a user's step takes the batch as it is."""
        return split_target(placed) if self._step_call is None else (placed, None)

    def try_out(self, batch: Slice, *, rank: int) -> None:
        """Forward and loss of a slice, without gradients and without side effects."""
        if self._step_call is not None:
            seed_all(mix(self._job.seed, rank, _EVALUATION + batch.start), self._job.device)
            # A step that differentiates shows fewer of the weights it uses.
            with evaluating(self._job.model.modules()), torch.no_grad(), contextlib.suppress(RuntimeError):
                self._output(self._placed(batch.batch), batch)
            return
        output = self.forward(batch, rank=rank)
        placed = self._placed(batch.batch)
        with torch.no_grad(), autocast(self._job):
            self._job.loss(
                output, split_target(placed)[1], max(batch.num_local, 1), batch.num_global, weight_of(placed)
            )

    def try_compiled(self, batch: Slice, strategy: str) -> None:
        """Refuse a compiled model whose results differ from the uncompiled one's on this batch. Collective on a mesh.

        For layers cut over ranks, dynamo follows other sharding rules than eager mode.
        """
        job, call = self._job, self._call
        job.model.train()
        inputs = self._split(self._placed(batch.batch))[0]
        trained = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
        with _on_trial(job, ()) as is_still, autocast(job):
            with torch.compiler.set_stance("force_eager"):
                wanted = outputs_and_gradients(call, inputs, trained)
            if draws_numbers(job.model) or not is_still():
                raise ConfigError(
                    f"compile=True under '{strategy}' takes models that draw no random numbers: the parts of a compiled layer would drop other "
                    "values than the whole. Nothing was trained; set dropout to 0, leave compile out, or use --strategy ddp or fsdp."
                )
            try:
                found = outputs_and_gradients(call, inputs, trained)
            except torch._dynamo.exc.TorchDynamoException as error:
                raise ConfigError(
                    f"compile=True: torch cannot compile the model as '{strategy}' cuts it: {str(error).strip().splitlines()[0]} Nothing "
                    "was trained; leave compile out, or use --strategy ddp or fsdp."
                ) from None
        worst = max(map(_distance, wanted, found), default=0.0)
        if len(wanted) != len(found) or not worst <= _TOLERANCE.get(job.autocast or trained[0].dtype, 1e-2):
            raise ConfigError(
                f"compile=True: compiled as '{strategy}' cuts it, the model computes something else than before on the first batch (outputs "
                f"or gradients differ by {worst:.1g} of their size). Nothing was trained; leave compile out, or use --strategy ddp or fsdp."
            )

    def _tell_graphs(self) -> None:
        """Report whether the model was compiled whole, in parts, or not at all: only the first forward shows it."""
        from torch._dynamo.utils import counters

        self._tells_graphs = False
        name, graphs = type(self._job.model).__name__.removeprefix("FSDP"), counters["stats"]["unique_graphs"]
        said = f"{name} runs as {graphs} compiled graph{'s' if graphs > 1 else ''}"
        _say(f"compile: {said if graphs else f'nothing of {name} could be compiled'}")

    def _placed(self, batch: Tree) -> Tree:
        return place(batch, self._job.device, self._job.cast_inputs)


def let_go_of_gathered(model: nn.Module) -> None:
    """Reshard what fsdp gathered for a forward without backward; it would keep and use it over the update."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def check_loss_in_forward(
    job: TrainJob,
    call: Callable[[Tree], Any],
    parts: Sequence[tuple[Tree, int]],
    num_global: int,
    *,
    compares: bool = True,
) -> None:
    """Refuse a loss that forward computes by comparing samples. `parts`: inputs and sizes of a slice and of its halves."""
    like = [*job.model.parameters(), torch.empty(0, dtype=job.autocast or torch.float64)]
    with _on_trial(job) as is_still, autocast(job):
        try:
            job.loss.check_forward(call, parts, num_global, like)
        except RuntimeError as error:  # a step that differentiates, which is impossible here
            if job.training_step is None or "does not require grad" not in str(error):
                raise
        except LossDoesNotRecombine as error:
            # Else halves drew other numbers than the whole, or there were none.
            if compares and is_still():
                if not error.is_drift:
                    raise
                _note_drift()


def compare_gradients_in_forward(
    job: TrainJob, call: Callable[[Tree], Any], parts: Sequence[tuple[Tree, int]], num_global: int
) -> None:
    """Refuse or name a loss within forward whose value hardly shows that it compares samples; its gradients do.

    Not for rows on servers, which their backward pushes, nor for a model too large to have its gradients twice.
    """
    # A hook would see these gradients as if they were the step's.
    trained = [each for each in job.model.parameters() if each.requires_grad and not each._backward_hooks]
    is_large = sum(parameter.numel() for parameter in trained) > MAX_NUMEL_RUN_BACK
    if is_large or strategies.parse(jobs.current().strategy).has_servers:
        return
    kinds = {job.autocast or torch.float64, *(each.dtype for each in trained if each.is_floating_point())}
    eps, gap = max(torch.finfo(kind).eps for kind in kinds), 0.0
    with _on_trial(job) as is_still, autocast(job), contextlib.suppress(TrainingError, RuntimeError):
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            gap = job.loss.gap_of_gradients(call, parts, num_global, trained)
        gap = gap if is_still() else 0.0
    if job.training_step is not None and gap > max(NOTICED, 8 * eps):
        raise LossComparesSamples(name=job.loss.name, gap=gap)
    if gap > (1e-6 if eps < 1e-12 else max(1e-4, 8 * eps)):
        _note_drift()


def refuse_uneven_terms(job: TrainJob, call: Callable[[Tree], Any], piece: Slice) -> None:
    """Refuse a loss that reads attributes which forward computes from several samples together, such as a balance of experts."""
    if piece.num_local < 2:
        return
    try:
        parts = [piece, *piece.cut(2)]
    except (TrainingError, RuntimeError):  # a batch of a user's collate function, or sparse
        return
    rule = copy.copy(job.loss)  # keeps what it counted in the step
    forwards, losses = [], []
    for part in parts:
        placed = place(part.batch, job.device, job.cast_inputs)
        inputs, target = split_target(map_tensors(Tensor.clone, placed))
        forwards.append(functools.partial(call, inputs))
        losses.append(functools.partial(_loss_sum, rule, target, part, weight_of(placed)))
    like = [*job.model.parameters(), torch.empty(0, dtype=job.autocast or torch.float64)]
    with _on_trial(job, _known_to_mix(job.model)) as is_still, autocast(job):
        refuse = forward_state.refuse_uneven_terms(
            job.model, job.loss.name, forwards, losses, 0.1 * tolerance_of(like)
        )
        if is_still():
            refuse()


def _loss_sum(rule: LossRule, target: Tree, part: Slice, weight: Tensor | None, output: Tree) -> Tensor:
    return rule(output, target, part.num_local, part.num_global, weight)[0]


def refuse_mixing(
    job: TrainJob,
    call: Callable[[Tree], Any],
    inputs: Tree,
    num_local: int,
    strategy: str,
    *,
    most: int = NUM_SAMPLES,
) -> None:
    """Refuse a forward whose result for a sample depends on other samples of the slice, by `most` of them; under verify it is only named."""
    if any(tensor.dim() == 0 or len(tensor) != max(num_local, 1) for tensor in tensors(inputs)):
        return  # a batch of a user's collate function, not divided by rows

    def try_out(at_rest: Iterable[nn.Module]) -> None:
        with _on_trial(job, at_rest) as is_still, torch.compiler.set_stance("force_eager"):
            refuse = refuse_mixed_samples(job.model, call, inputs, num_local, strategy, most=most)
            if is_still():
                refuse()
            # Rows of tables on servers are pushed by what their backward keeps.
            if num_local >= NUM_SAMPLES and not strategies.parse(jobs.current().strategy).has_servers:
                refuse = refuse_mixed_gradients(job.model, call, inputs, strategy)
                if is_still():
                    refuse()

    in_training = _known_to_mix(job.model)
    if jobs.current().verify is None:
        try_out(job.model.modules())
        if job.model not in _noted:
            _noted.add(job.model)
            try:
                try_out(in_training)
            except ForwardMixesSamples as found:
                _note_own_norm(found)
            except GradientMixesSamples:  # of such a norm
                pass
            with _on_trial(job, in_training) as is_still, torch.compiler.set_stance("force_eager"):
                uneven = buffers_of_slices(job.model, call, inputs) if num_local >= NUM_SAMPLES else []
                if uneven and is_still():
                    _note_buffers(uneven)
            refuse_carried(job, call, inputs, strategy)
        return
    # verify compares with one process anyway.
    for at_rest in (list(job.model.modules()), in_training):
        try:
            try_out(at_rest)
        except ForwardMixesSamples as found:
            note_mixing(found.layer, found.kind)
            return
        except GradientMixesSamples as found:
            note_mixing(found.parameter, "its gradient")
            return


def _known_to_mix(model: nn.Module) -> list[nn.Module]:
    """Layers at rest in a trial in training mode.

    One of the script's own that mixes only in training mode acts like BatchNorm, and is only named. A synchronised
    BatchNorm is bypassed: its sum over the ranks would wait for ranks that try nothing, with fewer samples or at a later
    step.
    """
    known = {layer.layer for layer in mixing_layers(model)}
    return [
        module
        for name, module in model.named_modules()
        if (name or THE_MODEL) in known or isinstance(module, SyncedBatchNorm)
    ]


def refuse_carried(job: TrainJob, call: Callable[[Tree], Any], inputs: Tree, strategy: str) -> None:
    """Refuse a forward that depends on the samples of the one before; where each row depends on its own, it is only named."""
    with _on_trial(job, _known_to_mix(job.model)) as is_still, torch.compiler.set_stance("force_eager"):
        refuse = forward_state.refuse_carried(job.model, call, inputs, strategy)
        if is_still() and (name := refuse()) is not None:
            _note(
                f"forward depends on '{name}', which the forward before left of the sample in the same row. Workers keep it for their own rows, "
                "as one process does while all batches have one size; a worker that replaces another begins without it"
            )


_noted: WeakSet[nn.Module] = WeakSet()
"""Models whose handling of a slice's samples in training mode was reported, or need not be."""


def _note_own_norm(found: ForwardMixesSamples) -> None:
    where = (
        f"the layer '{found.layer}' ({found.kind})"
        if found.layer
        else f"the model's own forward ({found.kind})"
    )
    _note(
        f"{where} mixes the samples of a batch in training mode. Each worker runs it on its own slice, as BatchNorm, which trains something "
        "else than one process with whole batches"
    )


def _note_buffers(names: Sequence[str]) -> None:
    named = ", ".join(f"'{name}'" for name in names[:3])
    _note(
        f"forward changes {named} otherwise by parts of a batch than by all of it (a sum over samples, a queue of them, a variance). Workers "
        "average what their slices make of it, which is not what one process has; shoal.gather in forward shows it all rows (ddp, fsdp)"
    )


def _note(text: str) -> None:
    _say(f"{text}. `shoal verify` tells by how much results differ")


def _say(text: str) -> None:
    if jobs.rank() == 0:
        print(f"note: {text}", file=sys.stderr, flush=True)


class OwnLoopTrial:
    """Forward hook: tries a model in a script's own loop for mixed samples, at its forwards 1, 2, 4, 8 and so on."""

    def __init__(self, job: TrainJob, strategy: str) -> None:
        self._job, self._strategy = job, strategy
        self._num_forwards = 0
        self._is_trying = False

    def __call__(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        scope = gathering.current()
        if self._is_trying or scope is None or scope.is_used:
            return
        self._num_forwards += 1
        if self._num_forwards.bit_count() != 1:
            return
        # A loop may have put samples in the second dimension: if both have that size, rows may be sequence
        # positions.
        if any(tensor.shape[1:2] == (scope.num_local,) for tensor in tensors((args, kwargs))):
            return
        self._is_trying = True
        gathering.enter(None)
        try:
            inputs = args, kwargs
            refuse_mixing(
                self._job, lambda given: model(*given[0], **given[1]), inputs, scope.num_local, self._strategy
            )
        finally:
            self._is_trying = False
            gathering.enter(scope)

    def __reduce__(self) -> Any:
        return _no_trial, ()  # a copy of the model, or one that the script saves whole


def _no_trial() -> Callable[..., None]:
    return _nothing


def _nothing(model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    return None


_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Tolerance between a compiled model and the same uncompiled, by dtype; others 1e-2."""


def outputs_and_gradients(
    call: Callable[[Tree], Any], inputs: Tree, trained: Sequence[nn.Parameter]
) -> list[Tensor]:
    """A model's outputs for these inputs, and the gradients of their squares; this rank's parts of them."""
    with torch.enable_grad():
        outputs = [each for each in tensors(call(inputs)) if each.is_floating_point()]
        squares = torch.stack([each.double().square().mean() for each in outputs if each.requires_grad]).sum()
        gradients = torch.autograd.grad(squares, trained, allow_unused=True)
    found = [*outputs, *(each for each in gradients if each is not None)]
    return [each.to_local() if isinstance(each, DTensor) else each.detach() for each in found]


def _distance(wanted: Tensor, found: Tensor) -> float:
    """Largest difference, relative to the largest number."""
    if wanted.shape != found.shape:
        return math.inf
    size = float(wanted.abs().max()) if wanted.numel() else 0.0
    return float((wanted - found).abs().max()) / size if size else float(found.any())


@contextlib.contextmanager
def _on_trial(job: TrainJob, at_rest: Iterable[nn.Module] | None = None) -> Iterator[Callable[[], bool]]:
    """Context for forwards with some modules in evaluation mode and no side effects; yields a function
    that tells whether none drew random numbers.
    """
    device = job.device
    with (
        torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
        evaluating(job.model.modules() if at_rest is None else at_rest),
        torch.no_grad(),
        unchanged(job.model),
    ):
        before, of_host = _generators(device), (random.getstate(), np.random.get_state())

        def is_still() -> bool:
            is_same = all(map(np.array_equal, np.random.get_state(), of_host[1]))
            return (
                is_same
                and random.getstate() == of_host[0]
                and all(map(torch.equal, before, _generators(device)))
            )

        try:
            yield is_still
        finally:
            random.setstate(of_host[0])
            np.random.set_state(of_host[1])


@functools.cache  # once
def _note_read() -> None:
    _note(
        "the loss reads a tensor of this forward that is neither an output nor an attribute of a module (kept by a hook, in a list), so shoal "
        "does not compare slices of it with the whole: right if the loss is a mean over its rows; else have forward return it"
    )


@functools.cache  # once
def _note_caches_off() -> None:
    _say("the model's key-value caches are off: its forward is called with use_cache=False")


@functools.cache  # once
def _note_drift() -> None:
    _say(
        "a part of the model's loss compares samples of a batch (a balance of experts, a Dice, say), and is computed within "
        "each worker's slice; `shoal verify` shows what that does, and shoal.gather(rows) in forward shows it all rows (ddp, fsdp)"
    )


@contextlib.contextmanager
def evaluating(modules: Iterable[M]) -> Iterator[list[M]]:
    """Put those of `modules` that train into evaluation mode, then back; frozen ones stay frozen."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield training
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def batchnorm_at_rest(modules: Sequence[_BatchNorm]) -> Iterator[None]:
    """BatchNorm at rest for a borrowed sample: it accepts no batch of one, and should keep nothing of it but the count."""
    with evaluating(modules) as rested:
        yield
    for module in rested:
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)


def explain_batch_of_one(error: ValueError, piece: Slice) -> None:
    """Extend BatchNorm's error about a batch of one with advice."""
    if "more than 1 value per channel" in str(error):
        error.add_note(
            f"This worker had {piece.num_local} sample to normalise, of a batch of {piece.num_global}. Leave a last batch "
            "out that is not full with batch(..., drop_last=True), or use larger batches, fewer workers or less "
            "accumulation."
        )


_AS_IT_IS = contextlib.nullcontext()


def autocast(job: TrainJob) -> contextlib.AbstractContextManager[object]:
    if job.autocast is None:
        return _AS_IT_IS
    return torch.autocast(job.device.type, dtype=job.autocast)


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the generators that a model on `device` draws from."""
    # Not torch.manual_seed: it seeds every backend, at a hundred times the cost.
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def _generators(device: torch.device) -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    return (
        states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]
    )


def place(batch: Tree, device: torch.device, dtype: torch.dtype | None = None) -> Tree:
    """Move the batch to the model's device; floating tensors to `dtype` if given."""
    if dtype is not None:
        batch = map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def _start_reading(total: Tensor) -> tuple[Tensor, torch.Event] | None:
    """Queue a copy of this number to the host before later work of the device."""
    if total.device.type == "cpu":
        return None
    there = torch.empty((), dtype=total.dtype, pin_memory=True).copy_(total, non_blocking=True)
    event = torch.Event(total.device)
    event.record(torch.accelerator.current_stream(total.device))
    return there, event


def _sum(totals: list[Tensor], like: Tensor) -> Tensor:
    if not totals:
        return torch.zeros((), dtype=like.dtype, device=like.device)
    return totals[0] if len(totals) == 1 else torch.stack(totals).sum()
