"""One stage of a pipeline: some layers of the user's model, run on one micro-batch at a time.

Random numbers are drawn as one process would draw them for the same
micro-batch: where a later stage draws, the generator's state goes from stage
to stage with the values.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.collectives.sync_batchnorm import SyncedBatchNorm
from shoal.data.slice import Slice
from shoal.data.tree import Tree, leaves, map_tensors, refill
from shoal.errors import ConfigError, TrainingError
from shoal.parallel import fsdp as fsdp_cut
from shoal.parallel.compute import (
    ModelCall,
    autocast,
    batchnorm_at_rest,
    evaluating,
    explain_batch_of_one,
    seed_all,
)
from shoal.parallel.pipeline import forward_state, p2p
from shoal.parallel.pipeline.partition import (
    NUM_SAMPLES,
    Partition,
    SegmentModule,
    sample,
    segments_of,
    spare_of,
)
from shoal.parallel.pipeline.plan import PipelineCut
from shoal.parallel.pipeline.trace import StageSegment, unchanged
from shoal.parallel.protocol import TrainJob
from shoal.parallel.sample_mixing import MAX_NUMEL_RUN_BACK
from shoal.parallel.tensor_parallel.dtensor_fixes import plain

try:
    from torch.distributed.pipelining._utils import _derive_grad_metas, extract_tensor_metas

    HAS_SHAPES = True
except ImportError:  # an older torch, whose stages infer shapes in another way
    HAS_SHAPES = False


def refuse_old_torch() -> None:
    if not HAS_SHAPES:
        raise ConfigError(
            f"pp tells torch's stages their shapes, as torch 2.13 can, and this is {torch.__version__}, which cannot. Nothing was "
            "trained; use --strategy fsdp or tp, or install torch 2.13."
        )


@dataclass(frozen=True, slots=True)
class StageRole:
    """A stage's work in one mode, training or evaluation."""

    segment: StageSegment
    is_first: bool
    is_last: bool
    takes_state: bool
    """Whether the generator's state comes with the values."""

    gives_state: bool

    @property
    def gives_grad(self) -> tuple[bool, ...]:
        """Whether each tensor that it gives needs a gradient."""
        return (*self.segment.needs_grad, False) if self.gives_state else self.segment.needs_grad


@dataclass(slots=True)
class PipelineStep:
    """The step that this rank's stages run."""

    pieces: Sequence[Slice]
    seed_of: Callable[[int], int]
    """The seed of a micro-batch."""

    takes: Mapping[tuple[int, int], Any]
    """Description of the values that come in, by stage and number of samples."""

    roles: Mapping[tuple[int, int], StageRole]
    """Roles by stage and number of samples."""

    outputs: dict[int, Any] = field(default_factory=dict)
    """Outputs of the last stage, by micro-batch."""


@dataclass(frozen=True, slots=True)
class ForwardOnly:
    """A micro-batch that runs forward only."""

    piece: Slice
    values: Sequence[Any]
    seed: int
    role: StageRole


