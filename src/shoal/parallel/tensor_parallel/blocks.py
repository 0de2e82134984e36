"""Blocks of known models under tensor parallelism: attentions and MLPs by the names of their layers.

Names come from the model's own plan (`tp_plan` of transformers) or from a table of common blocks.
Names prove nothing, so one block of each kind is partitioned on trial, as a copy, and compared with
the original: outputs and gradients, on the first data. A block that differs is left to the plan by
tracing.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.data.tree import Tree, map_tensors
from shoal.data.tree import tensors as tensors_of
from shoal.parallel.compute import ModelCall, evaluating
from shoal.parallel.state import first_line, tied_parameters
from shoal.parallel.tensor_parallel.local import has_hooks, is_transposed, num_features

_OWN_STYLES = {"colwise": "colwise", "rowwise": "rowwise", "replicated_with_grad_allreduce": "inside"}
"""Styles of transformers' plans that are ours under another name."""

_ELSEWHERE = ("colwise_gather_output", "colwise_rep", "embedding_rowwise", "embedding_colwise", "replicate")
"""Styles of layers without a partner, which the plan finds by itself."""

_COMMON: tuple[tuple[tuple[str, ...], str], ...] = (
    (("self.query", "self.key", "self.value"), "output.dense"),
    (("query", "key", "value"), "dense"),
    (("q_proj", "k_proj", "v_proj"), "out_proj"),
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_lin", "k_lin", "v_lin"), "out_lin"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("wi_0", "wi_1"), "wo"),
    (("intermediate.dense",), "output.dense"),
    (("intermediate_dense",), "output_dense"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("fc1",), "fc2"),
    (("lin1",), "lin2"),
    (("wi",), "wo"),
    (("c_fc",), "c_proj"),
)
"""Layers that open a block, and the one that closes it, by their names within it."""

_NUM_SAMPLES = 2


@dataclass(frozen=True, slots=True)
class Block:
    """Layers that are cut together."""

    root: str
    """The module whose forward runs all of them."""

    styles: Mapping[str, str]
    """Styles of its layers, by name within it."""

    source: str

    def names(self) -> dict[str, str]:
        prefix = f"{self.root}." if self.root else ""
        return {prefix + name: style for name, style in self.styles.items()}


