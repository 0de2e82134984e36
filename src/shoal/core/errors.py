"""Every error a user can cause, under one tree.

    ShoalError
    ├── ConfigError                an option, a strategy, a run directory            exit 2
    │   ├── DeviceMissing          (core/placement_errors.py) no such device for a worker
    │   ├── UnknownStrategy
    │   ├── RunDirectoryError
    │   └── ScriptNotFound
    ├── ScriptFailed               the user's own exception, with its traceback      exit 1
    ├── ScriptExited               the script left with sys.exit                     its own
    ├── DataError                  what the dataset cannot give                      exit 3
    │   ├── EmptyDataset
    │   ├── BatchTooSmall
    │   ├── BadSample              (from here on in core/data_errors.py) one sample, by file, row and column
    │   ├── TooManySkipped
    │   ├── NoFiles
    │   ├── FileLost               it is gone, changed or cannot be read
    │   ├── FileDamaged            its bytes are not what its format says
    │   ├── SampleEndsReader       every process that reads it dies
    │   ├── ReaderStuck            one that takes too long over a batch
    │   ├── ReadersLost            they are lost again and again, whatever they read
    │   ├── NoSuchColumn
    │   ├── SchemasDiffer
    │   ├── DatabaseRefused        it cannot be reached, or does not let us in
    │   ├── DatabaseLost           it closed the connection, and did not come back
    │   ├── QueryRefused
    │   ├── TableChanged
    │   ├── MapReduceFailed        (these in core/map_reduce_errors.py) in a process of workers=
    │   ├── TaskKeepsDying
    │   ├── MapReduceStalled
    │   ├── StoreFull              (these in core/memory_errors.py) no tier has room for a block
    │   ├── BlockDamaged
    │   └── CacheFull
    ├── TrainingError              what the model, the loss or a step refuses        exit 3
    │   ├── NonFiniteLoss
    │   ├── LossDoesNotRecombine
    │   ├── StageCannotRun         (these in core/pipeline_errors.py) a batch no stage was cut for
    │   │   ├── ShapeDecides
    │   │   └── ShapeLeadsElsewhere
    │   └── ModelsDiffer
    ├── CheckpointError            what cannot be written, read or fitted            exit 3
    │   ├── CheckpointWriteFailed
    │   ├── CheckpointDamaged
    │   ├── CheckpointMismatch
    │   │   └── OptimizerMismatch
    │   └── NoCheckpoint
    ├── ClusterError               a process or a wait                               exit 3
    │   ├── WorkerDied
    │   ├── PeerLost
    │   ├── CallsDiffer
    │   ├── CollectiveLeftOut      (core/parts_errors.py)
    │   ├── WaitTimedOut
    │   │   └── StoreWaitTimedOut  (cluster/store.py: it is torch's DistStoreError too)
    │   ├── CoordinatorLost
    │   ├── JournalFailed
    │   ├── WireError
    │   └── PsError                what a parameter server refuses, or cannot do
    │       ├── ServerRefused
    │       ├── LinkLost
    │       └── ArenaFull
    └── Interrupted                Ctrl-C or SIGTERM: the step was finished, saved   exit 130, 143

Each message is one paragraph: what happened with its numbers, what is safe,
what to do next. The facts stay on the object as attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self


class ShoalError(Exception):
    """The root of everything shoal raises on purpose."""

    exit_code = 3

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are rebuilt by calling the class with their message, which ours would not take:
        # one that comes home from a child process keeps its message and its facts.
        return _revived, (type(self), self.args, dict(self.__dict__))


def _revived(cls: type[ShoalError], args: tuple[Any, ...], facts: dict[str, Any]) -> ShoalError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(facts)
    return error


class ConfigError(ShoalError):
    """A setting that cannot be meant. Raised before anything starts."""

    exit_code = 2


class UnknownStrategy(ConfigError):
    """A strategy this version does not have."""

    def __init__(self, *, strategy: str, known: Sequence[str], guess: str | None = None) -> None:
        self.strategy, self.known, self.guess = strategy, list(known), guess
        hint = f" Did you mean '{guess}'?" if guess else ""
        super().__init__(
            f"there is no strategy '{strategy}'.{hint} This version has: {', '.join(known)}. Nothing was started."
        )


class RunDirectoryError(ConfigError):
    """A run directory that belongs to another job, or cannot be written."""

    def __init__(self, message: str, *, path: str) -> None:
        self.path = path
        super().__init__(message)


class ScriptNotFound(ConfigError):
    """The script to run is not there."""

    def __init__(self, *, script: str, guess: str | None = None) -> None:
        self.script, self.guess = script, guess
        hint = f" Did you mean '{guess}'?" if guess else ""
        super().__init__(
            f"the script '{script}' does not exist.{hint} Nothing was started; give the path of a Python file."
        )


class ScriptFailed(ShoalError):
    """The user's script raised. The traceback is the user's own, without shoal's launcher in it."""

    exit_code = 1

    def __init__(self, *, rank: int, traceback: str, num_workers: int = 1) -> None:
        self.rank, self.traceback, self.num_workers = rank, traceback, num_workers
        where = f" on rank {rank} of {num_workers}" if num_workers > 1 else ""
        super().__init__(f"{traceback.rstrip()}\nThe script failed{where}; the error above is its own.")


