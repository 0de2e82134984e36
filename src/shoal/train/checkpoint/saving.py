"""Trainer state on disk: models, checkpoints, and where a resumed fit goes on.

checkpoint.py knows files, hashes and names; this module decides what has to be
in them. Saving is collective (state may live in parts on all ranks); rank 0
writes. A snapshot is only read by the workers that took it, in the same
places, so each keeps its rank-local state in the job's scratch directory.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shoal.cluster.worker import session
from shoal.data.batches import Batches
from shoal.errors import CheckpointDamaged, CheckpointError, NoCheckpoint, OptimizerMismatch
from shoal.parallel.hashed_rows import expected_shapes, plain_tensors
from shoal.parallel.optimizer_state import optimizer_settings
from shoal.parallel.protocol import Leased, PeriodicSync, Piece, PieceReader
from shoal.parallel.state import MODEL
from shoal.runtime import scratch
from shoal.runtime.failpoints import failpoint
from shoal.runtime.serialization import from_plain, to_plain
from shoal.train.callbacks.model_checkpoint import ModelCheckpoint
from shoal.train.checkpoint.checkpoint import (
    Checkpoint,
    check_fits,
    newest_checkpoint,
    open_checkpoint,
    set_aside,
    step_path,
    write_checkpoint,
)
from shoal.train.progress import FitStart, History

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


_METRICS = "metrics/"


def save_model(trainer: Trainer, path: str) -> None:
    """The weights alone, for whoever uses the model."""
    pieces = [piece for piece in trainer.strategy.state() if piece.name.startswith(MODEL)]
    if trainer.rank == 0:
        write_checkpoint(path, pieces, progress={"step": trainer.step, "epoch": trainer.epoch})
    trainer.strategy.reduce(torch.zeros(1))  # nobody goes on before it is there


def load_model(trainer: Trainer, path: str) -> None:
    """The weights of a saved model or checkpoint."""
    _load(trainer, open_checkpoint(path), with_optimizer=False)


def save_checkpoint(trainer: Trainer, directory: str | None, *, is_snapshot: bool = False) -> str:
    """Everything needed to go on, at any number of workers. A snapshot goes with the job: nobody is told to go on from it."""
    home = directory or _homes(trainer)[0]
    path = step_path(home, trainer.step)
    pieces = [*snapshot_pieces(trainer, path), *_metric_pieces(trainer)]
    failpoint("worker: checkpoint not written")
    if trainer.rank == 0:
        write_checkpoint(
            path, pieces, progress=_to_save(trainer), previous=trainer.progress.newest_checkpoint
        )
        failpoint("worker: checkpoint written")
        moved = set_aside(home, after_step=trainer.step)
        if moved is not None:
            print(f"checkpoints of an earlier run were moved to {moved}", file=sys.stderr, flush=True)
        session.saved(path, trainer.step)
    if not is_snapshot:
        trainer.progress.newest_checkpoint = path
    return path


def resume(trainer: Trainer, batches: Batches, resume_from: str | None) -> FitStart | None:
    """Bring the trainer to where a checkpoint stands; None to begin anew."""
    if resume_from is None:
        return None
    if resume_from == "auto":
        found = _newest(trainer)
        if found is None:
            return None
    else:
        found = open_checkpoint(resume_from)
    saved, progress = found.progress, trainer.progress
    if "position" not in saved:
        raise NoCheckpoint(
            path=found.path, reason="it holds weights only, as Trainer.save writes them; use load() for those"
        )
    number, saved_number = len(progress.histories), saved["fit"]["number"]
    # Found, a checkpoint says which fit of the script it is of; named, it is meant for this one.
    if resume_from == "auto" and number < saved_number:
        finished = History(saved["histories"][number])
        progress.histories.append(finished)
        return FitStart(history=finished, first=(0, 0), began_s=0.0, began_samples=0, is_finished=True)
    if resume_from == "auto" and number > saved_number:
        return None  # this fit began after the checkpoint was written: it goes on from the one before it
    _check_data(batches, saved, found.path)
    _load(trainer, found, with_optimizer=True)
    for name, value in saved["position"].items():
        setattr(progress.position, name, value)
    trainer.strategy.step = trainer.step
    leases = _leases(trainer, saved)
    progress.num_skipped_steps = saved["skipped_steps"]
    if trainer.scheduler is not None and saved["scheduler"] is not None:
        load_scheduler(trainer.scheduler, saved["scheduler"], path=found.path)
    trainer.callbacks.load_state(saved["callbacks"])
    kept = {
        name.removeprefix(_METRICS): found.pieces[name] for name in found.pieces if name.startswith(_METRICS)
    }
    trainer.train_metrics.load_state(kept, trainer.data_rank, trainer.num_workers)
    progress.newest_checkpoint = found.path
    if trainer.rank == 0:
        at = f"step {trainer.step:,}, epoch {trainer.epoch + 1}, sample {trainer.position.next_index:,}"
        print(f"going on from {found.path}: {at}", file=sys.stderr, flush=True)
    return FitStart(
        history=History(saved["histories"][saved_number]),
        first=(saved["fit"]["first_epoch"], saved["fit"]["first_step"]),
        began_s=time.monotonic(),
        began_samples=progress.position.samples,
        leases=leases,
    )


def _leases(trainer: Trainer, saved: dict[str, Any]) -> dict[str, Any] | None:
    """Leases of a checkpoint; for a strategy without leases the position becomes the first sample not known to be done."""
    leases: dict[str, Any] | None = saved.get("leases")
    if leases is None or isinstance(trainer.strategy, Leased):
        return leases
    in_epoch = leases["done_below"] % leases["num_leases"]
    trainer.position.next_index = in_epoch * leases["samples_per_lease"]
    if trainer.rank == 0:
        print(
            f"note: the checkpoint is of '{saved['strategy']}', whose workers were at different places: batches from "
            f"sample {trainer.position.next_index:,} of the epoch on that some of them had finished are trained again",
            file=sys.stderr,
            flush=True,
        )
    return None


def _homes(trainer: Trainer) -> list[str]:
    """Directories of this script's checkpoints, the default one for a save without a directory first."""
    given = [c.directory for c in trainer.callbacks if isinstance(c, ModelCheckpoint) and c.directory]
    homes = [*given, str(trainer.run_dir / "checkpoints")]
    if trainer.job.launched and getattr(trainer.strategy, "holds_parts", False):
        homes.append(str(scratch.directory("snapshots")))
    return list(dict.fromkeys(homes))


