"""Every error a user can cause, under one tree.

    ShoalError
    ├── ConfigError                an option, a strategy, a run directory            exit 2
    │   ├── DeviceMissing          no such device for a worker
    │   ├── TableMemoryTooSmall    --table-memory below what the tables need
    │   ├── RowPolicyRefused       admission and eviction of rows
    │   ├── HostNotAdmitted        a machine that may not join a job
    │   ├── UnknownStrategy
    │   ├── RunDirectoryError
    │   ├── NotDistributed         several workers for a script that divides nothing among them
    │   ├── OtherLauncher          torchrun, srun or mpirun instead of `shoal run`
    │   └── ScriptNotFound
    ├── ScriptFailed               the user's own exception, with its traceback      exit 1
    ├── ScriptExited               the script left with sys.exit                     its own
    ├── DataError                  what the dataset cannot give                      exit 3
    │   ├── EmptyDataset
    │   ├── BatchTooSmall
    │   ├── BadSample              one sample, by file, row and column
    │   │   └── NoRecord           an offset of a stream without a record
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
    │   ├── StreamUnreachable
    │   ├── StreamRewound
    │   ├── StreamEnded
    │   ├── MapReduceFailed        in a process of workers=
    │   ├── TaskKeepsDying
    │   ├── MapReduceStalled
    │   ├── TablesFull             the disk has no room for rows past --table-memory
    │   ├── BlockDamaged
    │   └── CacheFull
    ├── TrainingError              what the model, the loss or a step refuses        exit 3
    │   ├── NonFiniteLoss
    │   ├── LossDoesNotRecombine
    │   ├── LossComparesSamples    a Dice over the batch, a correlation
    │   ├── ForwardMixesSamples    x - x.mean(0) within a model, say
    │   ├── GradientMixesSamples   a backward in which the gradient of a sample depends on the others of its batch
    │   ├── LossReadsParameters
    │   ├── StageCannotRun         a batch no stage was cut for
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
    │   │   └── NotConnected       other hosts are not reached while a group is formed
    │   ├── StrangerInGroup        somebody else connects to the workers' group
    │   ├── HostsApart             hosts that reach the head, and not each other
    │   ├── GroupNotFormed         the group of the workers cannot be formed, for another reason
    │   ├── CallsDiffer
    │   ├── CollectiveLeftOut
    │   ├── TaskFailed             of mapreduce, at every attempt
    │   ├── WaitTimedOut
    │   │   └── StoreWaitTimedOut  (recovery/rendezvous.py: it is torch's DistStoreError too)
    │   ├── CoordinatorLost
    │   ├── JournalFailed
    │   ├── JournalUnreachable
    │   ├── HeadFenced
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

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self


class ShoalError(Exception):
    """The root of everything shoal raises on purpose."""

    exit_code = 3

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are rebuilt by calling the class with their message, which these would not accept: one
        # that arrives from a child process keeps its message and its attributes.
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


class NotDistributed(ConfigError):
    """Several workers were started for a script that divides nothing among them."""

    def __init__(self, *, script: str, num_workers: int, at_end: bool) -> None:
        self.script, self.num_workers, self.at_end = script, num_workers, at_end
        done = (
            f"All {num_workers} have run it to its end, so what it wrote was written {num_workers} times"
            if at_end
            else "They were stopped before their first optimizer step"
        )
        super().__init__(
            f"{script} runs the same in each of the {num_workers} workers: it neither calls shoal nor forms a process group of "
            f"torch.distributed, and reads no RANK. {done}. Use -n 1; or have it train with shoal.Trainer or shoal.setup, or "
            "call torch.distributed.init_process_group() as under torchrun."
        )


class OtherLauncher(ConfigError):
    """This process is one of several that another launcher started."""

    def __init__(self, *, launcher: str, num_processes: int, engine: str) -> None:
        self.launcher, self.num_processes = launcher, num_processes
        super().__init__(
            f"{launcher} started this script as one of {num_processes} processes, and shoal starts its workers by itself: "
            f"{num_processes} separate trainings would write to the same places. Nothing was trained; start it once, with "
            f"`shoal run -n {num_processes} SCRIPT`, or with `shoal run --on {engine} SCRIPT` in each of them."
        )


class ScriptNotFound(ConfigError):
    """The script to run is not there."""

    def __init__(self, *, script: str, guess: str | None = None) -> None:
        self.script, self.guess = script, guess
        hint = f" Did you mean '{guess}'?" if guess else ""
        what = "is a folder" if os.path.isdir(script) else "does not exist"
        super().__init__(
            f"the script '{script}' {what}.{hint} Nothing was started; give the path of a Python file."
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
    """The user's line that opened the data, if known."""

    def opened_by(self, line: object) -> Self:
        """The same error, with the user's line that opened the data; the first one set stays."""
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
        shown = ", ".join(map(str, self.samples[:8])) + (", ..." if len(self.samples) > 8 else "")
        safe = f"the newest checkpoint is {checkpoint}" if checkpoint else "no checkpoint was written yet"
        super().__init__(
            f"the loss became {value} on rank {rank} at step {step}, in a slice of {len(self.samples)} samples of the "
            f"dataset (indices {shown}). The step was not applied, and {safe}. Look at those samples, lower the "
            "learning rate, clip with clip_norm=1.0, or leave such steps out with on_nonfinite='skip'."
        )


