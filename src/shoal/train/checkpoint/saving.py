"""Trainer state on disk: models, checkpoints, and the position from which a resumed fit continues.

checkpoint.py handles files, hashes and names; this module decides their contents. Saving is
collective. Ranks that hold parts of the state write them; otherwise rank 0 writes all of it, in the
background while training goes on. A snapshot is only read by the workers that took it, in the same
places, so each keeps its rank-local state in the job's scratch directory.
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
import math
import shutil
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shoal.cluster.worker import session
from shoal.data.batches import Batches
from shoal.errors import CheckpointDamaged, CheckpointError, NoCheckpoint, OptimizerMismatch
from shoal.parallel.loss_scale import LARGEST, LossScale
from shoal.parallel.protocol import (
    HoldsParts,
    Leased,
    PeriodicSync,
    Piece,
    PieceReader,
    TracksRows,
    has_diverged,
    holds_parts,
    weights_are_ahead,
)
from shoal.parallel.state import MODEL, expected_shapes, optimizer_settings, plain_tensors
from shoal.ps.client.bulk_transfer import RowStamps
from shoal.runtime import recorder, scratch
from shoal.runtime.failpoints import failpoint
from shoal.runtime.serialization import from_plain, to_plain, unlike
from shoal.train.arguments.by_name import rescale_learning_rates
from shoal.train.checkpoint.background import copied
from shoal.train.checkpoint.checkpoint import (
    Checkpoint,
    PartedCheckpoint,
    Size,
    check_fits,
    newest_first,
    open_checkpoint,
    set_aside,
    step_path,
    write_checkpoint,
)
from shoal.train.checkpoint.storage import MANIFEST, Place
from shoal.train.progress import FitStart, History, Position

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer

_METRICS = "metrics/"


def save_model(trainer: Trainer, path: str) -> None:
    """Only the weights, for inference: tied ones under each of their names, as `load_state_dict` wants them."""
    pieces = [piece for piece in trainer.strategy.state() if piece.name.startswith(MODEL)]
    # In a replay it is written already, and the weights are later ones.
    if trainer.rank == 0 and not weights_are_ahead(trainer.strategy):
        seen: set[int] = set()
        for number, piece in enumerate(pieces):
            at = piece.tensor.data_ptr()
            if at in seen:  # a shared memory would be written once
                pieces[number] = dataclasses.replace(piece, tensor=piece.tensor.clone())
            seen.add(at)
        write_checkpoint(path, pieces, progress={"step": trainer.step, "epoch": trainer.epoch})
    trainer.strategy.reduce(torch.zeros(1))  # barrier: no rank goes on before it is written


def load_model(trainer: Trainer, given: str | Mapping[str, Tensor]) -> None:
    if isinstance(given, str):
        _load(trainer, open_checkpoint(given), with_optimizer=False)
        return
    pieces = {MODEL + name: tensor for name, tensor in given.items()}
    _check_model(trainer, pieces, "given to load()")
    trainer.strategy.load(PieceReader(pieces, None))


def save_checkpoint(
    trainer: Trainer, directory: str | None, *, is_snapshot: bool = False, background: bool = False
) -> str:
    """Everything needed to continue, at any number of workers. A snapshot is deleted with the job and
    not offered for resume.

    In the background, training waits for a copy of the state in memory; without room for one, for
    the disk. Of tables on servers it then holds the rows that changed since the one before, as
    often as ModelCheckpoint's `full_every` says.

    Of a step that is replayed nothing is written, since its weights are gone; nor are later
    checkpoints set aside, since they are of this run.
    """
    home = directory or _homes(trainer)[0]
    path = step_path(home, trainer.step)
    if weights_are_ahead(trainer.strategy):
        list(_metric_pieces(trainer))  # collective
        if is_there(path):
            trainer.progress.newest_checkpoint = path
        return path
    writer, previous = trainer.checkpoints, trainer.progress.newest_checkpoint
    writer.wait(is_back_pressure=background)
    full_every = max((each.full_every for each in trainer.callbacks), default=1) if background else 1
    increment = trainer.increments.begin(home, trainer.step, full_every=full_every)
    write = _writing(trainer, path, previous, increment)
    failpoint("worker: checkpoint not written")

    def written() -> None:
        if trainer.rank == 0:
            session.saved(path, step)
            trainer.increments.written(increment, path)

    step = trainer.step
    if write is not None:
        in_background = write(background)
        tidy = partial(_tidy, home, step) if trainer.rank == 0 else _nothing
        if in_background is not None:
            writer.start(in_background, then=tidy, after=written)
        else:
            tidy()
            written()
    if not is_snapshot:
        trainer.progress.newest_checkpoint = path
    return path


def _writing(
    trainer: Trainer, path: str, previous: str | None, increment: Increment
) -> Callable[[bool], Callable[[], None] | None] | None:
    """Collect this rank's part. Collective; None on a rank that writes nothing.

    The returned function writes it, or with `True` copies it and returns the rest of the work, for
    another thread.
    """
    strategy = trainer.strategy
    if _writes_parts(trainer, path):
        assert isinstance(strategy, HoldsParts)
        parted = PartedCheckpoint(
            path, rank=trainer.rank, num_ranks=trainer.job.num_workers, previous=previous
        )
        metrics = list(_metric_pieces(trainer))
        pieces = [*strategy.parts(), *(metrics if trainer.rank == 0 else ())]
        progress = _to_save(trainer) if trainer.rank == 0 else {}
        if trainer.rank == 0:
            parted.begin()
        strategy.reduce(torch.zeros(1))  # barrier: rank 0 has created the directory

        def write(held: list[Piece]) -> None:
            parted.write(held, progress, trainer.checkpoints.gives_up)

        num_sharers = trainer.job.num_workers
    else:
        state = (
            strategy.state_with_changes(increment.changes)
            if isinstance(strategy, TracksRows) and increment.changes is not None
            else snapshot_pieces(trainer, path)
        )
        pieces = [*state, *_metric_pieces(trainer)]
        if trainer.rank != 0:
            return None
        progress, num_sharers = _to_save(trainer), 1
        base = increment.base if any(piece.changed_keys for piece in pieces) else None

        def write(held: list[Piece]) -> None:
            write_checkpoint(path, held, progress=progress, previous=previous, base=base)

    def run(background: bool) -> Callable[[], None] | None:
        held = copied(pieces, trainer.checkpoints.copies, num_sharers=num_sharers) if background else None
        if held is not None:
            return lambda: write(held)
        write(pieces)
        return None

    return run


TABLE_BYTES = 16 << 20
"""Smaller tables are always written completely: the saving would not be noticeable."""


@dataclasses.dataclass(slots=True)
class Increment:
    """One checkpoint's part in the chain: what it builds on, and which rows are asked for."""

    home: str
    step: int
    base: str | None
    number: int
    """Checkpoints since the last whole one; 0: it is one itself."""

    changes: RowStamps | None
    """None: later checkpoints will not ask for changes since."""


