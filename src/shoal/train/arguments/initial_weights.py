"""`init_from`: initial weights, from a checkpoint, a safetensors file or a .pth file, whole or in part.

Runs on every rank before a strategy has partitioned or moved anything. A resumed or replaced worker
loads newer weights afterwards. A .pth file is read with weights only: nothing in it is executed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from shoal.errors import CheckpointError, ConfigError
from shoal.train.checkpoint.checkpoint import MODEL, open_checkpoint
from shoal.train.checkpoint.storage import MANIFEST, Place

_WITHIN = ("state_dict", "model_state_dict", "model", "module", "weights")
"""Keys under which training scripts keep the weights in a .pth file, beside other things."""

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Result for each tensor."""

    loaded: list[str]
    skipped: dict[str, str]
    """Tensors only in the file, or of another shape, with the reason."""

    missing: list[str]
    """Tensors of the model missing in the file: they keep their initial values."""

    untouched: list[str]
    """Layers of the model without any loaded tensor."""

    def describe(self, path: str) -> str:
        said = [
            f"init_from {path}: {len(self.loaded)} of {len(self.loaded) + len(self.missing)} tensors loaded"
        ]
        if self.skipped:
            said.append(f"skipped {_listed([f'{name} ({why})' for name, why in self.skipped.items()])}")
        if self.missing:
            said.append(f"missing {_listed(self.missing)}")
        return "; ".join(said)


@torch.no_grad()
def initialise(model: nn.Module, path: str | os.PathLike[str], *, is_partial: bool) -> LoadedWeights:
    """Copy matching weights into the model; first refuses a file that would leave a part of it unloaded."""
    url = os.fspath(path)
    held = _read(url)
    own = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    held = _without_prefix(held, own)
    fitting = {name for name in own if name in held and held[name].shape == own[name].shape}
    skipped = {
        name: "not in the model"
        if name not in own
        else f"{list(tensor.shape)} there, {list(own[name].shape)} in the model"
        for name, tensor in held.items()
        if name not in fitting
    }
    missing = [name for name in own if name not in fitting]
    touched = {name.rpartition(".")[0] for name in fitting}
    layers = dict.fromkeys(name.rpartition(".")[0] for name in missing)
    result = LoadedWeights(
        [name for name in own if name in fitting],
        skipped,
        missing,
        [layer or "the model itself" for layer in layers if layer not in touched],
    )
    if not fitting:
        raise ConfigError(
            f"init_from={url!r} holds {len(held)} tensors and none of them is one of the model's {len(own)}: it has "
            f"{_listed(sorted(held))}, the model {_listed(sorted(own))}. Nothing was trained; it is of another model, or under other names."
        )
    if missing and not is_partial:
        left = result.untouched or missing
        raise ConfigError(
            f"init_from={url!r} has nothing for {len(missing)} of the model's {len(own)} tensors, so {_listed([repr(each) for each in left])} would begin with random "
            f"weights. Nothing was trained. {result.describe(url)}. If that is meant, as for a new head, say init_partial=True."
        )
    for name in result.loaded:
        own[name].copy_(held[name])
    return result


def _read(url: str) -> dict[str, Tensor]:
    place = Place.at(url)
    if place.fs.isfile(place.path):
        with place.fs.open(place.path, "rb") as source:
            if url.endswith(".safetensors"):
                try:
                    return load_safetensors(source.read())
                except SafetensorError as error:
                    raise CheckpointError(
                        f"{url} is no safetensors file: {error}. Nothing was loaded."
                    ) from None
            return _read_pickled(url, source)
    if place.has(MANIFEST):
        pieces = open_checkpoint(url).pieces
        return {name.removeprefix(MODEL): pieces[name] for name in pieces if name.startswith(MODEL)}
    if place.has("model.safetensors"):  # as Hugging Face saves a model
        return _read(f"{url.rstrip('/')}/model.safetensors")
    names = place.names()
    what = f"it has {_listed(names)}" if names else "it is not there"
    raise CheckpointError(
        f"init_from={url!r} is neither a checkpoint nor a file of weights: {what}. Nothing was loaded; name a directory of trainer.save or "
        "of a checkpoint, a .safetensors or a .pth file."
    )


def _read_pickled(url: str, source: Any) -> dict[str, Tensor]:
    try:
        found = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if type(error).__name__ == "UnpicklingError":  # whose text advises to execute what is in it
            why = "it holds other objects than tensors, a whole model perhaps, or is damaged"
        raise CheckpointError(
            f"{url} cannot be read as weights alone ({why}). Nothing was loaded, and nothing in it was "
            "executed; save it again with torch.save(model.state_dict(), path)."
        ) from None
    for key in _WITHIN:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    if not isinstance(found, Mapping) or not any(isinstance(each, Tensor) for each in found.values()):
        raise CheckpointError(
            f"{url} holds a {type(found).__name__} and no state_dict. Nothing was loaded; save it with "
            "torch.save(model.state_dict(), path)."
        )
    return {str(name): each for name, each in found.items() if isinstance(each, Tensor)}


def _without_prefix(held: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without the prefixes of DistributedDataParallel, torch.compile and Lightning, if the model has none."""
    for prefix in ("module.", "_orig_mod.", "model."):
        if all(name.startswith(prefix) for name in held) and not any(name.startswith(prefix) for name in own):
            return {name.removeprefix(prefix): tensor for name, tensor in held.items()}
    return held


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
