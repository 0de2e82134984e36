"""`shoal verify`: is what the workers compute what one process would compute?

Runs the script's first steps several times, each run a job forked from the
same warm parent, and shows how far the weights came apart. What decides is
`shoal.cli.equality`; the worker's side is `shoal.train.verification`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.options import Replicas, Script, Servers, Strategy, Workers, takes_parallel_options
from shoal.cli.verb import console, leave
from shoal.config import strategy as strategies
from shoal.config.choices import COMPRESSORS
from shoal.config.parallel_options import ParallelOptions, as_typed, options_of
from shoal.errors import ClusterError, ConfigError, ScriptFailed

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.cli.equality import Difference, Dump, Judged, Mix, VerifyOutcome
    from shoal.cluster.launch.api import LaunchConfig
    from shoal.cluster.supervisor.warm_parent import WarmParent

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal verify -n 3 --strategy ddp train.py\n"
    "  shoal verify -n 4 --steps 50 train.py --lr 0.1       --lr is the script's\n"
    "  shoal verify -n 4 train.py -- --seed 1               so is what follows --, where shoal has such an option too\n"
    "\n"
    "Exit code 0: equal up to rounding; 1: not equal; otherwise the script's own."
)

MAX_ROWS = 12
"""Parameters shown: those that differ most."""

MAX_LOG_CHARS = 4000
"""Of the coordinator's last words, where a run ended with it."""

NOT_VERIFIED = ("shard", "snapshot_every")
"""One process that runs the workers' slices in turn divides a batch evenly; and it never restores a snapshot."""


@takes_parallel_options(but_not=NOT_VERIFIED)
def verify(
    script: Script,
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="What follows SCRIPT is the script's own, options too."),
    ] = None,
    workers: Workers = 2,
    strategy: Strategy = None,
    servers: Servers = None,
    replicas: Replicas = None,
    *,
    parallel: ParallelOptions,
    steps: Annotated[int, typer.Option("--steps", metavar="STEPS", min=1, help="Steps to compare.")] = 20,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            metavar="X",
            min=0.0,
            help="Largest difference in float64, relative to the largest value.",
        ),
    ] = 1e-9,
    seed: Annotated[
        int,
        typer.Option("--seed", metavar="N", min=0, help="Seeds the script's global generators in every run."),
    ] = 0,
) -> None:
    """Check that workers compute what one process does.

    The script's first steps run spread over the workers and in one process, in
    float64, where rounding cannot hide a difference, and in float32 beside it.
    """
    from shoal.cli.equality import CannotCast, check

    chosen = strategies.choose(strategy, workers)
    if not strategies.parse(chosen).is_exact:
        raise ConfigError(
            f"'{chosen}' does not compute what one process does, and says so: it trades that for speed, so there is nothing to "
            "verify. Nothing was started; verify the script with --strategy ps, and compare the relaxed one by its metrics."
        )
    _refuse_what_is_meant_to_differ(parallel)
    job = {"script": script, "args": tuple(args or ()), "workers": workers, "strategy": chosen, "seed": seed}
    with temporary_job(**job, servers=servers, replicas=replicas, **options_of(parallel)) as (config, warm):
        try:
            outcome = check(
                VerifyRuns(config, warm, num_steps=steps),
                num_workers=strategies.num_slices(chosen, workers),
                tolerance=tolerance,
            )
        except CannotCast as failed:  # in a run where it had not failed before
            failed.leave()
            raise
    screen = console()
    rested = outcome.rested
    judged = rested if rested is not None and rested.differing else outcome.judged
    screen.print(table(judged, is_float32=outcome.is_float32))
    for line in conclusion(outcome, config, asked_steps=steps, tolerance=tolerance):
        screen.print(line, soft_wrap=not screen.is_terminal)
    raise typer.Exit(0 if outcome.equal else 1)


