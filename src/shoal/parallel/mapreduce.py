"""`mapreduce`: rounds of local training as ordinary tasks, whose models are averaged.

The job has one worker, the driver. A round is one task per part of each batch: a process of its
own, local or in a task of Ray or Spark. A task runs the script from the top as a replaced worker
does, loads the model of the round's beginning and its part's optimizer state from files, makes the
round's steps on its slices and writes model and optimizer to a file. The driver averages the
models, each weighted by its number of samples. It is the arithmetic of `ddp --sync-every`, without
connections between workers: a task is a function of its files, so a failed one is run again alone,
with the same bits. See docs/adr/0048.

    <run>/rounds/<launch>-<trainer>-<step>/
        begin.bin      calls, Trainer and model at the beginning of the round
        spec.bin       job, script and arguments of the tasks
        part-<n>.bin   a part's model, optimizer and sums; written atomically
        part-<n>.log   output of its process
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.cluster.launch.run_directory import read_config, write_atomically
from shoal.cluster.launch.threads import available_cores
from shoal.cluster.worker import session
from shoal.cluster.worker.process import WorkerSpec, encode_spec
from shoal.cluster.worker.task import RoundTask, run_task
from shoal.config.job import Job, TaskPlan
from shoal.data.slice import Slice
from shoal.engines.tasks import run_tasks
from shoal.parallel.local_sgd import average_state, pieces_of_rank
from shoal.parallel.protocol import ControlFlags, LossSum, Piece, PieceReader, Round, StepResult, TrainJob
from shoal.parallel.single import Single
from shoal.parallel.state import MODEL, OPTIMIZER, load_state, optimizer_settings, state_pieces
from shoal.recovery import state_transfer
from shoal.recovery.replay_log import ReplayLog
from shoal.recovery.state_transfer import Part

ATTEMPTS = 4


class RoundLog(ReplayLog):
    """Replay log in a file, from which tasks, and a replacement of a killed driver, start."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job, self._has_joined = job, False

    def _ensure_joined(self) -> None:
        if self._has_joined:
            return
        self._has_joined = True
        newest = _newest(self._job) if self._job.task is None else Path(self._job.task.state)
        if newest is None:
            session.live()
            return
        given = state_transfer.state_from_bytes(newest.read_bytes())
        self.was_given_state, self._recovery_state, self._unclaimed = True, given, given.parts
        self._log.inherit(given.log, starts_at=given.anchored_at)

    def export(self) -> bytes:
        """State that a process needs to start at this anchor."""
        parts = {number: holder.export_state() for number, holder in self._holders.items()}
        return state_transfer.state_to_bytes(
            state_transfer.RecoveryState(
                anchored_at=self._log.anchored_at,
                call=self._call,
                call_is_over=self._call_is_over,
                anchor=self._anchor(),
                results=self._results,
                parts=parts,
            )
        )


_log: RoundLog | None = None


def for_job(job: Job) -> MapReduce | MapTask:
    """The driver's strategy, or that of one of its tasks. All Trainers of a process share one replay log."""
    global _log
    if _log is None:
        _log = RoundLog(job)
    return MapReduce(job, _log) if job.task is None else MapTask(job, _log)


