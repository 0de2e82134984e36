"""A model partitioned over a mesh of ranks: `fsdp`, `tp`, `pp`, and products of those with `dp`.

Losses, counts, control flags and BatchNorm's statistics are exchanged as in `ddp`, on which this is
built; gradients are summed by the partitioned model itself while backward runs. Ranks hold parts
that no other rank has, so a death takes all back to the newest snapshot (docs/adr/0019).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from shoal.cluster.worker import session
from shoal.collectives import torch_waits
from shoal.config import strategy as strategies
from shoal.config.choices import SCHEDULES
from shoal.config.job import Job
from shoal.data.slice import Slice
from shoal.data.tree import Tree, leaves, map_tensors, tensors
from shoal.errors import ClusterError, ConfigError, PeerLost, TrainingError
from shoal.parallel import fsdp as fsdp_cut
from shoal.parallel import own_gradients, parameter_loss
from shoal.parallel.compute import (
    Compute,
    ModelCall,
    check_loss_in_forward,
    place,
    refuse_carried,
    refuse_mixing,
    refuse_uneven_terms,
    run_again,
)
from shoal.parallel.ddp import Ddp
from shoal.parallel.own_forward import OwnForward, once_differentiable
from shoal.parallel.pipeline import forward_state, optimizer_trial
from shoal.parallel.pipeline import plan as pipeline_plan
from shoal.parallel.pipeline import stage as pipeline_stage
from shoal.parallel.pipeline import state as pipeline_state
from shoal.parallel.pipeline.partition import Partition, find_partition, partition_by_blocks, sample
from shoal.parallel.pipeline.runner import PipelineRunner, RetracedRoles
from shoal.parallel.pipeline.stage import ModelStage
from shoal.parallel.protocol import LayerPlace, LossSum, Piece, PieceReader, StepResult, TrainJob
from shoal.parallel.sample_mixing import NUM_SAMPLES_ONCE, can_be_tried
from shoal.parallel.state import (
    MODEL,
    LazyTensors,
    is_first_holder,
    layers_of,
    load_state,
    local_block,
    parameter_names,
    parameter_of,
    plain_tensors,
    read_like,
    rebind_optimizer,
    refuse_different_models,
    state_pieces,
    ties_of,
    whole_pieces,
)
from shoal.parallel.step import StepExchange, as_loss, gradients_of, scale
from shoal.parallel.tensor_parallel import cut as tensor_cut
from shoal.parallel.tensor_parallel import dtensor_fixes
from shoal.parallel.tensor_parallel import plan as tensor_plan
from shoal.parallel.tensor_parallel.attention import disable_encoder_fast_path
from shoal.parallel.tensor_parallel.blocks import BlockTrial
from shoal.parallel.tensor_parallel.packing import Packing
from shoal.parallel.tensor_parallel.plan import TensorPlan
from shoal.recovery import device_group
from shoal.recovery.device_group import DeviceWatch
from shoal.recovery.rendezvous import forming_within, is_broken
from shoal.runtime import memory

# Error messages of a collective whose peer is gone.
_BROKEN = ("gloo", "Connection closed", "Connection reset", "NCCL")


_cut_modules: WeakSet[nn.Module] = WeakSet()
"""Modules of models that were partitioned in this process."""


def _is_cut(module: nn.Module) -> bool:
    own = module.parameters(recurse=False)
    return module in _cut_modules or any(isinstance(each, DTensor) or each.is_meta for each in own)


class MeshParallel(Ddp):
    """Every rank holds its part of the model and computes its part of the batch."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.holds_parts = True
        axes = strategies.parse(job.strategy).axes
        assert axes is not None
        self._axes = strategies.fill_axes(axes, job.num_workers, job.strategy)
        self._speakers = self._axes.speakers()
        self._is_cut = self._is_compiled = False
        self._view_of_mesh = 0
        self._speaks = job.rank in self._speakers
        self._timeout_s = job.liveness.step_timeout_s
        self._schedule, self._sequence, self._offload = job.schedule, job.sequence_parallel, job.offload
        self._pipeline: PipelineRunner | None = None
        self._ownership: pipeline_state.Ownership | None = None
        self._ties: pipeline_state.TiedGradients | None = None
        self._are_tied = False  # gradients of tied weights are summed, in a loop of the user's own
        self._own_slice: Slice | None = None
        self._tied_names: dict[str, str] = {}
        self._packing = Packing()
        self._tensor_plan: TensorPlan | None = None
        self._stage_cut: pipeline_plan.PipelineCut | None = None
        self._layer_names: list[str] = []
        self._watch: DeviceWatch | None = None
        self._unit_calls: list[fsdp_cut.UnitCalls] = []
        self._by_sample: list[nn.Module] = []
        self._layers_by_sample: fsdp_cut.LayersBySample | None = None
        self._data_groups: list[dist.ProcessGroup] = []
        self._kept = contextlib.ExitStack()  # contexts of a loop of the script's own, never left

    @property
    def num_micro(self) -> int | None:
        return self._pipeline.num_micro if self._pipeline is not None else None

    def prepare(self, job: TrainJob) -> None:
        """Check that all ranks built the same model, broadcast rank 0's weights, then partition it."""
        self._job = job
        torch_waits.record()
        if self._axes.pp > 1:
            pipeline_stage.refuse_old_torch()
        if self._axes.tp > 1:
            dtensor_fixes.refuse_old_torch()
        if job.build_optimizer is not None:
            self._refuse_rows(job.model)
        if job.is_own_loop and self._axes.pp > 1 and self._axes.tp > 1:
            raise ConfigError(
                f"'{self._axes}' cuts the layers of each stage, which a loop of the script's own is not run through. Nothing was trained; "
                "use shoal.Trainer, or stages alone (pp, dp=2,pp=2), or layers alone (tp, fsdp=2,tp=2)."
            )
        if job.training_step is not None and self._axes.pp > 1:
            raise ConfigError(
                f"'{self._axes}' cuts the forward of a model into stages, and a training_step runs what of the model it likes. Nothing was "
                "trained; give loss= in its place, or use --strategy ddp, fsdp, tp or ps."
            )
        if job.compile and self._axes.pp > 1:
            raise ConfigError(
                "compile=True compiles the model as one, and pp runs it in stages. Nothing was trained; leave compile out, or use "
                "--strategy ddp, fsdp or tp."
            )
        if not self._is_cut:
            self._refuse_cut_before(job.model)
            job.model.to(job.device)
            refuse_different_models(job.model, super().gather)
            self._group.run(self._broadcast)
            names, uncut = parameter_names(job.model), parameter_loss.Uncut(job.model)
            self._cut(job.model)
            job.loss = parameter_loss.WholeParameters(
                job.loss,
                job.model,
                uncut,
                self._packing,
                strategy=str(self._axes),
                in_stages=self._axes.pp > 1,
            )
            self._is_cut = True
            _cut_modules.update(job.model.modules())
            memory.return_large_blocks()
            if job.given_optimizer is not None:
                rebind_optimizer(job.given_optimizer, names, job.model, str(self._axes))
        self._build(job)
        if self._ownership is not None and self.optimizer is not None:
            optimizer_trial.refuse_mixed_parameters(
                self.optimizer, job.model, self._ownership, self._axes.pp, str(self._axes)
            )
        self._group.hold(job.number, self)

    def _refuse_cut_before(self, model: nn.Module) -> None:
        """Refuse a model that another Trainer or loop has partitioned, and a copy of it: this rank has parts."""
        name = next((name for name, module in model.named_modules() if _is_cut(module)), None)
        if name is not None:
            raise ConfigError(
                f"{f'the layer {name!r} of the model' if name else 'the model'} was split over the workers by another Trainer (or "
                f"shoal.setup) already, and under '{self._axes}' a second one cannot split it again. Nothing was trained by this one; go on "
                "with the first, or save there and build the model anew: first.save('a'), shoal.Trainer(build(), ..., init_from='a')."
            )

    def forward_backward(self, batch: Slice) -> LossSum:
        with self._unless_broken("forward and backward", runs_model=True):
            return super().forward_backward(batch)

    def commit(self) -> StepResult:
        with self._unless_broken("commit"):
            self._refuse_different_units()
            tensor_cut.match_placements(self._parameters)
            result = super().commit()
        spoilt = tuple((self._axes.data_rank(rank), loss) for rank, loss in result.nonfinite)
        return dataclasses.replace(result, nonfinite=spoilt) if spoilt else result

    def forward(self, batch: Slice) -> Tree:
        with self._unless_broken("forward", runs_model=True):
            if self._pipeline is not None:
                return self._pipeline.forward(batch, rank=self._data_rank)
            return super().forward(batch)

    @contextlib.contextmanager
    def _unless_broken(self, operation: str, *, runs_model: bool = False) -> Iterator[None]:
        """Context: a collective inside the model that breaks because a rank died is no error of the user's."""
        began_at = time.monotonic()
        watch = self._watch
        try:
            with (
                watch.over() if watch is not None else contextlib.nullcontext(),
                tensor_cut.running(runs_model) if self._axes.tp > 1 else contextlib.nullcontext(),
            ):
                yield
            return
        except RuntimeError as error:
            is_over = is_broken() or (watch is not None and watch.ended is not None)
            # A mesh has its own groups, whose connections may end before the watched ones.
            if not is_over and not any(word in str(error) for word in _BROKEN):
                refusal = (
                    tensor_cut.explain_unsupported(error, self._job.model)
                    if self._axes.tp > 1
                    else tensor_cut.explain_optimizer(error)
                )
                if "storage of size 0" in str(error):
                    refusal = ConfigError(
                        "the model or its loss differentiates in forward (torch.autograd.grad, a gradient penalty say), after which fsdp has let "
                        "go of parameters that the step's own backward needs. Nothing of this step was updated; use --strategy ddp or ps."
                    )
                by_parameters = parameter_loss.refusal(error, str(self._axes), in_stages=self._axes.pp > 1)
                raise refusal or by_parameters or error from None
        # Ranks that hold shards end with the dead one; the supervisor ends this one while it waits.
        self._group.regroup(operation, time.monotonic() - began_at)
        raise self._mesh_is_lost()

    def _run(self, batch: Slice) -> LossSum:
        if self._group.view != self._view_of_mesh:
            raise self._mesh_is_lost()
        if self._job.compile and self._axes.tp > 1 and not self._is_compiled:
            self._compute.try_compiled(batch, str(self._axes))
            self._is_compiled = True
        if self._pipeline is None or self._ties is None:
            return super()._run(batch)
        if self._ranks is not None:
            self._ranks.enter(self._group.view)
        with own_gradients.Resting():
            loss = self._pipeline.forward_backward(batch, rank=self._data_rank, step=self.step)
        self._ties.sum()
        self._contribute(loss, batch.share)
        return loss

    def _mesh_is_lost(self) -> ClusterError:
        """The mesh's groups belong to the view they were formed in, which is over."""
        return ClusterError(
            f"the connections of '{self._axes}' were lost at step {self.step + 1} though every worker lives, and with them the "
            "ways between the parts of the model. Checkpoints are whole: go on from the newest with `shoal resume`."
        )

    # ---- a loop of the user's own ------------------------------------------------------------------

    def _watch_own_loop(self, model: nn.Module) -> None:
        session.runs_collectives()
        if self._pipeline is not None:
            model.forward = self._own_pipelined
        self._own_forward = OwnForward(
            model, str(self._axes), lambda: self._unless_broken("forward", runs_model=True)
        )
        # Both until the script ends. A Trainer's own backward is right under fsdp.
        self._kept.enter_context(
            once_differentiable(str(self._axes), applies=lambda: not own_gradients.rests())
        )
        if self._axes.tp > 1:
            # Its loss and backward mix whole tensors with shards, too.
            self._kept.enter_context(tensor_cut.running(runs_model=False))
        if self._rank == 0 and self._job.number == 0:
            print(
                f"note: under '{self._axes}' each worker holds a part of the model: one that dies takes all of them back to the "
                "newest shoal.checkpoint where the script calls shoal.resume, else to its beginning. model.state_dict() has parts; "
                "shoal.checkpoint writes whole tensors",
                file=sys.stderr,
                flush=True,
            )

    def _own_pipelined(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the model in a user's own loop, through the stages: on the slice taken last."""
        pipeline, batch = self._pipeline, self._own_slice
        assert pipeline is not None
        if batch is None:
            raise ConfigError(
                f"the model was called before the first batch was taken from the data that shoal.setup returned, and under '{self._axes}' "
                "it runs batches of that data alone. Nothing was trained; call it in `for x, y in data:`."
            )
        given = [each for each in leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not given or any(each.dim() == 0 or len(each) != max(batch.num_local, 1) for each in given):
            raise ConfigError(
                f"under '{self._axes}' the model runs the batch that was taken last in parts, and it was given tensors of "
                f"{[tuple(each.shape) for each in given]} where that batch has {batch.num_local} samples. Nothing of this step was updated; "
                "give it tensors with a row for each sample, or use --strategy fsdp or ddp."
            )
        inputs: Any = args[0] if len(args) == 1 and not kwargs else (args or kwargs)
        # With a dummy target, so that a tuple of inputs is not taken for inputs and target.
        part = dataclasses.replace(batch, batch=(inputs, torch.zeros(len(given[0]))))
        if torch.is_grad_enabled() and self._job.model.training:
            return pipeline.own_forward(part, rank=self._data_rank)
        return pipeline.forward(part, rank=self._data_rank)

    def norm_over_stages(self) -> float | None:
        """Norm of the whole gradient; None where every rank can compute it from its parameters. Collective."""
        ownership = self._ownership
        if self._pipeline is None or ownership is None:
            return None
        parameters = dict(self._job.model.named_parameters())
        return pipeline_state.norm_over_stages(parameters, ownership, self._stages_group, self._job.device)

    def _norm(self, gradients: list[Tensor]) -> float:
        over_stages = self.norm_over_stages()
        return super()._norm(gradients) if over_stages is None else over_stages

    def about_to_run(self) -> None:
        if self._group.view != self._view_of_mesh:
            raise self._mesh_is_lost()
        super().about_to_run()

    def weigh(self, batch: Slice) -> None:
        self._own_slice = batch
        self._own_forward.weight = batch.num_counted / batch.num_global

    def sum_gradients(self, batch: Slice) -> None:
        """Backward has summed the gradients; if samples were skipped, its divisor was too large."""
        mine = torch.tensor([float(batch.num_local), batch.num_counted], dtype=torch.float64)
        count, counted = self.reduce(mine).tolist()
        if count != batch.num_global:
            raise TrainingError(
                f"samples of a batch of {batch.num_global} were left out, and under '{self._axes}' its gradients are divided by the rest "
                "only after they were clipped. Nothing of this step was applied; repair the data, or use --strategy ddp."
            )
        tensor_cut.match_placements(self._parameters)
        self._sum_ties()
        scale(gradients_of(self._parameters), count / counted if counted else 0.0)

    def _sum_ties(self) -> None:
        """Once per step: after it a tied weight has the gradient of all stages."""
        if self._ties is not None and not self._are_tied:
            self._are_tied = True
            self._ties.sum()

    def _refuse_different_units(self) -> None:
        for calls in self._unit_calls:
            calls.refuse_different(self._data_groups, self._job.device)
        if self._layers_by_sample is not None:
            self._layers_by_sample.leave_out_unused(self._data_groups, self._job.device)

    def adopt(self, batch: Slice) -> None:
        if self._axes.num_data_ranks > 1 and batch.run_back is not None and not batch.run_back[1]:
            raise ConfigError(
                "optimizer.step() was called on this worker without a backward() since the last one (left out by what its own slice gives, `if "
                f"loss.item() < 2: loss.backward()` say), and under '{self._axes}' each backward() sums over all workers, which wait for it. "
                "Nothing of this step was updated; decide by a number that all workers have, shoal.reduce(...) of it, and leave out the step, "
                "too; or run backward() on every worker, of loss * 0 where a slice is to count nothing."
            )
        self._sum_ties()
        self._are_tied = False
        self._num_global = batch.num_global
        self._contribute(LossSum(as_loss(batch.run_back), batch.num_counted, None), batch.share)

    def _make_compute(self, job: TrainJob) -> Compute:
        # Backward is collective: a borrowed sample runs it too.
        return Compute(
            job, check_loss=True, check_mixing=self._cut_by, borrowed_run_back=True, ranks=self._ranks
        )

    def _make_gradients(self, model: nn.Module) -> None:
        return None  # backward itself sums

    def _make_exchange(self, model: nn.Module) -> StepExchange:
        return StepExchange(
            model,
            self._buckets,
            rank=self._rank,
            num_workers=self._num_workers,
            data_rank=self._data_rank,
            counts_loss=self._speaks,
            counts_buffers=self._axes.coordinates(self._rank).tp == 0,
        )

    def _cut(self, model: nn.Module) -> None:
        """Partition the model, which is whole and equal on every rank."""
        if self._job.checkpoint_activations and self._axes.pp > 1:
            run_again(model, self._job.checkpoint_activations)  # checkpointed blocks stay whole
        mesh = self._mesh(self._job.device)
        self._tied_names = ties_of(model, MODEL)
        if self._offload and self._rank == 0 and self._job.device.type == "cpu":
            note = "--offload keeps shards in the host's memory, and without an accelerator they are there anyway: nothing is moved"
            print(f"note: {note}, nothing is saved", file=sys.stderr, flush=True)
        self._refuse_mixed_samples(model)
        plan = None
        if self._axes.tp > 1:
            with forward_state.attributes_kept(model):
                plan = self._find_tensor_plan(model, mesh)
        with own_gradients.Resting():  # measuring runs it forward and back
            found = self._find_stages(model, plan) if self._axes.pp > 1 else None
        self._tensor_plan, self._stage_cut = plan, found[1] if found is not None else None
        self._layer_names = list(layers_of(model))  # now: afterwards a stage has only its own
        self._synchronise(model)  # only now: finding the stages runs the model on single ranks
        if plan is not None:
            self._packing = plan.packing_of(model)
            tensor_cut.apply(plan, model, mesh["tp"])
            if self._rank == 0:
                print(plan.table(), file=sys.stderr, flush=True)
        parts: list[nn.Module] = [model]
        if found is not None:
            parts = list(self._take_stages(*found, mesh))
        # One rank has nothing to shard, but may offload.
        if self._axes.num_data_ranks > 1 or self._offload:
            for part in parts:
                with pipeline_state.following(model, part):
                    names = fsdp_cut.shard(
                        part,
                        mesh["dp", "fsdp"] if self._axes.dp > 1 else mesh["fsdp"],
                        offload=self._offload,
                        by_sample=self._by_sample,
                    )
                if names and self._axes.num_data_ranks > 1:
                    self._unit_calls.append(fsdp_cut.UnitCalls(part))
            if self._by_sample:
                self._layers_by_sample = fsdp_cut.LayersBySample(self._by_sample)
            self._data_groups = [
                mesh[axis].get_group() for axis in ("dp", "fsdp") if getattr(self._axes, axis) > 1
            ]
        disable_encoder_fast_path(model)
        if found is not None:
            assert self._ownership is not None
            self._ties = pipeline_state.TiedGradients(model, self._ownership, mesh["pp"].get_group())

    def _refuse_mixed_samples(self, model: nn.Module) -> None:
        """Try the model on the first data while every rank has all of it: once partitioned, its forward is collective.

        Not in a script's own loop or a training step, which may transform batches before they call
        the model.
        """
        job = self._job
        if (
            self._axes.num_data_ranks == 1
            or job.first_slice is None
            or job.training_step is not None
            or job.is_own_loop
            or not can_be_tried(model)
        ):
            return
        first, call, strategy = job.first_slice(), ModelCall(model), str(self._axes)
        inputs = place(first.inputs, job.device, job.cast_inputs)
        num_rows = max((len(tensor) for tensor in tensors(inputs) if tensor.dim()), default=0)
        if job.loss.is_in_forward:
            refuse_carried(job, call, inputs, strategy)
        else:
            refuse_mixing(job, call, inputs, num_rows, strategy, most=NUM_SAMPLES_ONCE)
            refuse_uneven_terms(job, call, first)
        pipeline_stage.refuse_written(model, inputs, strategy)
        if self._axes.pp == 1:
            self._by_sample = pipeline_stage.layers_by_sample(model, inputs)
        if self._by_sample and TorchVersion(torch.__version__) < "2.13":
            note = f"samples run through different layers (experts, a branch; {len(self._by_sample)} of them), and the fsdp of torch before 2.13 fails"
            print(
                f"note: {note} in a step in which a worker runs others than the rest",
                file=sys.stderr,
                flush=True,
            )
            self._by_sample = []

    def _find_tensor_plan(self, model: nn.Module, mesh: DeviceMesh) -> TensorPlan:
        """Layers that tp partitions. Blocks known by name are tried first, if there is data to try them on."""
        job, trial = self._job, BlockTrial()
        if job.first_slice is not None and not self._sequence:
            inputs = place(job.first_slice().inputs, job.device, job.cast_inputs)
            at_rest = [module for module in model.modules() if not module.training]
            if not model.training:
                model.train()  # as in the first step, so that random draws show
            trial = tensor_cut.try_blocks(model, mesh["tp"], inputs)
            for module in at_rest:
                module.training = False
        notes = trial.notes()
        if TorchVersion(torch.__version__) < "2.13":
            notes.append(
                f"note: DTensor's results were checked with torch 2.13, and this is {torch.__version__}: run `shoal verify` before you "
                "trust tp here"
            )
        for note in notes if self._rank == 0 else ():
            print(note, file=sys.stderr, flush=True)
        return tensor_plan.find_plan(
            model, self._axes.tp, job.tensor_plan, sequence=self._sequence, blocks=trial.blocks
        )

    def _find_stages(
        self, model: nn.Module, plan: TensorPlan | None
    ) -> tuple[Partition, pipeline_plan.PipelineCut, list[Tree]]:
        """Stage boundaries by rank 0's measurements, and the model's outputs without data; refused alike on every rank."""
        job, num_stages = self._job, self._axes.pp * SCHEDULES[self._schedule].stages_per_worker
        if job.first_slice is None:
            raise ConfigError(
                "pp follows a model's forward on the first of the data to find where it can be cut, and no data is at hand. "
                "Nothing was trained; call fit, evaluate or predict before anything else."
            )
        inputs = place(job.first_slice().inputs, job.device, job.cast_inputs)
        if job.loss.is_in_forward:  # while every rank has the whole model
            four = sample(inputs, 4)
            halves = [map_tensors(lambda t, at=at: t[at : at + 2], four) for at in (0, 2)]  # type: ignore[misc]
            check_loss_in_forward(job, ModelCall(model), [(four, 4), (halves[0], 2), (halves[1], 2)], 4)
        whole = pipeline_plan.kept_whole_by_tp(model, plan) if plan is not None else {}
        styles = {row.layer: row.style for row in plan.rows.values()} if plan is not None else {}
        try:
            partition = find_partition(model, inputs, num_stages, job.pipeline_cut or (), whole)
            by_size = pipeline_plan.costs_by_size(partition)
            # Refuses before any measurement.
            cut = pipeline_plan.find_cut(partition, num_stages, by_size, job.pipeline_cut, styles)
        except ConfigError as error:
            # A forward on values without data does not see tp's hooks around layers.
            found = partition_by_blocks(model, inputs) if plan is None else None
            if found is None:
                raise
            try:
                partition, by_size = found, pipeline_plan.costs_by_size(found)
                cut = pipeline_plan.find_cut(partition, num_stages, by_size, job.pipeline_cut, styles)
                pipeline_stage.refuse_different_results(job, partition, cut, inputs)
            except Exception:  # a user's or torch's, on values without data
                raise error from None
            if self._rank == 0:
                why = str(error).partition(". Nothing was trained")[0]
                print(
                    f"note: {why}. It is cut between its repeated blocks instead", file=sys.stderr, flush=True
                )
        costs = torch.tensor(by_size, dtype=torch.float64)
        if self._rank == 0:
            try:
                measured = pipeline_plan.costs_of_job(partition, inputs, job.number)
            except RuntimeError as error:
                raise (parameter_loss.refusal(error, str(self._axes), in_stages=True) or error) from None
            costs = torch.tensor(measured, dtype=torch.float64)
        self._group.run(lambda group: group.broadcast(costs))
        cut = pipeline_plan.find_cut(partition, num_stages, costs.tolist(), job.pipeline_cut, styles)
        outputs = pipeline_stage.refuse_different_results(job, partition, cut, inputs)
        forward_state.hide(pipeline_stage.refuse_memory(model, inputs, str(self._axes)))
        if self._rank == 0:
            print(cut.table(), file=sys.stderr, flush=True)
            if partition.is_batch_dependent and job.num_micro == 1:
                print(
                    "note: samples of a batch depend on each other, or forward changes buffers, so it is not run in micro-batches and stages wait for one "
                    "another; accumulate=4 would run it in 4, here and in one process",
                    file=sys.stderr,
                    flush=True,
                )
        return partition, cut, outputs

    def _take_stages(
        self, partition: Partition, cut: pipeline_plan.PipelineCut, outputs: list[Tree], mesh: DeviceMesh
    ) -> Iterable[ModelStage]:
        """Keep this rank's stages; of the others only names."""
        axes, at = self._axes, self._axes.coordinates(self._rank).pp
        all_stages = pipeline_stage.stages_of(
            self._job,
            partition,
            cut,
            gives_copies=self._schedule == "zero-bubble",
            outputs_like=outputs,
            mesh=mesh["tp"] if axes.tp > 1 else None,
        )
        stages = {number: stage for number, stage in enumerate(all_stages) if number % axes.pp == at}
        ownership = pipeline_state.ownership_of(partition.model, all_stages, axes.pp, at)
        if axes.num_data_ranks > 1:
            pipeline_state.refuse_shared_on_one_rank(partition.model, list(stages.values()))
        pipeline_state.drop_foreign_tensors(partition.model, ownership)
        group = mesh["pp"].get_group()
        self._ownership = ownership
        self._pipeline = PipelineRunner(
            self._job,
            partition,
            stages,
            RetracedRoles(partition, cut, all_stages, stages),
            empty_output=outputs[-1],
            num_stages=cut.num_stages,
            schedule=self._schedule,
            group=group,
            data_groups=[mesh[axis].get_group() for axis in ("dp", "fsdp") if getattr(axes, axis) > 1],
            num_data_ranks=axes.num_data_ranks,
        )
        partition.forget()
        self._stages_group = group
        return stages.values()

    def _mesh(self, device: torch.device) -> DeviceMesh:
        axes = self._axes
        names = ("pp", "dp", "fsdp", "tp")
        while True:
            _ = self._group.reducer  # makes sure that the group exists
            self._view_of_mesh = self._group.view
            try:
                with forming_within():
                    mesh = init_device_mesh(
                        device.type, (axes.pp, axes.dp, axes.fsdp, axes.tp), mesh_dim_names=names
                    )
                break
            except PeerLost:
                self._group.regroup()
        for name in names:  # subgroups, in which torch would wait for half an hour
            _set_pg_timeout(timedelta(seconds=self._timeout_s), mesh.get_group(name))
            if device.type != "cpu":
                device_group.connect(device, mesh.get_group(name))
        if device.type != "cpu":
            self._watch = DeviceWatch(device, self._timeout_s, is_broken=is_broken)
        return mesh

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the parts of the batch: of ranks that compute the same part, one contributes."""
        return super().reduce(values if self._speaks else torch.zeros_like(values))

    def gather(self, value: torch.Tensor | None) -> list[torch.Tensor]:
        """Tensor of every part of the batch, in order."""
        everybody = super().gather(value)
        return [everybody[rank] for rank in self._speakers]

    def places(self) -> Iterator[LayerPlace]:
        """Layers by stage of the pipeline, by their style under tp, and as shards of the data ranks."""
        cut, plan, axes = self._stage_cut, self._tensor_plan, self._axes
        stage_of: dict[str, int] = {}
        for layer in self._layer_names:
            if cut is not None:
                for number, begin in enumerate(cut.begins):
                    for piece in cut.layers[begin:]:
                        # Later stages overwrite: a tied weight is shown at its last stage.
                        if any(held.rpartition(".")[0] == layer for held in piece.holds):
                            stage_of[layer] = number
        for layer in self._layer_names:
            stage = stage_of.get(layer, 0 if cut is not None else None)
            num_data = axes.num_data_ranks
            how, sends = [], list[tuple[str, dict[str, float]]]()
            row = plan.rows.get(layer) if plan is not None else None
            is_split = row is not None and row.style not in ("replicated", "sequence")
            if row is not None:
                how.append(f"tp {row.style}")
                if row.style in ("rowwise", "heads"):
                    sends.append(("all-reduce of outputs (tp)", {"output": 1.0}))
                elif row.style == "colwise alone":
                    sends.append(("all-gather of outputs (tp)", {"output": 1.0}))
                if row.style in ("colwise", "heads"):
                    sends.append(("all-reduce of input gradients (tp)", {"input": 1.0}))
            if num_data > 1:
                part = 1.0 / (axes.tp if is_split else 1)
                if axes.fsdp > 1:
                    how.append(f"sharded over {axes.fsdp}")
                    share = part * (axes.fsdp - 1) / axes.fsdp
                    sends.append(("all-gather of weights, twice", {"parameters": 2 * share}))
                    sends.append(("reduce-scatter of gradients", {"parameters": share}))
                if axes.dp > 1:
                    sends.append(("all-reduce of gradients", {"parameters": part / axes.fsdp}))
            num_ranks = self._num_workers
            workers_of_stage = [
                rank
                for rank in range(num_ranks)
                if stage is None or axes.coordinates(rank).pp == stage % axes.pp
            ]
            where = "each worker" if stage is None else f"stage {stage}: {_ranks(workers_of_stage)}"
            yield LayerPlace(
                layer,
                where,
                ", ".join(how),
                is_cut=is_split or axes.fsdp > 1,
                stage=stage,
                sends=tuple(sends),
            )

    def state(self) -> Iterator[Piece]:
        """Model and optimizer, tensor by tensor, whole on rank 0. Collective."""
        with self._unless_broken("gathering the state"):
            pieces = state_pieces(self._job.model, self.optimizer)
            if self._pipeline is None or self._ownership is None:
                yield from whole_pieces(
                    pieces,
                    keep=self._rank == 0,
                    packing=self._packing,
                    ties=ties_of(self._job.model, MODEL),
                )
                return
            leaders = range(0, self._num_workers, self._num_workers // self._axes.pp)
            yield from pipeline_state.pieces_on_rank_0(
                list(
                    whole_pieces(
                        pipeline_state.own_pieces(pieces, self._ownership),
                        keep=self._rank in leaders,
                        packing=self._packing,
                        ties=self._tied_names,
                    )
                ),
                rank=self._rank,
                leaders=leaders,
                ties=self._tied_names,
                gather=super().gather,
                device=self._job.device,
            )

    def parts(self) -> Iterator[Piece]:
        """Shards of this rank; of replicated ones only the first holder's."""
        at, ownership = self._axes.coordinates(self._rank), self._ownership
        for piece in state_pieces(self._job.model, self.optimizer):
            if piece.tensor.is_meta or (ownership is not None and not ownership.saves(piece.name)):
                continue
            if is_first_holder(piece.tensor, at):
                yield from self._packing.parts_in_user_layout(piece.name, *local_block(piece.tensor))

    def load(self, pieces: PieceReader) -> None:
        """Every rank reads its own parts."""
        model, packing = self._job.model, self._packing
        like = dict(plain_tensors(model))
        elsewhere = {name for name, tensor in like.items() if tensor.is_meta}
        of_parameters = dict(model.named_parameters())

        def read(piece: str) -> Tensor:
            held = (like if piece.startswith(MODEL) else of_parameters).get(parameter_of(piece))
            if held is not None and held.is_meta:
                return held  # another stage's: nothing is written
            return read_like(pieces.tensors, piece, held, packing)

        # Weights of other stages are requested, their optimizer state is not.
        names = [n for n in pieces.tensors if n.startswith(MODEL) or parameter_of(n) not in elsewhere]
        settings = pieces.optimizer_settings
        if settings is not None and elsewhere:
            numbers = {name: held for name, held in settings["numbers"].items() if name not in elsewhere}
            settings = {**settings, "numbers": numbers}
        load_state(model, self.optimizer, PieceReader(LazyTensors(names, read), settings, pieces.path))


def _ranks(ranks: list[int]) -> str:
    return f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}"
