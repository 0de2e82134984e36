"""Checkpoints of a loop of the script's own, in the format of the Trainer's.

    model, optimizer, data = shoal.setup(model, optimizer, data)
    start = shoal.resume(step=0, epoch=0)
    for epoch in range(start.epoch, 10):
        for x, y in data:                  # from where the checkpoint stood
            ...
            optimizer.step()
            step += 1
            shoal.checkpoint(every=100, step=step, epoch=epoch)

A checkpoint holds what shoal knows of (models, optimizers, schedulers, the place
in the data, random state) and the values that the script names. Rank 0 writes,
and no rank goes on before it is there.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.cluster.worker import session
from shoal.config import job as jobs
from shoal.errors import CheckpointDamaged, ConfigError, Interrupted, NoCheckpoint, OptimizerMismatch
from shoal.parallel.protocol import Piece, PieceReader
from shoal.parallel.state import LazyTensors, expected_shapes, optimizer_settings, plain_tensors, whole
from shoal.runtime import events
from shoal.runtime.failpoints import failpoint
from shoal.runtime.serialization import to_plain
from shoal.train.calls import Call, asked_to_leave, check_limit, signals_finish_the_step
from shoal.train.checkpoint.checkpoint import (
    Checkpoint,
    check_fits,
    newest_checkpoint,
    open_checkpoint,
    prune,
    set_aside,
    step_path,
    write_checkpoint,
)
from shoal.train.checkpoint.saving import load_scheduler, scheduler_state
from shoal.train.custom import loop as custom
from shoal.train.custom import loop_shape
from shoal.train.custom.loop import CustomLoop, counted, present_moment
from shoal.train.custom.script_state import note_generators, restore_generators

KEEP_LAST = 3
"""Checkpoints that are kept; older ones are removed once a newer one is complete."""

_VALUES, _RANDOM = "values/", "random/"
_signals = ExitStack()  # in a plain process, from the first checkpoint to its end


def resume(checkpoint: str | None = None, /, **values: Any) -> SimpleNamespace:
    """Continue from a checkpoint of this loop, if there is one; returns the named values as saved, else as given here.

    Call it after every `shoal.setup` and after the schedulers are built, before the loop. Under
    `shoal resume` it is the newest of the run; `"auto"` is the newest of the run directory in any
    case, a path is that one. A value with a `load_state_dict` (an average of the weights, a
    GradScaler) is loaded in place.
    """
    loops = _loops("shoal.resume")
    custom.script.resumes = True
    number = session.begin_call("resume", f"values={sorted(values)}")
    call = Call(number, loops[0].strategy.replay_log)
    job, replay_log = jobs.current(), loops[0].strategy.replay_log
    if call.is_over:  # models and optimizers come from another worker; the rest is in the received state
        kept: dict[str, Any] | None = call.result
    else:
        is_alone = job.incarnation > 0 and not (replay_log is not None and replay_log.was_given_state)
        wanted = "auto" if checkpoint is None and (job.resume or is_alone) else checkpoint
        found = _find(wanted)
        kept = _load(found, values) if found is not None else None
        call.end(None, kept=kept or {})
    if not kept:
        return SimpleNamespace(**values)
    custom.script.progress.restore(kept["progress"])
    custom.script.progress.saved(kept["path"])
    for data, state in zip(custom.script.every, kept["data"], strict=True):
        data.resume_at(state, kept["path"])
    for loop, states in zip(loops, kept["schedulers"], strict=True):
        for scheduler, state in zip(_schedulers(loop), states, strict=True):
            load_scheduler(scheduler, state, path=kept["path"])
    restore_generators(kept["random"])
    torch.set_rng_state(kept["torch"])
    loop_shape.use_enterable(loop_shape.script_frames(), {"enumerate": counted})
    if job.rank == 0 and not call.is_over:
        at = f"step {custom.script.progress.step:,}" + "".join(
            f", sample {each['next_index']:,} of epoch {each['epoch'] + 1}" for each in kept["data"][:1]
        )
        print(f"going on from {kept['path']}: {at}", file=sys.stderr, flush=True)
    return SimpleNamespace(**{name: _put_back(kept["values"][name], given) for name, given in values.items()})


def checkpoint(*, every: int = 1, **values: Any) -> str | None:
    """Write a checkpoint after this step, from which `shoal.resume` continues; returns its path, or None if none was due.

    With `every=100` it is written each 100 steps, and when the job is asked to leave (Ctrl-C,
    SIGTERM), which then ends the script: so call it at every step. Values must be equal on every
    worker: numbers, strings, tensors, containers of these, and objects with a `state_dict`.
    """
    loops = _loops("shoal.checkpoint")
    check_limit("every", every)
    _refuse_unsaved(loops, values)
    _tell_once(values)
    if custom.script.takes_whole_batches:  # workers come here at different steps
        if custom.script.ended:
            _leave(custom.script.progress.newest)
        return None
    step = custom.script.progress.step
    is_due = step // every != custom.script.progress.saved_step // every
    if not (is_due or custom.script.ended) or any(loop.has_gradients for loop in loops):
        return None  # gradients of an unfinished step are in no checkpoint: wait for the next call
    if any(loop.has_diverged for loop in loops):
        if not custom.script.ended:
            return None  # each worker has weights of its own: wait for the next call after a sync
        for loop in loops:
            loop.sync()
    _, remembered = present_moment()
    path: str = remembered("checkpoint", lambda: _save(loops, values))
    if custom.script.ended:
        _leave(path)
    return path


# ---- saving -----------------------------------------------------------------------------------------


def _save(loops: list[CustomLoop], values: dict[str, Any]) -> str:
    job, step = jobs.current(), custom.script.progress.step
    strategy, replay_log = loops[-1].strategy, loops[-1].strategy.replay_log
    tensors: dict[str, Tensor] = {}
    plain = {name: _apart(_state_of(value), f"{_VALUES}{name}", tensors) for name, value in values.items()}
    _refuse_different(plain, tensors, strategy.gather)
    custom.refuse_different_weights(strategy.gather)
    pieces = [piece for number, loop in enumerate(loops) for piece in _pieces(loop, number)]
    pieces += [_piece(name, tensor) for name, tensor in tensors.items()]
    random, drawn = _apart(note_generators(), _RANDOM + "of", tensors := {}), torch.get_rng_state()
    pieces += [_piece(name, tensor) for name, tensor in {**tensors, f"{_RANDOM}torch": drawn}.items()]
    home = job.run_dir / "checkpoints"
    path = step_path(home, step)
    custom.script.progress.flush()
    # If the others have gone on already, a replacement has their later weights.
    is_over = replay_log is not None and replay_log.next_is_known
    if job.rank == 0 and not is_over:
        failpoint("worker: checkpoint not written")
        progress = {
            "step": step,
            "epoch": max((data.position.epoch for data in custom.script.data), default=0),
            "loops": [
                {
                    "step": loop.strategy.step,
                    "optimizer": optimizer_settings(loop.model, loop.optimizer),
                    "schedulers": [scheduler_state(each) for each in _schedulers(loop)],
                }
                for loop in loops
                if loop.optimizer is not None
            ],
            "data": [data.state() for data in custom.script.every],
            "progress": custom.script.progress.state(),
            "random": random,
            "values": plain,
            "strategy": job.strategy,
            "num_workers": job.num_workers,
        }
        write_checkpoint(path, pieces, progress=progress, previous=custom.script.progress.newest)
        failpoint("worker: checkpoint written")
        moved = set_aside(home, after_step=step)
        if moved is not None:
            print(f"checkpoints of an earlier run were moved to {moved}", file=sys.stderr, flush=True)
        prune(home, KEEP_LAST)
        session.saved(path, step)
    for data in custom.script.every:
        data.reached()
    strategy.reduce(torch.zeros(1))  # barrier: no rank goes on before it is written
    custom.script.progress.saved(path)
    return path


def _pieces(loop: CustomLoop, number: int) -> Iterator[Piece]:
    for piece in loop.strategy.state():
        yield Piece(_named(piece.name, number), piece.tensor, piece.global_shape, piece.offset)


def _piece(name: str, tensor: Tensor) -> Piece:
    return Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def _named(piece: str, number: int) -> str:
    """Names for the first loop as in a Trainer's checkpoint; for the others "model-1/...", "optimizer-1/..."."""
    kind, _, rest = piece.partition("/")
    return f"{kind}-{number}/{rest}" if number else piece


