"""Where a model is cut into the stages of a pipeline: which layers follow one another, and what each costs.

Pure but for `measure`, which runs the layers once on a batch. Decides from
the model alone, so every rank comes to the same cut from the same costs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.core.errors import ConfigError
from shoal.strategies.compute import place
from shoal.strategies.protocol import TrainJob

_REPEATS = 3
_PER_LAYER = 1.0  # cost of a layer without parameters, in elements: it is not free


@dataclass(frozen=True, slots=True)
class Layer:
    """One of the layers that run one after the other."""

    name: str
    """Its path in the user's module."""

    module: nn.Module


@dataclass(frozen=True, slots=True)
class Cut:
    """A model as stages."""

    layers: tuple[Layer, ...]
    begins: tuple[int, ...]
    """Number of the layer at which each stage begins; the first is 0."""

    costs: tuple[float, ...]
    """Of each layer, in whatever unit it was measured."""

    @property
    def num_stages(self) -> int:
        """How many."""
        return len(self.begins)

    def stage(self, number: int) -> list[Layer]:
        """The layers of one stage."""
        ends = [*self.begins[1:], len(self.layers)]
        return list(self.layers[self.begins[number] : ends[number]])

    def table(self) -> str:
        """One line for each stage: its layers, its parameters and its part of the cost."""
        whole = sum(self.costs) or 1.0
        ends = [*self.begins[1:], len(self.layers)]
        lines = ["stage  layers                          parameters   cost"]
        for number, (begin, end) in enumerate(zip(self.begins, ends, strict=True)):
            names = self.layers[begin].name
            if end - begin > 1:
                names += f" ... {self.layers[end - 1].name}"
            held = sum(p.numel() for layer in self.layers[begin:end] for p in layer.module.parameters())
            cost = sum(self.costs[begin:end]) / whole
            lines.append(f"{number:5d}  {names:30s}  {held:10,d}  {cost:4.0%}")
        return "\n".join(lines)


def layers_of(model: nn.Module, num_stages: int) -> list[Layer]:
    """The layers that run one after the other, sequences inside sequences laid open; refuses what is no sequence."""
    if not _is_plain(model):
        raise ConfigError(
            f"a {type(model).__name__} cannot be cut into {num_stages} stages: only a model that is an nn.Sequential says by "
            "itself in which order its layers run, and that nothing but the last one's output reaches the next. Nothing "
            "was trained; build it as nn.Sequential(...), or use fsdp or tp."
        )
    found: list[Layer] = []

    def visit(path: str, module: nn.Module) -> None:
        # Not named_children: that leaves out a layer that comes a second time.
        for name, child in module._modules.items():
            assert child is not None
            inner = f"{path}.{name}" if path else name
            if _is_plain(child) and len(child._modules):
                visit(inner, child)
            else:
                found.append(Layer(inner, child))

    visit("", model)
    return found