class Increments:
    """The newest checkpoint of each directory, as the base of the next; local to this process, so a
    replacement starts with a full one.
    """

    def __init__(self) -> None:
        self._newest: dict[str, tuple[str, Increment]] = {}

    def begin(self, home: str, step: int, *, full_every: int) -> Increment:
        if full_every == 1:
            return Increment(home, step, None, 0, None)
        path, before = self._newest.get(home, ("", None))
        if (
            before is None
            or before.changes is None
            or before.number + 1 >= full_every
            or before.step >= step  # it would be replaced by the one that needs it, or set aside
            or before.changes.num_table_bytes < TABLE_BYTES
            or not is_there(path)
        ):
            return Increment(home, step, None, 0, RowStamps({}))
        return Increment(home, step, path, before.number + 1, RowStamps(before.changes.read_to))

    def written(self, increment: Increment, path: str) -> None:
        self._newest[increment.home] = path, increment


def _writes_parts(trainer: Trainer, path: str) -> bool:
    """Whether every rank writes its own parts: if it has any, and all ranks see the directory."""
    sees_it = Place.at(path).local is not None and not trainer.job.is_on_several_hosts
    return sees_it and isinstance(trainer.strategy, HoldsParts)


def is_there(path: str) -> bool:
    """Whether the checkpoint is whole on disk, and has not been removed since."""
    return Place.at(path).has(MANIFEST)


def _nothing() -> None:
    pass


def _tidy(home: str, step: int) -> None:
    failpoint("worker: checkpoint written")
    moved = set_aside(home, after_step=step)
    if moved is not None:
        print(f"checkpoints of an earlier run were moved to {moved}", file=sys.stderr, flush=True)