def _schedulers(loop: CustomLoop) -> list[Any]:
    assert loop.optimizer is not None
    return custom.script.recovery.schedulers_of(loop.optimizer, look=True)


def _state_of(value: Any) -> Any:
    return value.state_dict() if callable(getattr(value, "state_dict", None)) else value


def _apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The value with its tensors replaced by names of pieces."""
    if isinstance(value, np.ndarray):
        tensors[name] = torch.from_numpy(value)
        return {"array in": name}
    if isinstance(value, Tensor) and value.dim():
        tensors[name] = whole(value.detach()).clone()
        return {"tensor in": name}
    if isinstance(value, (list, tuple)):
        return type(value)([_apart(item, f"{name}.{at}", tensors) for at, item in enumerate(value)])
    if isinstance(value, dict):
        return {key: _apart(item, f"{name}.{key}", tensors) for key, item in value.items()}
    return value


def _together(value: Any, pieces: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        match value:
            case {"tensor in": str(name)}:
                return pieces[name]
            case {"array in": str(name)}:
                return pieces[name].numpy()
        return {key: _together(item, pieces) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_together(item, pieces) for item in value])
    return value


def _put_back(saved: Any, given: Any) -> Any:
    if callable(getattr(given, "load_state_dict", None)):
        given.load_state_dict(saved)
        return given
    return saved


def _refuse_different(
    plain: dict[str, Any], tensors: dict[str, Tensor], gather: Callable[[Tensor], list[Tensor]]
) -> None:
    """Refuse values that differ between workers: only rank 0's are saved."""
    sums = []
    for name, value in plain.items():
        found = zlib.crc32(repr(to_plain(value, f"the value '{name}' of shoal.checkpoint")).encode())
        for key in sorted(key for key in tensors if key.split(".")[0] == _VALUES + name):
            found = zlib.crc32(tensors[key].cpu().contiguous().view(torch.uint8).numpy().data, found)
        sums.append(found)
    everywhere = [each.tolist() for each in gather(torch.tensor(sums, dtype=torch.int64))]
    differing = [name for at, name in enumerate(plain) if len({each[at] for each in everywhere}) > 1]
    if differing:
        raise ConfigError(
            f"shoal.checkpoint was given {', '.join(f'{name}=' for name in differing)} with another value on every worker, and a "
            "checkpoint goes on at any number of them. Nothing was saved; add it up with shoal.reduce first, or leave it out."
        )


