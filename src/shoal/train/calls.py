"""Calls of the script into shoal: arguments are checked, and the call is numbered and compared between ranks.

A replacement runs the script from the top; calls that the others have finished return their result,
without work. In a plain `python train.py` signals and the progress display are handled here too;
under `shoal run` by the supervisor.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from shoal.cluster.supervisor.display import binary, open_display
from shoal.cluster.worker import session
from shoal.config import job as jobs
from shoal.config import placement
from shoal.config import strategy as strategies
from shoal.config.choices import COMPRESSORS, MEASURED
from shoal.config.job import Job
from shoal.data.batches import Batches, as_batches
from shoal.data.slice import Slice
from shoal.errors import BatchTooSmall, ConfigError, EmptyDataset
from shoal.parallel.batch_dependence import refuse_gradient_hooks
from shoal.parallel.parameter_file import ParameterFile
from shoal.parallel.protocol import Turn
from shoal.recovery.replay_log import ReplayLog
from shoal.runtime.seeds import mix
from shoal.runtime.transport.messages.supervisor import Progress

R = TypeVar("R")

_numbers = itertools.count()


class Call:
    """A numbered call of this process. `end` it with its result."""

    is_over: bool
    """The others have finished it, with this `result`."""

    result: Any

    after: dict[str, Any] | None
    """State of the called object after the call."""

    def __init__(
        self,
        number: int,
        replay_log: ReplayLog | None,
        state_after: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """`state_after` is read at the call's end; a replacement has that state once it has passed the call."""
        self._number, self._replay_log, self._state_after = number, replay_log, state_after
        self.is_over, kept = replay_log.begin_call(number) if replay_log is not None else (False, None)
        self.result, self.after = (kept["result"], kept["after"]) if kept is not None else (None, None)

    def end(self, result: R, *, kept: Any = None) -> R:
        """End the call; a replacement receives `kept` (by default the result itself) for it."""
        if self._replay_log is not None:
            after = self._state_after() if self._state_after is not None else None
            self._replay_log.end_call(
                self._number, {"result": result if kept is None else kept, "after": after}
            )
        return result


def next_number() -> int:
    """Number for one more Trainer or loop: equal on every rank, since all run the same script."""
    return next(_numbers)


def batches_of(data: Any, *, what: str, seed: int, may_be_endless: bool = False) -> Batches:
    """Data handed to `what`, as batches. Validation data is checked here too, not after an epoch of training."""
    batches = as_batches(data, default_seed=seed)
    if batches.is_endless and not may_be_endless:
        cure = "say when to stop, fit(..., max_steps=10_000), or " if what == "fit" else ""
        raise ConfigError(
            f"{what} goes over all of the data, and repeat() or a stream gives it no end. Nothing was started; {cure}leave "
            "repeat() out or give it a number, and give from_stream records= or until='now'."
        )
    if batches.num_samples == 0:
        raise EmptyDataset(what=what)
    shard = _shard(what)
    # Balanced by costs only for training: other data may lack the column.
    if shard is not None and (what in ("fit", "setup") or not shard.startswith("balanced")):
        batches = batches.shard_unless_said(shard)
    job = jobs.current()
    num_parts = max(job.num_data_ranks, job.tasks)  # the ranks of tp and pp compute the same part
    size = batches.batch_size(num_parts)
    if 0 < size < num_parts:
        raise BatchTooSmall(batch_size=size, num_workers=num_parts)
    return batches


def _shard(what: str) -> str | None:
    """Shares of batches if the script does not set them; by measured speed if workers compute on different devices."""
    job = jobs.current()
    if job.shard is None and what == "fit" and job.strategy == "ddp" and placement.of_job(job).is_mixed:
        return f"weighted={MEASURED}"
    return job.shard