def _newest(trainer: Trainer) -> Checkpoint | None:
    """The newest whole checkpoint, wherever this script's callbacks write theirs."""
    found = [newest_checkpoint(home, on_damaged=_report_damage(trainer.rank)) for home in _homes(trainer)]
    return max((one for one in found if one), key=lambda one: int(one.progress["step"]), default=None)


def _to_save(trainer: Trainer) -> dict[str, Any]:
    progress, optimizer, leasing = trainer.progress, trainer.strategy.optimizer, trainer.leasing
    assert optimizer is not None
    return {
        "step": trainer.step,
        "epoch": trainer.epoch,
        "position": dataclasses.asdict(trainer.position),
        "fit": {
            "number": len(progress.histories) - 1,
            "first_epoch": progress.fit_first[0],
            "first_step": progress.fit_first[1],
        },
        "histories": [history.epochs for history in progress.histories],
        "skipped_steps": progress.num_skipped_steps,
        "optimizer": optimizer_settings(trainer.model, optimizer),
        "scheduler": scheduler_state(trainer.scheduler) if trainer.scheduler is not None else None,
        "callbacks": trainer.callbacks.state(),
        "data": progress.data_description,
        "seed": trainer.config.seed,
        "leases": leasing.state if leasing is not None else None,
        "strategy": trainer.job.strategy,
        "num_workers": trainer.num_workers,
    }


