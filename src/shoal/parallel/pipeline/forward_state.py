"""Values that a forward leaves in attributes of its modules: counters, hidden states, activations for a loss to read.

One process has them as its last forward left them, of the whole batch. Stages of
a pipeline run in other processes, from a trace that may leave attributes alone,
so there they are refused: at once where a later forward depends on them, else
when they are read. Workers that divide a batch have those of their own slices:
refused where a later forward, or the loss, makes something else of slices than
of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.data.tree import Tree, map_tensors, tensors
from shoal.errors import ConfigError, TrainingError
from shoal.parallel.sample_mixing import unchanged, without_hooks_of_script

_OF_TORCH = frozenset(nn.Module().__dict__)
_OPAQUE = (nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, torch.Generator)
_MAX_DEPTH, _MAX_ITEMS = 4, 64

Place = tuple[Any, Any]
"""A mapping or list, and the key under which it holds a value."""


def attributes_of(model: nn.Module) -> Iterator[tuple[str, Place, Any]]:
    """Name, place and value of each tensor and number in the modules' own attributes, within containers and plain objects too."""
    seen: set[int] = set()

    def within(name: str, place: Any, depth: int) -> Iterator[tuple[str, Place, Any]]:
        if id(place) in seen or depth > _MAX_DEPTH:
            return
        seen.add(id(place))
        members = enumerate(place) if isinstance(place, (list, tuple)) else list(place.items())
        for count, (key, value) in enumerate(members):
            if count >= _MAX_ITEMS:
                return
            if not depth and key in _OF_TORCH:  # a module
                continue
            path = f"{name}.{key}" if name else str(key)
            if isinstance(value, (Tensor, int, float)):
                if not isinstance(value, nn.Parameter):
                    yield path, (place, key), value
            elif isinstance(value, (list, tuple, dict)):
                yield from within(path, value, depth + 1)
            elif not isinstance(value, _OPAQUE) and isinstance(getattr(value, "__dict__", None), dict):
                yield from within(path, value.__dict__, depth + 1)

    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield from within(name, module.__dict__, 0)


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put numbers and tensors in attributes back at the end, and remove new ones: forwards of a trial do not count."""
    values = [(place, key, value) for _, (place, key), value in attributes_of(model)]
    try:
        yield
    finally:
        known = {(id(place), key) for place, key, _ in values}
        for _, (place, key), _ in list(attributes_of(model)):
            if isinstance(place, dict) and (id(place), key) not in known:
                del place[key]
        for place, key, value in values:
            if isinstance(place, (list, dict)) and (isinstance(place, dict) or key < len(place)):
                place[key] = value


class WrittenParameters(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says nothing of its type
    """Records the model's parameters that operations write into, through `.data` too, whether their values change or not."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {
            parameter.untyped_storage().data_ptr(): name
            for name, parameter in model.named_parameters()
            if parameter.numel() and parameter.layout is torch.strided and not parameter.is_meta
        }
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        if schema.is_mutable:
            names = [each.name for each in schema.arguments]
            written = {each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write}
            given = [each for name, each in zip(names, args, strict=False) if name in written]
            given += [each for name, each in (kwargs or {}).items() if name in written]
            for tensor in tensors(given):
                if tensor.layout is torch.strided and not tensor.is_meta:
                    name = self._names.get(tensor.untyped_storage().data_ptr())
                    if name is not None and name not in self.names:
                        self.names.append(name)
        return func(*args, **(kwargs or {}))


def refuse_written_parameters(model: nn.Module, call: Callable[[], object], strategy: str, why: str) -> None:
    """Refuse a forward that writes into parameters. `call` runs it; `why`: what becomes of that under `strategy`."""
    with WrittenParameters(model) as written:
        call()
    if written.names:
        raise ConfigError(
            f"the forward of the {type(model).__name__} writes into its parameter '{written.names[0]}' (an average of other weights, a "
            f"bound), and under '{strategy}' {why}. Nothing was trained; do that in a callback after each step, or use --strategy ddp."
        )