def described(batches: Batches) -> str:
    """Sizes, seeds and filters' selections: ranks that differ in them would train some samples twice and others never."""
    stages = batches.describe().get("stages", [])
    seeds = [stage["seed"] for stage in stages if stage.get("seed") is not None]
    size = batches.batch_size(jobs.num_workers())
    said = f"samples={batches.num_samples}, batch={size or None}"
    said += f", seeds={seeds}" if seeds else ""
    chosen = [stage["digest"] for stage in stages if stage.get("digest") is not None]
    said += f", chosen={chosen}" if chosen else ""
    return f"{said}, shard={batches.sharding.describe()}" if batches.sharding.name else said


def first_slice(batches: Batches, num_workers: int) -> Callable[[], Slice]:
    """Reads the first data, for a strategy that measures a model before it partitions it."""

    def read() -> Slice:
        [part] = batches.slices(epoch=0, start=0, rank=0, num_workers=num_workers, stop=1)
        return part

    return read


OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def build_model(
    given: nn.Module | Callable[[], nn.Module], *, seed: int, into: ParameterFile | None = None
) -> nn.Module:
    """The model, or the result of its factory under `seed`, with its parameters in the file `into` if given."""
    if not isinstance(given, nn.Module):
        torch.manual_seed(mix(seed))
        with into.building() if into is not None else contextlib.nullcontext():
            built = given()
        if not isinstance(built, nn.Module):
            raise ConfigError(
                f"the function given as model= returned a {type(built).__name__}, not an nn.Module."
            )
        if into is not None:
            into.move_rest(built)
        given = built
    for name, tensor in given.named_parameters():
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"the shape of the parameter '{name}' is not known yet: a lazy layer learns it from its first batch, which "
                "the workers would each see another of. Nothing was trained; call the model once with a sample before it "
                "is given to the Trainer, or build it with the sizes."
            )
    return given


def build_optimizer(
    given: OptimizerFactory | torch.optim.Optimizer | Mapping[str, OptimizerFactory], model: nn.Module
) -> torch.optim.Optimizer:
    if isinstance(given, Mapping):
        return _build_as_one(given, model)
    if not isinstance(given, torch.optim.Optimizer):
        built = given([p for p in model.parameters() if p.requires_grad])
        if not isinstance(built, torch.optim.Optimizer):
            raise ConfigError(
                f"the function given as optimizer= returned a {type(built).__name__}, not an optimizer."
            )
        given = built
    if isinstance(given, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS runs the model several times per update, which no strategy can cut. Nothing was trained; use an "
            "optimizer that steps without a closure."
        )
    known = {id(parameter) for parameter in model.parameters()}
    if any(id(p) not in known for group in given.param_groups for p in group["params"]):
        raise ConfigError(
            "the optimizer given to the Trainer was built on parameters that are not the model's. Build it on "
            "model.parameters(), or give a function: optimizer=lambda params: torch.optim.SGD(params, lr=0.1)."
        )
    return given


def refuse_beside_step(training_step: Any, *, compile: bool, metrics: Any) -> None:
    if not callable(training_step):
        raise ConfigError(
            f"training_step must be callable as training_step(model, batch), got {training_step!r}."
        )
    beside = ["compile=True"] * compile + ["metrics="] * bool(metrics)
    if beside:
        raise ConfigError(
            f"{' and '.join(beside)} cannot be beside training_step, which gives shoal a loss and no outputs of the model. Nothing was "
            "trained; leave it out, or give loss= in the place of training_step."
        )


def refuse_as_optimizers(optimizers: Mapping[str, Any], *, is_step: bool, job: Job) -> None:
    """Refuse invalid arguments for several optimizers of one Trainer, before anything is built."""
    name = strategies.parse(job.strategy)
    why = None
    if not is_step:
        why = "it needs training_step=, which gives each of them its loss"
    elif not optimizers or not all(
        callable(each) and not isinstance(each, torch.optim.Optimizer) for each in optimizers.values()
    ):
        why = 'it has to hold functions, {"critic": lambda params: torch.optim.Adam(params), ...}'
    elif job.num_workers > 1 and (not name.is_exact or job.sync_every is not None):
        relaxed = job.strategy if job.sync_every is None else f"--sync-every {job.sync_every}"
        why = f"under '{relaxed}' a batch is one update, and it would be one for each of them: use ddp, fsdp, tp or ps"
    elif name.axes is not None and name.axes.pp != 1:
        why = "pp follows one forward of the model, and a training_step runs what it likes: use ddp, fsdp, tp or ps"
    if why is not None:
        raise ConfigError(f"optimizer= is a dict of optimizers, and {why}. Nothing was trained.")


