"""Pipeline runner: splits a slice into micro-batches and runs them through this rank's stages by torch's schedules.

A slice is run in micro-batches exactly as gradient accumulation would run it in one process: the
same parts, in the same order, with the same seeds. A model whose samples depend on each other gets
no more micro-batches than the user requested by `accumulate=`.

A forward that branches on a shape (`if x.shape[1] > 8`, `range(length)`) is traced again for every
shape, and split before the same layers. All ranks of a pipeline read the same batch, so each
computes the same segments by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shoal.config.choices import SCHEDULES
from shoal.data.slice import Slice, split_target, weight_of
from shoal.data.tree import Tree, concatenate, leaves, map_tensors
from shoal.errors import ConfigError, ShapeDecides, ShapeLeadsElsewhere
from shoal.parallel.compute import _EVALUATION, autocast, evaluating, place
from shoal.parallel.loss import is_number
from shoal.parallel.pipeline import p2p
from shoal.parallel.pipeline.partition import (
    Partition,
    branches_on_shape,
    decisions_of,
    layer_starts,
    live_at,
    segments_of,
)
from shoal.parallel.pipeline.plan import PipelineCut
from shoal.parallel.pipeline.stage import (
    ForwardOnly,
    ModelStage,
    PipelineStep,
    StageRole,
    UnevenStage,
    num_held,
    roles_from,
)
from shoal.parallel.pipeline.trace import TracedForward, forget, unchanged
from shoal.parallel.protocol import LossSum, TrainJob
from shoal.parallel.state import attribute
from shoal.runtime.seeds import mix

L = TypeVar("L")

_MAX_ROLES = 512  # for which roles are kept

Roles = Sequence[StageRole]  # the roles of all stages, in their order


class RetracedRoles:
    """The roles of all stages by the shape of a batch."""

    def __init__(
        self,
        partition: Partition,
        cut: PipelineCut,
        all_stages: Sequence[ModelStage],
        own: Mapping[int, ModelStage],
    ) -> None:
        """`all_stages` are read and not kept; this rank's `own` stages receive the modules that new roles need."""
        self._model, self._meta_copy, self._opened, self._own = (
            partition.model,
            partition.meta_copy,
            partition.opened,
            own,
        )
        self._first = {
            True: [stage.train_role for stage in all_stages],
            False: [stage.evaluation_role for stage in all_stages],
        }
        traced = {True: partition.train, False: partition.evaluation}
        self._decides = {training: branches_on_shape(each) for training, each in traced.items()}
        self._decisions = {training: decisions_of(each) for training, each in traced.items()}
        self._node_texts = {training: each.node_texts() for training, each in traced.items()}
        self._held = [set(stage.targets) for stage in all_stages]
        seen: dict[str, int] = {}
        numbered = []
        for layer in cut.layers:
            seen[layer.name] = seen.get(layer.name, 0) + 1
            numbered.append((layer.name, seen[layer.name]))
        self._begins = [numbered[begin] for begin in cut.begins]
        self._found: dict[object, Roles] = {}
        self._num_cuts = 0

    def roles(self, piece: Slice, *, training: bool) -> Roles:
        """The roles for a micro-batch; refuses a shape whose forward needs layers of other stages."""
        if self._meta_copy is None or not self._decides[training]:
            return self._first[training]
        shapes = [tuple(leaf.shape[1:]) for leaf in leaves(piece.inputs) if isinstance(leaf, Tensor)]
        key = (training, num_held(piece), *shapes)
        if key not in self._found:
            if len(self._found) >= _MAX_ROLES:
                self._found.clear()
            self._found[key] = self._find(piece, training=training)
        return self._found[key]

    def _find(self, piece: Slice, *, training: bool) -> Roles:
        assert self._meta_copy is not None
        decisions = self._decisions[training]
        if decisions is not None:
            with contextlib.suppress(ShapeDecides):
                decisions(list(leaves(piece.inputs)))
                return self._first[training]
        traced = self._meta_copy.trace(
            piece.inputs, lambda path, module: path in self._opened, training=training
        )
        if traced is None or traced.node_texts() == self._node_texts[training]:
            return self._first[training]
        try:
            return self._cut(traced, piece, training=training)
        finally:
            forget(traced)

    def _cut(self, traced: TracedForward, piece: Slice, *, training: bool) -> Roles:
        shapes = [tuple(leaf.shape) for leaf in leaves(piece.inputs) if isinstance(leaf, Tensor)]
        constants = self._renamed(traced)
        begins = self._begins_in(traced, shapes)
        segments = segments_of(traced, begins, training=training)
        for number, segment in enumerate(segments):
            for path in segment.targets:
                if path not in self._held[number] and path not in constants and self._has_tensors(path):
                    homes = [f"in stage {home}" for home, held in enumerate(self._held) if path in held]
                    where = [*homes, "in no stage, since the first batch did not need it"][0]
                    raise ShapeLeadsElsewhere(
                        shapes=shapes, why=f"it needs '{path}' in stage {number}, and that is {where}"
                    )
        for number, begin in enumerate(begins[1:], start=1):
            values = [node.meta["example"] for node in live_at(traced, begin)]
            odd = p2p.why_not(values)
            if odd is None and training and not any(tensor.requires_grad for tensor in p2p.pack(values)[0]):
                odd = "nothing that is trained"
            if odd is not None:
                raise ShapeLeadsElsewhere(shapes=shapes, why=f"{odd} would go to stage {number}")
        for number, stage in self._own.items():
            stage.held.hold(self._model, segments[number].targets, constants)
        return roles_from(segments)

    def _begins_in(self, traced: TracedForward, shapes: Sequence[tuple[int, ...]]) -> list[int]:
        """Node numbers of the same layers; for a skipped layer, of the first layer that the previous stage does not have."""
        marks = layer_starts(traced)
        at_name = {(name, nth): at for at, (_, name, nth) in enumerate(marks)}
        begins = [0]
        for number, wanted in enumerate(self._begins[1:], start=1):
            rest = range(begins[-1] + 1, len(marks))
            others = (at for at in rest if marks[at][1] not in self._held[number - 1])
            at = at_name.get(wanted) or next(others, None)
            if at is None or at not in rest:
                raise ShapeLeadsElsewhere(shapes=shapes, why=f"no layer is left for stage {number}")
            begins.append(at)
        return [0, *(marks[at][0] for at in begins[1:])]

    def _renamed(self, traced: TracedForward) -> dict[str, Tensor]:
        """Constants, renamed so that no two traces share a name."""
        names = {name: f"{name}_{self._num_cuts}" for name in traced.constants}
        self._num_cuts += 1
        for node in traced.graph.nodes:
            if node.op == "get_attr" and node.target in names:
                node.target = names[str(node.target)]
        return {names[name]: tensor for name, tensor in traced.constants.items()}

    def _has_tensors(self, path: str) -> bool:
        assert self._meta_copy is not None
        held = attribute(self._meta_copy.model, path)
        if isinstance(held, nn.Module):
            return any(True for _ in (*held.parameters(), *held.buffers()))
        return True


