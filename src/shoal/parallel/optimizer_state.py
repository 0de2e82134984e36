"""An optimizer's state without pickle: tensors as pieces, the rest as JSON, both by parameter name.

Names, not positions: a checkpoint is read under another strategy, at another
number of workers and by a fresh process whose parameters are other objects.
Decides what of a saved optimizer fits the one the script built; reads and
writes no file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, OptimizerMismatch
from shoal.parallel.protocol import Piece
from shoal.runtime.serialization import from_plain, to_plain

PREFIX = "optimizer/"

# How a step is executed, not what it computes: the script that loads decides, on its own devices.
_EXECUTION = {"foreach", "fused", "capturable", "differentiable"}


def optimizer_pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Piece]:
    """Every tensor of the state, in the order of the groups."""
    for name, state in _named_state(model, optimizer):
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensor = value.detach()
                yield Piece(f"{PREFIX}{name}/{key}", tensor, tuple(tensor.shape), (0,) * tensor.dim())


def optimizer_settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is not a tensor: the class, the groups' hyper-parameters and who is in them, single numbers of the state."""
    names = _names(model, optimizer)
    kind = type(optimizer).__name__
    groups = [
        {
            "params": [names[parameter] for parameter in group["params"]],
            "settings": {
                key: to_plain(value, f"{kind}'s {key}") for key, value in group.items() if key != "params"
            },
        }
        for group in optimizer.param_groups
    ]
    numbers = {
        name: {
            key: to_plain(value, f"{kind}'s state {key} of {name}")
            for key, value in state.items()
            if not isinstance(value, Tensor)
        }
        for name, state in _named_state(model, optimizer)
    }
    return {
        "class": kind,
        "groups": groups,
        "numbers": {name: held for name, held in numbers.items() if held},
    }


def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pieces: Mapping[str, Tensor],
    settings: dict[str, Any],
    *,
    path: str = "",
    elsewhere: Collection[str] = (),
) -> None:
    """Give an optimizer, built afresh on `model`, the state that was saved. Refuses before it changes anything.

    Saved state under the names in `elsewhere` is somebody else's to load.
    A scheduler must be built before: building one sets the learning rate.
    """
    names = _names(model, optimizer)
    _check(optimizer, names, settings, path)
    parameters = {name: parameter for parameter, name in names.items()}
    state = _read(pieces, parameters, path, elsewhere)
    for name, numbers in settings["numbers"].items():
        state.setdefault(name, {}).update({key: from_plain(value) for key, value in numbers.items()})

    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()
    for name, held in state.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: _placed(key, value, parameter, groups[parameter]) if isinstance(value, Tensor) else value
            for key, value in held.items()
        }
    _set_groups(optimizer, settings)


def load_settings(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any], *, path: str = ""
) -> None:
    """The groups' hyper-parameters alone, where the state is kept elsewhere. Refuses as `load_optimizer` does."""
    _check(optimizer, _names(model, optimizer), settings, path)
    _set_groups(optimizer, settings)


def _set_groups(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> None:
    for group, saved in zip(optimizer.param_groups, settings["groups"], strict=True):
        for key, plain in saved["settings"].items():
            if key not in _EXECUTION:
                _set(group, key, from_plain(plain))


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Names of the optimizer's parameters, in the order of its groups."""
    known: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    names = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise ConfigError(
                    f"the optimizer trains a tensor of shape {tuple(parameter.shape)} that is not a parameter of the model, "
                    "so a checkpoint has no name for its state. Nothing was saved or loaded; register it in the model "
                    "with nn.Parameter, or build the optimizer from the parameters it is given."
                )
            names[parameter] = known[parameter]
    return names


def _named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS cannot be saved or spread over workers: it calls the loss several times within one step and keeps a "
            "history that is not per parameter. Nothing was saved; use another optimizer."
        )
    for parameter, name in _names(model, optimizer).items():
        if parameter in optimizer.state:
            yield name, optimizer.state[parameter]


def _check(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str], settings: dict[str, Any], path: str
) -> None:
    kind, saved_kind = type(optimizer).__name__, settings["class"]
    if kind != saved_kind:
        raise OptimizerMismatch(path=path, problem=f"it is {saved_kind}, the script builds {kind}")
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    saved_groups = [group["params"] for group in settings["groups"]]
    if len(groups) != len(saved_groups):
        raise OptimizerMismatch(
            path=path, problem=f"it has {len(saved_groups)} parameter groups, the script builds {len(groups)}"
        )
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if set(group) != set(saved):
            only_saved = sorted(set(saved) - set(group)) or ["nothing"]
            only_here = sorted(set(group) - set(saved)) or ["nothing"]
            raise OptimizerMismatch(
                path=path,
                problem=f"parameter group {number} holds {', '.join(only_saved[:5])} there alone and "
                f"{', '.join(only_here[:5])} here alone",
            )


def _read(
    pieces: Mapping[str, Tensor], parameters: dict[str, Tensor], path: str, elsewhere: Collection[str]
) -> dict[str, dict[str, Any]]:
    state: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        if piece.startswith(PREFIX):
            name, _, key = piece.removeprefix(PREFIX).rpartition("/")
            if name in elsewhere:
                continue
            if name not in parameters:
                raise OptimizerMismatch(
                    path=path, problem=f"it has state for {name}, which the script's optimizer does not train"
                )
            state.setdefault(name, {})[key] = pieces[piece]
    return state


def _placed(key: str, value: Tensor, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """A copy where the optimizer wants it. Keeps the saved dtype: torch's own loading rounds to the parameter's."""
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    device = parameter.device if on_device else torch.device("cpu")
    if value.shape == parameter.shape and value.dim() > 0:
        # Strides like the parameter's, as the optimizer itself would have made it.
        return torch.empty_like(parameter, dtype=value.dtype, device=device, requires_grad=False).copy_(value)
    return value.to(device=device, copy=True)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    held = group.get(key)
    if isinstance(held, Tensor) and isinstance(value, (Tensor, float)):
        held.fill_(value)  # in place: a scheduler, or a compiled step, may hold the same tensor
    elif isinstance(value, Tensor):
        group[key] = value.to(group["params"][0].device) if group.get("capturable") else value
    else:
        group[key] = value