def _build_as_one(given: Mapping[str, OptimizerFactory], model: nn.Module) -> torch.optim.Optimizer:
    """One optimizer with the parameter groups of all: it skips parameters without a gradient."""
    known = dict(model.named_children())
    seen: dict[int, str] = {}
    whole: torch.optim.Optimizer | None = None
    for name, factory in given.items():
        if name not in known:
            raise ConfigError(
                f"optimizer= has an entry '{name}', and the model has no part of that name: it has {', '.join(known) or 'none'}. "
                "Nothing was trained; name an attribute of the model that is a module."
            )
        for path, parameter in known[name].named_parameters(prefix=name):
            if id(parameter) in seen:
                raise ConfigError(
                    f"'{path}' belongs to the optimizers '{seen[id(parameter)]}' and '{name}' of the model. Nothing was trained; let "
                    "each parameter have one."
                )
            seen[id(parameter)] = name
        built = build_optimizer(factory, known[name])
        if whole is None:
            whole = built
        elif type(built) is not type(whole):
            raise ConfigError(
                f"the optimizers of one Trainer are of one class, with settings of their own, and these are {type(whole).__name__} and "
                f"{type(built).__name__}. Nothing was trained; use one class, or a loop of your own (shoal.setup)."
            )
        else:
            for group in built.param_groups:
                whole.add_param_group(group)
            whole.state.update(built.state)  # Adagrad has some from the beginning
    assert whole is not None
    return whole


def turns_of(given: Any, model: nn.Module) -> list[Turn | None]:
    """Turns of a model's optimizers in a step; a single None where it has one."""
    if not isinstance(given, Mapping):
        return [None]
    own = {name: [p for p in getattr(model, name).parameters() if p.requires_grad] for name in given}
    return [
        Turn(name, tuple(p for other, held in own.items() if other != name for p in held)) for name in given
    ]


def refuse_hooks(job: Job, model: nn.Module) -> None:
    """Refuse gradient hooks that would act on partial gradients; allowed where a worker computes whole batches."""
    name = strategies.parse(job.strategy)
    if job.num_workers > 1 and name.is_exact and job.sync_every is None:
        refuse_gradient_hooks(model, job.strategy, is_cut=name.axes is not None)


def refuse_lookups(job: Job, model: nn.Module) -> None:
    """Refuse torch's tables whose forward or backward depends on which rows a whole batch looks up."""
    name = strategies.parse(job.strategy)
    if job.num_workers == 1 or job.sync_every is not None:
        return
    is_cut = job.num_data_ranks > 1
    in_parts = name.axes is not None and name.axes.pp != 1
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        layer = f"the layer '{path}' ({type(module).__name__})" if path else f"the {type(module).__name__}"
        if module.max_norm is not None and is_cut:
            raise ConfigError(
                f"{layer} has max_norm={module.max_norm:g}: forward rescales the rows that it looks up, in place, and under '{job.strategy}' a "
                "worker looks up those of its own slice alone, so that workers would hold different weights. Nothing was trained; leave "
                "max_norm out, or use --strategy tp or pp, where every worker sees whole batches."
            )
        if module.scale_grad_by_freq and name.is_exact and (is_cut or in_parts):
            raise ConfigError(
                f"{layer} has scale_grad_by_freq=True: backward divides by how often a row is looked up in a batch, and under '{job.strategy}' "
                "it sees a part of the batch alone. Nothing was trained; leave it out, or use --strategy tp."
            )