class LossDoesNotRecombine(TrainingError):
    """A loss whose value over a batch is not made of those of its parts."""

    is_drift = False
    """Whether it recombined at first, with a guessed count: a small term beside a mean, for example a balance of experts."""

    def __init__(
        self,
        *,
        whole: float,
        recombined: float,
        name: str,
        is_pair: bool = False,
        what: str = "",
        in_forward: bool = False,
    ) -> None:
        self.whole, self.recombined, self.name = whole, recombined, name
        self.is_pair, self.what, self.in_forward = is_pair, what, in_forward
        subject = f"the {what} " if what else ("its sum " if is_pair else "it ")
        how = "added" if is_pair else "weighted by their samples"
        cure = "Let it return a pair (sum, count) instead of a mean: the sum over what it counts, and how much that was."
        if is_pair:
            cure = (
                "Both numbers of its pair (sum, count) must add up over parts of a batch: sum over what is counted (not a mean "
                "times the samples), and let a penalty on parameters count for each sample, (sum + count * penalty, count)."
            )
        if in_forward:
            cure = (
                "Its forward compares samples of a batch with each other (in-batch negatives, say), and a worker has those of its "
                "own slice alone: let forward take the rows of all workers, shoal.gather(rows), before it computes the loss."
            )
        super().__init__(
            f"the loss '{name}' does not recombine: over a slice {subject}is {whole:.6g}, but its two halves "
            f"{how} give {recombined:.6g}. Cut over workers it would train something else; nothing of this step was "
            f"updated. {cure}"
        )


class LossComparesSamples(TrainingError):
    """A loss whose gradient by a sample depends on the others of its batch, though its value hardly does."""

    def __init__(self, *, name: str, gap: float) -> None:
        self.name, self.gap = name, gap
        super().__init__(
            f"the loss '{name}' compares the samples of a batch with each other: the gradients of a slice and those of its two halves differ "
            f"by {gap:.2g} of the largest. A worker has the samples of its own slice alone, so something else would be trained than in one "
            "process; nothing of this step was updated. If it is a mean over something other than samples, let it return a pair (sum, count). "
            "Else let it see the rows of all workers: shoal.gather(output) and shoal.gather(target), which is exact under ddp and fsdp; or "
            "run in one process."
        )


class ForwardMixesSamples(TrainingError):
    """A layer whose result for a sample depends on the others of its batch."""

    def __init__(
        self, *, layer: str, kind: str, strategy: str, gap: float, batch_first: bool | None = None
    ) -> None:
        self.layer, self.kind, self.strategy, self.gap = layer, kind, strategy, gap
        where = f"the layer '{layer}' ({kind})" if layer else f"the model's own forward ({kind})"
        cure = (
            "Let it see the rows of all workers, shoal.gather(x).mean(0) in place of x.mean(0) say (ddp, fsdp), use a BatchNorm, "
            "or run in one process."
        )
        if batch_first is False:
            cure = "Its batch_first is False, so that it takes the samples for places of a sequence: is batch_first=True meant?"
        super().__init__(
            f"{where} mixes the samples of a batch: rows of the same samples, run together and in parts, differ by "
            f"{gap:.2g} of what rows differ from each other. Under '{strategy}' a worker has the samples of its own slice alone, and "
            f"something else would be trained than in one process. Nothing of this step was updated. {cure}"
        )