class ModelStage(nn.Module):
    """Some layers of the user's model, which are in `held` under their own names."""

    def __init__(
        self,
        job: TrainJob,
        partition: Partition,
        number: int,
        train: StageRole,
        evaluation: StageRole,
        *,
        spare: Sequence[str] = (),
        gives_copies: bool,
        outputs_like: Sequence[Tree] = (),
        mesh: DeviceMesh | None = None,
    ) -> None:
        """`spare`: modules that batches of other shapes may need. `outputs_like`: outputs of the model. `mesh`: the ranks of tp."""
        super().__init__()
        self.targets = (*train.segment.targets, *evaluation.segment.targets, *spare)
        self.held = SegmentModule(
            partition.model, self.targets, {**partition.train.constants, **partition.evaluation.constants}
        )
        self._job, self.number, self.train_role, self.evaluation_role = job, number, train, evaluation
        self._gives_copies, self._outputs_like, self.mesh = gives_copies, outputs_like, mesh
        self.step = PipelineStep((), lambda number: 0, {}, {})
        self._batchnorms = [module for module in self.modules() if isinstance(module, _BatchNorm)]

    def forward(self, *tensors: Tensor, piece: Tensor | None = None, alone: ForwardOnly | None = None) -> Any:
        """Run one micro-batch of the step, from the tensors of the stage before to those for the next; or one forward only."""
        if alone is not None:
            return self._compute(alone.role, alone.piece, alone.values, alone.seed)
        assert piece is not None
        number, step = int(piece), self.step
        one = step.pieces[number]
        role = step.roles[self.number, num_held(one)]
        values: Sequence[Any] = ()
        if not role.is_first:
            values = p2p.unpack(
                list(tensors), step.takes[self.number, num_held(one)], self._job.device, self.mesh
            )
        self.tell_batchnorm(one.borrowed)
        rests = [m for m in self._batchnorms if one.borrowed and not isinstance(m, SyncedBatchNorm)]
        with batchnorm_at_rest(rests):
            result = self._compute(role, one, values, step.seed_of(number))
        if role.is_last:
            step.outputs[number] = result
            return tuple(leaf for leaf in leaves(result) if isinstance(leaf, Tensor))
        given = p2p.pack(result)[0]
        # torch frees a stage's output in place, which a layer may still need for the gradient of its
        # weights. It also sends only contiguous tensors, which a view (a slice, a transposition) is not.
        if self._gives_copies:
            return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in given)
        return tuple(tensor.contiguous() for tensor in given)

    def _compute(self, role: StageRole, piece: Slice, values: Sequence[Any], seed: int) -> Any:
        device = self._job.device
        if role.is_first:
            seed_all(seed, device)
        elif role.takes_state:
            *values, state = values
            set_random_state(state, device)
        inputs = list(leaves(piece.inputs))
        own = [inputs[number] for number in role.segment.inputs]
        try:
            with autocast(self._job):
                if role.is_last:
                    return self._job.loss.run(
                        lambda: self._in_class(
                            map_tensors(plain, role.segment.run(self.held, *own, *values))
                        ),
                        piece.inputs,
                        num_held(piece),
                        piece.num_global,
                    )
                result = role.segment.run(self.held, *own, *values)
        except ValueError as error:
            explain_batch_of_one(error, piece)
            raise
        return (*result, random_state(device)) if role.gives_state else result

    def _in_class(self, result: Any) -> Any:
        """The output in the model's own class: of a dict's subclass, a graph makes a dict."""
        found = _there(result)
        for like in self._outputs_like:
            if len(_there(like)) == len(found):
                values = iter(found)
                return refill(like, (leaf if leaf is None else next(values) for leaf in leaves(like)))
        return result

    def tell_batchnorm(self, is_borrowed: bool) -> None:
        """Tell synchronised layers, which run in step with other ranks, not to count a borrowed sample."""
        for module in self._batchnorms:
            if isinstance(module, SyncedBatchNorm):
                module.ranks.is_borrowed = is_borrowed


def num_held(piece: Slice) -> int:
    """Samples in a micro-batch: its own, or the borrowed one."""
    return max(piece.num_local, 1)


def roles_of(partition: Partition, cut: PipelineCut, *, training: bool) -> list[StageRole]:
    chosen = [cut.layers[begin] for begin in cut.begins]
    if training:
        segments = segments_of(partition.train, [layer.begin for layer in chosen], training=True)
    else:
        begins = [layer.begin_in_evaluation or 0 for layer in chosen]
        segments = segments_of(partition.evaluation, begins, training=False)
    return roles_from(segments)


def roles_from(segments: Sequence[StageSegment]) -> list[StageRole]:
    num = len(segments)
    draws = [any(segment.draws for segment in segments[number:]) for number in range(num)]
    return [
        StageRole(
            segment,
            is_first=number == 0,
            is_last=number == num - 1,
            takes_state=number > 0 and draws[number],
            gives_state=number < num - 1 and draws[number + 1],
        )
        for number, segment in enumerate(segments)
    ]


def stages_of(
    job: TrainJob,
    partition: Partition,
    cut: PipelineCut,
    *,
    gives_copies: bool,
    outputs_like: Sequence[Tree] = (),
    mesh: DeviceMesh | None = None,
) -> list[ModelStage]:
    """All stages of a model that is still whole on this rank."""
    train, evaluation = roles_of(partition, cut, training=True), roles_of(partition, cut, training=False)
    used = [
        {*one.segment.targets, *other.segment.targets} for one, other in zip(train, evaluation, strict=True)
    ]
    spare = spare_of(partition, used)
    return [
        ModelStage(
            job,
            partition,
            number,
            train[number],
            evaluation[number],
            spare=spare[number],
            gives_copies=gives_copies,
            outputs_like=outputs_like,
            mesh=mesh,
        )
        for number in range(cut.num_stages)
    ]


