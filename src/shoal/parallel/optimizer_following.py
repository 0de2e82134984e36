"""An optimizer that was built before its model was cut: its groups follow the parameters to what they became."""

from __future__ import annotations

import torch
from torch import nn

from shoal.errors import ConfigError


def names_of(model: nn.Module) -> dict[int, str]:
    """The parameters as they are, by identity."""
    return {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}


def follow(optimizer: torch.optim.Optimizer, before: dict[int, str], model: nn.Module, strategy: str) -> None:
    """Let `optimizer`, built on the parameters named `before`, train those that the model now has under these names."""
    if optimizer.state:
        raise ConfigError(
            f"the optimizer given to the Trainer has taken steps already, and '{strategy}' cuts the parameters that its state "
            "belongs to. Nothing was trained; give a function, optimizer=lambda params: torch.optim.Adam(params), and take the "
            "state over with a checkpoint."
        )
    now = dict(model.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        # Whoever is no parameter of the model is refused where the optimizer is taken over.
        group["params"] = [now.get(before.get(id(each), ""), each) for each in group["params"]]