class GradientMixesSamples(TrainingError):
    """A backward in which the gradient of a sample depends on the others of its batch."""

    def __init__(self, *, parameter: str, strategy: str, gap: float) -> None:
        self.parameter, self.strategy, self.gap = parameter, strategy, gap
        super().__init__(
            f"the gradient of '{parameter}' over four samples is not the sum of those over two pairs of them (they differ by {gap:.2g} of its "
            "size), though forward gives the same rows: something in backward depends on the whole slice, an autograd.Function that "
            f"normalises the gradient it is given, say. Under '{strategy}' a worker has the samples of its own slice alone, and something "
            "else would be trained than in one process. Nothing of this step was updated; let backward treat each sample by itself, "
            "or run in one process."
        )


class LossReadsParameters(TrainingError):
    """A loss over parameters that this process does not hold, or that are no longer those of the model."""

    def __init__(self, *, names: Sequence[str], strategy: str, in_stages: bool) -> None:
        self.names, self.strategy, self.in_stages = list(names), strategy, in_stages
        named = ", ".join(f"'{name}'" for name in self.names[:3])
        more = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        why = (
            "the loss runs where the last stage is, which holds the parameters of its own layers alone"
            if in_stages
            else "these tensors were taken from the model before it was cut, and are not what is trained any more"
        )
        cure = "" if in_stages else "read them inside the loss, from model.parameters(); or "
        super().__init__(
            f"the loss reads parameters of the model, {named}{more}, and under '{strategy}' {why}: their penalty would be left "
            f"out without a word. Nothing of this step was updated; {cure}give the optimizer weight_decay= in place of "
            "the penalty, or use --strategy ddp."
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
            "Make room, or choose another path (of a run's checkpoints: another --run-dir), then `shoal resume` goes on from there."
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
        self.path, self.missing = path, list(missing)
        self.unexpected, self.shapes = list(unexpected), list(shapes)
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


class StrangerInGroup(ClusterError):
    """Processes that are no rank of the job keep connecting to its groups."""

    def __init__(self, *, rank: int, stranger: str, num_attempts: int) -> None:
        self.rank, self.stranger, self.num_attempts = rank, stranger, num_attempts
        super().__init__(
            f"the workers could not connect to each other alone: {num_attempts} times a process that is no worker of this job "
            f"was in their group, the last time on rank {rank}, where {stranger}. Nothing that it sent was used, and "
            "checkpoints are whole; end that process, or run where others cannot reach the ports of this machine, and go on "
            "with `shoal resume`."
        )


class HostsApart(ClusterError):
    """Hosts that reach the head, and not each other."""

    def __init__(self, *, rank: int, silent: dict[int, str], num_attempts: int, reason: str) -> None:
        self.rank, self.silent, self.num_attempts, self.reason = rank, dict(silent), num_attempts, reason
        listed = ", ".join(f"rank {other} ({address})" for other, address in sorted(silent.items()))
        super().__init__(
            f"rank {rank} did not reach {listed} in {num_attempts} attempts to form the group of the workers (the last error: "
            f"{reason}), though the head hears from all of them. Nothing of the step was applied, and checkpoints are whole; a "
            "link, a route or a firewall between the hosts lets nothing through: open all TCP ports between them, and go on with "
            "`shoal resume`."
        )


class GroupNotFormed(ClusterError):
    """The same processes of several hosts could not form their group in many attempts."""

    def __init__(self, *, rank: int, num_attempts: int, reason: str) -> None:
        self.rank, self.num_attempts, self.reason = rank, num_attempts, reason
        super().__init__(
            f"rank {rank} could not form the group of the workers in {num_attempts} attempts, in which no process was lost. The "
            f"last error: {reason}. Nothing of the step was applied, and checkpoints are whole; look for the cause in the logs of "
            "the other ranks, check that hosts reach each other at the addresses of --bind or --interface, and go on with "
            "`shoal resume`."
        )


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


class RowPolicyRefused(ConfigError, ValueError):
    """A policy of rows that cannot be meant. A ValueError too: a message that carries one is malformed."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the policy of a table's rows cannot be used: {problem}. Nothing was declared.")


class TableMemoryTooSmall(ConfigError):
    """A limit below the rows that are in use at once."""

    def __init__(self, *, limit_bytes: int, needed_bytes: int, num_tables: int) -> None:
        self.limit_bytes, self.needed_bytes, self.num_tables = limit_bytes, needed_bytes, num_tables
        super().__init__(
            f"--table-memory is {limit_bytes:,} bytes on each server, and {num_tables} tables need {needed_bytes:,}: the 1,024 "
            "rows of each that are worked on at once. Nothing was trained; give at least that, and better a tenth of the tables."
        )


class HostNotAdmitted(ConfigError):
    """A machine that may not join a job."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"this host was not admitted: {reason}. Nothing was started here; the job is as it was."
        )


