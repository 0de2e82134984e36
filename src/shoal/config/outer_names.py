"""How models that were trained apart become one again, by name, and what `--sync-every` cannot go with.

Names only; `shoal.parallel.local_sgd.local_sgd` does it.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.config import named_settings
from shoal.config.named_settings import Setting
from shoal.errors import ConfigError

OUTERS = {
    "average": "the models' average, weighted by what each was trained on (local SGD)",
    "nesterov:lr=0.7,momentum=0.9": "a step with Nesterov momentum towards that average (DiLoCo)",
}

_SETTINGS = {
    "average": {},
    "nesterov": {"lr": Setting(0.7, 1e-6, 10.0), "momentum": Setting(0.9, 1e-6, 0.9999)},
}

MAX_SYNC_EVERY = 1_000_000
"""Beyond it the workers never meet within any run, and a number is a slip of the hand."""


class Outer(NamedTuple):
    """The step from the last common model towards the average, as torch.optim.SGD takes it."""

    lr: float = 1.0
    momentum: float = 0.0


def parse(said: str) -> Outer:
    """What a name means; refuses what means nothing."""
    _, settings = named_settings.parse(said, _SETTINGS, what="outer optimizer", shown=OUTERS)
    return Outer(**settings)


def check(sync_every: int | None, outer: str, *, strategy: str) -> None:
    """Refuse what cannot be meant, or not together."""
    parse(outer)
    if sync_every is None:
        if outer != "average":
            raise ConfigError(
                f"--outer {outer} says what becomes of models that workers trained apart for --sync-every steps, and that was not "
                "given. Nothing was started; add --sync-every 10, or leave --outer out."
            )
        return
    if not 1 <= sync_every <= MAX_SYNC_EVERY:
        raise ConfigError(
            f"--sync-every {sync_every} is no number of steps between two averages: give one from 1 to {MAX_SYNC_EVERY}. "
            "Nothing was started."
        )
    if strategy != "ddp":
        others = (
            "one process, which has nobody to average with"
            if strategy == "single"
            else f"--strategy {strategy}, whose workers share what they train at every step"
        )
        raise ConfigError(
            f"--sync-every {sync_every} lets workers train whole models apart and averages them, and this is {others}. Nothing "
            "was started; use it with --strategy ddp and -n 2 or more, or leave it out."
        )


def refuse_own_loop(sync_every: int | None) -> None:
    """Nobody would tell when the workers of a script's own loop have to meet for the last time."""
    if sync_every is not None:
        raise ConfigError(
            f"--sync-every {sync_every} has workers train apart and meet now and then, and a loop of the script's own (shoal.setup) "
            "does not say where it ends: its workers would stay apart. Nothing was trained; use shoal.Trainer, or leave "
            "--sync-every out."
        )


def refuse_plateau_of_steps(sync_every: int | None) -> None:
    """A schedule that follows losses would be another one on every worker."""
    if sync_every is not None:
        raise ConfigError(
            f"ReduceLROnPlateau with scheduler_every='step' watches the loss of every step, which under --sync-every {sync_every} is each "
            "worker's own: their learning rates would part. Nothing was trained; use scheduler_every='epoch'."
        )
