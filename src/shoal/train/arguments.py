"""What a Trainer is given, checked before anything runs; and what it takes where nothing is given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shoal.config import placement
from shoal.config import strategy as strategies
from shoal.config.job import Job
from shoal.errors import ConfigError
from shoal.runtime.seeds import mix

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def build_model(given: nn.Module | Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """The model that was given, or that the given function builds under `seed`."""
    if not isinstance(given, nn.Module):
        torch.manual_seed(mix(seed))
        built = given()
        if not isinstance(built, nn.Module):
            raise ConfigError(
                f"the function given as model= returned a {type(built).__name__}, not an nn.Module."
            )
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
    given: OptimizerFactory | torch.optim.Optimizer, model: nn.Module
) -> torch.optim.Optimizer:
    """The optimizer that was given, or that the given function builds on the model's parameters."""
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


def device_of(job: Job, said: str | torch.device | None) -> torch.device:
    """Where this worker's model lives: as the script said, or as the job was told. Refuses what is not there."""
    placed = placement.of_job(job, None if said is None else str(said))
    if (
        placed.accelerator is not None
        and job.num_workers > 1
        and not strategies.parse(job.strategy).has_servers
    ):
        told = placement.of_job(job)
        if placed.devices != told.devices:
            raise ConfigError(
                f"Trainer(device={str(said)!r}) puts the {job.num_workers} workers on {', '.join(placed.devices)}, and they were "
                f"started to exchange on {', '.join(told.devices)} (--device {job.device}). Nothing was trained; leave device= out "
                f"of the Trainer, and start with --device {said}."
            )
    if job.rank == 0:
        for note in placed.notes:
            print(f"note: {note}", file=sys.stderr, flush=True)
    return torch.device(placed.devices[job.rank])


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a word that is not one of a few."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_callable(name: str, value: Any, hint: str, kind: type) -> None:
    """Refuse what is neither of a kind nor a function that builds it."""
    if not isinstance(value, kind) and not callable(value):
        raise ConfigError(f"{name} must be {hint}, got {value!r}.")


def check_limit(name: str, value: int | None, *, least: int = 1) -> None:
    """Refuse a count that is not positive, or less than another least."""
    if value is not None and (not isinstance(value, int) or value < least):
        what = "a positive integer" if least else "a positive integer, or 0"
        raise ConfigError(f"{name} must be {what}, got {value!r}.")
