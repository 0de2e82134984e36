"""One stage of a pipeline: some layers of the user's model, run on one micro-batch at a time.

Random numbers are drawn as one process would draw them for the same
micro-batch: where a later stage draws, the generator's state goes from stage
to stage with the values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _derive_grad_metas, extract_tensor_metas
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from shoal.collectives.sync_batchnorm import SyncedBatchNorm
from shoal.data.slice import Slice
from shoal.data.tree import Tree, leaves
from shoal.errors import ConfigError
from shoal.parallel.compute import autocast, evaluating, seed_all
from shoal.parallel.model_call import ModelCall
from shoal.parallel.pipeline import p2p as wire
from shoal.parallel.pipeline.partition import NUM_SAMPLES, Flow, Holder, Part, parts_of, sample, spare_of
from shoal.parallel.pipeline.plan import Cut
from shoal.parallel.pipeline.trace import unchanged
from shoal.parallel.protocol import TrainJob


@dataclass(frozen=True, slots=True)
class Role:
    """What a stage does in one mode."""

    part: Part
    is_first: bool
    is_last: bool
    takes_state: bool
    """The generator's state comes with the values."""

    gives_state: bool

    @property
    def gives_grad(self) -> tuple[bool, ...]:
        """Which of the tensors that it gives need a gradient."""
        return (*self.part.needs_grad, False) if self.gives_state else self.part.needs_grad


@dataclass(slots=True)
class Step:
    """What the stages of this rank need to know of the step that is run."""

    pieces: Sequence[Slice]
    seed_of: Callable[[int], int]
    """The seed of a micro-batch."""

    takes: Mapping[tuple[int, int], Any]
    """By stage and number of samples: the description of what comes in."""

    roles: Mapping[tuple[int, int], Role]
    """By the same: what is done with them."""

    outputs: dict[int, Any] = field(default_factory=dict)
    """Of the last stage, by micro-batch."""


@dataclass(frozen=True, slots=True)
class Alone:
    """A micro-batch that is run by itself, without gradients."""

    piece: Slice
    values: Sequence[Any]
    seed: int
    role: Role


class Stage(nn.Module):
    """Some layers of the user's model, which are in `held` under their own names."""

    def __init__(
        self,
        job: TrainJob,
        flow: Flow,
        number: int,
        train: Role,
        evaluation: Role,
        *,
        spare: Sequence[str] = (),
        gives_copies: bool,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """`spare`: what other batches may need. `mesh`: ranks that have parts of what this one has parts of."""
        super().__init__()
        self.targets = (*train.part.targets, *evaluation.part.targets, *spare)
        self.held = Holder(flow.model, self.targets, {**flow.train.constants, **flow.evaluation.constants})
        self._job, self.number, self.train_role, self.evaluation_role = job, number, train, evaluation
        self._gives_copies, self.mesh = gives_copies, mesh
        self.step = Step((), lambda number: 0, {}, {})
        self._batchnorms = [module for module in self.modules() if isinstance(module, _BatchNorm)]

    def forward(self, *tensors: Tensor, piece: Tensor | None = None, alone: Alone | None = None) -> Any:
        """One micro-batch of the step, tensors from the stage before to tensors for the next; or one by itself."""
        if alone is not None:
            return self._compute(alone.role, alone.piece, alone.values, alone.seed)
        assert piece is not None
        number, step = int(piece), self.step
        one = step.pieces[number]
        role = step.roles[self.number, num_held(one)]
        values: Sequence[Any] = ()
        if not role.is_first:
            values = wire.unpack(
                list(tensors), step.takes[self.number, num_held(one)], self._job.device, self.mesh
            )
        with self._batchnorm_told(one.borrowed):
            result = self._compute(role, one, values, step.seed_of(number))
        if role.is_last:
            step.outputs[number] = result
            return tuple(leaf for leaf in leaves(result) if isinstance(leaf, Tensor))
        given = wire.pack(result)[0]
        # Torch lets go in place of what a stage gave, which a layer may still need for the gradient of its weights. And it
        # sends only what lies in one piece, which a view (a slice, a transposition) does not.
        if self._gives_copies:
            return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in given)
        return tuple(tensor.contiguous() for tensor in given)

    def _compute(self, role: Role, piece: Slice, values: Sequence[Any], seed: int) -> Any:
        device = self._job.device
        if role.is_first:
            seed_all(seed, device)
        elif role.takes_state:
            *values, state = values
            set_random_state(state, device)
        inputs = list(leaves(piece.inputs))
        try:
            with autocast(self._job):
                result = role.part.run(self.held, *(inputs[number] for number in role.part.inputs), *values)
        except ValueError as error:
            if "more than 1 value per channel" in str(error):
                error.add_note(
                    f"There was {piece.num_local} sample to normalise, of a batch of {piece.num_global}. Leave a last batch "
                    "out that is not full with batch(..., drop_last=True), or use larger batches or less accumulation."
                )
            raise
        if role.is_last:
            return pytree.tree_map_only(DTensor, wire.whole, result)
        return (*result, random_state(device)) if role.gives_state else result

    def tell_batchnorm(self, is_borrowed: bool) -> None:
        """Synchronised ones are in step with those of other ranks, and count nothing of a borrowed sample."""
        for module in self._batchnorms:
            if isinstance(module, SyncedBatchNorm):
                module.ranks.is_borrowed = is_borrowed

    @contextlib.contextmanager
    def _batchnorm_told(self, is_borrowed: bool) -> Iterator[None]:
        """Of a borrowed sample, as everywhere: it leaves nothing behind but the count."""
        self.tell_batchnorm(is_borrowed)
        resting = [each for each in self._batchnorms if is_borrowed and not isinstance(each, SyncedBatchNorm)]
        with evaluating(resting) as rested:
            yield
        for module in rested:
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.add_(1)