@dataclass(frozen=True, slots=True)
class BlockTrial:
    """Blocks whose partitioned trial computed the same, and why others did not."""

    blocks: tuple[Block, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Reason by kind of block."""

    def notes(self) -> list[str]:
        return [f"note: tp does not cut {what} as a block: {why}" for what, why in self.refused.items()]


def candidates(model: nn.Module, degree: int) -> Iterator[tuple[Block, str | None]]:
    """Blocks by their names, and reasons against one."""
    modules, tied = dict(model.named_modules()), tied_parameters(model)
    seen: set[str] = set()
    for block in (*_by_own_plan(model, modules), *_by_common_names(modules)):
        names = set(block.names())
        if names & seen:
            continue
        seen |= names
        yield block, _why_not(block, modules, degree, tied)


def _by_own_plan(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[Block]:
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping):
        return
    found: dict[str, dict[str, str]] = {}
    for pattern, style in plan.items():
        for name in modules:
            if style not in _ELSEWHERE and fnmatch.fnmatchcase(name, str(pattern)):
                root, _, layer = name.rpartition(".")
                found.setdefault(root, {})[layer] = str(style)
    for root, styles in found.items():
        yield Block(root, {key: _OWN_STYLES.get(style, style) for key, style in styles.items()}, "tp_plan")


def _by_common_names(modules: Mapping[str, nn.Module]) -> Iterator[Block]:
    for root in modules:
        prefix = f"{root}." if root else ""
        for openers, closing in _COMMON:
            layers = [modules.get(prefix + name) for name in (*openers, closing)]
            if all(_is_linear(layer) for layer in layers):
                styles = {**dict.fromkeys(openers, "colwise"), closing: "rowwise"}
                yield Block(root, styles, "common names")
                break


def _is_linear(module: nn.Module | None) -> bool:
    if module is None or "forward" in vars(module) or "weight" not in module._parameters:
        return False
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def _why_not(block: Block, modules: Mapping[str, nn.Module], degree: int, tied: set[int]) -> str | None:
    prefix = f"{block.root}." if block.root else ""
    for name, module in modules.items():
        if name != block.root and name.startswith(prefix) and has_hooks(module):
            return f"'{name}' has a hook of the script's own, which would see a part of the features"
    for name, style in block.names().items():
        module = modules[name]
        if style == "inside":
            continue
        if style not in ("colwise", "rowwise"):
            return f"its plan says '{style}' of '{name}', which is not supported"
        if not _is_linear(module):
            return f"'{name}' is a {type(module).__name__}"
        if any(id(each) in tied for each in module.parameters()):
            return f"the weight of '{name}' is shared with another layer"
        num = num_features(module)[style == "colwise"]
        if num % degree:
            return f"the {num} {'outputs' if style == 'colwise' else 'inputs'} of '{name}' cannot be divided by {degree}"
    if set(block.styles.values()) >= {"colwise", "rowwise"}:
        return None
    return "it has no colwise layer with a rowwise one that closes it"


Cut = Callable[[nn.Module, Mapping[str, str]], None]
"""Cuts layers of a copy, by their names within it."""


def try_blocks(model: nn.Module, inputs: Tree, degree: int, cut: Cut) -> BlockTrial:
    """Cut one block of each kind on trial. Collective: every rank of the mesh tries the same blocks in the same order."""
    accepted: list[Block] = []
    refused: dict[str, str] = {}
    kinds: dict[object, list[Block]] = {}
    modules = dict(model.named_modules())
    for block, why in candidates(model, degree):
        if why is not None:
            refused.setdefault(_what(block, modules), f"{why} (by {block.source})")
        else:
            kinds.setdefault(_kind(block, modules), []).append(block)
    if not kinds:
        return BlockTrial((), refused)
    calls = _first_calls(model, inputs, {blocks[0].root for blocks in kinds.values()})
    for blocks in kinds.values():
        block = blocks[0]
        if block.root not in calls:
            refused[_what(block, modules)] = f"its forward was not called (by {block.source})"
            continue
        why = _why_different(modules[block.root], block, calls[block.root], cut)
        if why is None:
            accepted += blocks
        else:
            refused[_what(block, modules)] = f"{why} (by {block.source})"
    return BlockTrial(tuple(accepted), refused)


def _what(block: Block, modules: Mapping[str, nn.Module]) -> str:
    return f"{type(modules[block.root]).__name__} ({', '.join(block.styles)})"


def _kind(block: Block, modules: Mapping[str, nn.Module]) -> object:
    root = modules[block.root]
    shapes = tuple((name, tuple(each.shape)) for name, each in root.named_parameters())
    chances = tuple(each.p for each in root.modules() if isinstance(each, nn.Dropout))
    return type(root), tuple(block.styles.items()), shapes, chances


def _first_calls(model: nn.Module, inputs: Tree, roots: set[str]) -> dict[str, tuple[Any, Any]]:
    """Arguments of the first call of each of these modules, in an evaluation of the whole model on a few samples."""
    calls: dict[str, tuple[Any, Any]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.setdefault(name, (args, kwargs))

        return hook

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True) for name in roots
    ]
    buffers = [
        (module, key, buffer, buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    few = map_tensors(lambda tensor: tensor[:_NUM_SAMPLES] if tensor.dim() else tensor, inputs)
    try:
        # With gradients: which arguments need one decides what a trial compares. A model that rejects these
        # few samples, alike on every rank, is left to the plan by tracing.
        with (
            contextlib.suppress(Exception),
            torch.enable_grad(),
            evaluating(list(model.modules())),
            torch.random.fork_rng(),
        ):
            ModelCall(model)(few)
    finally:
        for hook in hooks:
            hook.remove()
        for module, key, buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
            module._buffers[key] = buffer
    return calls


def _why_different(module: nn.Module, block: Block, call: tuple[Any, Any], cut: Cut) -> str | None:
    # Half precision rounds more than the differences sought.
    whole, part = (copy.deepcopy(module)._apply(_fine) for _ in range(2))  # type: ignore[no-untyped-call]
    try:
        call = map_tensors(_fine, call[0]), map_tensors(_fine, call[1])
        cut(part, block.styles)
        gap = _gap(_step(whole, call), _step(part, call))
    except Exception as error:  # a forward that takes parts for the whole may raise anything
        return f"a trial step on a part failed ({first_line(error)})"
    if gap is None:
        return None
    with evaluating([*whole.modules(), *part.modules()]):
        draws = _gap(_step(whole, call), _step(part, call)) is None
    return (
        "it draws random numbers for each part of the features"
        if draws
        else f"a trial step differs by {gap:.1e}"
    )


def _fine(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def _step(module: nn.Module, call: tuple[Any, Any]) -> list[Tensor]:
    """Outputs and gradients of one forward and backward, in an order independent of the partition."""
    given: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        given.append(tensor.detach().clone().requires_grad_())
        return given[-1]

    module.zero_grad()
    with torch.enable_grad(), torch.random.fork_rng():
        torch.manual_seed(7)
        args, kwargs = map_tensors(leaf, call[0]), map_tensors(leaf, call[1])
        outputs = [each for each in tensors_of(module(*args, **kwargs)) if each.is_floating_point()]
        weights = [torch.arange(each.numel(), device=each.device).cos().view(each.shape) for each in outputs]
        sums = [(each * weight).sum() for each, weight in zip(outputs, weights, strict=True)]
        torch.stack(sums).sum().backward()  # type: ignore[no-untyped-call]
    gradients = [each.grad for each in given] + [each.grad for _, each in module.named_parameters()]
    return [*outputs, *(_whole(each) for each in gradients if each is not None)]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gap(expected: list[Tensor], found: list[Tensor]) -> float | None:
    """The largest difference, relative to the largest number of each tensor; None where it is rounding."""
    if [each.shape for each in expected] != [each.shape for each in found]:
        return float("inf")
    worst = 0.0
    for one, other in zip(expected, found, strict=True):
        eps = torch.finfo(one.dtype).eps
        allowed = 10 * eps**0.5 if one.itemsize >= 4 else 8 * eps
        scale = max(one.abs().max().item(), 1e-3) if one.numel() else 1.0
        gap = ((one - other).abs().max().item() if one.numel() else 0.0) / scale
        worst = max(worst, gap / allowed) if gap == gap else float("inf")
    return None if worst <= 1 else worst