class WaitTimedOut(ClusterError):
    """A wait that reached its deadline, and who was missing."""

    def __init__(self, *, operation: str, waited_s: float, missing: Sequence[str], setting: str) -> None:
        self.operation, self.waited_s, self.setting = operation, waited_s, setting
        self.missing = list(missing)
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


class JournalUnreachable(ClusterError):
    """No member of the etcd in which a job's head is recorded gives an answer."""

    def __init__(self, *, tried: Mapping[str, str], is_refused: bool = False) -> None:
        """`is_refused`: members answer, and this user may not do what was asked."""
        self.tried, self.is_refused = dict(tried), is_refused
        self.told = ", ".join(f"{member} ({reason})" for member, reason in tried.items())
        super().__init__(
            f"etcd refuses this user: {self.told}. ETCDCTL_USER=NAME:PASSWORD, or NAME:PASSWORD@ in the URL, names one that may "
            "read and write keys under /shoal/."
            if is_refused
            else f"etcd does not answer; tried were {self.told}."
        )


class HeadFenced(ClusterError):
    """Another host may have taken over as head of the job."""

    def __init__(self, *, job: str, why: str, journal: str, record: str) -> None:
        self.job, self.why = job, why
        super().__init__(
            f"this host is no longer the head of {job}: {why}, and another host may go on with the run. All processes of the job "
            f"on this host were ended, and checkpoints written so far are whole. `shoal join` makes this host part of the job "
            f"again; `etcdctl get {record}` at {journal} names its head. Where no host has taken over, `shoal resume {job}` goes "
            "on."
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
            "did not has to be sent again to the servers that hold its slots in the next view."
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


def _some(names: Sequence[object], limit: int = 6) -> str:
    listed = ", ".join(map(str, names[:limit]))
    return f"{listed} and {len(names) - limit} more" if len(names) > limit else listed


class BadSample(DataError):
    """One sample that cannot be read, with its position. Raised when the sample is read, not before."""

    def __init__(
        self,
        *,
        where: str,
        reason: str,
        row: int | None = None,
        line: int | None = None,
        offset: int | None = None,
        column: str | None = None,
        index: int | None = None,
    ) -> None:
        """`where` is a file, a table or a function; `row` and `line` count from 1, `offset` is in bytes."""
        self.where, self.reason, self.row, self.line = where, reason, row, line
        self.offset, self.column, self.index = offset, column, index
        counted = {"row": row, "line": line, "byte": offset}
        address = [where, *(f"{what} {number:,}" for what, number in counted.items() if number is not None)]
        address += [] if column is None else [f"column '{column}'"]
        sample = "" if index is None else f" This is sample {index} of the dataset."
        super().__init__(
            f"{', '.join(address)}: {reason.rstrip('.')}.{sample} Nothing was changed; mend it there, or leave such "
            "samples out, each of them counted, with on_error='skip'."
        )

    def at_index(self, index: int) -> Self:
        """The same, as the sample with this index of a dataset."""
        names = ("where", "reason", "row", "line", "offset", "column")
        return type(self)(**{name: getattr(self, name) for name in names}, index=index)


class TooManySkipped(DataError):
    """More bad samples than `max_skips` allows."""

    def __init__(self, *, num_skipped: int, max_skips: int, last: BadSample) -> None:
        self.num_skipped, self.max_skips, self.last = num_skipped, max_skips, last
        super().__init__(
            f"{num_skipped} bad {'sample was' if num_skipped == 1 else 'samples were'} left out, and max_skips={max_skips} allows no more. The last was: "
            f"{str(last).partition(' Nothing was changed;')[0]} Training stopped before the batch with it; what was "
            "trained and saved before is whole. Mend the data, or raise max_skips."
        )
        self.opened_by(last.opened_at)


class NoFiles(DataError):
    """A path, pattern or directory that gives no file to read."""

    def __init__(self, *, where: str, problem: str) -> None:
        self.where, self.problem = where, problem
        super().__init__(
            f"there is nothing to read at {where}: {problem}. Nothing was read; check the spelling, and that this host "
            "sees the path."
        )


class FileLost(DataError):
    """A file that is gone, that changed since it was opened, or that cannot be read."""

    def __init__(self, *, url: str, reason: str) -> None:
        self.url, self.reason = url, reason
        super().__init__(
            f"the file {url} cannot be read any further: {reason}. Nothing of it was used since; checkpoints written so "
            "far are whole. Put the file back as it was and go on with `shoal resume`, or start anew with the data as it "
            "is now."
        )


class FileDamaged(DataError):
    """A file whose bytes are not what its format says."""

    def __init__(self, *, url: str, problem: str) -> None:
        self.url, self.problem = url, problem
        super().__init__(
            f"the file {url} is damaged: {problem}. Nothing of that part was used; write or copy the file again, or leave "
            "it out."
        )


class NoSuchColumn(DataError):
    """A column that was asked for and is not there."""

    def __init__(self, *, asked: Sequence[str], there: Sequence[str], where: str, asked_by: str) -> None:
        self.asked, self.there, self.where = list(asked), list(there), where
        names = ", ".join(f"'{name}'" for name in asked)
        super().__init__(
            f"{where} has no column {names}, which {asked_by} asks for. It has {', '.join(there)}. Nothing was read; "
            "use one of those names."
        )


class SchemasDiffer(DataError):
    """Files that are read as one table and are not one."""

    def __init__(self, *, first: str, other: str, differences: Sequence[str]) -> None:
        self.first, self.other, self.differences = first, other, list(differences)
        super().__init__(
            f"the file {other} is not of one table with {first}: {'; '.join(self.differences[:5])}. Nothing was read; "
            "read them apart, choose columns=[...] that they share, or say the types with schema={...}."
        )


class SampleEndsReader(DataError):
    """Some samples that end every process that reads them."""

    def __init__(self, *, what: str, indices: Sequence[object], how: str, num_deaths: int) -> None:
        self.what, self.indices, self.how, self.num_deaths = what, list(indices), how, num_deaths
        super().__init__(
            f"{num_deaths} processes in turn were lost over the same {len(self.indices)} samples, the last one of them "
            f"{how}: {what}, the samples with indices {_some(self.indices, 8)}. No sample was left out and nothing of this "
            "batch was trained. SIGKILL is mostly the system's answer to a lack of memory, so try fewer workers; else run "
            "the function on those samples in one process, with workers=0, to see where it crashes."
        )


class ReaderStuck(DataError):
    """A process that takes too long over one batch."""

    def __init__(
        self,
        *,
        reader: int,
        rank: int,
        what: str,
        indices: Sequence[object],
        waited_s: float,
        stack: Sequence[str],
    ) -> None:
        self.reader, self.rank, self.what, self.indices = reader, rank, what, list(indices)
        self.waited_s, self.stack = waited_s, list(stack)
        shown = self.stack if len(self.stack) <= 4 else [self.stack[0], *self.stack[-3:]]
        where = f" It stands at {', called from '.join(shown)}." if shown else ""
        super().__init__(
            f"reader {reader} of worker {rank} has been at {len(self.indices)} samples for {waited_s:g} s: {what}, the "
            f"samples with indices {_some(self.indices, 8)}.{where} It was ended, no sample was left out, and nothing of "
            "this batch was trained. Mend what it waits for; if it is only slow, raise timeout_s in map(..., timeout_s=...)."
        )


class ReadersLost(DataError):
    """Processes that read are lost again and again, whatever they are given."""

    def __init__(self, *, num_lost: int, how: str) -> None:
        self.num_lost, self.how = num_lost, how
        super().__init__(
            f"{num_lost} processes that were to read data were lost before one of them had read a batch; the last {how}. No "
            "sample was left out; find out who ends them (a limit on memory or on processes, perhaps), or take workers= out "
            "of map."
        )


class DatabaseRefused(DataError):
    """A database that cannot be reached, or does not let us in, when a table of it is opened."""

    def __init__(self, *, place: str, reason: str) -> None:
        self.place, self.reason = place, reason
        super().__init__(
            f"the database {place} cannot be read: {reason}. Nothing was read; check the address, the user and the "
            "password, and that the database answers from this host."
        )


class DatabaseLost(DataError):
    """A database that closed the connection in the middle, and did not come back in time."""

    def __init__(self, *, place: str, reading: str, reason: str, num_attempts: int, waited_s: float) -> None:
        self.place, self.reading, self.reason = place, reading, reason
        self.num_attempts, self.waited_s = num_attempts, waited_s
        super().__init__(
            f"the connection to the database {place} was lost while reading {reading}, and {num_attempts} attempts within "
            f"{waited_s:.1f} s did not bring it back: {reason}. Nothing of that range was used, and checkpoints written so "
            "far are whole. Bring the database back and go on with `shoal resume`; timeout_s= says how long to wait for it."
        )


class QueryRefused(DataError):
    """A query that the database does not understand, or does not allow."""

    def __init__(self, *, place: str, what: str, reason: str) -> None:
        self.place, self.what, self.reason = place, what, reason
        super().__init__(
            f"the database {place} refuses {what}: {reason}. Nothing was read or changed; mend the query, or the names of "
            "table, key and columns."
        )


class TableChanged(DataError):
    """A table that has another number of rows than when it was opened."""

    def __init__(self, *, table: str, place: str, rows: str, then: int, now: int) -> None:
        self.table, self.place, self.rows, self.then, self.now = table, place, rows, then, now
        super().__init__(
            f"{table} at {place} changed while it was read: it had {then:,} rows ({rows}) when it was opened, and has "
            f"{now:,} now. Nothing of them was used, and checkpoints written so far are whole. Read from a copy, or from a "
            "query whose rows stay as they are, for instance up to a date; then start anew."
        )


class StreamUnreachable(DataError):
    """A broker or Flight server that does not answer, or refuses."""

    def __init__(self, *, place: str, reason: str, waited_s: float) -> None:
        self.place, self.reason, self.waited_s = place, reason, waited_s
        super().__init__(
            f"the stream {place} cannot be read after {waited_s:.0f} s: {reason.rstrip('.')}. Records that were trained are counted, "
            "and checkpoints written so far hold their offsets. See whether the server runs and the address is right; then "
            "start it again, or `shoal resume`."
        )


class StreamRewound(DataError):
    """Records that a stream had, or a checkpoint stands at, and that are not there any more."""

    def __init__(self, *, place: str, partition: int, offset: int, first: int | None, end: int) -> None:
        self.place, self.partition, self.offset, self.first, self.end = place, partition, offset, first, end
        if first is not None and offset < first:
            now = f"it begins at offset {first:,} now: {first - offset:,} records were deleted before they were read"
            cure = "keep records longer (retention.ms), or begin anew at start='earliest'"
        else:
            now = f"it ends at offset {end:,} now: it was made anew, or has lost its last records"
            cure = "begin anew, with another run directory"
        super().__init__(
            f"the stream {place} went on at offset {offset:,} of partition {partition}, and {now}. Nothing of them was used, and "
            f"checkpoints written so far are whole. A run cannot go on without a gap; {cure}, and take over the weights with trainer.load()."
        )


class StreamEnded(DataError):
    """A stream that gives no more records, and training wants some."""

    def __init__(
        self, *, place: str, num_planned: int, wanted: int | None, offsets: list[int], waited_s: float
    ) -> None:
        self.place, self.num_planned, self.wanted, self.offsets = place, num_planned, wanted, offsets
        missing = "" if wanted is None else f" of the {wanted:,} of records="
        shown = ", ".join(f"{number}: {offset:,}" for number, offset in enumerate(offsets[:8]))
        more = ", ..." if len(offsets) > 8 else ""
        super().__init__(
            f"the stream {place} has given {num_planned:,} records{missing} and none more for {waited_s:g} s (offsets by partition: "
            f"{shown}{more}). What was trained is whole, and checkpoints hold the offsets: `shoal resume` goes on there when more come. "
            "To wait longer set timeout_s=, to train on what is there until='now'."
        )


class NoRecord(BadSample):
    """An offset without a record, as transactions and compaction leave them: never an error, always skipped."""


_SAFE = "Finished tasks are kept and not run again."


class MapReduceFailed(DataError):
    """A user's function raised in one of the processes of `workers=`, or on an engine. The traceback is the user's own."""

    def __init__(self, *, traceback: str, task: str, on: str = "") -> None:
        self.traceback, self.task, self.on = traceback, task, on
        where = f"by {on}, at its last attempt," if on else "in a process of its own"
        super().__init__(
            f"{traceback.rstrip()}\nThe error above is that of a function given to map_reduce, raised {where} "
            f"in the task '{task}'. {'No result was written.' if on else _SAFE}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(MapReduceFailed, traceback=self.traceback, task=self.task, on=self.on), ()


class TaskKeepsDying(DataError):
    """Every process that began a task was gone before it had finished it."""

    def __init__(self, *, task: str, what: str, attempts: Sequence[str]) -> None:
        self.task, self.what, self.attempts = task, what, list(attempts)
        super().__init__(
            f"the task '{task}' of map_reduce ({what}) was begun {len(self.attempts)} times, and each time its process was "
            f"gone before it was done: {', '.join(self.attempts)}. It was not begun again. {_SAFE} Look for a crash or for "
            "memory that runs out on those samples; buffer_bytes= and batched= say how much is held at once."
        )


class MapReduceStalled(DataError):
    """No task has shown progress within the time-out."""

    def __init__(self, *, waited_s: float, holders: Mapping[str, str]) -> None:
        self.waited_s, self.holders = waited_s, dict(holders)
        listed = [f"'{task}' is held by {who}" for task, who in list(self.holders.items())[:8]]
        more = f", and {len(self.holders) - 8} more" if len(self.holders) > 8 else ""
        super().__init__(
            f"map_reduce waited {waited_s:.1f} s without a sign of life of the tasks that are left: "
            f"{', '.join(listed)}{more}. {_SAFE} If one sample may take that long, raise timeout_s; else end the process "
            "that is stuck, and its task goes to another."
        )


class TaskFailed(ClusterError):
    """A task of --strategy mapreduce that failed at every attempt."""

    def __init__(self, *, part: int, code: int, said: str, log: str) -> None:
        self.part, self.code, self.said, self.log = part, code, said, log
        super().__init__(
            f"task {part} of a round ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}, and so did every attempt "
            f"before it; last it said: {said or 'nothing'}. All of its output is in {log}. The other tasks of the round are kept, and "
            "so are checkpoints; mend what it says and go on with `shoal resume`."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _task_failed, (self.part, self.code, self.said, self.log)


def _task_failed(part: int, code: int, said: str, log: str) -> TaskFailed:
    return TaskFailed(part=part, code=code, said=said, log=log)


class TablesFull(DataError):
    """The disk has no room for rows that do not fit into memory."""

    def __init__(self, *, directory: str, num_bytes: int, wanted_bytes: int, reason: str) -> None:
        self.directory, self.num_bytes, self.wanted_bytes, self.reason = (
            directory,
            num_bytes,
            wanted_bytes,
            reason,
        )
        super().__init__(
            f"rows past --table-memory lie in a file in {directory}, which has {num_bytes:,} bytes and was to have "
            f"{wanted_bytes:,}: {reason}. Nothing of this push was done, and the newest checkpoint is whole; make room there, or "
            "go on with `shoal resume` with a larger --table-memory, more servers, or --table-dir on another disk."
        )


class BlockDamaged(DataError):
    """A file of a store's disk tier that is not what was written."""

    def __init__(self, *, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(
            f"the file {path}, in which a store kept a block, is damaged: {problem}. Nothing of it was used; blocks that "
            "can be loaded again are. Check the disk, and go on from the last checkpoint."
        )


class CacheFull(DataError):
    """A cache whose disk is full."""

    def __init__(
        self, *, what: str, directory: str, needed_bytes: int, free_bytes: int | None, reason: str
    ) -> None:
        self.what, self.directory, self.reason = what, directory, reason
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes
        free = "" if free_bytes is None else f", where {free_bytes:,} are free"
        super().__init__(
            f"the cache of {what} needs {needed_bytes:,} bytes more in {directory}{free}: {reason}. Nothing was lost: the "
            "data itself was only read, and checkpoints are whole. Free space there, name another directory, or read "
            "without a cache."
        )


class CollectiveLeftOut(ClusterError):
    """Ranks wait within the model for one that went past them."""

    def __init__(self, *, waiting: Sequence[int], operation: str, past: Sequence[int]) -> None:
        self.waiting, self.operation, self.past = list(waiting), operation, list(past)
        ones, others = (
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for ranks in (waiting, past)
        )
        super().__init__(
            f"{ones} waited in {operation} for {others}, which lived and went on without it: what the model exchanges there was "
            "left out, as by a forward that returns early, detaches or takes another way on some ranks. What those ranks hold "
            "is no longer one model, so the job ends here; checkpoints are whole. Have every rank run the same layers for "
            "every batch, and go on from the newest checkpoint with `shoal resume`."
        )


class StageCannotRun(TrainingError):
    """A batch that no stage was cut for. Its step was not applied."""


class ShapeDecides(StageCannotRun):
    """The model's forward takes another path for this batch than for the one it was partitioned with."""

    def __init__(self, *, seen: object, value: object, line: str) -> None:
        self.seen, self.value, self.line = repr(seen), repr(value), line
        super().__init__(
            f"the model's forward decides by the shape of a batch{line}: what it asks for was {seen} when the model was cut into "
            f"stages and is {value} for this batch, and what it would do then is in no stage. The step was not applied. Give "
            "batches whose tensors have one shape but for the number of samples (pad or cut sequences to one length), let forward "
            "do the same for every length, or go on with --strategy fsdp or tp, which run forward as it is."
        )


class ShapeLeadsElsewhere(StageCannotRun):
    """The model's forward takes a path for this batch on which the stages cannot run in sequence."""

    def __init__(self, *, shapes: Sequence[tuple[int, ...]], why: str) -> None:
        self.shapes, self.why = list(shapes), why
        super().__init__(
            f"the model's forward decides by the shape of a batch, and for inputs of {' and '.join(map(str, shapes))} it takes another "
            f"way than for those by which the model was cut into stages: {why}. The step was not applied. Give batches whose tensors "
            "have one shape but for the number of samples (pad or cut sequences to one length), name cuts with pipeline_cut= that "
            "keep the layers of all ways in one stage, or go on with --strategy fsdp or tp, which run forward as it is."
        )


class DeviceMissing(ConfigError):
    """A worker was to compute on a device that is not there."""

    def __init__(self, *, device: str, rank: int, num_workers: int, visible: Mapping[str, int]) -> None:
        self.device, self.rank, self.num_workers, self.visible = device, rank, num_workers, dict(visible)
        kind = device.partition(":")[0]
        found = visible.get(kind, 0)
        there = ", ".join(f"{count} {name}" for name, count in visible.items() if count) or "no accelerator"
        how_many = f" of {num_workers}" if num_workers > 1 else ""
        fewer = f", use -n {found} or fewer" if 0 < found < num_workers else ""
        super().__init__(
            f"worker {rank}{how_many} was to compute on {device}, and this host has {there} that torch can use (what "
            f"CUDA_VISIBLE_DEVICES and its like hide does not count). Nothing was trained; use --device cpu{fewer}, or "
            "--soft-placement, which puts workers without a device on the CPU."
        )