_MAX_SHAPES = 32  # of inputs, for which stages are kept ready
_ROUNDS = 2  # micro-batches for each rank of a pipeline


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared:
    """The schedule and roles for one set of micro-batch shapes."""

    schedule: Any
    takes: dict[tuple[int, int], Any]
    roles: dict[tuple[int, int], StageRole]


class PipelineRunner:
    """This rank's stages of one model."""

    def __init__(
        self,
        job: TrainJob,
        partition: Partition,
        stages: dict[int, ModelStage],
        retraced: RetracedRoles,
        *,
        empty_output: Tree,
        num_stages: int,
        schedule: str,
        group: dist.ProcessGroup,
        data_groups: Sequence[dist.ProcessGroup],
        num_data_ranks: int,
    ) -> None:
        """`stages` by their numbers; `retraced`: the roles of all of them; `empty_output`: what the model returns, without data, for ranks that have no last stage; `data_groups`: ranks that run the same stages on other slices."""
        self._job, self._stages, self._retraced, self._num_stages = job, stages, retraced, num_stages
        self._schedule, self._group, self._data_groups = schedule, group, data_groups
        self._num_data_ranks, self._empty_output = num_data_ranks, empty_output
        self._ranks = dist.get_process_group_ranks(group)
        self._prepared: dict[Any, _Prepared] = {}
        self._num_steps, self._next_check = 0, 1
        self.is_last = num_stages - 1 in stages
        self.num_micro = job.num_micro * (1 if partition.is_batch_dependent else _ROUNDS * len(self._ranks))
        """Micro-batches of a slice in training."""
        self._evaluates_whole = partition.is_batch_dependent_in_evaluation or partition.draws_in_evaluation

    def forward_backward(self, batch: Slice, *, rank: int, step: int) -> LossSum:
        """All micro-batches forward and back: gradients of the loss sum, divided by the samples of the global batch."""
        job = self._job
        if not job.model.training:
            job.model.train()
        pieces = self._placed(batch).cut(self.num_micro)
        loss = self._step(
            pieces,
            lambda number: mix(job.seed, rank, step, number),
            lambda now: _Loss(job, now, batch.num_global),
        )
        if not self.is_last:
            return LossSum(torch.zeros(()), 0.0, None)
        self._num_steps += 1
        is_due = self._num_steps >= self._next_check or job.checks_every_loss
        if (is_due or loss.must_check) and loss.check():  # else there was nothing to see
            self._next_check = 2 * self._num_steps
        return loss.sum()

    def _step(
        self, pieces: Sequence[Slice], seed_of: Callable[[int], int], loss_of: Callable[[PipelineStep], L]
    ) -> L:
        """All micro-batches forward and back by the schedule; returns the loss function that it called."""
        ready = self._prepared_for(pieces)
        now = PipelineStep(pieces, seed_of, ready.takes, ready.roles)
        for stage in self._stages.values():
            stage.step = now
        loss = loss_of(now)
        ready.schedule._loss_fn = loss  # the schedule is reused, its loss is this step's
        numbers = torch.arange(len(pieces))
        wanted = {"target": numbers, "losses": []} if self.is_last else {}
        try:
            ready.schedule.step(piece=numbers, return_outputs=False, **wanted)
        except RuntimeError as error:  # torch's own, around a layer's error
            raise error.__cause__ or error from None
        return loss

    def own_forward(self, batch: Slice, *, rank: int) -> Tree:
        """In a script's own loop: outputs of a slice in training, on every rank of the pipeline.

        They have no graph. Their backward runs the micro-batches again, forward and back by the
        schedule, with the same seeds.
        """
        job = self._job
        pieces = self._placed(batch).cut(self.num_micro)
        self._prepared_for(pieces)

        def seed_of(number: int) -> int:
            return mix(job.seed, rank, batch.epoch, batch.start, number)

        with unchanged(job.model):
            outputs = self._on_every_rank(pieces, self._run(pieces, seed_of, training=True, at_rest=False))
        rows = [each for each in leaves(outputs) if isinstance(each, Tensor)]
        if any(each.dim() == 0 or len(each) != num_held(batch) for each in rows):
            raise ConfigError(
                "pp runs a batch in parts, and an output of the model has no row for each of its samples (a loss that forward computes, say), so "
                "a loop of the script's own cannot be given it. Nothing was updated; use shoal.Trainer with loss='model', or "
                "--strategy fsdp, tp or ddp."
            )

        def run_back(gradients: Sequence[Tensor | None]) -> None:
            self._step(pieces, seed_of, lambda step: _GivenGradients(step, gradients))

        told = iter(_Rerun.apply(run_back, torch.zeros((), requires_grad=True), *rows))  # type: ignore[no-untyped-call]
        return map_tensors(lambda _: next(told), outputs)

    def forward(self, batch: Slice, *, rank: int) -> Tree:
        """The outputs of a slice in evaluation mode, without gradients, on every rank of the pipeline."""
        job = self._job
        about = max(-(-batch.num_global // self._num_data_ranks), 1)
        number = 1 if self._evaluates_whole else min(_ROUNDS * len(self._ranks), about)
        pieces = self._placed(batch).cut(number)
        seed = mix(job.seed, rank, _EVALUATION + batch.start)
        return self._on_every_rank(pieces, self._run(pieces, lambda _: seed, training=False))

    def _on_every_rank(self, pieces: Sequence[Slice], outputs: Sequence[Any]) -> Tree:
        """Joined outputs of micro-batches, which the last stage has."""
        joined, found = None, None
        if self.is_last:
            own = [pair for pair in zip(pieces, outputs, strict=True) if not pair[0].borrowed]
            joined = _joined(own or [(pieces[0], outputs[0])])
            found = [leaf for leaf in leaves(joined) if isinstance(leaf, Tensor)]
        # Its tensors are sent; every rank knows the output's class.
        found = p2p.share(found, self._rank_of(self._num_stages - 1), self._group, self._job.device)
        if self.is_last:
            return joined
        numbers = iter(found)
        return map_tensors(lambda _: next(numbers), self._empty_output)

    def _placed(self, batch: Slice) -> Slice:
        return dataclasses.replace(batch, batch=place(batch.batch, self._job.device, self._job.cast_inputs))

    def _run(
        self,
        pieces: Sequence[Slice],
        seed_of: Callable[[int], int],
        *,
        training: bool,
        at_rest: bool = True,
        keep: Callable[[ModelStage, Slice, Any, Any], None] | None = None,
    ) -> list[Any]:
        """Run forward only; returns the outputs on the last stage. `keep` receives each stage's inputs and outputs.

        `at_rest`: in evaluation mode, whatever graph is run.
        """
        device, outputs, sends = self._job.device, [], []
        resting = self._job.model.modules() if at_rest else ()
        with evaluating(resting), torch.no_grad():
            for at, piece in enumerate(pieces):
                roles = self._retraced.roles(piece, training=training)
                for number, stage in sorted(self._stages.items()):
                    values: Any = ()
                    if number > 0:
                        values = p2p.receive(self._rank_of(number - 1), self._group, device, stage.mesh)
                    result = stage(alone=ForwardOnly(piece, values, seed_of(at), roles[number]))
                    if keep is not None:
                        keep(stage, piece, values, result)
                    if number < self._num_stages - 1:
                        sends += p2p.send(result, self._rank_of(number + 1), self._group, device)
                    else:
                        outputs.append(result)
        for work, _ in sends:
            work.wait()
        for stage in self._stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # the outermost would keep its weights whole for a backward
        return outputs

    def _rank_of(self, stage: int) -> int:
        return self._ranks[stage % len(self._ranks)]

    def _prepared_for(self, pieces: Sequence[Slice]) -> _Prepared:
        shapes = tuple((tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves(pieces[0].inputs))
        key = (tuple(num_held(piece) for piece in pieces), shapes)
        is_new = key not in self._prepared
        if self._data_groups:  # ranks that share weights prepare together: it is collective
            flag = torch.tensor([int(is_new)], device=self._job.device)
            for group in self._data_groups:
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
            is_new = bool(flag.item())
        if is_new:
            if len(self._prepared) >= _MAX_SHAPES:
                self._prepared.clear()
            self._prepared[key] = self._prepare(pieces)
        return self._prepared[key]

    def _prepare(self, pieces: Sequence[Slice]) -> _Prepared:
        """Run micro-batches of each size forward to learn the shapes between stages, and build the schedule."""
        takes: dict[tuple[int, int], Any] = {}
        gives: dict[tuple[int, int], Any] = {}

        def keep(stage: ModelStage, piece: Slice, given: Any, result: Any) -> None:
            takes[stage.number, num_held(piece)] = p2p.pack(given)[1]
            # The last stage's output goes to the loss, whatever its structure.
            tensors = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
            is_last = stage.number == self._num_stages - 1
            gives[stage.number, num_held(piece)] = p2p.pack(tensors if is_last else result)[1]

        probes = [min(pieces, key=num_held), max(pieces, key=num_held)]
        roles = {
            (number, num_held(piece)): role
            for piece in probes
            for number, role in enumerate(self._retraced.roles(piece, training=True))
        }
        with unchanged(self._job.model):
            self._run(probes, lambda _: 0, training=True, keep=keep)
        stages = [
            UnevenStage(
                stage,
                self._num_stages,
                self._job.device,
                self._group,
                [
                    _metas(
                        takes[number, num_held(piece)],
                        roles[number - 1, num_held(piece)].gives_grad if number else (),
                    )
                    for piece in pieces
                ],
                [
                    _metas(gives[number, num_held(piece)], roles[number, num_held(piece)].gives_grad)
                    for piece in pieces
                ],
                trains_beside=any(roles[number, num_held(piece)].segment.trains_beside for piece in probes),
            )
            for number, stage in sorted(self._stages.items())
        ]
        # With fewer micro-batches than stages, 1F1B is all forwards, then all backwards.
        is_short = self._schedule == "1f1b" and len(pieces) < self._num_stages
        choice = SCHEDULES["gpipe" if is_short else self._schedule]
        schedule = choice.load()(
            stages if choice.stages_per_worker > 1 else stages[0],
            len(pieces),
            loss_fn=lambda output, target: output,
            scale_grads=False,
        )
        return _Prepared(schedule, takes, roles)


class _Loss:
    """The loss function of one step, with the sum over its micro-batches."""

    def __init__(self, job: TrainJob, step: PipelineStep, num_global: int) -> None:
        self._job, self._step, self._num_global = job, step, num_global
        self._totals: dict[int, Tensor] = {}
        self._outputs: dict[int, Tree] = {}
        self._targets: dict[int, Tree] = {}
        self._count = 0.0
        self.must_check = False

    def __call__(self, tensors: Any, number: Tensor) -> Tensor:
        """One micro-batch's share of the mean over the global batch."""
        at = int(number)
        piece, output = self._step.pieces[at], self._step.outputs.pop(at)
        target, weight = split_target(piece.batch)[1], weight_of(piece.batch)
        # A loss may write into its target, and `check` asks it once more.
        kept_target = map_tensors(Tensor.clone, target) if self._job.loss.is_checked else target
        with autocast(self._job):
            total, count = self._job.loss(output, target, num_held(piece), piece.num_global, weight)
        if piece.borrowed:  # a borrowed sample only keeps the ranks in step, and has no gradient
            return total * 0.0
        self._totals[at] = total.detach()
        self._outputs[at] = map_tensors(lambda tensor: tensor.detach(), output)
        self._targets[at] = kept_target
        self._count += count
        self.must_check |= self._job.loss.must_check
        return self._job.scaled(total) / self._num_global

    def check(self) -> bool:
        """Refuse a loss that would mean something else when its batch is divided; False if there was nothing to check.

        Checks all micro-batches together: each alone may be a single sample, which has no halves.
        """
        pieces = [self._step.pieces[at] for at in sorted(self._outputs)]
        num_local = sum(piece.num_local for piece in pieces)
        if num_local < 2 or self._job.loss.is_in_forward:
            return False
        output = concatenate([self._outputs[at] for at in sorted(self._outputs)])
        target = concatenate([self._targets[at] for at in sorted(self._outputs)])
        weights = [weight for piece in pieces if (weight := weight_of(piece.batch)) is not None]
        self._job.loss.check(output, target, num_local, torch.cat(weights) if weights else None)
        return True

    def sum(self) -> LossSum:
        if not self._outputs:
            return LossSum(torch.zeros(()), 0.0, None)
        totals = torch.stack([total for _, total in sorted(self._totals.items())])
        predicted = [self._job.loss.predictions(output) for _, output in sorted(self._outputs.items())]
        outputs = concatenate(predicted)
        return LossSum(totals.sum(), self._count, outputs)


class _GivenGradients:
    """Replacement of a loss: backward of the outputs begins with the gradients of the script's own loss."""

    def __init__(self, step: PipelineStep, gradients: Sequence[Tensor | None]) -> None:
        self._step, self._gradients = step, gradients

    def __call__(self, tensors: Any, number: Tensor) -> Tensor:
        at = int(number)
        piece, output = self._step.pieces[at], self._step.outputs.pop(at)
        begin = sum(each.num_local for each in self._step.pieces[:at])
        total = torch.zeros(())
        rows = [each for each in leaves(output) if isinstance(each, Tensor)]
        for each, gradient in zip(rows, self._gradients, strict=True):
            if each.requires_grad:
                given = each[:0] if gradient is None else gradient[begin : begin + piece.num_local]
                # A borrowed sample only keeps the ranks in step, and has no gradient.
                total = total + (each[: piece.num_local] * given).sum() + each.sum() * 0.0
        return total


class _Rerun(torch.autograd.Function):
    """Outputs of a forward whose backward is run elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, run_back: Callable[[Sequence[Tensor | None]], None], root: Tensor, *outputs: Tensor
    ) -> Any:
        ctx.run_back = run_back
        ctx.mark_non_differentiable(*(each for each in outputs if not each.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        with torch.enable_grad():
            ctx.run_back(gradients)
        return None, None, *(None for _ in gradients)


def _joined(parts: Sequence[tuple[Slice, Tree]]) -> Tree:
    """The outputs of micro-batches as one; of numbers, such as a loss, the mean over samples."""
    whole = sum(num_held(piece) for piece, _ in parts)

    def share(piece: Slice, tree: Tree) -> Tree:
        weight = num_held(piece) / whole
        return map_tensors(lambda tensor: tensor * weight if is_number(tensor) else tensor, tree)

    joined = concatenate([share(piece, tree) for piece, tree in parts]) if len(parts) > 1 else parts[0][1]
    numbers = iter([is_number(leaf) for leaf in leaves(parts[0][1]) if isinstance(leaf, Tensor)])
    return map_tensors(lambda tensor: tensor.sum() if next(numbers) else tensor, joined)


def _metas(description: Any, needs_grad: Sequence[bool]) -> tuple[Tensor, ...]:
    told = p2p.metas(description)
    flags = needs_grad or [False] * len(told)
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta").requires_grad_(flag)
        for (dtype, shape), flag in zip(told, flags, strict=True)
    )