def refuse_memory(model: nn.Module, call: Callable[[Tree], Tree], inputs: Tree, strategy: str) -> list[Place]:
    """Refuse a forward that depends on what forwards before it left outside of buffers.

    `call` runs the model and puts buffers and generators back. Returns the places of tensors that forward computes from
    samples and leaves there.
    """
    first: list[Tensor] = []
    refuse_written_parameters(
        model,
        lambda: first.extend(each.detach().clone() for each in tensors(call(inputs))),
        strategy,
        "stages run its layers, once for each micro-batch, and not what it does between them",
    )
    left = {name: value for name, _, value in attributes_of(model)}
    left = {
        name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in left.items()
    }
    # One sample in the place of all: a mean over them is another.
    call(map_tensors(lambda tensor: tensor[:1].expand_as(tensor).clone(), inputs))
    now = {name: (place, value) for name, place, value in attributes_of(model)}
    again = list(tensors(call(inputs)))
    for one, other in zip(first, again, strict=False):
        if one.shape != other.shape or not torch.allclose(one, other, 1e-5, 1e-7, equal_nan=True):
            changed = [n for n, (_, value) in now.items() if n not in left or not _is_same(left[n], value)]
            named = f"'{changed[0]}'" if changed else "an object of its own, or its weights"
            raise ConfigError(
                f"the forward of the {type(model).__name__} gives something else for the same samples once others went before: it keeps what "
                f"it did in {named} (a counter, a hidden state), and under '{strategy}' each stage runs parts of it, once for each "
                "micro-batch. Nothing was trained; keep it in a buffer, or use fsdp or tp."
            )
    return [
        place
        for name, (place, value) in now.items()
        if isinstance(value, Tensor) and name in left and not _is_same(left[name], value)
    ]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other)


def refuse_carried(
    model: nn.Module, call: Callable[[Tree], Tree], inputs: Tree, strategy: str
) -> Callable[[], str | None]:
    """Run samples after others; call the result to refuse outputs that depend on the samples of the forward before.

    Workers that divide a batch have those of their own slices. The result returns the name of the attribute instead where
    each sample depends only on the one in its own row. Buffers, which workers average, are put back after each forward,
    and so is everything else in the end. A forward that keeps no tensor in an attribute of its modules is run once.
    """
    num_rows = min((len(tensor) for tensor in tensors(inputs) if tensor.dim()), default=0)
    half, keeps_some = num_rows // 2, False
    if half == 0:
        return lambda: None

    def exchanged(begin: int) -> Tree:
        """The inputs, with the first sample in the place of those from `begin` on."""
        return map_tensors(
            lambda tensor: torch.cat([tensor[:begin], tensor[:1].expand_as(tensor[begin:])]), inputs
        )

    def run(*given: Tree) -> tuple[list[Tensor], dict[str, Any]]:
        """Outputs of the last forward, and the attributes after the first one."""
        left: dict[str, Any] = {}
        nonlocal keeps_some
        with attributes_kept(model), unchanged(model), without_hooks_of_script(model):
            before_it = _versions(model)
            for number, each in enumerate(given):
                buffers = [(module._buffers, module._buffers.copy()) for module in model.modules()]
                for place, before in buffers:
                    place.update({k: None if v is None else v.clone() for k, v in before.items()})
                output = [
                    tensor.detach().clone() for tensor in tensors(call(map_tensors(Tensor.clone, each)))
                ]
                for place, before in buffers:
                    place.update(before)
                if not number:
                    keeps_some = any(before_it.get(key) != now for key, now in _versions(model).items())
                    left = {name: _copied(value) for name, _, value in attributes_of(model)}
        return output, left

    found = dict[str, Any]()
    # Errors are ignored: the trial may hold states of another number of samples.
    with contextlib.suppress(Exception), torch.no_grad():
        run(inputs)
        if not keeps_some:
            return lambda: None
        others = exchanged(0)
        found = {
            "same": run(inputs, inputs),
            "again": run(inputs, inputs),
            "others": run(others, inputs),
            "half": run(exchanged(half), inputs),
        }

    def refuse() -> str | None:
        if not found or not _are_close(found["same"][0], found["again"][0]):
            return None
        if _are_close(found["same"][0], found["others"][0]):
            return None
        names = [n for n, v in found["others"][1].items() if not _is_same(found["same"][1].get(n), v)]
        name = names[0] if names else "an object of its own"
        rows = [[each[:half] for each in found[which][0] if each.dim()] for which in ("same", "half")]
        if _are_close(*rows):
            return name
        raise TrainingError(
            f"the forward of the {type(model).__name__} depends on the samples of the forward before, which it keeps in '{name}', and under "
            f"'{strategy}' a worker has only those of its own slice of the batch: it would train something else than one process. Nothing of "
            "this step was updated; keep it in a buffer (register_buffer), which the workers average, let forward take the rows of all "
            "workers, shoal.gather(rows) (ddp, fsdp), or run in one process."
        )

    return refuse


