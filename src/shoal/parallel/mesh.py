"""A model cut over a mesh of ranks: `fsdp`, `tp`, `pp`, and products of those with `dp`.

What travels beside gradients (losses, counts, wishes, BatchNorm's statistics)
goes the way of `ddp`, which this is built on; gradients are summed by the cut
itself while backward runs. Ranks hold parts that nobody else has, so a killed
one takes everybody back to the newest snapshot (docs/adr/0019).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from shoal.collectives.gradients import NothingToSend, Sums
from shoal.config import strategy as strategies
from shoal.config.choices import SCHEDULES
from shoal.config.job import Job
from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.errors import ClusterError, ConfigError
from shoal.parallel import fsdp as fsdp_cut
from shoal.parallel import optimizer_following, parameter_loss
from shoal.parallel.activations import run_again
from shoal.parallel.check_same_model import refuse_different_models
from shoal.parallel.compute import place
from shoal.parallel.ddp import Ddp
from shoal.parallel.hashed_rows import MODEL, plain_tensors
from shoal.parallel.pipeline import plan as pipeline_plan
from shoal.parallel.pipeline import stage as pipeline_stage
from shoal.parallel.pipeline import state as pipeline_state
from shoal.parallel.pipeline.partition import Partition, find_partition
from shoal.parallel.pipeline.retrace import RetracedRoles
from shoal.parallel.pipeline.runner import PipelineRunner
from shoal.parallel.pipeline.stage import ModelStage
from shoal.parallel.protocol import LossSum, Piece, PieceReader, StepResult, TrainJob
from shoal.parallel.sharded_tensors import CutReader, ties_of, whole_pieces
from shoal.parallel.state import load_state, state_pieces
from shoal.parallel.step_exchange import StepExchange
from shoal.parallel.tensor_parallel import cut as tensor_cut
from shoal.parallel.tensor_parallel import plan as tensor_plan
from shoal.parallel.tensor_parallel.attention import disable_encoder_fast_path
from shoal.parallel.tensor_parallel.packing import Packing
from shoal.parallel.tensor_parallel.plan import TensorPlan
from shoal.recovery import device_group
from shoal.recovery.device_watch import DeviceWatch
from shoal.recovery.rendezvous import forming_within, is_broken
from shoal.runtime import memory

_BROKEN = ("gloo", "Connection closed", "Connection reset", "NCCL")
"""What a collective says whose peer is gone."""


class MeshParallel(Ddp):
    """Every rank holds its part of the model and computes its part of the batch."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.holds_parts = True
        axes = strategies.parse(job.strategy).axes
        assert axes is not None
        self._axes = strategies.fill_axes(axes, job.num_workers, job.strategy)
        self._speakers = self._axes.speakers()
        self._is_cut = False
        self._view_of_mesh = 0
        self._speaks = job.rank in self._speakers
        self._timeout_s = job.liveness.step_timeout_s
        self._schedule, self._sequence, self._offload = job.schedule, job.sequence_parallel, job.offload
        self._pipeline: PipelineRunner | None = None
        self._ownership: pipeline_state.Ownership | None = None
        self._ties: pipeline_state.TiedGradients | None = None
        self._tied_names: dict[str, str] = {}
        self._packing = Packing()
        self._watch: DeviceWatch | None = None

    @property
    def num_micro(self) -> int | None:
        """Micro-batches in which a pipeline runs a slice."""
        return self._pipeline.num_micro if self._pipeline is not None else None

    def prepare(self, job: TrainJob) -> None:
        """Check that all ranks built the same model, give everybody rank 0's weights, then cut it."""
        self._job = job
        if job.build_optimizer is not None:
            self._refuse_rows(job.model)
        if job.compile and (self._axes.pp > 1 or self._axes.tp > 1):
            why = (
                "pp runs it in stages"
                if self._axes.pp > 1
                else "tp runs layers of which each rank has a part, which dynamo cannot follow"
            )
            raise ConfigError(
                f"compile=True compiles the model as one, and {why}. Nothing was trained; leave compile out, or use --strategy ddp or fsdp."
            )
        if not self._is_cut:
            job.model.to(job.device)
            refuse_different_models(job.model, super().gather)
            self._group.run(self._broadcast)
            names, uncut = optimizer_following.names_of(job.model), parameter_loss.Uncut(job.model)
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
            memory.return_large_blocks()
            if job.given_optimizer is not None:
                optimizer_following.follow(job.given_optimizer, names, job.model, str(self._axes))
        self._build(job, borrowed_run_back=True)
        self._group.hold(job.number, self)

    def forward_backward(self, batch: Slice) -> LossSum:
        """Compute this rank's part; gradients are summed and sharded while backward runs."""
        with self._unless_broken("forward and backward", runs_model=True):
            return super().forward_backward(batch)

    def commit(self) -> StepResult:
        """Agree, clip, decide and update, each rank its part."""
        with self._unless_broken("commit"):
            tensor_cut.match_placements(self._parameters)
            verdict = super().commit()
        spoilt = tuple((self._axes.data_rank(rank), loss) for rank, loss in verdict.nonfinite)
        return dataclasses.replace(verdict, nonfinite=spoilt) if spoilt else verdict

    def forward(self, batch: Slice) -> Tree:
        """This rank's outputs, without gradients."""
        with self._unless_broken("forward", runs_model=True):
            if self._pipeline is not None:
                return self._pipeline.forward(batch, rank=self._data_rank)
            return super().forward(batch)

    @contextlib.contextmanager
    def _unless_broken(self, operation: str, *, runs_model: bool = False) -> Iterator[None]:
        """A collective inside the model that breaks because a rank died is no error of the user's."""
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
            # A mesh has groups of its own, whose connections may end before those that are watched.
            if not is_over and not any(word in str(error) for word in _BROKEN):
                refusal = (
                    tensor_cut.explain_unsupported(error, self._job.model) if self._axes.tp > 1 else None
                )
                by_parameters = parameter_loss.refusal(error, str(self._axes), in_stages=self._axes.pp > 1)
                raise refusal or by_parameters or error from None
        # Whoever holds parts goes with the one that died; the supervisor ends us while we wait.
        self._group.regroup(operation, time.monotonic() - began_at)
        raise self._mesh_is_lost()

    def _run(self, batch: Slice) -> LossSum:
        if self._group.view != self._view_of_mesh:
            raise self._mesh_is_lost()
        if self._pipeline is None or self._ties is None:
            return super()._run(batch)
        if self._ranks is not None:
            self._ranks.enter(self._group.view)
        loss = self._pipeline.forward_backward(batch, rank=self._data_rank, step=self.step)
        self._ties.sum()
        self._contribute(loss, batch.share)
        return loss

    def _mesh_is_lost(self) -> ClusterError:
        """The groups of a mesh are those of the view it was made in, and that is over."""
        return ClusterError(
            f"the connections of '{self._axes}' were lost at step {self.step + 1} though every worker lives, and with them the "
            "ways between the parts of the model. Checkpoints are whole: go on from the newest with `shoal resume`."
        )

    def weigh(self, batch: Slice) -> None:
        """A loop of the user's own runs backward, and with it the exchange, before anybody is asked."""
        raise ConfigError(
            f"'{self._axes}' sums gradients while backward runs, and shoal.setup learns of a loop's own backward only after "
            "it. Nothing was trained; use shoal.Trainer, or --strategy ddp."
        )

    def _make_gradients(self, model: nn.Module) -> Sums:
        return NothingToSend()

    def _make_exchange(self, model: nn.Module) -> StepExchange:
        return StepExchange(
            model,
            self._gradients,
            rank=self._rank,
            num_workers=self._num_workers,
            data_rank=self._data_rank,
            counts_loss=self._speaks,
            counts_buffers=self._axes.coordinates(self._rank).tp == 0,
        )

    def _norm_over_ranks(self) -> Callable[[], float] | None:
        ownership = self._ownership
        if self._pipeline is None or ownership is None:
            return None
        parameters = dict(self._job.model.named_parameters())
        return lambda: pipeline_state.norm_over_stages(
            parameters, ownership, self._stages_group, self._job.device
        )

    def _cut(self, model: nn.Module) -> None:
        """Cut the model, which is whole and the same on every rank."""
        if self._job.checkpoint_activations and self._axes.pp > 1:
            run_again(model, self._job.checkpoint_activations)  # what does so stays whole
        mesh = self._mesh(self._job.device)
        self._tied_names = ties_of(model, MODEL)
        self._say_what_offload_does()
        plan = None
        if self._axes.tp > 1:
            plan = tensor_plan.find_plan(model, self._axes.tp, self._job.tensor_plan, sequence=self._sequence)
        found = self._find_stages(model, plan) if self._axes.pp > 1 else None
        self._synchronise(model)  # only now: to find stages a rank runs the model by itself
        if plan is not None:
            self._packing = plan.packing_of(model)
            tensor_cut.apply(plan, model, mesh["tp"])
            if self._rank == 0:
                print(plan.table(), file=sys.stderr, flush=True)
        parts: list[nn.Module] = [model]
        if found is not None:
            parts = list(self._take_stages(*found, mesh))
        if (
            self._axes.num_data_ranks > 1 or self._offload
        ):  # one rank has nothing to shard, but perhaps to keep elsewhere
            for part in parts:
                with pipeline_state.following(model, part):
                    fsdp_cut.shard(
                        part,
                        mesh["dp", "fsdp"] if self._axes.dp > 1 else mesh["fsdp"],
                        offload=self._offload,
                    )
        disable_encoder_fast_path(model)
        if found is not None:
            assert self._ownership is not None
            self._ties = pipeline_state.TiedGradients(model, self._ownership, mesh["pp"].get_group())

    def _find_stages(
        self, model: nn.Module, plan: TensorPlan | None
    ) -> tuple[Partition, pipeline_plan.PipelineCut]:
        """Where to cut, by what rank 0 measures; refused alike on every rank."""
        job, num_stages = self._job, self._axes.pp * SCHEDULES[self._schedule].stages_per_worker
        if job.first_inputs is None:
            raise ConfigError(
                "pp follows a model's forward on the first of the data to find where it can be cut, and no data is at hand. "
                "Nothing was trained; call fit, evaluate or predict before anything else."
            )
        inputs = place(job.first_inputs(), job.device, job.cast_inputs)
        whole = pipeline_plan.kept_whole_by_tp(model, plan) if plan is not None else {}
        partition = find_partition(model, inputs, num_stages, job.pipeline_cut or (), whole)
        styles = {row.layer: row.style for row in plan.rows.values()} if plan is not None else {}
        by_size = pipeline_plan.costs_by_size(partition)
        # Refuses before anybody measures.
        cut = pipeline_plan.find_cut(partition, num_stages, by_size, job.pipeline_cut, styles)
        costs = torch.tensor(by_size, dtype=torch.float64)
        if self._rank == 0:
            try:
                measured = pipeline_plan.costs_of_job(partition, inputs, job.number)
            except RuntimeError as error:
                raise (parameter_loss.refusal(error, str(self._axes), in_stages=True) or error) from None
            costs = torch.tensor(measured, dtype=torch.float64)
        self._group.run(lambda group: group.broadcast(costs))
        cut = pipeline_plan.find_cut(partition, num_stages, costs.tolist(), job.pipeline_cut, styles)
        pipeline_stage.refuse_different_results(partition, cut, inputs)
        if self._rank == 0:
            print(cut.table(), file=sys.stderr, flush=True)
            if partition.is_batch_dependent and job.num_micro == 1:
                print(
                    "note: samples of a batch depend on each other, so it is not run in micro-batches and stages wait for one "
                    "another; accumulate=4 would run it in 4, here and in one process",
                    file=sys.stderr,
                    flush=True,
                )
        return partition, cut

    def _take_stages(
        self, partition: Partition, cut: pipeline_plan.PipelineCut, mesh: DeviceMesh
    ) -> Iterable[ModelStage]:
        """This rank's stages, and nothing kept of the others but names."""
        axes, at = self._axes, self._axes.coordinates(self._rank).pp
        all_stages = pipeline_stage.stages_of(
            self._job,
            partition,
            cut,
            gives_copies=self._schedule == "zero-bubble",
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
            num_stages=cut.num_stages,
            schedule=self._schedule,
            group=group,
            data_groups=[mesh[axis].get_group() for axis in ("dp", "fsdp") if getattr(axes, axis) > 1],
            num_data_ranks=axes.num_data_ranks,
        )
        partition.forget()
        self._stages_group = group
        return stages.values()

    def _say_what_offload_does(self) -> None:
        if self._offload and self._rank == 0 and self._job.device.type == "cpu":
            print(
                "note: --offload keeps shards in the host's memory, and without an accelerator they are there anyway: nothing is "
                "moved, nothing is saved",
                file=sys.stderr,
                flush=True,
            )

    def _mesh(self, device: torch.device) -> DeviceMesh:
        _ = self._group.native  # the group is there
        axes = self._axes
        names = ("pp", "dp", "fsdp", "tp")
        self._view_of_mesh = self._group.view
        with forming_within():
            mesh = init_device_mesh(device.type, (axes.pp, axes.dp, axes.fsdp, axes.tp), mesh_dim_names=names)
        for name in names:  # groups of their own, which torch would wait in for half an hour
            _set_pg_timeout(timedelta(seconds=self._timeout_s), mesh.get_group(name))
            if device.type != "cpu":
                device_group.connect(device, mesh.get_group(name))
        if device.type != "cpu":
            self._watch = DeviceWatch(device, self._timeout_s)
        return mesh

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the parts of the batch: of ranks that compute the same part, one speaks."""
        return super().reduce(values if self._speaks else torch.zeros_like(values))

    def gather(self, value: torch.Tensor | None) -> list[torch.Tensor]:
        """The tensor of every part of the batch, in their order."""
        everybody = super().gather(value)
        return [everybody[rank] for rank in self._speakers]

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

    def load(self, pieces: PieceReader) -> None:
        """Every rank reads the whole tensors and keeps its parts."""
        named = dict(self._job.model.named_parameters())
        like = {MODEL + name: tensor for name, tensor in plain_tensors(self._job.model).items()}
        for name in pieces.tensors:
            if name.startswith("optimizer/"):
                owner = named.get(name.removeprefix("optimizer/").rpartition("/")[0])
                if owner is not None:
                    like[name] = owner
        elsewhere = {
            name: tensor for name, tensor in like.items() if tensor.is_meta and name.startswith(MODEL)
        }
        settings = pieces.optimizer_settings
        if settings is not None and elsewhere:
            numbers = {
                name: held for name, held in settings["numbers"].items() if MODEL + name not in elsewhere
            }
            settings = {**settings, "numbers": numbers}
        in_order = self._packing.reading(pieces.tensors)
        tensors = pipeline_state.StageReader(CutReader(in_order, like), elsewhere)
        load_state(self._job.model, self.optimizer, PieceReader(tensors, settings, pieces.path))