def device_of(job: Job, said: str | torch.device | None) -> torch.device:
    """Device of this worker's model: the script's, or the job's. Refuses a missing device."""
    placed = placement.of_job(job, None if said is None else str(said))
    if (
        placed.accelerator is not None
        and job.num_workers > 1
        and not strategies.parse(job.strategy).has_servers
    ):
        launched_on = placement.of_job(job)
        if placed.devices != launched_on.devices:
            raise ConfigError(
                f"Trainer(device={str(said)!r}) puts the {job.num_workers} workers on {', '.join(placed.devices)}, and they were "
                f"started to exchange on {', '.join(launched_on.devices)} (--device {job.device}). Nothing was trained; leave device= out "
                f"of the Trainer, and start with --device {said}."
            )
    if job.rank == 0:
        for note in placed.notes:
            print(f"note: {note}", file=sys.stderr, flush=True)
    return torch.device(placed.devices[job.rank])


PRECISIONS = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision of the Trainer to the type that forward runs in by autocast."""

OTHER_PRECISIONS = {
    "bf16-mixed": "bf16",
    "bfloat16": "bf16",
    "32-true": "float32",
    "fp32": "float32",
    "float16": "fp16",
    "half": "fp16",
    "16-mixed": "fp16",
    "fp16-mixed": "fp16",
}
"""Names of Trainer(precision=) in other libraries."""


def refuse_fp16(job: Job) -> None:
    """Refuse a loss scale where ranks do not decide a step together."""
    why = None
    if job.num_workers > 1 and not strategies.parse(job.strategy).is_exact:
        why = f"under '{job.strategy}' each worker's push is an update of its own: use ps, ddp or fsdp"
    elif job.sync_every is not None:
        why = f"with --sync-every {job.sync_every} each worker steps alone: leave it out"
    elif job.num_workers > 1 and COMPRESSORS.parse(job.compress)[0].name != "none":
        why = f"--compress {job.compress} rounds gradients, or keeps what it left out of them, at the scale of their step: leave it out"
    if why is not None:
        raise ConfigError(
            f"precision='fp16' scales the loss, and all workers have to skip the same steps and change the scale together; {why}, or "
            "use precision='bf16', which needs no scale. Nothing was trained."
        )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_callable(name: str, value: Any, hint: str, kind: type) -> None:
    if not isinstance(value, kind) and not callable(value):
        raise ConfigError(f"{name} must be {hint}, got {value!r}.")


def check_limit(name: str, value: int | None, *, least: int = 1) -> None:
    if value is not None and (not isinstance(value, int) or value < least):
        what = "a positive integer" if least else "a positive integer, or 0"
        raise ConfigError(f"{name} must be {what}, got {value!r}.")


# ---- signals and display in a plain process ---------------------------------------------------------


_asked: str | None = None


def asked_to_leave() -> str | None:
    return _asked or session.stop_requested()


@contextlib.contextmanager
def signals_finish_the_step() -> Iterator[None]:
    """Context in which the first Ctrl-C or SIGTERM asks the loop to leave and the second one interrupts."""
    global _asked
    job = jobs.current()
    if job.launched or job.task is not None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        global _asked
        if _asked is not None:
            raise KeyboardInterrupt
        _asked = signal.Signals(number).name
        print("finishing the step and saving; Ctrl-C again to leave now", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _asked = None


@contextlib.contextmanager
def drawn_here(job: Job, *, wanted: bool) -> Iterator[None]:
    """Context that draws reported progress, unless the supervisor does or the script disabled it."""
    if job.launched or job.task is not None or not wanted or sys.stdout is None or sys.stderr is None:
        yield
        return
    # A notebook's streams only take text; a cell shows plain lines.
    display = open_display(binary(sys.stdout), binary(sys.stderr))

    def show(progress: Progress) -> None:
        display.update(progress)
        display.tick()

    session.listen(show)
    try:
        with display.owning_prints():
            yield
    finally:
        session.listen(None)
        display.close()