@contextmanager
def temporary_job(**settings: Any) -> Iterator[tuple[LaunchConfig, WarmParent]]:
    """A job to run several times, in a temporary run directory and from one warm parent."""
    from shoal.cluster.launch.api import LaunchConfig, launch
    from shoal.cluster.launch.roles import preload_for
    from shoal.cluster.supervisor.warm_parent import WarmParent

    with tempfile.TemporaryDirectory(prefix="shoal-") as directory:
        config = LaunchConfig(run_dir=directory, quiet=True, **settings)
        if not Path(config.script).is_file():
            launch(config)  # refuses it, before a warm parent is started for nothing
        preload = preload_for(config.script, with_servers=config.num_servers > 0, with_mesh=config.is_mesh)
        with WarmParent(preload=preload) as warm:
            yield config, warm


@dataclass(slots=True)
class VerifyRuns:
    """Runs the script once more each time it is called, and reads what that run left."""

    config: LaunchConfig
    """The spread run; its run directory is temporary and takes all of them."""

    warm: WarmParent
    num_steps: int
    num_runs: int = field(default=0, init=False)

    def __call__(
        self,
        dtype: str,
        *,
        spread: bool,
        num_slices: int = 1,
        num_micro: int | None = None,
        at_rest: tuple[str, ...] = (),
    ) -> Dump:
        """One run. A script that fails ends the verb as it would end `shoal run`."""
        from shoal.cli.equality import RESTING_STEPS, CannotCast, read_dump
        from shoal.cluster.launch.api import launch
        from shoal.config.job import VerifyPlan

        self.num_runs += 1
        dump_to = Path(self.config.run_dir) / f"dump-{self.num_runs}"
        plan = VerifyPlan(
            dtype=dtype,
            num_steps=min(self.num_steps, RESTING_STEPS) if at_rest else self.num_steps,
            at_rest=at_rest,
            dump_to=str(dump_to),
            num_slices=num_slices,
            num_micro=num_micro,
            stands_for=1 if spread else self.config.workers,
        )
        config = replace(self.config, name=f"verify-{self.num_runs}", verify=plan)
        if not spread:
            first, soft = self.config.device.split(",")[0], self.config.soft_placement
            alone = options_of(ParallelOptions(device=first, soft_placement=soft))
            config = replace(config, workers=1, strategy="single", servers=None, replicas=None, **alone)
        with open(Path(self.config.run_dir) / "output", "wb") as said:
            result = launch(config, warm=self.warm, stdout=said, stderr=said)
        if isinstance(result.error, ScriptFailed):
            # In float64 it may fail because of the cast, which is verify's doing and not the script's.
            raise CannotCast(lambda: leave(result))
        if result.exit_code:
            # The error may point to this log, which goes with the temporary directory.
            log = result.run_dir / "logs" / "coordinator.log"
            if isinstance(result.error, ClusterError) and log.exists():
                typer.echo(log.read_text(errors="replace")[-MAX_LOG_CHARS:], err=True, nl=False)
            leave(result)
        dump = read_dump(dump_to)
        if dump is None:
            raise ConfigError(
                f"the script '{self.config.script}' ended without training, so there is nothing to compare: it neither "
                "called Trainer.fit nor stepped the optimizer that shoal.setup returned (weights that the script writes itself are no step). "
                "Nothing was changed; check "
                "that it trains when it is run with these arguments."
            )
        is_cut = strategies.num_slices(config.strategy or "ddp", config.workers) > 1
        named = _named(dump.mixes)
        if spread and config.batchnorm == "sync" and dump.mixes and is_cut:
            raise ConfigError(
                f"this cannot be verified: {named} draws other numbers on every worker, so one process would have to run the workers' "
                "slices in turn, and --batchnorm sync normalises all of them at once. Nothing was changed; verify with dropout set "
                "to 0, or without --batchnorm sync."
            )
        kinds = {each.strip().partition(":")[0] for each in config.device.split(",")}
        if spread and len(kinds) > 1 and dump.mixes:
            raise ConfigError(
                f"this cannot be verified: {named} sees the slice of a worker and not the batch, and with --device {config.device} "
                "slices are as large as each device is fast, and random numbers those of its kind. Nothing was changed; verify on "
                "devices of one kind."
            )
        resting = ", with the layers named at rest" if at_rest else ""
        typer.echo(
            f"{dtype}: {dump.num_steps} steps {_how(config, num_slices, num_micro)}{resting}", err=True
        )
        return dump