def resume(trainer: Trainer, batches: Batches, resume_from: str | None) -> FitStart | None:
    """Bring the trainer to the state of a checkpoint; None to begin anew."""
    if resume_from is None:
        return None
    if resume_from != "auto":
        found = open_checkpoint(resume_from)
        if "position" not in found.progress:
            raise NoCheckpoint(
                path=found.path,
                reason="it holds weights only, as Trainer.save writes them; use load() for those",
            )
        return _go_on(trainer, batches, found, is_named=True)
    report, damaged = _report_damage(trainer.rank), None
    for found in _newest(trainer):
        if _is_of_another(trainer, found):
            continue
        try:
            start = _go_on(trainer, batches, found, is_named=False)
        except CheckpointDamaged as damage:
            damaged = damage
            report(damage)
            continue
        if start is None and damaged is not None:
            break  # the one before it is of an earlier fit, and everything after that is damaged
        return start
    if damaged is not None:
        raise damaged  # the trainer may have loaded a part of it, so it cannot begin anew
    return None


def _is_of_another(trainer: Trainer, found: Checkpoint) -> bool:
    """Whether another Trainer of the script wrote it: they share a directory, and a launched script makes them in one order."""
    fit = found.progress.get("fit")
    number = fit.get("trainer") if isinstance(fit, dict) else None
    return trainer.job.launched and isinstance(number, int) and number != trainer.number


def _go_on(trainer: Trainer, batches: Batches, found: Checkpoint, *, is_named: bool) -> FitStart | None:
    """Bring the trainer to the state of this checkpoint; CheckpointDamaged if its contents are inconsistent."""
    try:
        _check_progress(found.progress)
        return _apply(trainer, batches, found, is_named=is_named)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"its progress cannot be used: {error if isinstance(error, ValueError) else repr(error)}"
        raise CheckpointDamaged(path=found.path, problem=problem) from error


def _apply(trainer: Trainer, batches: Batches, found: Checkpoint, *, is_named: bool) -> FitStart | None:
    saved, progress = found.progress, trainer.progress
    number, saved_number = len(progress.histories), saved["fit"]["number"]
    # A checkpoint that was found belongs to the fit it names; one given by path is meant for this fit.
    if not is_named and number < saved_number:
        finished = History(saved["histories"][number])
        firsts = fit_starts(saved)
        progress.firsts[number:] = [firsts[number]]
        progress.histories.append(finished)
        progress.position.epoch, progress.position.step = firsts[
            number + 1
        ]  # the next one began where it ended
        progress.passed_results = [*map(tuple, saved.get("results", ()))]
        return FitStart(history=finished, first=(0, 0), began_s=0.0, began_samples=0, is_finished=True)
    if not is_named and number > saved_number:
        return None  # this fit began after the checkpoint was written: it continues from the one before it
    _check_data(batches, saved, found.path)
    progress.passed_results = None
    progress.results[:] = map(tuple, saved.get("results", ()))
    batches.import_streams(saved.get("streams", ()))
    _load(trainer, found, with_optimizer=True)
    for name, value in saved["position"].items():
        setattr(progress.position, name, value)
    progress.origin = continues_at(saved, batches, trainer.num_workers) if is_named else saved_origin(saved)
    # Each turn is a commit, and draws its own numbers.
    trainer.strategy.step = trainer.step * len(trainer.turns)
    leases = _leases(trainer, saved)
    progress.num_skipped_steps = saved["skipped_steps"]
    if trainer.scheduler is not None and saved["scheduler"] is not None:
        load_scheduler(trainer.scheduler, saved["scheduler"], path=found.path)
    if trainer.config.scale_lr is not None:
        rescale_learning_rates(trainer.strategy.optimizer, trainer.scheduler, trainer.lr_scale)
    _tell_changed_params(trainer, saved)
    if trainer.train_job.loss_scale is not None and saved.get("loss_scale") is not None:
        trainer.train_job.loss_scale = LossScale(**saved["loss_scale"])
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


def fit_starts(saved: dict[str, Any]) -> list[tuple[int, int]]:
    """Where each fit up to the checkpoint's own began; checkpoints of earlier versions tell it of that one alone."""
    fit = saved["fit"]
    own = (fit["first_epoch"], fit["first_step"])
    return [*map(tuple, saved.get("firsts") or [(0, 0)] * fit["number"]), own]


