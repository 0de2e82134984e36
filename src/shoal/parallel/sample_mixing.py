"""Forwards that mix the samples of a batch, such as `x - x.mean(0)`: detected by running a few samples
together and apart.

A worker only has its own slice, so under data parallelism such a model trains something else, and
no loss shows it. Layers that are known to mix (BatchNorm), and dropout, are inactive in evaluation
mode; forwards that draw random numbers or keep state there are not judged. A trial has no side
effects on the model.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.data.tree import Tree, map_tensors, tensors
from shoal.errors import ForwardMixesSamples, GradientMixesSamples

NUM_SAMPLES = 4
"""Samples run together and in pairs: few, so that a trial costs less than a step."""

NOTICED = 0.02
"""Difference of a row, relative to the differences between rows, that counts as mixing."""

NUM_SAMPLES_ONCE = 32
"""Samples of a trial that is not repeated at later steps: four hardly fill an expert that drops what exceeds its capacity."""

MAX_NUMEL_RUN_BACK = 1 << 26
"""Trained elements up to which gradients of a whole model are compared: they need as much memory, on every rank."""

NUM_DIRECTIONS = 4
_ROWS_AT_ONCE = 256


def can_be_tried(model: nn.Module) -> bool:
    """False if a layer that is known to mix does so in evaluation mode too, or cannot be observed."""
    return not any(
        (isinstance(each, _BatchNorm) and each.running_mean is None)
        or isinstance(each, torch.jit.ScriptModule)
        for each in model.modules()
    )


def refuse_mixed_samples(
    model: nn.Module,
    call: Callable[[Tree], Tree],
    inputs: Tree,
    num_local: int,
    strategy: str,
    *,
    most: int = NUM_SAMPLES,
) -> Callable[[], None]:
    """Run the first samples, `most` of them, together, in halves, and together again; call the result to raise the refusal, if any."""
    if num_local < NUM_SAMPLES:
        return lambda: None
    if any(p.is_floating_point() and torch.finfo(p.dtype).eps > 1e-3 for p in model.parameters()):
        most = NUM_SAMPLES  # of many samples, rounding alone sends some to another expert
    num = min(num_local, most) // NUM_SAMPLES * NUM_SAMPLES
    half = num // 2
    with without_hooks_of_script(model):
        runs = [
            _run(model, call, inputs, at)
            for at in (slice(0, num), slice(0, half), slice(half, num), slice(0, num))
        ]

    def refuse() -> None:
        whole, first, second, again = runs
        if not (whole.ended and first.ended and second.ended and again.ended):
            return
        gap = _gap(whole.events[-1], first.events[-1], second.events[-1], num)
        is_stateful = not _is_same(whole.events, again.events)
        if gap is None or is_stateful:
            return
        layer = _first_mixed(whole.events, first.events, second.events, num)
        module = model.get_submodule(layer)
        raise ForwardMixesSamples(
            layer=layer,
            kind=type(module).__name__,
            strategy=strategy,
            gap=gap,
            batch_first=getattr(module, "batch_first", None),
        )

    return refuse


def buffers_of_slices(model: nn.Module, call: Callable[[Tree], Tree], inputs: Tree) -> list[str]:
    """Buffers whose change by some samples is not the mean of those by their halves, so that averages
    over workers are not one process's.

    Sums over samples, queues of samples, a variance. Floating ones are averaged over the workers;
    of others rank 0's is kept, so they must change alike. BatchNorm's are known.
    """
    num, half = NUM_SAMPLES, NUM_SAMPLES // 2
    known = {id(b) for m in model.modules() if isinstance(m, _BatchNorm) for b in m.buffers(recurse=False)}
    buffers = {name: buffer.detach() for name, buffer in model.named_buffers() if id(buffer) not in known}
    found = []
    for at in (slice(0, num), slice(0, half), slice(half, num)):
        with without_hooks_of_script(model), unchanged(model):
            if not _run(model, call, inputs, at).ended:
                return []
            now = dict(model.named_buffers(remove_duplicate=False))
            # By value: writes through `.data` do not change the version.
            changed = {
                name: now[name].detach()
                for name, before in buffers.items()
                if name in now and not _is_equal(before, now[name])
            }
        found.append(changed)
    uneven = []
    for name, before in buffers.items():
        if not any(name in changed for changed in found):
            continue
        whole, first, second = (changed.get(name, before) for changed in found)
        if not before.shape == whole.shape == first.shape == second.shape:
            uneven.append(name)
            continue
        before = before.double()
        by_whole, by_halves = whole.double() - before, (first.double() + second.double()) / 2 - before
        size = torch.maximum(by_whole.abs().max(), by_halves.abs().max())
        if float((by_whole - by_halves).abs().max()) > NOTICED * float(size):
            uneven.append(name)
    return uneven


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def refuse_mixed_gradients(
    model: nn.Module, call: Callable[[Tree], Tree], inputs: Tree, strategy: str
) -> Callable[[], None]:
    """Run the first samples back together and in pairs; call the result to refuse gradients of pairs that do not add up.

    For example, a script's autograd function that normalises its incoming gradient. Outputs must
    have a row for each sample. Not for a model too large to have its gradients twice.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and not p._backward_hooks}
    num, half = NUM_SAMPLES, NUM_SAMPLES // 2
    if sum(parameter.numel() for parameter in trained.values()) > MAX_NUMEL_RUN_BACK:
        return lambda: None
    shapes: set[tuple[torch.Size, ...]] = set()
    rounding = 0.0

    def gradients(at: slice) -> list[Tensor | None]:
        nonlocal rounding
        with without_hooks_of_script(model), unchanged(model):
            output = call(map_tensors(lambda tensor: tensor[at].clone(), inputs))
        rows = [t for t in tensors(output) if t.requires_grad and t.dim() and len(t) == at.stop - at.start]
        shapes.add(tuple(row.shape[1:] for row in rows))
        kinds = {each.dtype for each in (*rows, *trained.values()) if each.is_floating_point()}
        rounding = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
        # A function of each row by itself, independent of their order.
        flat = [row.flatten(1) if row.dim() > 1 else row[:, None] for row in rows]
        weights = [torch.arange(row.shape[1], device=row.device).cos().to(row.dtype) for row in flat]
        total = sum(
            ((r * w).sum() + r.square().sum() for r, w in zip(flat, weights, strict=True)), torch.zeros(())
        )
        found = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        return [each if each is not None and each.layout is torch.strided else None for each in found]

    sizes: dict[str, float] = {}
    changes, gaps = dict[str, float](), dict[str, float]()
    # Errors are ignored: the trial before this one has judged the forward.
    with contextlib.suppress(Exception), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        whole = gradients(slice(0, num))
        # Unused parameters prove nothing.
        left = {name: each for name, each in zip(trained, whole, strict=True) if each is not None}
        del whole
        sizes = {name: _largest(each) for name, each in left.items()}
        again = dict(zip(trained, gradients(slice(0, num)), strict=True))
        changes = {
            name: _largest(each - other) for name, each in left.items() if (other := again[name]) is not None
        }
        del again
        for at in (slice(0, half), slice(half, num)):
            for name, part in zip(trained, gradients(at), strict=True):
                if part is not None and name in left:
                    left[name] = left[name] - part
        gaps = {name: _largest(each) for name, each in left.items() if name in changes}

    def refuse() -> None:
        if len(shapes) > 1:
            return  # rows padded to the longest sample of a part are no function of each sample
        # A gradient that is zero except for rounding, as of a bias before a norm, is as small relative to
        # the others.
        floor = max(1e-5, 8 * rounding) * max(filter(math.isfinite, sizes.values()), default=0.0)
        if any(change > 1e-3 * sizes[name] + floor for name, change in changes.items()):
            return  # it is not deterministic
        for name, gap in gaps.items():
            if gap > max(NOTICED, 8 * rounding) * sizes[name] and gap > max(floor, 1e-6):
                raise GradientMixesSamples(
                    parameter=name, strategy=strategy, gap=gap / max(sizes[name], 1e-30)
                )

    return refuse


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@contextlib.contextmanager
def without_hooks_of_script(model: nn.Module) -> Iterator[None]:
    """Disable the script's hooks during a trial: they keep what they see, for a loss say. Those of torch and shoal stay."""
    kept = [
        (hooks, hooks.copy())
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        if hooks
    ]
    try:
        for hooks, before in kept:
            for number, hook in before.items():
                if not _module_of(hook).startswith(("torch.", "shoal.")):
                    del hooks[number]
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)