def _named(mixes: Sequence[Mix]) -> str:
    return ", ".join(f"{mix.layer} ({mix.kind})" for mix in mixes[:3])


def _refuse_what_is_meant_to_differ(parallel: ParallelOptions) -> None:
    """Refuse options that give up the result of one process on purpose: no reference exists for them."""
    if COMPRESSORS.parse(parallel.compress)[0].name != "none":
        why = f"--compress {parallel.compress} sends gradients rounded or in part"
        what = "--compress"
    elif parallel.sync_every is not None:
        why = f"--sync-every {parallel.sync_every} lets workers train apart and averages their models"
        what = "--sync-every"
    else:
        return
    raise ConfigError(
        f"{why}: the weights are not those of one process, by no tolerance that holds for every model and "
        f"optimizer. Nothing was started; verify the script without {what}, then run it both ways with `shoal run` and compare the "
        "losses, a line for each step in metrics.jsonl of both runs."
    )


def _how(config: LaunchConfig, num_slices: int, num_micro: int | None) -> str:
    if config.workers > 1:
        return f"with {_spread(config)} on {config.workers} workers"
    how = f"in one process, as {num_slices} slices in turn" if num_slices > 1 else "in one process"
    return f"{how}, in {num_micro} micro-batches" if num_micro is not None and num_micro > 1 else how


def _spread(config: LaunchConfig) -> str:
    return f"{config.strategy}{as_typed(config)}"


