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
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from shoal.parallel.protocol import Leased, MeetsNowAndThen, Piece, PieceReader
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
from shoal.train.progress import History

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


_METRICS = "metrics/"


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a fit goes on."""

    history: History
    first: tuple[int, int]
    """Epoch and step at which the fit had begun, from which its limits count."""

    finished: History | None = None
    """Set when the checkpoint is of a later fit of the script: this one is over, with this history."""


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
        write_checkpoint(path, pieces, progress=_progress(trainer), previous=trainer.newest_checkpoint)
        failpoint("worker: checkpoint written")
        moved = set_aside(home, after_step=trainer.step)
        if moved is not None:
            print(f"checkpoints of an earlier run were moved to {moved}", file=sys.stderr, flush=True)
        session.saved(path, trainer.step)
    if not is_snapshot:
        trainer.newest_checkpoint = path
    return path


def resume(trainer: Trainer, batches: Batches, resume_from: str | None) -> Resumed | None:
    """Bring the trainer to where a checkpoint stands; None to begin anew."""
    if resume_from is None:
        return None
    if resume_from == "auto":
        found = _newest(trainer)
        if found is None:
            return None
    else:
        found = open_checkpoint(resume_from)
    progress = found.progress
    if "position" not in progress:
        raise NoCheckpoint(
            path=found.path, reason="it holds weights only, as Trainer.save writes them; use load() for those"
        )
    number, saved_number = len(trainer.histories), progress["fit"]["number"]
    # Found, a checkpoint says which fit of the script it is of; named, it is meant for this one.
    if resume_from == "auto" and number < saved_number:
        finished = History(progress["histories"][number])
        trainer.histories.append(finished)
        return Resumed(history=finished, first=(0, 0), finished=finished)
    if resume_from == "auto" and number > saved_number:
        return None  # this fit began after the checkpoint was written: it goes on from the one before it
    _check_data(batches, progress, found.path)
    _load(trainer, found, with_optimizer=True)
    for name, value in progress["position"].items():
        setattr(trainer.position, name, value)
    trainer.strategy.step = trainer.position.step
    _take_leases(trainer, progress)
    trainer.num_skipped_steps = progress["skipped_steps"]
    if trainer.scheduler is not None and progress["scheduler"] is not None:
        load_scheduler(trainer.scheduler, progress["scheduler"], path=found.path)
    _load_callbacks(trainer, progress["callbacks"])
    kept = {
        name.removeprefix(_METRICS): found.pieces[name] for name in found.pieces if name.startswith(_METRICS)
    }
    trainer.train_metrics.load_state(kept, trainer.data_rank, trainer.num_workers)
    trainer.newest_checkpoint = found.path
    if trainer.rank == 0:
        at = f"step {trainer.step:,}, epoch {trainer.epoch + 1}, sample {trainer.position.next_index:,}"
        print(f"going on from {found.path}: {at}", file=sys.stderr, flush=True)
    return Resumed(
        history=History(progress["histories"][saved_number]),
        first=(progress["fit"]["first_epoch"], progress["fit"]["first_step"]),
    )


def _take_leases(trainer: Trainer, progress: dict[str, Any]) -> None:
    """Where data was handed out by lease, the place in it is what was finished of them."""
    leases = progress.get("leases")
    if leases is None:
        return
    if isinstance(trainer.strategy, Leased):
        trainer.kept_leases = leases
        return
    in_epoch = leases["done_below"] % leases["num_leases"]
    trainer.position.next_index = in_epoch * leases["samples_per_lease"]
    if trainer.rank == 0:
        print(
            f"note: the checkpoint is of '{progress['strategy']}', whose workers were at different places: batches from "
            f"sample {trainer.position.next_index:,} of the epoch on that some of them had finished are trained again",
            file=sys.stderr,
            flush=True,
        )


def _homes(trainer: Trainer) -> list[str]:
    """Where this script's checkpoints go; those that nobody gave a place to, the first."""
    given = [c.directory for c in trainer.callbacks if isinstance(c, ModelCheckpoint) and c.directory]
    homes = [*given, str(trainer.run_dir / "checkpoints")]
    if trainer.job.launched and getattr(trainer.strategy, "holds_parts", False):
        homes.append(str(scratch.directory("snapshots")))
    return list(dict.fromkeys(homes))


def _newest(trainer: Trainer) -> Checkpoint | None:
    """The newest whole checkpoint, wherever this script's callbacks write theirs."""
    found = [newest_checkpoint(home, on_damaged=_tell(trainer)) for home in _homes(trainer)]
    return max((one for one in found if one), key=lambda one: int(one.progress["step"]), default=None)


def _progress(trainer: Trainer) -> dict[str, Any]:
    optimizer = trainer.strategy.optimizer
    assert optimizer is not None
    return {
        "step": trainer.step,
        "epoch": trainer.epoch,
        "position": dataclasses.asdict(trainer.position),
        "fit": {
            "number": len(trainer.histories) - 1,
            "first_epoch": trainer.fit_began_at[0],
            "first_step": trainer.fit_began_at[1],
        },
        "histories": [history.epochs for history in trainer.histories],
        "skipped_steps": trainer.num_skipped_steps,
        "optimizer": optimizer_settings(trainer.model, optimizer),
        "scheduler": scheduler_state(trainer.scheduler) if trainer.scheduler is not None else None,
        "callbacks": [
            {"callback": type(callback).__name__, "state": callback.state()} for callback in trainer.callbacks
        ],
        "data": trainer.data_description,
        "seed": trainer.seed,
        "leases": trainer.leasing.state if trainer.leasing is not None else None,
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


def _load_callbacks(trainer: Trainer, saved: list[dict[str, Any]]) -> None:
    """By class, the first to the first: a script may have more or fewer of them than the one that saved."""
    left = list(saved)
    for callback in trainer.callbacks:
        own = next((entry for entry in left if entry["callback"] == type(callback).__name__), None)
        if own is not None:
            left.remove(own)
            callback.load_state(own["state"])


def _check_data(batches: Batches, progress: dict[str, Any], path: str) -> None:
    before = progress["data"].get("num_samples")
    if before is not None and batches.num_samples is not None and before != batches.num_samples:
        raise CheckpointError(
            f"the checkpoint {path} stands in the middle of a dataset of {before} samples, but fit was given one of "
            f"{batches.num_samples}. Nothing was loaded; resume with the same data, or take over the weights alone with "
            "trainer.load()."
        )


def _tell(trainer: Trainer) -> Any:
    def damaged(error: CheckpointDamaged) -> None:
        if trainer.rank == 0:
            print(f"{error} Going on with the one before it.", file=sys.stderr, flush=True)

    return damaged


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """What a fresh scheduler of the same kind needs to go on."""
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
    if mine is None or not isinstance(strategy, MeetsNowAndThen):
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
    """Where this worker's part of a snapshot is; None where `path` is none, or workers have no parts."""
    at = Path(path)
    if not trainer.job.launched or not isinstance(trainer.strategy, MeetsNowAndThen):
        return None
    if at.parent != scratch.directory("snapshots"):
        return None
    return scratch.directory("own-parts", f"worker-{trainer.rank}") / at.name