class MapTask(Single):
    """One part of one round. Its last commit writes the result and ends the process."""

    def __init__(self, job: Job, log: RoundLog) -> None:
        super().__init__(rank=job.rank)
        assert job.task is not None
        self._plan, self.replay_log = job.task, log
        self._sums = {"steps": 0, "samples": 0, "skipped": 0, "loss_total": 0.0, "count": 0.0}

    def prepare(self, job: TrainJob) -> None:
        super().prepare(job)
        assert self.replay_log is not None
        self.replay_log.hold(job.number, self)

    def forward_backward(self, batch: Slice) -> LossSum:
        self._batch = batch
        return super().forward_backward(batch)

    def commit(self) -> StepResult:
        self._job.control = ControlFlags()  # the driver reads the script's requests, between rounds
        result = super().commit()
        sums = self._sums
        sums["steps"] += 1
        sums["samples"] += self._batch.num_global
        sums["loss_total"] += result.loss_total if result.applied else 0.0
        sums["count"] += result.count if result.applied else 0.0
        sums["skipped"] += not result.applied
        if sums["steps"] == self._plan.num_steps and (result.applied or self._job.may_skip):
            assert self.optimizer is not None
            write_atomically(
                Path(self._plan.result),
                state_transfer.to_bytes(
                    {
                        **sums,
                        "next_index": self._batch.start + self._batch.num_global,
                        "tensors": {p.name: p.tensor for p in state_pieces(self._job.model, self.optimizer)},
                        "settings": optimizer_settings(self._job.model, self.optimizer),
                    }
                ),
            )
            raise SystemExit(0)
        return result

    def export_state(self) -> Part:
        raise NotImplementedError("a task hands nothing over")

    def import_state(self, part: Part) -> None:
        self.step = part.plain["step"]
        own = part.plain["optimizers"].get(str(self._rank))
        kept = state_transfer.from_bytes(Path(own).read_bytes()) if own else {"tensors": {}, "settings": None}
        optimizer = {name: tensor for name, tensor in kept["tensors"].items() if name.startswith(OPTIMIZER)}
        load_state(
            self._job.model, self.optimizer, PieceReader({**part.tensors, **optimizer}, kept["settings"])
        )

    def pull_weights(self) -> None:
        """The model is here."""