class ScriptExited(ShoalError):
    """The script ended itself, with sys.exit and a code that is not 0."""

    def __init__(self, *, rank: int, code: int) -> None:
        self.rank, self.code, self.exit_code = rank, code, code
        super().__init__(f"the script left with exit code {code} on rank {rank}.")


class DataError(ShoalError):
    """The dataset cannot give what was asked of it."""

    opened_at: str | None = None
    """The user's line that opened the data, once somebody has said it."""

    def opened_by(self, line: object) -> Self:
        """The same error, which from now on says which line of the user's opened the data; the first one said stays."""
        if line is not None and self.opened_at is None:
            self.opened_at = str(line)
            self.args = (f"{self} The data is opened at {self.opened_at}", *self.args[1:])
        return self


class EmptyDataset(DataError):
    """There is no sample to train on, evaluate or predict."""

    def __init__(self, *, what: str) -> None:
        self.what = what
        super().__init__(
            f"the dataset given to {what} has no samples. Nothing was changed; check the source, the filter or the "
            "fractions of split()."
        )


class BatchTooSmall(DataError):
    """A batch that cannot be cut over the workers."""

    def __init__(self, *, batch_size: int, num_workers: int) -> None:
        self.batch_size, self.num_workers = batch_size, num_workers
        super().__init__(
            f"a batch of {batch_size} cannot be cut over {num_workers} workers: {num_workers - batch_size} of them "
            "would never see a sample. Nothing was trained; batch(n) is the batch of one update, so use at least "
            f"batch({num_workers}), or batch({batch_size}, per_worker=True) for {batch_size} per worker, or -n {batch_size}."
        )


class TrainingError(ShoalError):
    """The model, the loss or a step was refused."""


class NonFiniteLoss(TrainingError):
    """The loss of a step is NaN or infinite; the step was not applied."""

    def __init__(
        self, *, rank: int, step: int, value: float, samples: Sequence[int], checkpoint: str | None
    ) -> None:
        self.rank, self.step, self.value = rank, step, value
        self.samples, self.checkpoint = list(samples), checkpoint
        shown = ", ".join(str(index) for index in self.samples[:8]) + (
            ", ..." if len(self.samples) > 8 else ""
        )
        safe = f"the newest checkpoint is {checkpoint}" if checkpoint else "no checkpoint was written yet"
        super().__init__(
            f"the loss became {value} on rank {rank} at step {step}, in a slice of {len(self.samples)} samples of the "
            f"dataset (indices {shown}). The step was not applied, and {safe}. Look at those samples, lower the "
            "learning rate, clip with clip_norm=1.0, or leave such steps out with on_nonfinite='skip'."
        )


class LossDoesNotRecombine(TrainingError):
    """A loss whose value over a batch is not the mean of its parts."""

    def __init__(self, *, whole: float, recombined: float, name: str) -> None:
        self.whole, self.recombined, self.name = whole, recombined, name
        super().__init__(
            f"the loss '{name}' does not recombine: over the first slice it is {whole:.6g}, but its two halves "
            f"weighted by their samples give {recombined:.6g}. Cut over workers it would train something else, so "
            "nothing was trained. Let it return a pair (sum, count) instead of a mean: the sum over what it counts, and "
            "how much that was."
        )