def _are_close(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(
        one.shape == other.shape and torch.allclose(one, other, 1e-5, 1e-7, equal_nan=True)
        for one, other in zip(some, others, strict=True)
    )


def _versions(model: nn.Module) -> dict[int, int]:
    """Versions of the tensors in attributes, by identity: another tensor, or one written into, differs."""
    return {id(value): value._version for _, _, value in attributes_of(model) if isinstance(value, Tensor)}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def refuse_uneven_terms(
    model: nn.Module,
    name: str,
    forwards: Sequence[Callable[[], Tree]],
    losses: Sequence[Callable[[Tree], Tensor]],
    tolerance: float,
) -> Callable[[], None]:
    """Run a slice and its halves; call the result to refuse a loss that reads attributes which forward left, unevenly.

    `losses` give the sum over the samples for the outputs of `forwards`. What the loss makes of such an attribute is
    compared by the gradient: of rows each has its own, of anything else those of the halves add up, and so do the products
    with its values. A mean over samples passes; a product of two means, or a variance, does not.
    """
    found: list[dict[str, tuple[Tensor, Tensor]]] = []
    # Errors are ignored: a loss may differentiate, which needs the graph of forward.
    with contextlib.suppress(Exception):
        for forward, loss in zip(forwards, losses, strict=True):
            with attributes_kept(model), unchanged(model):
                before = _versions(model)
                with torch.no_grad(), without_hooks_of_script(model):
                    output = forward()
                left = {}
                for path, (place, key), value in list(attributes_of(model)):
                    is_new = isinstance(value, Tensor) and before.get(id(value)) != value._version
                    if is_new and value.is_floating_point() and isinstance(place, (list, dict)):
                        place[key] = left[path] = value.detach().clone().requires_grad_()
                if not left:
                    return lambda: None
                with torch.enable_grad():
                    total = loss(output)
                if not total.requires_grad:
                    return lambda: None
                gradients = torch.autograd.grad(total, list(left.values()), allow_unused=True)
                found.append(
                    {
                        path: (value.detach(), by)
                        for (path, value), by in zip(left.items(), gradients, strict=True)
                        if by is not None
                    }
                )

    def refuse() -> None:
        if len(found) < len(forwards):
            return
        whole, *halves = found
        for path, (value, by) in whole.items():
            parts = [half[path] for half in halves if path in half]
            if len(parts) == len(halves) and _adds_up(value, by, parts, tolerance):
                continue
            raise TrainingError(
                f"the loss '{name}' reads '{path}', which the model's forward leaves in an attribute, and which it computes from several "
                f"samples together (a balance of experts, a variance): over a slice that gives {float((value * by).sum()):.6g}, but its "
                f"two halves added give {sum(float((v * g).sum()) for v, g in parts):.6g}. Divided over workers it would train something "
                "else; nothing of this step was updated. Let forward compute it from the rows of all workers, shoal.gather(rows) (ddp, "
                "fsdp), or as a mean over samples; or run in one process."
            )

    return refuse


def _adds_up(value: Tensor, by: Tensor, parts: Sequence[tuple[Tensor, Tensor]], tolerance: float) -> bool:
    def is_near(one: Tensor, other: Tensor) -> bool:
        size = max(float(one.abs().max()), float(other.abs().max())) if one.numel() else 0.0
        return not one.numel() or not float((one - other).abs().max()) > tolerance * size

    values, gradients = [part[0] for part in parts], [part[1] for part in parts]
    if all(each.shape == value.shape for each in values):
        products = [v * g for v, g in parts]
        return is_near(by, torch.stack(gradients).sum(0)) and is_near(
            value * by, torch.stack(products).sum(0)
        )
    if sum(len(each) for each in values) == len(value) and {each.shape[1:] for each in values} == {
        value.shape[1:]
    }:
        return is_near(value, torch.cat(values)) and is_near(by, torch.cat(gradients))
    return is_near((value * by).sum(), torch.stack([(v * g).sum() for v, g in parts]).sum())


class LeftElsewhere(Tensor):
    """Stands for a tensor that forward left in an attribute elsewhere: raises when it is used."""

    attribute: str

    @staticmethod
    def __new__(cls, attribute: str) -> LeftElsewhere:
        made = torch.Tensor._make_subclass(cls, torch.empty(0))
        made.attribute = attribute
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has an argument of its own
        return f"LeftElsewhere({self.attribute!r})"

    def __deepcopy__(self, _: Any) -> LeftElsewhere:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        [name, *_] = [
            each.attribute for each in (*args, *(kwargs or {}).values()) if isinstance(each, cls)
        ] or ["?"]
        raise TrainingError(
            f"'{name}' is read, which the model's forward leaves in an attribute, and under pp the stage that computes it runs in another "
            "process: what is there is of another batch. Nothing of this step was updated; have forward return it beside its "
            "output, for the loss to take from there, or use --strategy ddp or fsdp."
        )


def hide(places: list[Place]) -> None:
    """Have later readers refused; a module that runs on this rank writes it anew."""
    for place, key in places:
        if isinstance(place, (list, dict)):
            place[key] = LeftElsewhere(str(key))