def num_held(piece: Slice) -> int:
    """Samples that a micro-batch holds: its own, or the one that is borrowed."""
    return max(piece.num_local, 1)


def roles_of(flow: Flow, cut: Cut, *, training: bool) -> list[Role]:
    """What each stage does in one mode."""
    chosen = [cut.layers[begin] for begin in cut.begins]
    if training:
        parts = parts_of(flow.train, [layer.begin for layer in chosen], training=True)
    else:
        begins = [layer.begin_in_evaluation or 0 for layer in chosen]
        parts = parts_of(flow.evaluation, begins, training=False)
    return roles_from(parts)


def roles_from(parts: Sequence[Part]) -> list[Role]:
    """What each stage does that has one of these parts."""
    num = len(parts)
    draws = [any(part.draws for part in parts[number:]) for number in range(num)]
    return [
        Role(
            part,
            is_first=number == 0,
            is_last=number == num - 1,
            takes_state=number > 0 and draws[number],
            gives_state=number < num - 1 and draws[number + 1],
        )
        for number, part in enumerate(parts)
    ]


def stages_of(
    job: TrainJob, flow: Flow, cut: Cut, *, gives_copies: bool, mesh: DeviceMesh | None = None
) -> list[Stage]:
    """All stages of a model, as long as one rank has all of it."""
    train, evaluation = roles_of(flow, cut, training=True), roles_of(flow, cut, training=False)
    used = [{*one.part.targets, *other.part.targets} for one, other in zip(train, evaluation, strict=True)]
    spare = spare_of(flow, used)
    return [
        Stage(
            job,
            flow,
            number,
            train[number],
            evaluation[number],
            spare=spare[number],
            gives_copies=gives_copies,
            mesh=mesh,
        )
        for number in range(cut.num_stages)
    ]