class ModelsDiffer(TrainingError):
    """Ranks built different models."""

    def __init__(self, *, rank: int, differences: Sequence[str]) -> None:
        self.rank, self.differences = rank, list(differences)
        super().__init__(
            f"rank {rank} built another model than rank 0: {'; '.join(self.differences[:5])}. Nothing was trained; the "
            "script must build the same model on every rank, whatever shoal.rank() is."
        )


class CheckpointError(ShoalError):
    """A checkpoint that cannot be written, read or fitted to the model."""


class CheckpointWriteFailed(CheckpointError):
    """The disk refused a checkpoint; the one before it is untouched."""

    def __init__(self, *, path: str, reason: str, previous: str | None) -> None:
        self.path, self.reason, self.previous = path, reason, previous
        safe = f"the previous one, {previous}, is whole" if previous else "there is no earlier one"
        super().__init__(
            f"the checkpoint {path} could not be written: {reason}. Its unfinished files were removed and {safe}. "
            "Make room or choose another --run-dir, then `shoal resume` goes on from there."
        )


class CheckpointDamaged(CheckpointError):
    """A checkpoint whose bytes are not the ones that were written."""

    def __init__(self, *, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(
            f"the checkpoint {path} is damaged: {problem}. It was not loaded and nothing was changed; use an older one."
        )


class CheckpointMismatch(CheckpointError):
    """A checkpoint of another model."""

    def __init__(
        self, *, path: str, missing: Sequence[str], unexpected: Sequence[str], shapes: Sequence[str]
    ) -> None:
        self.path, self.missing, self.unexpected, self.shapes = (
            path,
            list(missing),
            list(unexpected),
            list(shapes),
        )
        parts = []
        if missing:
            parts.append(f"the model has {_some(missing)}, the checkpoint has not")
        if unexpected:
            parts.append(f"the checkpoint has {_some(unexpected)}, the model has not")
        if shapes:
            parts.append(f"shapes differ: {_some(shapes)}")
        super().__init__(
            f"the checkpoint {path} belongs to another model: {'; '.join(parts)}. Nothing was loaded; build the model "
            "it was saved from, or load another checkpoint."
        )


class OptimizerMismatch(CheckpointMismatch):
    """A checkpoint of another optimizer; the weights would fit."""

    def __init__(self, *, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        self.missing, self.unexpected, self.shapes = [], [], []
        CheckpointError.__init__(
            self,
            f"the optimizer saved in the checkpoint {path or 'given'} is not the one of this script: {problem}. Nothing "
            "of it was loaded; build the optimizer it was saved from, or take over the weights alone with trainer.load().",
        )


class NoCheckpoint(CheckpointError):
    """There is nothing to load."""

    def __init__(self, *, path: str, reason: str = "it does not exist") -> None:
        self.path, self.reason = path, reason
        super().__init__(f"there is no checkpoint to load at {path}: {reason}.")


class ClusterError(ShoalError):
    """A process that went away, or a wait that ended without its answer."""


class WorkerDied(ClusterError):
    """A worker ended without finishing its script."""

    def __init__(
        self,
        *,
        rank: int,
        how: str,
        step: int | None,
        checkpoint: str | None,
        log: Sequence[str] = (),
        run: str = "",
    ) -> None:
        self.rank, self.how, self.step, self.checkpoint, self.log = rank, how, step, checkpoint, list(log)
        when = f" after step {step}" if step is not None else " before its first step"
        safe = (
            f"The newest checkpoint is {checkpoint}; go on with `shoal resume {run}`."
            if checkpoint
            else "No checkpoint was written yet; ModelCheckpoint(every_steps=...) keeps one."
        )
        last = ("\nIts last lines:\n  " + "\n  ".join(self.log)) if self.log else ""
        super().__init__(f"worker {rank} {how}{when}, so the others were stopped. {safe}{last}")


class PeerLost(ClusterError):
    """An exchange broke because another rank went away. The cause is reported there."""

    def __init__(self, *, rank: int, operation: str, reason: str) -> None:
        self.rank, self.operation, self.reason = rank, operation, reason
        super().__init__(f"rank {rank} could not finish {operation}: {reason}")


class CallsDiffer(ClusterError):
    """Ranks call shoal in different order."""

    def __init__(self, *, number: int, calls: dict[int, str]) -> None:
        self.number, self.calls = number, dict(calls)
        listed = ", ".join(f"rank {rank} {call}" for rank, call in sorted(calls.items()))
        super().__init__(
            f"the ranks disagree about {f'call {number} into shoal' if number else 'what comes next'}: {listed}. Nothing of it was done. Every rank runs "
            "the whole script: keep fit, evaluate, predict, save, load and shoal.collectives out of `if shoal.rank() == 0`, and "
            "give every rank the same data."
        )


class WaitTimedOut(ClusterError):
    """A wait that reached its deadline, and who was missing."""

    def __init__(self, *, operation: str, waited_s: float, missing: Sequence[str], setting: str) -> None:
        self.operation, self.waited_s, self.missing, self.setting = (
            operation,
            waited_s,
            list(missing),
            setting,
        )
        super().__init__(
            f"{operation} waited {waited_s:.1f} s for {', '.join(self.missing) or 'nobody it knows of'}. "
            f"If that is only slow, raise {setting}."
        )


class CoordinatorLost(ClusterError):
    """The connection to the coordinator ended, or never came to be."""

    def __init__(self, *, path: str, operation: str, reason: str) -> None:
        self.path, self.operation, self.reason = path, operation, reason
        super().__init__(
            f"{operation} lost the coordinator: {reason}. Checkpoints written so far are whole; if the job "
            "itself was not stopped, start it again with `shoal resume`."
        )


class JournalFailed(ClusterError):
    """The coordinator cannot write down, or read, what it promises."""

    def __init__(self, *, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(
            f"the coordinator cannot go on with its journal {path}: {problem}. Checkpoints written so far are whole; make "
            "room, or move a damaged journal away, then go on with `shoal resume`."
        )


class WireError(ClusterError):
    """Bytes that are not a message of this version of shoal."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(
            f"bytes that are no shoal message: {problem}. Nothing of them was used and their connection is closed; "
            "both ends must be the same version of shoal, and nobody else belongs on its sockets."
        )


class PsError(ClusterError):
    """A parameter server refused, or what passes between it and its clients cannot be done."""


class ServerRefused(PsError):
    """A parameter server says that something cannot be, and what it expected. Nothing was changed there."""


class LinkLost(PsError):
    """The connection to a parameter server ended. What it did not acknowledge is the client's to send again."""

    def __init__(self, *, peer: str, reason: str) -> None:
        self.peer, self.reason = peer, reason
        super().__init__(
            f"the connection to {peer} is lost: {reason}. What it acknowledged is kept there and on its replicas; what it "
            "did not has to be sent again to whoever holds its slots in the next view."
        )


class ArenaFull(PsError):
    """A buffer that does not fit into what a connection may share with its server."""

    def __init__(self, *, asked: int, in_use: int, limit: int, setting: str) -> None:
        self.asked, self.in_use, self.limit, self.setting = asked, in_use, limit, setting
        super().__init__(
            f"no {asked:,} bytes of shared memory more: {in_use:,} of {limit:,} are in use by what is under way. Nothing "
            f"was sent; wait for answers before asking for more, send smaller pieces, or raise {setting}."
        )


class Interrupted(ShoalError):
    """The user or the system asked the job to leave; it finished its step and saved."""

    exit_code = 130

    def __init__(self, *, signal_name: str, step: int | None, checkpoint: str | None, run: str = "") -> None:
        self.signal_name, self.step, self.checkpoint, self.run = signal_name, step, checkpoint, run
        self.exit_code = {"SIGTERM": 143, "SIGHUP": 129}.get(signal_name, 130)
        at = f" after step {step}" if step is not None else ""
        saved = f"; the newest checkpoint is {checkpoint}" if checkpoint else ""
        resume = f" Go on with `shoal resume {run}`." if run and checkpoint else ""
        super().__init__(f"stopped by {signal_name}{at}{saved}.{resume}")


def _some(names: Sequence[str], limit: int = 6) -> str:
    listed = ", ".join(names[:limit])
    return f"{listed} and {len(names) - limit} more" if len(names) > limit else listed