# ---- loading ----------------------------------------------------------------------------------------


def _find(wanted: str | None) -> Checkpoint | None:
    if wanted is None:
        return None
    if wanted != "auto":
        return open_checkpoint(wanted)

    def damaged(error: CheckpointDamaged) -> None:
        if jobs.rank() == 0:
            print(f"{error} Going on with the one before it.", file=sys.stderr, flush=True)

    return newest_checkpoint(jobs.current().run_dir / "checkpoints", on_damaged=damaged)


def _load(found: Checkpoint, values: dict[str, Any]) -> dict[str, Any]:
    """Load models and optimizers; returns the rest."""
    saved, path, loops = found.progress, found.path, _loops("shoal.resume")
    if "loops" not in saved:
        raise NoCheckpoint(path=path, reason="it is no checkpoint of shoal.checkpoint, but of a Trainer")
    schedulers = [len(_schedulers(loop)) for loop in loops]
    there = [len(loop["schedulers"]) for loop in saved["loops"]]
    if schedulers != there or len(saved["data"]) != len(custom.script.every):
        raise OptimizerMismatch(
            path=path,
            problem=f"it has {len(there)} calls of shoal.setup with {there} schedulers and {len(saved['data'])} datasets, the script "
            f"had {len(loops)} with {schedulers} and {len(custom.script.every)} when it called shoal.resume",
        )
    missing = sorted(set(values) - set(saved["values"]))
    if missing:
        raise ConfigError(
            f"shoal.resume asks for {', '.join(missing)}, and the checkpoint {path} has {', '.join(sorted(saved['values'])) or 'no values'}. "
            "Nothing was loaded; name what shoal.checkpoint was given."
        )
    for number, (loop, kept) in enumerate(zip(loops, saved["loops"], strict=True)):
        _load_loop(loop, number, kept, found)
    return {
        "path": path,
        "progress": saved["progress"],
        "data": saved["data"],
        "schedulers": [loop["schedulers"] for loop in saved["loops"]],
        "random": _together(saved["random"], found.pieces),
        "torch": found.pieces[f"{_RANDOM}torch"],
        "values": {name: _together(saved["values"][name], found.pieces) for name in values},
    }