def refuse_different_results(
    job: TrainJob, partition: Partition, cut: PipelineCut, inputs: Tree
) -> list[Tree]:
    """Run all stages in turn on a few samples, and refuse stages that give other results than the model.

    Returns the model's outputs in training and in evaluation, without data: their class and
    structure.
    """
    outputs = []
    few = sample(inputs, NUM_SAMPLES)
    given, model = list(leaves(few)), partition.model
    batchnorms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for training in (True, False):
        # BatchNorm of other ranks may be waiting for this rank's.
        resting = batchnorms if training else list(model.modules())
        traced = partition.train if training else partition.evaluation
        with evaluating(resting), torch.set_grad_enabled(training):
            roles = roles_of(partition, cut, training=training)
            with unchanged(model):
                wanted = job.loss.run(lambda: ModelCall(model)(few), few, NUM_SAMPLES, NUM_SAMPLES)
                outputs.append(map_tensors(lambda tensor: tensor.new_empty(0), wanted))
                gradients = {}
                with contextlib.suppress(Exception):  # an output without a derivative
                    gradients = _gradients(model, wanted)
            with unchanged(model):
                in_turn = functools.partial(_run_in_turn, model, roles, given, traced.constants)
                values = job.loss.run(in_turn, few, NUM_SAMPLES, NUM_SAMPLES)
                gradients_in_turn = _gradients(model, values) if gradients else {}
        pairs = zip(_there(wanted), _there(values), strict=True)
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
        _refuse_different_gradients(model, gradients, gradients_in_turn, cut.num_stages)
    return outputs


def refuse_written(model: nn.Module, inputs: Tree, strategy: str) -> None:
    """Refuse a forward that writes into its parameters, of which fsdp gathers copies."""

    def call() -> None:
        # Errors are ignored: some inputs cannot be divided.
        kept = forward_state.attributes_kept(model)
        with contextlib.suppress(Exception), kept, unchanged(model), torch.no_grad():
            ModelCall(model)(sample(inputs, NUM_SAMPLES))

    forward_state.refuse_written_parameters(
        model,
        call,
        strategy,
        "it writes into what is gathered for one forward, and the workers' parts stay as they were",
    )


def layers_by_sample(model: nn.Module, inputs: Tree) -> list[nn.Module]:
    """Modules that run for some of the first samples alone and not for others: experts, branches."""

    def call(given: Tree) -> None:
        with forward_state.attributes_kept(model), unchanged(model), torch.no_grad():
            ModelCall(model)(given)

    try:
        with evaluating(model.modules()):
            some = sample(inputs, NUM_SAMPLES)
            parts = [
                map_tensors(lambda tensor, at=at: tensor[at : at + 1].clone(), some)  # type: ignore[misc]
                for at in range(NUM_SAMPLES)
            ]
            return fsdp_cut.layers_by_sample(
                model, [functools.partial(call, each) for each in (inputs, *parts)]
            )
    except TrainingError:
        raise
    except Exception:  # evaluation mode may want other inputs, and some cannot be divided
        return []


def refuse_memory(model: nn.Module, inputs: Tree, strategy: str) -> list[forward_state.Place]:
    """Refuse a forward that remembers the ones before; returns the places of what it leaves behind of its samples."""

    def call(given: Tree) -> Tree:
        with unchanged(model), torch.no_grad():
            return ModelCall(model)(given)

    with evaluating([module for module in model.modules() if isinstance(module, _BatchNorm)]):
        return forward_state.refuse_memory(model, call, sample(inputs, NUM_SAMPLES), strategy)