def continues_at(saved: dict[str, Any], batches: Batches, num_workers: int) -> tuple[int, int]:
    """Epoch and step from which training goes on; after an epoch's last step that is the next epoch, though its end is still to be run."""
    position = saved["position"]
    is_ended = (
        position["next_index"] > 0 and batches.num_steps(num_workers, start=position["next_index"]) == 0
    )
    return saved["epoch"] + is_ended, saved["step"]


def saved_origin(saved: dict[str, Any]) -> tuple[int, int] | None:
    """Where the script began, if it named a checkpoint to begin with; see TrainingProgress.origin."""
    return tuple(saved["origin"]) if saved.get("origin") else None


def _tell_changed_params(trainer: Trainer, saved: dict[str, Any]) -> None:
    before, now = saved.get("params") or {}, trainer.config.params
    changed = [
        f"{name} {before.get(name)!r} -> {now.get(name)!r}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if changed and before and trainer.rank == 0:
        print(f"note: params differ from the checkpoint's: {', '.join(changed)}", file=sys.stderr, flush=True)


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
    given = [each.checkpoint_directory for each in trainer.callbacks if each.checkpoint_directory]
    homes = [*given, str(trainer.run_dir / "checkpoints")]
    if trainer.job.launched and trainer.job.shares_run_dir and holds_parts(trainer.strategy):
        homes.append(str(scratch.directory("snapshots")))
    return list(dict.fromkeys(homes))


def _newest(trainer: Trainer) -> Iterator[Checkpoint]:
    """The checkpoints of this script, of whatever directory, newest first."""
    found = [newest_first(home, on_damaged=_report_damage(trainer.rank)) for home in _homes(trainer)]
    return heapq.merge(*found, key=lambda one: int(one.progress["step"]), reverse=True)


class _Fit(msgspec.Struct, forbid_unknown_fields=True):
    number: Size
    first_epoch: Size
    first_step: Size
    trainer: Size | None = None
    """Number of the Trainer in its script; checkpoints of before have none."""


class _Group(msgspec.Struct):
    params: list[str]
    settings: dict[str, Any]


class _Optimizer(msgspec.Struct):
    class_: str = msgspec.field(name="class")
    groups: list[_Group]
    numbers: dict[str, dict[str, Any]]


class _Scheduler(msgspec.Struct):
    class_: str = msgspec.field(name="class")
    state: dict[str, Any]


class _CallbackState(msgspec.Struct):
    callback: str
    state: Any


class _Leases(msgspec.Struct):
    samples_per_lease: Size
    num_leases: Size
    done_below: Size
    counted: list[list[Size]]


class _SavedScale(msgspec.Struct):
    value: Annotated[float, msgspec.Meta(ge=1.0, le=LARGEST)]
    num_good: Size


class _Stream(msgspec.Struct):
    begins: list[Size]
    ends: list[Size] | None
    base: Size
    rounds: list[tuple[Size, Size, Size]]
    types: str | None


class _Progress(msgspec.Struct, kw_only=True):
    """The progress of a checkpoint, as `_to_save` writes it."""

    step: Size
    epoch: Size
    position: Position
    fit: _Fit
    firsts: list[tuple[Size, Size]] = []
    origin: tuple[Size, Size] | None = None
    histories: list[list[dict[str, float]]]
    results: list[tuple[Size, str, dict[str, Any]]] = []
    skipped_steps: Size
    optimizer: _Optimizer
    scheduler: _Scheduler | None
    loss_scale: _SavedScale | None = None
    callbacks: list[_CallbackState]
    data: dict[str, Any]
    streams: list[_Stream] = []
    seed: Any
    leases: _Leases | None = None
    strategy: str
    num_workers: Size
    params: dict[str, Any] | None = None


def _check_progress(saved: dict[str, Any]) -> None:
    """Raise ValueError for a field that is missing, of another type, or inconsistent with the others."""
    said = msgspec.convert(saved, _Progress)
    position, fit = said.position, said.fit
    counts = (position.next_index, position.samples, position.loss_count)
    if min(counts) < 0 or max(counts) >= 1 << 62 or not said.num_workers:
        raise ValueError("it counts less than nothing")
    if (said.step, said.epoch) != (position.step, position.epoch):
        raise ValueError(
            f"it is of step {said.step} and epoch {said.epoch} and stands at {position.step} and {position.epoch}"
        )
    num_samples = said.data.get("num_samples")
    if num_samples is not None and position.next_index > num_samples:
        raise ValueError(f"it stands at sample {position.next_index} of {num_samples}")
    if fit.first_epoch > said.epoch or fit.first_step > said.step or fit.number >= len(said.histories):
        raise ValueError("its fit begins after it")
    if said.origin is not None and said.origin[1] > said.step:
        raise ValueError("its script begins after it")
    begun = [*said.firsts, (fit.first_epoch, fit.first_step)]
    if begun != sorted(begun) or len(said.firsts) not in (0, fit.number):
        raise ValueError("its fits do not follow each other")


def _to_save(trainer: Trainer) -> dict[str, Any]:
    progress, optimizer, leasing = trainer.progress, trainer.strategy.optimizer, trainer.leasing
    assert optimizer is not None
    first_epoch, first_step = progress.firsts[-1] if progress.firsts else (0, 0)
    saved = {
        "step": trainer.step,
        "epoch": trainer.epoch,
        "position": dataclasses.asdict(trainer.position),
        "fit": {
            "number": len(progress.histories) - 1,
            "first_epoch": first_epoch,
            "first_step": first_step,
            "trainer": trainer.number,
        },
        "firsts": progress.firsts[:-1],
        "origin": progress.origin,
        "histories": [history.epochs for history in progress.histories],
        "results": progress.results,
        "skipped_steps": progress.num_skipped_steps,
        "optimizer": optimizer_settings(trainer.local_model, optimizer),
        "scheduler": scheduler_state(trainer.scheduler) if trainer.scheduler is not None else None,
        "loss_scale": dataclasses.asdict(scale) if (scale := trainer.train_job.loss_scale) else None,
        "callbacks": trainer.callbacks.state(),
        "data": progress.data_description,
        "streams": trainer.export_streams(),
        "seed": trainer.config.seed,
        "leases": leasing.state if leasing is not None else None,
        "strategy": trainer.job.strategy,
        "num_workers": trainer.num_workers,
        "params": trainer.config.params,
    }
    return copy.deepcopy(saved)  # training goes on while it is written


def _metric_pieces(trainer: Trainer) -> Iterator[Piece]:
    if trainer.leasing is not None:
        return  # the others are in the middle of their own batches: no gather is possible now
    for name, tensor in trainer.train_metrics.state(trainer.strategy.gather).items():
        yield Piece(_METRICS + name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def _load(trainer: Trainer, checkpoint: Checkpoint, *, with_optimizer: bool) -> None:
    _check_model(trainer, checkpoint.pieces, checkpoint.path)
    settings = checkpoint.progress.get("optimizer") if with_optimizer else None
    try:
        pieces = with_rank_local_state(trainer, checkpoint)
        trainer.strategy.load(PieceReader(pieces, settings, checkpoint.path))
    except OptimizerMismatch as error:  # the raising code does not know the file's name
        raise OptimizerMismatch(path=checkpoint.path, problem=error.problem) from None


def _check_model(trainer: Trainer, pieces: Mapping[str, Tensor], path: str) -> None:
    shapes = {
        name: (tuple(tensor.shape), tensor.dtype)
        for name, tensor in plain_tensors(trainer.local_model).items()
    }
    check_fits({**shapes, **expected_shapes(trainer.local_model)}, pieces, path)


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
    """Load saved state into a scheduler, built afresh.

    It sets no learning rate: that is part of the optimizer's state. Load the optimizer after the
    scheduler was built, in either order with this.
    """
    kind = type(scheduler).__name__
    if saved["class"] != kind:
        raise OptimizerMismatch(
            path=path, problem=f"its scheduler is {saved['class']}, the script builds {kind}"
        )
    state = from_plain(saved["state"])
    if problem := unlike(state, scheduler.state_dict(), kind):
        raise CheckpointDamaged(path=path, problem=problem)
    scheduler.load_state_dict(state)


def snapshot_pieces(trainer: Trainer, path: str) -> Iterable[Piece]:
    """Pieces of a checkpoint at `path`; of a snapshot, only the common ones. Collective."""
    strategy, mine = trainer.strategy, _rank_local_path(trainer, path)
    if mine is None or not isinstance(strategy, PeriodicSync):
        return strategy.state()
    common = list(strategy.common_pieces())
    write_checkpoint(str(mine), list(strategy.own_pieces()), progress={"step": trainer.step})
    strategy.reduce(torch.zeros(1))  # barrier: a snapshot counts once every part of it is written
    return common


def with_rank_local_state(trainer: Trainer, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    mine = _rank_local_path(trainer, checkpoint.path)
    if mine is None or not mine.exists():
        return checkpoint.pieces
    own = open_checkpoint(str(mine)).pieces
    return ChainMap({name: own[name] for name in own}, checkpoint.pieces)  # type: ignore[arg-type]  # only read


def remove_rank_local_state(trainer: Trainer, path: str) -> None:
    """Delete this worker's part of the snapshot at `path`."""
    if (mine := _rank_local_path(trainer, path)) is not None:
        shutil.rmtree(mine, ignore_errors=True)


def _rank_local_path(trainer: Trainer, path: str) -> Path | None:
    """Path of this worker's part of a snapshot; None if `path` is no snapshot, or workers have no parts."""
    at = Path(path)
    if not trainer.job.launched or not isinstance(trainer.strategy, PeriodicSync):
        return None
    if at.parent != scratch.directory("snapshots"):
        return None
    return scratch.directory("own-parts", f"worker-{trainer.rank}") / at.name


# ---- snapshots --------------------------------------------------------------------------------------


EVERY_STEPS = 50
"""Steps between two snapshots unless the script or --snapshot-every sets it: at most this many are
repeated after a death, or a multiple of them if snapshots would cost more than SHARE of the time.
"""

SHARE = 0.02

MOST_STEPS = 2000
"""Largest interval, whatever snapshots cost."""


def steps_between(*, cost_s: float, step_s: float) -> int:
    """Interval at which snapshots cost at most SHARE of the time."""
    wanted = cost_s / (SHARE * max(step_s, 1e-9))
    return max(min(math.ceil(wanted / EVERY_STEPS) * EVERY_STEPS, MOST_STEPS), EVERY_STEPS)


class Snapshots:
    """Snapshots after steps that all ranks count alike."""

    def __init__(self, trainer: Trainer) -> None:
        job = trainer.job
        self._trainer = trainer
        said = (
            trainer.config.snapshot_every if trainer.config.snapshot_every is not None else job.snapshot_every
        )
        self._every = (trainer.progress.snapshot_steps or EVERY_STEPS) if said is None else said
        self._is_told = said is not None
        # Without a shared run directory only rank 0's host would find them.
        is_of_use = (
            job.launched
            and job.can_recover
            and job.verify is None
            and holds_parts(trainer.strategy)
            and job.shares_run_dir
        )
        self._is_on = is_of_use and self._every > 0
        self._taken: list[str] = []
        self._seen_step = trainer.step
        self._since = time.monotonic()

    def after_step(self) -> None:
        """Take a snapshot if due. Collective."""
        trainer, step = self._trainer, self._trainer.step
        if not self._is_on or step // self._every == self._seen_step // self._every:
            return
        if has_diverged(trainer.strategy):
            return  # when the workers have one model again
        num_steps, began_at = max(step - self._seen_step, 1), time.monotonic()
        self._seen_step = step
        # Ranks with a part of their own beside the checkpoint wait for all of it.
        background = not isinstance(trainer.strategy, PeriodicSync)
        with recorder.CHECKPOINT:
            self._taken.append(
                save_checkpoint(
                    trainer, str(scratch.directory("snapshots")), is_snapshot=True, background=background
                )
            )
        if not self._is_told:
            self._every = self._agreed(time.monotonic() - began_at, (began_at - self._since) / num_steps)
            trainer.progress.snapshot_steps = self._every
        self._since = time.monotonic()
        while len(self._taken) > 2:
            oldest = self._taken.pop(0)
            remove_rank_local_state(trainer, oldest)
            if trainer.rank == 0:
                shutil.rmtree(oldest, ignore_errors=True)

    def _agreed(self, cost_s: float, step_s: float) -> int:
        """From all ranks' measurements, so that all take the next one at the same step."""
        cost_of_all, step_of_all = self._trainer.strategy.reduce(
            torch.tensor([cost_s, step_s], dtype=torch.float64)
        ).tolist()
        return steps_between(cost_s=cost_of_all, step_s=step_of_all)
