"""Losses and optimizers by name, the rule by which a learning rate follows the number of workers, and params.

shoal.Trainer(model, loss="cross_entropy", optimizer="adamw", lr=1e-3)
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shoal.data.batches import Batches
from shoal.errors import ConfigError

LOSSES: dict[str, type[nn.Module]] = {
    "cross_entropy": nn.CrossEntropyLoss,
    "nll": nn.NLLLoss,
    "bce": nn.BCELoss,
    "bce_with_logits": nn.BCEWithLogitsLoss,
    "mse": nn.MSELoss,
    "mae": nn.L1Loss,
    "smooth_l1": nn.SmoothL1Loss,
    "huber": nn.HuberLoss,
    "poisson_nll": nn.PoissonNLLLoss,
    "kl_div": nn.KLDivLoss,
}

OTHER_LOSSES = {
    "l1": "mae",
    "l2": "mse",
    "mean_squared_error": "mse",
    "mean_absolute_error": "mae",
    "sparse_categorical_crossentropy": "cross_entropy",
    "categorical_crossentropy": "cross_entropy",
    "crossentropy": "cross_entropy",
    "binary_crossentropy": "bce_with_logits",
    "binary_cross_entropy": "bce",
    "binary_cross_entropy_with_logits": "bce_with_logits",
    "logloss": "bce_with_logits",
}
"""Names in Keras, torch's functions and others. Keras's take logits here: omit a softmax or sigmoid at the model's end."""

ELEMENTWISE = ("bce", "bce_with_logits", "mse", "mae", "smooth_l1", "huber", "poisson_nll")
"""Losses that compare each element of the output with the same element of the target."""

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS")
}

SCALES: dict[str, Callable[[int], float]] = {"linear": float, "sqrt": math.sqrt}
"""`scale_lr`: factor of the learning rate, by the number of workers that each have a batch of the given size."""

LR_SCALE = "lr_scale"
"""Setting of a parameter group: the factor included in its learning rate. In checkpoints, for a resume
at another number of workers.
"""


def loss_named(name: str) -> nn.Module:
    known = name.lower().removesuffix("_loss")
    known = OTHER_LOSSES.get(known, known)
    if known not in LOSSES:
        raise ConfigError(
            f"loss='{name}' is no loss that shoal knows.{_guess(known, (*LOSSES, *OTHER_LOSSES))} Nothing was trained; it knows {', '.join(LOSSES)}, "
            "'model' for a model that returns its loss, and any callable of (output, target)."
        )
    loss = LOSSES[known]()
    if known in ELEMENTWISE:
        loss.register_forward_pre_hook(_refuse_broadcast)
    return loss


def _refuse_broadcast(loss: nn.Module, given: tuple[Any, ...]) -> None:
    """Refuse shapes that torch would broadcast, comparing each of N outputs with each of N targets, with only a warning."""
    output, target = given
    if (
        not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor))
        or output.shape == target.shape
    ):
        return
    shape = ", ".join(map(str, (-1, *output.shape[1:])))
    what = f"write y.reshape({shape})" if output.numel() == target.numel() else "let both have one shape"
    raise ConfigError(
        f"the loss {type(loss).__name__} compares the output with the target element by element, and the output has shape "
        f"{tuple(output.shape)}, the target {tuple(target.shape)}. Nothing of this step was applied; {what}, or give the loss as an object, "
        f"loss=nn.{type(loss).__name__}(), to have torch broadcast them."
    )


def optimizer_named(
    name: str, lr: float | None, options: Mapping[str, Any] | None
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """A function of the parameters, checked now rather than when the model is built."""
    kind = OPTIMIZERS.get(name.lower())
    if kind is None:
        raise ConfigError(
            f"optimizer='{name}' is not one of torch.optim.{_guess(name.lower(), OPTIMIZERS)} Nothing was trained; by name there are "
            f"{', '.join(sorted(OPTIMIZERS))}, and optimizer=lambda params: ... takes any other."
        )
    settings = dict(options or {}) | ({"lr": lr} if lr is not None else {})
    taken = [each for each in inspect.signature(kind).parameters if each not in ("self", "params")]
    unknown = [each for each in settings if each not in taken]
    if unknown:
        raise ConfigError(
            f"{kind.__name__} has no setting '{unknown[0]}'.{_guess(unknown[0], taken)} Nothing was trained; it has {', '.join(taken)}."
        )

    def build(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            return kind(params, **settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"optimizer='{name}' cannot be built: {error}. Nothing was trained.") from None

    build([nn.Parameter(torch.zeros(1, 1))])  # a matrix: Muon accepts nothing else
    return build


def _guess(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def check_params(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Hyper-parameters as JSON holds them."""
    if params is None:
        return {}
    try:
        return dict(json.loads(json.dumps(dict(params), allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"params= is written to the run directory and to checkpoints as JSON, and cannot be: {error}. Nothing was trained; give a "
            "dict of numbers, strings, lists and dicts."
        ) from None


# ---- learning rates by the number of workers -----------------------------------------------------


def scale_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
        group[LR_SCALE] = factor
    return optimizer


def rescale_learning_rates(optimizer: torch.optim.Optimizer | None, scheduler: Any, factor: float) -> None:
    """Set learning rates to this job's factor, after loading a checkpoint of another number of workers."""
    ratios = []
    for group in optimizer.param_groups if optimizer is not None else ():
        ratios.append(factor / group[LR_SCALE])
        group[LR_SCALE] = factor
        for name in ("lr", "initial_lr", "max_lr", "min_lr"):
            if name in group:
                group[name] = group[name] * ratios[-1]
    _rescale_scheduler(scheduler, ratios)


def _rescale_scheduler(scheduler: Any, ratios: list[float]) -> None:
    """Rescale the rates that a scheduler keeps per group, and those of the schedulers it is made of."""
    for name in ("base_lrs", "max_lrs", "min_lrs", "_last_lr"):
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list) and len(rates) == len(ratios):
            setattr(scheduler, name, [rate * ratio for rate, ratio in zip(rates, ratios, strict=True)])
    for inner in getattr(scheduler, "_schedulers", ()):
        _rescale_scheduler(inner, ratios)


def describe_scaling(batches: Batches, rates: list[float], rule: str, num_workers: int) -> str:
    """The line at a fit's start. Refuses batches whose size does not follow the number of workers."""
    size, of_all = batches.batch_size(1), batches.batch_size(num_workers)
    if size and batches.batch_size(2) == size:
        raise ConfigError(
            f"scale_lr='{rule}' multiplies the learning rate because {num_workers} workers make an update {num_workers} times larger, and "
            f"batch({size}) is the batch of one update at any number of workers. Nothing was trained; write batch({size}, "
            "per_worker=True), or leave scale_lr out."
        )
    factor = SCALES[rule](num_workers)
    each = f" ({size} x {num_workers} workers)" if size else ""
    told = ", ".join(f"{rate:g} ({rate / factor:g} x {factor:g})" for rate in dict.fromkeys(rates))
    return f"global batch {of_all}{each}, learning rate {told} by scale_lr='{rule}'"