def _gradients(model: nn.Module, output: Tree) -> dict[str, Tensor]:
    """Gradients of a scalar of all outputs; none for a model too large to have them twice."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    given = [leaf for leaf in _there(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not given or not trained or sum(p.numel() for p in trained.values()) > MAX_NUMEL_RUN_BACK:
        return {}
    total = sum((leaf.double().square().sum() for leaf in given), torch.zeros((), dtype=torch.float64))
    found = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    dense = {name: each for name, each in zip(trained, found, strict=True) if each is not None}
    return {name: each for name, each in dense.items() if each.layout is torch.strided}


def _refuse_different_gradients(
    model: nn.Module, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], num_stages: int
) -> None:
    """Equal outputs may have another graph: no output shows what a forward detaches or differentiates in its own way."""
    sizes = {name: float(each.abs().max()) for name, each in wanted.items() if each.numel()}
    # Relative to the others a gradient may be rounding alone.
    floor = 1e-5 * max(filter(math.isfinite, sizes.values()), default=0.0) + 1e-6
    for name in wanted.keys() | found.keys():
        if not math.isfinite(sizes.get(name, 0.0)):
            continue
        like = wanted[name] if name in wanted else found[name]
        one, other = wanted.get(name, torch.zeros_like(like)), found.get(name, torch.zeros_like(like))
        size = max(float(one.abs().max()), float(other.abs().max())) if like.numel() else 0.0
        if size and not float((one - other).abs().max()) <= 1e-2 * size + floor:
            raise ConfigError(
                f"the {type(model).__name__} has another gradient of '{name}' when its layers run in {num_stages} stages: its forward does "
                "something with gradients that cannot be followed. Nothing was trained; take that into a module of its own, which "
                "stays whole, or use fsdp or tp."
            )


def _there(tree: Tree) -> list[Any]:
    """Leaves, without those that a class leaves out and a graph has as None."""
    return [leaf for leaf in leaves(tree) if leaf is not None]


def _run_in_turn(
    model: nn.Module, roles: Sequence[StageRole], given: Sequence[Any], constants: Mapping[str, Tensor]
) -> Any:
    values: Any = ()
    for role in roles:
        held = SegmentModule(model, role.segment.targets, dict(constants))
        values = role.segment.run(held, *(given[number] for number in role.segment.inputs), *values)
    return values


def random_state(device: torch.device) -> Tensor:
    """The state of the generators that a model on `device` draws from."""
    states = [torch.default_generator.get_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states).to(device)


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Continue from another process's generators."""
    state = state.cpu()
    split = torch.default_generator.get_state().numel()
    torch.default_generator.set_state(state[:split].clone())
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[split:].clone(), device)


class UnevenStage(PipelineStage):
    """A stage as torch's schedules know it, whose micro-batches may differ in size."""

    def __init__(
        self,
        stage: ModelStage,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        takes: Sequence[tuple[Tensor, ...]],
        gives: Sequence[tuple[Tensor, ...]],
        *,
        trains_beside: bool,
    ) -> None:
        """`takes` and `gives`: by micro-batch, tensors on the meta device."""
        # Gradients of weights are derived from those of the stage's inputs: if a weight does not depend on
        # these, all are computed at once. So they are with sharded weights: those belong to the graph only
        # while they are gathered.
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
            # A forward that branches on the number of samples may pass on more values for one micro-batch
            # than for another.
            self._send_to_next(len(self._gives[chunk] or ()))
            self._stage_meta.output_grads = _derive_grad_metas(self._gives[chunk] or ())
            super()._setup_backward_recv_info(1)
            found[chunk] = self.grad_recv_info[0]
        self._send_to_next(max(len(given or ()) for given in self._gives))
        self.grad_recv_info, self.chunks = found, num_microbatches

    def _send_to_next(self, num_tensors: int) -> None:
        following = [] if self.is_last else [self.stage_index + 1]
        self.act_send_info = dict.fromkeys(range(num_tensors), following)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run backward of one micro-batch; checkpointed layers, which run forward again, learn whether it is borrowed."""
        assert isinstance(self.submod, ModelStage)
        self._stage_meta.inputs = self._takes[bwd_chunk_id]
        self.submod.tell_batchnorm(self.submod.step.pieces[bwd_chunk_id].borrowed)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of the gradients of one micro-batch's inputs, zeros where there is none."""
        self._stage_meta.inputs = self._takes[bwd_chunk_id]
        self._stage_meta.input_grads = _derive_grad_metas(self._takes[bwd_chunk_id] or ())
        if self._takes[bwd_chunk_id]:
            self.grad_send_info = self._create_grad_send_info(self.args_recv_info[bwd_chunk_id])
        if bwd_chunk_id in self.bwd_cache:
            self.bwd_cache[bwd_chunk_id] = tuple(map(_sendable, self.bwd_cache[bwd_chunk_id]))
        return super().get_bwd_send_ops(bwd_chunk_id)


def _sendable(gradient: Tensor | None) -> Tensor | None:
    """A contiguous tensor: the gradient of a mean is not."""
    if isinstance(gradient, DTensor):
        # The gradient of a plain input that was used within a tp pair is a partial sum.
        gradient = gradient.full_tensor()
    return None if gradient is None else gradient.contiguous()