def _module_of(hook: Any) -> str:
    function = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(function, "__module__", ""))


class _Digest(NamedTuple):
    """Summary of one tensor, to compare two runs by."""

    shape: torch.Size
    rows: Tensor
    """A few numbers for each row."""

    rounding: float
    """Possible rounding of them."""


@dataclass(slots=True)
class _Crossing:
    """A tensor that enters or leaves a module: `within` is the innermost running module."""

    within: str
    digests: list[_Digest]


@dataclass(slots=True)
class _TrialRun:
    events: list[_Crossing] = field(default_factory=list)
    ended: bool = False


def _run(model: nn.Module, call: Callable[[Tree], Tree], inputs: Tree, at: slice) -> _TrialRun:
    run, running, handles = _TrialRun(), list[str](), []

    def entering(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            run.events.append(_Crossing(running[-1] if running else name, _digests((args, kwargs))))
            running.append(name)

        return hook

    def leaving(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            run.events.append(_Crossing(name, _digests(output)))
            running.pop()

        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(entering(name), with_kwargs=True))
        handles.append(module.register_forward_hook(leaving(name), with_kwargs=True))
    try:
        # Errors are ignored: evaluation mode may want other inputs, or more samples; some tensors cannot be
        # divided. Copies, because a forward may write into its inputs, which backward and the script still
        # need.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = call(map_tensors(lambda tensor: tensor[at].clone(), inputs))
            run.events.append(_Crossing("", _digests(output)))
            run.ended = not running
    finally:
        for handle in handles:
            handle.remove()
    return run


def _digests(tree: Tree) -> list[_Digest]:
    """Projections of each row on fixed directions: keeping all activations would take too much memory."""
    found = []
    for tensor in tensors(tree):
        if (
            isinstance(tensor, DTensor)
            or not tensor.is_floating_point()
            or not tensor.numel()
            or not tensor.dim()
        ):
            continue
        wide = tensor.detach().to(torch.float64 if tensor.dtype is torch.float64 else torch.float32)
        wide = wide.reshape(len(tensor), -1, tensor.shape[-1] if tensor.dim() > 1 else 1)
        projected = wide @ _directions(wide.shape[2], 1.7, wide)
        projected = (projected * _directions(wide.shape[1], 2.3, wide)).sum(1) / wide[0].numel() ** 0.5
        eps = torch.finfo(tensor.dtype).eps
        rounding = 1e-6 if eps < 1e-12 else max(1e-3, 8 * eps)
        size = float(wide.square().mean().sqrt())
        found.append(_Digest(tensor.shape, projected.double().cpu(), rounding * size))
    return found


def _directions(size: int, pace: float, like: Tensor) -> Tensor:
    at = torch.arange(1, size + 1, dtype=like.dtype, device=like.device)[:, None]
    return torch.cos(at * pace * torch.arange(1, NUM_DIRECTIONS + 1, dtype=like.dtype, device=like.device))


def _gap(whole: _Crossing, first: _Crossing, second: _Crossing, num: int) -> float | None:
    """Difference of several of `num` samples, relative to the differences between rows; None if there is none.

    Several: a single row that rounding sends across a threshold within the model is no mixing.
    """
    if not len(whole.digests) == len(first.digests) == len(second.digests):
        return None
    for together, a, b in zip(whole.digests, first.digests, second.digests, strict=True):
        num_rows = together.shape[0]
        if num_rows % num or not a.shape[0] == b.shape[0] == num_rows // 2:
            continue  # its rows are no samples
        if together.shape[1:] in (a.shape[1:], b.shape[1:]) and a.shape != b.shape:
            continue  # padded to the longest sample: padding is no result
        apart = torch.cat([a.rows, b.rows])
        if not torch.isfinite(together.rows).all() or not torch.isfinite(apart).all():
            continue
        spread = float((together.rows - together.rows.mean(0)).square().mean().sqrt())
        noticed = max(NOTICED * spread, together.rounding)
        gaps = (together.rows - apart).abs().amax(1)
        if (is_far := gaps > noticed).any():
            # Rows may be ordered otherwise: sequence positions before samples, or samples by length.
            blocks = together.rows[is_far].split(_ROWS_AT_ONCE)  # type: ignore[no-untyped-call]
            gaps[is_far] = torch.cat([torch.cdist(each, apart, p=math.inf).amin(1) for each in blocks])
        of_samples = gaps.reshape(num, -1).amax(1)
        if int((of_samples > noticed).sum()) >= NUM_SAMPLES // 2:
            return float(of_samples.max()) / spread if spread else float("inf")
    return None


def _is_same(events: list[_Crossing], again: list[_Crossing]) -> bool:
    last, repeated = events[-1].digests, again[-1].digests
    return len(last) == len(repeated) and all(
        one.shape == other.shape and bool(((one.rows - other.rows).abs() <= one.rounding).all())
        for one, other in zip(last, repeated, strict=True)
    )


def _first_mixed(whole: list[_Crossing], first: list[_Crossing], second: list[_Crossing], num: int) -> str:
    """The innermost module that runs where rows first differ; "" is the model itself."""
    for events in zip(whole, first, second, strict=False):
        if len({event.within for event in events}) > 1:
            break  # samples take different paths
        if _gap(*events, num) is not None:
            return events[0].within
    return ""


_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore everything a forward writes into its modules: buffers, and attributes such as counters and hidden states."""
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    contents: list[tuple[Any, Any]] = []
    # Tensors are replaced by copies: backward may need the originals unchanged.
    lent: dict[int, Tensor] = {}
    scripted: list[tuple[Tensor, Tensor]] = []
    try:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):  # has no Python attributes, and no other buffers
                scripted += [(buffer, buffer.clone()) for buffer in module.buffers(recurse=False)]
                continue
            own = {name: value for name, value in module.__dict__.items() if name not in _OF_TORCH}
            attributes.append((module.__dict__, own))
            contents.append((module._buffers, module._buffers.copy()))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = lent.setdefault(id(buffer), buffer.clone())
            for name, value in own.items():
                if type(value) in (list, dict, set):
                    contents.append((value, value.copy()))
                elif type(value) is Tensor and value.is_leaf:
                    module.__dict__[name] = lent.setdefault(id(value), value.detach().clone())
        yield
    finally:
        for place, own in attributes:
            for name in [name for name in place if name not in own and name not in _OF_TORCH]:
                del place[name]
            place.update({name: value for name, value in own.items() if place.get(name) is not value})
        for value, before in contents:
            if isinstance(value, list):
                value[:] = before
            else:
                value.clear()
                value.update(before)
        for buffer, before in scripted:
            if not torch.equal(buffer, before):
                buffer.copy_(before)