def _metric_pieces(trainer: Trainer) -> Iterator[Piece]:
    if trainer.leasing is not None:
        return  # the others are in the middle of their own batches: nobody gathers now
    for name, tensor in trainer.train_metrics.state(trainer.strategy.gather).items():
        yield Piece(_METRICS + name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def _load(trainer: Trainer, checkpoint: Checkpoint, *, with_optimizer: bool) -> None:
    shapes = {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in plain_tensors(trainer.model).items()
    }
    check_fits({**shapes, **expected_shapes(trainer.model)}, checkpoint.pieces, checkpoint.path)
    settings = checkpoint.progress.get("optimizer") if with_optimizer else None
    try:
        pieces = with_rank_local_state(trainer, checkpoint)
        trainer.strategy.load(PieceReader(pieces, settings, checkpoint.path))
    except OptimizerMismatch as error:  # raised where the file's name is not known
        raise OptimizerMismatch(path=checkpoint.path, problem=error.problem) from None


def _check_data(batches: Batches, progress: dict[str, Any], path: str) -> None:
    before = progress["data"].get("num_samples")
    if before is not None and batches.num_samples is not None and before != batches.num_samples:
        raise CheckpointError(
            f"the checkpoint {path} stands in the middle of a dataset of {before} samples, but fit was given one of "
            f"{batches.num_samples}. Nothing was loaded; resume with the same data, or take over the weights alone with "
            "trainer.load()."
        )


def _report_damage(rank: int) -> Callable[[CheckpointDamaged], None]:
    def report(error: CheckpointDamaged) -> None:
        if rank == 0:
            print(f"{error} Going on with the one before it.", file=sys.stderr, flush=True)

    return report


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """State of a learning-rate scheduler as JSON, for a fresh one of the same class.

    Functions (the lambdas of LambdaLR) are not state: the script that resumes
    builds the scheduler with them again.
    """
    kind = type(scheduler).__name__
    return {"class": kind, "state": to_plain(scheduler.state_dict(), kind)}


def load_scheduler(scheduler: LRScheduler, saved: dict[str, Any], *, path: str = "") -> None:
    """Give a scheduler, built afresh, the state that was saved.

    It sets no learning rate: the optimizer's own state brings that. Load the
    optimizer after the scheduler was built, in either order with this.
    """
    kind = type(scheduler).__name__
    if saved["class"] != kind:
        raise OptimizerMismatch(
            path=path, problem=f"its scheduler is {saved['class']}, the script builds {kind}"
        )
    scheduler.load_state_dict(from_plain(saved["state"]))


def snapshot_pieces(trainer: Trainer, path: str) -> Iterable[Piece]:
    """The pieces of a checkpoint at `path`: of a snapshot, only what all have alike. Collective."""
    strategy, mine = trainer.strategy, _rank_local_path(trainer, path)
    if mine is None or not isinstance(strategy, PeriodicSync):
        return strategy.state()
    common = list(strategy.common_pieces())
    write_checkpoint(str(mine), list(strategy.own_pieces()), progress={"step": trainer.step})
    strategy.reduce(torch.zeros(1))  # a snapshot counts once every part of it is there
    return common


def with_rank_local_state(trainer: Trainer, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """A checkpoint's tensors, and this worker's own beside them."""
    mine = _rank_local_path(trainer, checkpoint.path)
    if mine is None or not mine.exists():
        return checkpoint.pieces
    own = open_checkpoint(str(mine)).pieces
    return ChainMap({name: own[name] for name in own}, checkpoint.pieces)  # type: ignore[arg-type]  # only read


def remove_rank_local_state(trainer: Trainer, path: str) -> None:
    """The snapshot at `path` goes, and this worker's part with it."""
    if (mine := _rank_local_path(trainer, path)) is not None:
        shutil.rmtree(mine, ignore_errors=True)


def _rank_local_path(trainer: Trainer, path: str) -> Path | None:
    """Path of this worker's part of a snapshot; None where `path` is no snapshot, or workers have no parts."""
    at = Path(path)
    if not trainer.job.launched or not isinstance(trainer.strategy, PeriodicSync):
        return None
    if at.parent != scratch.directory("snapshots"):
        return None
    return scratch.directory("own-parts", f"worker-{trainer.rank}") / at.name