class MapReduce(Single):
    """The driver: runs tasks round by round, and holds the average of their models."""

    def __init__(self, job: Job, log: RoundLog) -> None:
        super().__init__()
        self._of, self.replay_log = job, log
        self.sync_every = job.sync_every
        self._optimizers: dict[str, str] = {}
        """Files with the state of each part's optimizer, by part; none before the first round."""

    def prepare(self, job: TrainJob) -> None:
        super().prepare(job)
        assert self.replay_log is not None
        self.replay_log.hold(job.number, self)

    def run_round(self, num_steps: int) -> Round:
        """Train each part for this many steps from the present model, and load the average."""
        folder = _rounds(self._of) / f"{self._of.launch}-{self._job.number}-{self.step}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        assert isinstance(self.replay_log, RoundLog)
        write_atomically(folder / "begin.bin", self.replay_log.export())
        num_tasks = self._of.tasks
        at_once = min(num_tasks, available_cores())
        write_atomically(folder / "spec.bin", encode_spec(self._spec(folder, num_steps, at_once)))
        tasks = [RoundTask(folder=str(folder), part=part) for part in range(num_tasks)]
        run_tasks(run_task, tasks, on=self._of.tasks_on, workers=at_once, attempts=ATTEMPTS)
        found = [state_transfer.from_bytes(Path(task.result).read_bytes()) for task in tasks]
        self._average(found)
        self._optimizers = {str(task.part): task.result for task in tasks}
        self.step += num_steps
        for old in _rounds(self._of).glob(f"*-{self._job.number}-*"):
            if old != folder and not any(Path(kept).parent == old for kept in self._optimizers.values()):
                shutil.rmtree(old, ignore_errors=True)
        count, total = sum(each["count"] for each in found), sum(each["loss_total"] for each in found)
        control = self._job.control
        return Round(
            num_steps=num_steps,
            num_samples=found[0]["samples"],
            next_index=found[0]["next_index"],
            result=StepResult(
                loss=total / count if count else 0.0,
                loss_total=total,
                count=count,
                applied=True,
                grad_norm=None,
                stop=control.stop,
                checkpoint=control.checkpoint,
                leave=False,
                num_skipped=sum(each["skipped"] for each in found),
            ),
        )

    def _spec(self, folder: Path, num_steps: int, at_once: int) -> WorkerSpec:
        config = read_config(self._of.run_dir)
        plan = TaskPlan(state=str(folder / "begin.bin"), num_steps=num_steps)
        job = replace(
            self._of, num_workers=self._of.tasks, launched=False, coordinator=None, resume=False, faults=()
        )
        return WorkerSpec(
            job=replace(job, task=plan),
            env={},
            cwd=config.cwd,
            script=config.script,
            module=config.module,
            args=config.args,
            num_threads=max(1, available_cores() // at_once),
            master_port=0,
        )

    def _average(self, found: list[dict[str, Any]]) -> None:
        """Mean of trained weights and floating buffers over the parts, weighted by samples, in float64
        and in their order.

        Other buffers (counters) are the first part's. If no sample counted, nothing changes.
        """
        total = sum(each["count"] for each in found)
        trained = {name for name, parameter in self._job.model.named_parameters() if parameter.requires_grad}
        frozen = {name for name, _ in self._job.model.named_parameters()} - trained
        with torch.no_grad():
            for piece in state_pieces(self._job.model, None):
                if piece.name.removeprefix(MODEL) in frozen or not total:
                    continue
                parts = [each["tensors"][piece.name] for each in found]
                piece.tensor.copy_(
                    weighted_mean(parts, [each["count"] for each in found])
                    if piece.tensor.is_floating_point()
                    else parts[0]
                )

    # ---- state ----------------------------------------------------------------------------------

    def export_state(self) -> Part:
        tensors = {piece.name: piece.tensor for piece in state_pieces(self._job.model, None)}
        return Part({"step": self.step, "optimizers": self._optimizers}, tensors)

    def import_state(self, part: Part) -> None:
        self.step, self._optimizers = part.plain["step"], dict(part.plain["optimizers"])
        load_state(self._job.model, None, PieceReader(part.tensors, None))

    def pull_weights(self) -> None:
        """The model is here."""

    def state(self) -> Iterator[Piece]:
        """The model, every part's optimizer, and their average: as `ddp --sync-every` saves them."""
        yield from state_pieces(self._job.model, None)
        kept = [
            state_transfer.from_bytes(Path(path).read_bytes())["tensors"]
            for path in self._optimizers.values()
        ]
        yield from average_state(
            [{name: each[name] for name in each if name.startswith(OPTIMIZER)} for each in kept]
        )

    def load(self, pieces: PieceReader) -> None:
        """Each part's own optimizer state if there were as many; else the average of all."""
        load_state(self._job.model, None, pieces)
        self._optimizers = {}
        if pieces.optimizer_settings is None or self.optimizer is None:
            return
        folder = _rounds(self._of) / f"{self._of.launch}-{self._job.number}-loaded"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in range(self._of.tasks):
            saved = pieces_of_rank(pieces.tensors, part, self._of.tasks)
            tensors = {name: saved[name] for name in saved if name.startswith(OPTIMIZER)}
            path = folder / f"part-{part}.bin"
            content = {"tensors": tensors, "settings": pieces.optimizer_settings}
            write_atomically(path, state_transfer.to_bytes(content))
            self._optimizers[str(part)] = str(path)


def weighted_mean(parts: list[Tensor], counts: list[float]) -> Tensor:
    """Σ count · part / Σ count, added up in float64 in the order of the parts."""
    total = torch.zeros_like(parts[0], dtype=torch.float64)
    for part, count in zip(parts, counts, strict=True):
        total += part.to(torch.float64) * count
    return (total / sum(counts)).to(parts[0].dtype)


def _rounds(job: Job) -> Path:
    return job.run_dir / "rounds"


def _newest(job: Job) -> Path | None:
    """Beginning of the newest round of this launch, in a replacement driver."""
    if job.incarnation == 0:
        return None
    found = list(_rounds(job).glob(f"{job.launch}-*/begin.bin"))
    return max(found, key=lambda path: os.stat(path).st_mtime_ns, default=None)