def _is_plain(module: nn.Module) -> bool:
    """Whether nothing happens in it but one layer after the other."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return type(module) is nn.Sequential and not any(hooks)


def find_cut(
    layers: Sequence[Layer], num_stages: int, costs: Sequence[float], user_cut: Sequence[str] | None = None
) -> Cut:
    """The stages, as equal in cost as they can be; or those of the user, checked."""
    refuse(layers)
    blocked = _blocked(layers)
    if user_cut is not None:
        begins = _begins_of(layers, num_stages, user_cut)
        for begin in begins[1:]:
            if begin in blocked:
                raise ConfigError(
                    f"a stage cannot begin at '{layers[begin].name}', as pipeline_cut says: {blocked[begin]}. Nothing was "
                    "trained; cut elsewhere."
                )
        return Cut(tuple(layers), tuple(begins), tuple(costs))
    allowed = [0, *(number for number in range(1, len(layers)) if number not in blocked)]
    if len(allowed) < num_stages:
        reasons = list(dict.fromkeys(blocked.values()))
        because = f" ({'; '.join(reasons[:3])})" if reasons else ""
        raise ConfigError(
            f"the model cannot be cut into {num_stages} stages: of its {len(layers)} layers in a row, a stage can begin at "
            f"{len(allowed)}{because}. Nothing was trained; use fewer stages, or fsdp or tp."
        )
    ends = [*allowed[1:], len(layers)]
    blocks = [sum(costs[begin:end]) for begin, end in zip(allowed, ends, strict=True)]
    return Cut(tuple(layers), tuple(allowed[block] for block in balance(blocks, num_stages)), tuple(costs))


def balance(costs: Sequence[float], num_stages: int) -> list[int]:
    """Where each of so many stages begins so that the dearest is as cheap as it can be; none is empty."""
    num = len(costs)
    upto = [0.0]
    for cost in costs:
        upto.append(upto[-1] + cost)
    # best[k][i]: the dearest of k stages over the first i costs, and where the last of them begins.
    best = [[(float("inf"), 0)] * (num + 1) for _ in range(num_stages + 1)]
    best[0][0] = (0.0, 0)
    for k in range(1, num_stages + 1):
        for i in range(k, num + 1):
            best[k][i] = min((max(best[k - 1][j][0], upto[i] - upto[j]), j) for j in range(k - 1, i))
    begins, end = [], num
    for k in range(num_stages, 0, -1):
        end = best[k][end][1]
        begins.append(end)
    return begins[::-1]


def refuse(layers: Sequence[Layer]) -> None:
    """Layers that do not compute in micro-batches what they compute in a batch."""
    for layer in layers:
        for path, module in layer.module.named_modules():
            if isinstance(module, _BatchNorm):
                name = f"{layer.name}.{path}" if path else layer.name
                raise ConfigError(
                    f"the layer '{name}' ({type(module).__name__}) normalises over a batch, and a pipeline runs batches in "
                    "parts: it would normalise each alone. Nothing was trained; use GroupNorm or LayerNorm, or ddp or fsdp."
                )


def _blocked(layers: Sequence[Layer]) -> dict[int, str]:
    """Layers at which no stage can begin, and why."""
    reasons: dict[int, str] = {}
    first: dict[int, int] = {}
    for number, layer in enumerate(layers):
        for tensor in [*layer.module.parameters(), *layer.module.buffers()]:
            begin = first.setdefault(id(tensor), number)
            for between in range(begin + 1, number + 1):
                reasons.setdefault(
                    between,
                    f"'{layers[begin].name}' and '{layer.name}' share a weight, so they stay in one stage",
                )
    for number, layer in enumerate(layers):
        if any(parameter.requires_grad for parameter in layer.module.parameters()):
            break
        reasons.setdefault(
            number + 1, f"'{layer.name}' and those before it train nothing, so nothing goes back to them"
        )
    return reasons


def _begins_of(layers: Sequence[Layer], num_stages: int, user_cut: Sequence[str]) -> list[int]:
    begins = [0]
    for name in user_cut:
        at = next(
            (n for n, layer in enumerate(layers) if layer.name == name or layer.name.startswith(f"{name}.")),
            None,
        )
        if at is None:
            raise ConfigError(
                f"pipeline_cut names '{name}', and no layer in a row is called so. Nothing was trained; the layers are "
                f"{', '.join(layer.name for layer in layers)}."
            )
        if at <= begins[-1]:
            raise ConfigError(
                f"pipeline_cut says that a stage begins at '{name}', which does not come after the beginning of the stage "
                "before it. Nothing was trained; name the first layer of each stage but the first, in their order."
            )
        begins.append(at)
    if len(begins) != num_stages:
        raise ConfigError(
            f"pipeline_cut names {len(user_cut)} layers, which makes {len(begins)} stages, and there are {num_stages}. Nothing "
            f"was trained; name {num_stages - 1}."
        )
    return begins


def costs_by_size(layers: Sequence[Layer]) -> list[float]:
    """What each layer costs, as far as its parameters tell."""
    return [_PER_LAYER + sum(p.numel() for p in layer.module.parameters()) for layer in layers]


def measured(layers: Sequence[Layer], job: TrainJob) -> list[float] | None:
    """Seconds of each layer on the first batch; None where there is none, or where it is not one tensor."""
    if job.first_inputs is None:
        return None
    try:
        inputs = place(job.first_inputs(), job.device, job.cast_inputs)
        if isinstance(inputs, (tuple, list)) and len(inputs) == 1:
            inputs = inputs[0]
        return measure(layers, inputs) if isinstance(inputs, Tensor) else None
    except Exception:
        # Whatever is wrong with the data or the model is said when it is trained, on every rank alike.
        return None


def measure(layers: Sequence[Layer], inputs: Tensor) -> list[float]:
    """Seconds that each layer takes forward and backward on these inputs; leaves no trace in the model."""
    kept = [buffer.clone() for layer in layers for buffer in layer.module.buffers()]
    costs = []
    value: object = inputs
    with torch.random.fork_rng(devices=[]):
        for layer in layers:
            least = float("inf")
            for _ in range(_REPEATS):
                given = _leaf(value)
                began_at = time.perf_counter()
                result = layer.module(given)
                for tensor in result if isinstance(result, tuple) else (result,):
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        tensor.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
                least = min(least, time.perf_counter() - began_at)
            value = result
            costs.append(least)
    for buffer, before in zip(
        [buffer for layer in layers for buffer in layer.module.buffers()], kept, strict=True
    ):
        buffer.copy_(before)
    for layer in layers:
        for parameter in layer.module.parameters():
            parameter.grad = None
    return costs


def _leaf(value: object) -> object:
    """The same values, with nothing before them."""
    if isinstance(value, tuple):
        return tuple(_leaf(each) for each in value)
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    return value