def refuse_wrong(flow: Flow, cut: Cut, inputs: Tree) -> None:
    """Run all stages one after the other on a few samples: together they have to give what the model gives."""
    few = sample(inputs, NUM_SAMPLES)
    given, model = list(leaves(few)), flow.model
    batchnorms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for training in (True, False):
        resting = (
            batchnorms if training else list(model.modules())
        )  # those of other ranks may be waiting for ours
        traced = flow.train if training else flow.evaluation
        with evaluating(resting), torch.set_grad_enabled(training):
            with unchanged(model):
                wanted = ModelCall(model)(few)
            with unchanged(model):
                values: Any = ()
                for role in roles_of(flow, cut, training=training):
                    held = Holder(model, role.part.targets, dict(traced.constants))
                    taken = pytree.tree_map_only(
                        Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), values
                    )
                    values = role.part.run(held, *(given[number] for number in role.part.inputs), *taken)
        pairs = zip(pytree.tree_leaves(wanted), pytree.tree_leaves(values), strict=True)
        for one, other in pairs:
            same = (
                torch.allclose(one, other, 1e-3, 1e-5, equal_nan=True)
                if isinstance(one, Tensor)
                else one == other
            )
            if not same:
                raise ConfigError(
                    f"the {type(model).__name__} gives something else when its layers run in {cut.num_stages} stages, "
                    f"{'in training' if training else 'in evaluation'}: its forward does what cannot be seen from outside, as "
                    "writing into a value that another layer uses. Nothing was trained; cut it elsewhere with pipeline_cut=, "
                    "or use fsdp or tp."
                )


def random_state(device: torch.device) -> Tensor:
    """The generators that a model on `device` draws from, as they stand."""
    states = [torch.default_generator.get_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states).to(device)


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Go on as the generators of another process would."""
    state = state.cpu()
    split = torch.default_generator.get_state().numel()
    torch.default_generator.set_state(state[:split].clone())
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[split:].clone(), device)


class UnevenStage(PipelineStage):
    """A stage as torch's schedules know it, whose micro-batches may differ in size."""

    def __init__(
        self,
        stage: Stage,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        takes: Sequence[tuple[Tensor, ...]],
        gives: Sequence[tuple[Tensor, ...]],
        *,
        trains_beside: bool,
    ) -> None:
        """`takes` and `gives`: by micro-batch, tensors on the meta device."""
        # Gradients of weights are found from those of what comes in: where a weight is beside that, all are computed at once.
        # Where weights are sharded too: they are the graph's own only as long as they are gathered.
        together = trains_beside or isinstance(stage, FSDPModule)
        at_once: Any = (lambda: lambda: None) if stage.number and together else None
        super().__init__(
            stage,
            stage.number,
            num_stages,
            device,
            input_args=takes[0],
            output_args=gives[0],
            group=group,
            dw_builder=at_once,
        )
        self._takes = [extract_tensor_metas(tensors) for tensors in takes]
        self._gives = [extract_tensor_metas(tensors) for tensors in gives]

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        found = {}
        for chunk in range(num_microbatches):
            self._stage_meta.inputs = self._takes[chunk]
            super()._setup_forward_recv_info(1, has_backward)
            found[chunk] = self.args_recv_info[0]
        self.args_recv_info = found

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        found = {}
        for chunk in range(num_microbatches):
            self._stage_meta.output_grads = _derive_grad_metas(self._gives[chunk] or ())
            super()._setup_backward_recv_info(1)
            found[chunk] = self.grad_recv_info[0]
        self.grad_recv_info, self.chunks = found, num_microbatches

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Gradients of one micro-batch, of which layers that run again have to know whose it is."""
        assert isinstance(self.submod, Stage)
        self.submod.tell_batchnorm(self.submod.step.pieces[bwd_chunk_id].borrowed)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Gradients of what one micro-batch was given, zeros where there is none."""
        self._stage_meta.input_grads = _derive_grad_metas(self._takes[bwd_chunk_id] or ())
        if bwd_chunk_id in self.bwd_cache:
            self.bwd_cache[bwd_chunk_id] = tuple(map(_sendable, self.bwd_cache[bwd_chunk_id]))
        return super().get_bwd_send_ops(bwd_chunk_id)


def _sendable(gradient: Tensor | None) -> Tensor | None:
    """Only what lies in one piece is sent, and the gradient of a mean does not."""
    if isinstance(gradient, DTensor):
        # Of what came as a plain tensor, and was used where each rank of tp has a part of the gradient.
        gradient = gradient.full_tensor()
    return None if gradient is None else gradient.contiguous()