def table(judged: Judged, *, is_float32: bool = False) -> Table:
    """The parameters that differ most, in float64 and float32, and the losses."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("parameter or buffer", overflow="fold")
    for column in ("float32", "relative") if is_float32 else ("float64", "relative", "float32", "relative"):
        drawn.add_column(column, justify="right", no_wrap=True)
    beside = {tensor.name: tensor for tensor in judged.float32.tensors}
    for tensor in judged.float64.tensors[:MAX_ROWS]:
        cells = () if is_float32 else _cells(beside.get(tensor.name))
        drawn.add_row(tensor.name, *_cells(tensor), *cells)
    if len(judged.float64.tensors) > MAX_ROWS:
        drawn.add_row(f"and {len(judged.float64.tensors) - MAX_ROWS} that differ less")
    drawn.add_section()
    cells = () if is_float32 else _cells(judged.float32.losses)
    drawn.add_row("loss of a step", *_cells(judged.float64.losses), *cells)
    return drawn


def _cells(difference: Difference | None) -> tuple[str, str]:
    if difference is None:
        return "-", "-"
    if difference.note:
        return difference.note, ""
    return f"{difference.absolute:.1e}", f"{difference.relative:.1e}"


def conclusion(
    outcome: VerifyOutcome, config: LaunchConfig, *, asked_steps: int, tolerance: float
) -> Iterator[str]:
    """The outcome in sentences; the last one answers the question."""
    from shoal.cli.equality import ROUNDED

    float64, float32 = outcome.judged.float64, outcome.judged.float32
    num_slices = strategies.num_slices(config.strategy or "ddp", config.workers)
    in_turn = f"one process ran the {num_slices} workers' slices in turn, with the workers' seeds"
    if num_slices == 1:
        in_turn = "one process ran the batch with the workers' seeds"
    if outcome.is_float32:
        tolerance = max(tolerance, ROUNDED)
        yield (
            "The script fails in float64, to which verify casts its model and data (a constant of its own is float32, say), so it was "
            "compared in float32: rounding cannot be told from a small mistake there."
        )
    if outcome.num_steps < asked_steps:
        yield f"The script trains for {outcome.num_steps} steps; {asked_steps} were asked for."
    for found in float64.nonfinite:
        yield (
            f"{found.name} holds {found.num_nonfinite} values that are not finite, the same ones on both sides. "
            "They count as equal."
        )
    if outcome.mixes:
        if outcome.is_own_loop:
            in_turn = "both sides ran them in evaluation mode, a loop of its own cannot run slices in turn"
        yield f"Some layers see the slice of a batch and not the batch, so {in_turn}:"
        for mix in outcome.mixes:
            yield f"  {mix.layer} ({mix.kind}) {mix.why}"
    if outcome.still_drawing:
        yield (
            f"{_named(outcome.still_drawing)} draws random numbers in evaluation mode too, so nothing was compared with whole batches: a layer that "
            "mixes the batch unnamed would not show. The loss was checked by itself, at each step."
        )
    if outcome.judged.rounding:
        yield (
            f"{_listed(outcome.judged.rounding)} in float64, and count as equal: they differ far more in float32, so "
            "the difference shrinks with the precision, as rounding does and a mistake does not. Their gradient is "
            "zero but for rounding (a bias before a BatchNorm, say), and the optimizer enlarges what is left."
        )
    spread = f"{_spread(config)} on {config.workers} worker{'s' if config.workers > 1 else ''}"
    if outcome.equal and outcome.is_float32:
        yield (
            f"equal: {spread} computes what one process does, up to rounding: the largest difference is "
            f"{float32.worst().relative:.1e} in float32 (tolerance {tolerance:.0e})."
        )
        return
    if outcome.equal:
        explained = {found.name for found in outcome.judged.rounding}
        yield (
            f"equal: {spread} computes what one process does. The largest {'other ' if explained else ''}difference is "
            f"{float64.worst(leaving_out=explained).relative:.1e} in float64 (tolerance {tolerance:.0e}) and "
            f"{float32.worst(leaving_out=explained).relative:.1e} in float32."
        )
        return
    differing, against = outcome.judged.differing, "one process"
    if outcome.rested is not None and outcome.rested.differing:
        differing = outcome.rested.differing
        against = "one process with whole batches, though the layers above were at rest in both (in evaluation mode)"
    yield (
        f"not equal: {spread} computes something else than {against}. Beyond the tolerance of {tolerance:.0e} are "
        f"{len(differing)} of {len(float64.all)} rows: {_listed(differing)} in {'float32' if outcome.is_float32 else 'float64'}, which is not rounding. "
        f"{_likely_cause(outcome)}"
    )


def _likely_cause(outcome: VerifyOutcome) -> str:
    """Observed causes first, then those that cannot be observed: a script's own arithmetic leaves no trace."""
    if outcome.suspects:
        return (
            f"The cause is likely {_named(outcome.suspects)}, which mixes the samples of a batch: run together and in pairs, the same "
            "samples come out different, and a worker has its own slice alone. Let it see the rows of all workers "
            "(shoal.gather), or use a BatchNorm with --batchnorm sync."
        )
    of_rank = ""
    if outcome.rank_asked_at:
        of_rank = f"code that depends on the rank, which the script asks for in {'; '.join(outcome.rank_asked_at[:3])}, or "
    of_loss = "a loss that is no mean over its samples, such as a mean over a mask (let it return a pair (sum, count))"
    if outcome.is_own_loop:
        return (
            f"The cause is likely {of_rank}gradients that are clipped or changed by arithmetic of the script's own before "
            "optimizer.step() sums them (shoal.clip_grad_norm_ sees sums), or "
            f"{of_loss.replace('let it return', 'shoal.mean takes')}."
        )
    if outcome.depends_on_cut or outcome.rested is not None:
        return (
            "It depends on how the batch is cut: one process that runs the workers' slices in turn gets what they get. The cause is likely "
            f"{of_loss}."
        )
    return (
        "How the batch is cut does not explain it. The cause is likely "
        f"{of_rank or 'code that depends on the rank (an environment variable, a file), or '}a penalty on parameters that is no part of a "
        "mean over samples."
    )


def _listed(differences: Sequence[Difference]) -> str:
    shown = [f"{found.name} {found.note or f'differs by {found.relative:.1e}'}" for found in differences[:3]]
    more = [f"{len(differences) - 3} more"] if len(differences) > 3 else []
    return " and ".join(
        [", ".join((shown + more)[:-1]), (shown + more)[-1]] if len(shown + more) > 1 else shown
    )