def _load_loop(loop: CustomLoop, number: int, kept: dict[str, Any], found: Checkpoint) -> None:
    own = {
        name.replace(f"-{number}/", "/", 1) if number else name: name
        for name in found.pieces
        if name.split("/")[0]
        in {_named(f"{kind}/", number)[:-1] for kind in ("model", "optimizer", "residual")}
    }
    pieces = LazyTensors(list(own), lambda name: found.pieces[own[name]])
    shapes = {name: (tuple(each.shape), each.dtype) for name, each in plain_tensors(loop.model).items()}
    check_fits({**shapes, **expected_shapes(loop.model)}, pieces, found.path)
    try:
        loop.strategy.load(PieceReader(pieces, kept["optimizer"], found.path))
    except OptimizerMismatch as error:  # the raising code does not know the file's name
        raise OptimizerMismatch(path=found.path, problem=error.problem) from None
    loop.strategy.step = kept["step"]


# ---- leaving ----------------------------------------------------------------------------------------


def _tell_once(values: dict[str, Any]) -> None:
    """Tell the supervisor that this loop saves checkpoints; in a plain process signals finish the step first."""
    if custom.script.saves:
        return
    custom.script.saves = custom.script.progress.ends_itself = True
    job = jobs.current()
    events.emit(events.LOOP_SAVES, resumes=custom.script.resumes)
    if not job.launched:
        _signals.enter_context(signals_finish_the_step())
    if not custom.script.resumes and job.rank == 0:
        print(
            "note: the script calls shoal.checkpoint and did not call shoal.resume before its loop: `shoal resume` would begin it anew",
            file=sys.stderr,
            flush=True,
        )


def _refuse_unsaved(loops: list[CustomLoop], values: dict[str, Any]) -> None:
    named = {id(value) for value in values.values()}
    for loop in loops:
        for other, where in (
            *((each, "within it") for each in loop.inner),
            *((each, "beside it") for each in loop.beside),
        ):
            if id(other) not in named:
                how = "inner=optimizer.base_optimizer" if where == "within it" else "second=second_optimizer"
                raise ConfigError(
                    f"shoal.checkpoint saves the state of the {type(loop.optimizer).__name__} that shoal.setup was given, and not that of the "
                    f"{type(other).__name__} {where}. Nothing was saved; name that one too, here and in shoal.resume: "
                    f"shoal.checkpoint(..., {how})."
                )


def _leave(path: str | None) -> None:
    interrupted = Interrupted(
        signal_name=asked_to_leave() or "SIGINT", step=custom.script.progress.step, checkpoint=path
    )
    if jobs.current().launched:
        raise interrupted
    print(f"{interrupted} Go on with shoal.resume('auto', ...).", file=sys.stderr, flush=True)
    raise SystemExit(interrupted.exit_code)


def _loops(what: str) -> list[CustomLoop]:
    loops = [loop for loop in custom.script.loops if loop.optimizer is not None]
    if not loops:
        raise ConfigError(
            f"{what} was called before shoal.setup, so there is nothing to save or to go on with yet."
        )
    return loops
