"""Partition of a forward that cannot be traced: stages begin at its repeated blocks, and each runs the
user's own forward.

A stage runs forward from its beginning. Results of other stages are `AbsentTensor`s: shapes without
data, and so is everything computed from them. At the stage's first block the arguments received
from the previous stage take their place, and at the first block of the next stage forward is left.
So code between the blocks may branch on the batch, which every rank has, and not on layer outputs:
that raises. A stage cannot return a wrong result, since a value that was not received has no data.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shoal.data.tree import Tree, leaves, map_tensors
from shoal.errors import StageCannotRun
from shoal.parallel.compute import ModelCall, evaluating
from shoal.parallel.pipeline.trace import StageSegment, TracedForward, unchanged
from shoal.parallel.state import attribute

_FAKE = FakeTensorMode(allow_non_fake_inputs=True)
_PLAIN = (bool, int, float, str, type(None))
_READS_NOTHING = ("__init__", "__init_subclass__", "__int__", "__index__", "__invert__")


class AbsentTensor(Tensor):
    """A value that another stage computes: its shape and type, and its data once that stage has sent it."""

    fake: Tensor
    value: Tensor | None

    @staticmethod
    def __new__(cls, fake: Tensor) -> AbsentTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, fake.shape, dtype=fake.dtype, device=fake.device, strides=fake.stride()
        )
        made.fake, made.value = fake, None
        return made

    @staticmethod
    def like(tensor: Tensor) -> AbsentTensor:
        with torch._C.DisableTorchFunctionSubclass(), _FAKE:
            return AbsentTensor(
                torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has an argument of its own
        return f"AbsentTensor({tuple(self.fake.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_absent = False

        def given(tensor: AbsentTensor) -> Tensor:
            nonlocal is_absent
            if tensor.value is not None:
                return tensor.value
            is_absent = True
            return tensor.fake

        args, kwargs = pytree.tree_map_only(AbsentTensor, given, (args, kwargs or {}))
        if not is_absent:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if _writes(name) and args and isinstance(args[0], Tensor) and not isinstance(args[0], FakeTensor):
            raise StageCannotRun(_needs(f"is written into another ('{name}')"))
        # A graph that ends in values without data is useless.
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: t if isinstance(t, FakeTensor) else t.detach(), (args, kwargs)
        )
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise StageCannotRun(_needs(f"decides what is done next ('{name}')")) from None
        return pytree.tree_map_only(FakeTensor, AbsentTensor, result)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's is no class method
        return cls.__torch_function__(func, types, args, kwargs)


def _needs(use: str) -> str:
    return (
        f"a value that the layers of an earlier stage compute {use} in the model's forward, outside of its blocks, and stages hand "
        "on the arguments of a block alone. The step was not applied; cut the model elsewhere with pipeline_cut=, or use fsdp or tp."
    )


def _writes(name: str) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    assigned = name.startswith("__i") and name.endswith("__") and name not in _READS_NOTHING
    return in_place or assigned or name == "__setitem__"


class _StageEnds(BaseException):
    """Leaves the forward at the first block of the next stage, through every `except Exception` of the model."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = (args, kwargs)


@dataclass(frozen=True, slots=True)
class Unit:
    """Part of a forward from the call of one block to that of the next; the first unit is everything before any block."""

    name: str
    modules: tuple[str, ...]
    """Paths of its outermost modules that hold no block."""

    tensors: tuple[str, ...]
    """Paths of parameters and buffers that forward uses directly."""

    holds: tuple[str, ...]
    """All parameters and buffers of both, by their first names."""

    draws: bool
    takes: tuple[tuple[str, Tensor], ...]
    """Arguments of its block computed by earlier layers: the position in the call, and an example."""


@dataclass(frozen=True, slots=True)
class BlockForward(TracedForward):
    """One forward as a row of blocks. The graph has a node for every unit and one for every value between them."""

    runner: BlockRunner
    units: tuple[Unit, ...]
    begins: tuple[int, ...]
    """Number of each unit's first node."""


class BlockRunner:
    """Runs a model's own forward from one block to another."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], inputs: Tree) -> None:
        self._model, self._call = model, ModelCall(model)
        self._like = map_tensors(lambda t: t.new_empty(0), inputs)
        self._num_inputs = len(list(leaves(inputs)))
        self._blocks = [model.get_submodule(path) for path in blocks]
        self._names = list(blocks)
        self._slots: list[tuple[dict[str, Any], str, str, AbsentTensor]] = []
        for path, module in model.named_modules(remove_duplicate=False):
            for slots in (module._parameters, module._buffers):
                for name, tensor in slots.items():
                    if tensor is not None:
                        whole = f"{path}.{name}" if path else name
                        self._slots.append((slots, name, whole, AbsentTensor.like(tensor.detach())))
        self._results: dict[Any, Any] = {}

    @property
    def num_inputs(self) -> int:
        return self._num_inputs

    def segment(self, units: Sequence[Unit], first: int, end: int) -> Callable[..., Any]:
        """Function of the units from `first` to before `end`: of a holder of their modules, the inputs
        and the values taken.
        """
        own = units[first:end]
        modules = tuple(dict.fromkeys(path for unit in own for path in unit.modules))
        tensors = tuple(dict.fromkeys(path for unit in own for path in unit.tensors))
        prefixes = tuple(f"{path}." for path in modules)
        # By position, not path: a module shared by two others has one of each.
        here = {
            (id(s), name) for s, name, path, _ in self._slots if path in tensors or path.startswith(prefixes)
        }
        absent = [slot for slot in self._slots if (id(slot[0]), slot[1]) not in here]
        takes = [place for place, _ in units[first].takes]
        is_last = end >= len(units)
        gives = [] if is_last else [place for place, _ in units[end].takes]

        def run(held: nn.Module, *values: Any) -> Any:
            # FSDP gathers the holder's parameters; modules are the model's own objects, lone tensors are
            # not.
            own = {path: attribute(held, path) for path in tensors}
            swaps = [(slots, name, empty) for slots, name, _, empty in absent]
            swaps += [(slots, name, own[path]) for slots, name, path, _ in self._slots if path in own]
            taken = dict(zip(takes, values[self._num_inputs :], strict=True))
            with self._intercepted(first, end, taken), _swapped(swaps):
                try:
                    output = self._forward(values[: self._num_inputs])
                except _StageEnds as ends:
                    return tuple(map(_present, _at(ends.call, gives)))
            if not is_last:
                raise StageCannotRun(
                    f"forward ended without calling '{self._names[end - 1]}', at which the next stage begins. The step was not applied; "
                    "blocks that are left out now and then cannot be cut apart: use fsdp or tp."
                )
            return pytree.tree_map_only(Tensor, _present, output)

        return run

    def _forward(self, values: Sequence[Tensor]) -> Any:
        given = iter(values)
        return self._call(map_tensors(lambda _: next(given), self._like))

    @contextlib.contextmanager
    def _intercepted(self, first: int, end: int, taken: Mapping[str, Any]) -> Iterator[None]:
        """Replace blocks before unit `first` by their shapes, pass `taken` to its own, and leave
        forward at the block of `end`.
        """
        generators = _generators(self._like)

        def stand_in(number: int) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._result_of(number, args, kwargs)

        def begin(*args: Any, **kwargs: Any) -> Any:
            if any(
                not torch.equal(one, other)
                for one, other in zip(generators, _generators(self._like), strict=True)
            ):
                raise StageCannotRun(
                    f"forward draws random numbers outside of its blocks, before '{self._names[first - 1]}', and every stage would draw its "
                    "own. The step was not applied; draw them inside a module, or use fsdp or tp."
                )
            for absent, value in zip(_at((args, kwargs), taken), taken.values(), strict=True):
                if not isinstance(absent, AbsentTensor):
                    raise StageCannotRun(
                        f"'{self._names[first - 1]}' is called otherwise for this batch than for the first one, so what comes from the stage before "
                        "has no place. The step was not applied; use fsdp or tp."
                    )
                absent.value = value
            return own(first)(*args, **kwargs)

        def own(number: int) -> Callable[..., Any]:
            block = self._blocks[number - 1]

            def call(*args: Any, **kwargs: Any) -> Any:
                args, kwargs = pytree.tree_map_only(AbsentTensor, _present, (args, kwargs))
                return block._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's own

            return call

        def leave(*args: Any, **kwargs: Any) -> Any:
            raise _StageEnds(args, kwargs)

        calls = {number: stand_in(number) for number in range(1, first)}
        calls |= {number: own(number) for number in range(max(first, 1), end)}
        calls |= {first: begin} if first else {}
        calls |= {end: leave} if end <= len(self._blocks) else {}
        blocks = {self._blocks[number - 1]: call for number, call in calls.items()}
        before = {block: block.__dict__.get("_compiled_call_impl") for block in blocks}
        for block, call in blocks.items():
            # Replaces the call as a whole, hooks included: those of fsdp would wait for a backward.
            block._compiled_call_impl = call
        try:
            yield
        finally:
            for block, compiled in before.items():
                block._compiled_call_impl = compiled

    def _result_of(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an earlier stage's block, without data; computed once for arguments of the same shapes."""
        block = self._blocks[number - 1]
        found, spec = pytree.tree_flatten((args, kwargs))
        is_known = all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in found)
        shapes = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in found
        )
        key = (number, block.training, str(spec), shapes) if is_known else None
        if key not in self._results:
            before = _attributes(block)
            result = block._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's own
            given = pytree.tree_leaves(result)
            if key is None or not all(isinstance(leaf, (AbsentTensor, *_PLAIN)) for leaf in given):
                return result
            # A block that stores something in an attribute, for forward to read later, stores it at every
            # call.
            if any(
                one is not other or size != now
                for (one, size), (other, now) in zip_longest(
                    before, _attributes(block), fillvalue=(None, None)
                )
            ):
                return result
            if len(self._results) > 1000:
                self._results.clear()
            self._results[key] = result
        return pytree.tree_map_only(AbsentTensor, lambda t: AbsentTensor(t.fake), self._results[key])

    # ---- units, found once while the model is whole -------------------------------------------------

    def record(self, inputs: Tree) -> BlockForward | None:
        """Units of the forward in the model's mode; None if blocks are not called once each, one after the other."""
        model, paths = self._model, {m: path for path, m in self._model.named_modules()}
        holders = {
            ".".join(path.split(".")[:depth]) for path in self._names for depth in range(path.count(".") + 1)
        }
        names = {id(t): name for name, t in [*model.named_buffers(), *model.named_parameters()]}
        calls: list[Any] = []
        modules: list[list[str]] = [[]]
        tensors: list[list[str]] = [[]]
        states, versions = [_generators(self._like)], [_versions(model)]
        inside: list[str] = []

        def at_module(module: nn.Module, _: Any) -> None:
            path = paths.get(module)
            if path is not None and path not in holders and not any(path.startswith(f"{m}.") for m in inside):
                modules[-1].append(path)
                inside[:] = [path]

        def at_block(number: int) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls.append((number, (args, kwargs)))
                modules.append([])
                tensors.append([])
                states.append(_generators(self._like))
                versions.append(_versions(model))
                return self._blocks[number]._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's own

            return call

        class Uses(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                for leaf in pytree.tree_leaves((args, kwargs)):
                    if isinstance(leaf, Tensor) and id(leaf) in names:
                        tensors[-1].append(names[id(leaf)])
                return func(*args, **(kwargs or {}))

        handle = register_module_forward_pre_hook(at_module)
        try:
            for number, block in enumerate(self._blocks):
                block._compiled_call_impl = at_block(number)
            with unchanged(model), Uses(), torch.enable_grad():
                self._forward(list(leaves(inputs)))
                states.append(_generators(self._like))
                versions.append(_versions(model))
        finally:
            handle.remove()
            for block in self._blocks:
                block._compiled_call_impl = None
        if [number for number, _ in calls] != list(range(len(self._blocks))):
            return None
        takes = self._places_taken(inputs)
        if len(takes) != len(modules):
            return None  # code before a block depends on layer outputs
        changed = {name for name in versions[0] if any(each[name] != versions[0][name] for each in versions)}
        kept = {name for name, _ in model.named_buffers()} - changed
        outside = [n for n in kept if not any(n.startswith(f"{path}.") for path in self._names)]
        units = []
        for number, (called, used) in enumerate(zip(modules, tensors, strict=True)):
            found = list(dict.fromkeys(called))
            inside_them = [names[id(t)] for path in found for t in _tensors_of(model.get_submodule(path))]
            alone = [name for name in dict.fromkeys(used) if name not in inside_them]
            holds = list(dict.fromkeys([*inside_them, *(n for n in alone if n not in outside)]))
            example = dict(_flat(calls[number - 1][1])) if number else {}
            units.append(
                Unit(
                    self._names[number - 1] if number else (found or alone or ["forward"])[0],
                    tuple(found),
                    # Code between blocks may read them in every stage.
                    tuple(dict.fromkeys([*alone, *outside])),
                    tuple(holds),
                    any(
                        not torch.equal(a, b) for a, b in zip(states[number], states[number + 1], strict=True)
                    ),
                    tuple((place, _without_past(example[place])) for place in takes[number]),
                )
            )
        return self._graph(units, outside)

    def _places_taken(self, inputs: Tree) -> list[list[str]]:
        """Arguments of each unit's block that depend on an earlier layer: those without
        data when no layer has any.
        """
        kept = [
            (slots, name, empty)
            for slots, name, _, empty in self._slots
            if isinstance(slots[name], nn.Parameter)
        ]
        takes: list[list[str]] = [[]]

        def at_block(number: int) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                takes.append([path for path, leaf in _flat((args, kwargs)) if isinstance(leaf, AbsentTensor)])
                return self._result_of(number + 1, args, kwargs)

            return call

        try:
            for number, block in enumerate(self._blocks):
                block._compiled_call_impl = at_block(number)
            with unchanged(self._model), _swapped(kept):
                # Code after the last block may branch on its results.
                with contextlib.suppress(StageCannotRun):
                    self._forward(list(leaves(inputs)))
        finally:
            for block in self._blocks:
                block._compiled_call_impl = None
        return takes

    def _graph(self, units: Sequence[Unit], constants: Sequence[str]) -> BlockForward:
        graph, begins = fx.Graph(), []

        def node(kind: str, target: Any, args: tuple[Any, ...], example: Any, draws: bool = False) -> fx.Node:
            made = graph.create_node(kind, target, args)
            made.meta |= {"example": example, "draws": draws, "changes": [], "no_grad": False, "at": ""}
            return made

        inputs = [node("placeholder", f"input_{n}", (), None) for n in range(self._num_inputs)]
        shared = [node("get_attr", name, (), attribute(self._model, name)) for name in constants]
        values: list[fx.Node] = []
        for number, unit in enumerate(units):
            begins.append(len(graph.nodes) if number else 0)
            held = [node("get_attr", name, (), attribute(self._model, name)) for name in unit.holds]
            given = units[number + 1].takes if number + 1 < len(units) else ()
            ran = node("call_function", _unit, (*inputs, *shared, *held, *values), None, unit.draws)
            values = [
                node("call_function", operator.getitem, (ran, n), example)
                for n, (_, example) in enumerate(given)
            ]
        graph.output(ran)
        for each in graph.nodes:
            each.meta.setdefault("changes", [])
            each.meta.setdefault("draws", False)
            each.meta.setdefault("example", None)
        return BlockForward(graph, {}, self, tuple(units), tuple(begins))


def _unit(*_: Any) -> None:
    """Represents a unit in the graph, which is partitioned and not run."""


def repeated_blocks(model: nn.Module, inputs: Tree) -> list[str]:
    """Paths of repeated blocks that forward calls once each, in order: members of one list or sequence, of one class."""
    found: dict[nn.Module, str] = {}

    def visit(prefix: str, module: nn.Module) -> None:
        members = dict(module.named_children())
        kinds = Counter(type(child) for child in members.values() if list(child.children()))
        for name, child in members.items():
            is_member = isinstance(module, (nn.ModuleList, nn.Sequential))
            if is_member and kinds[type(child)] > 1 and any(True for _ in child.parameters()):
                found[child] = prefix + name
            else:
                visit(f"{prefix}{name}.", child)

    visit("", model)
    called: list[nn.Module] = []
    handles = [block.register_forward_pre_hook(lambda module, _: called.append(module)) for block in found]
    try:
        with unchanged(model), torch.no_grad():
            ModelCall(model)(inputs)
    finally:
        for handle in handles:
            handle.remove()
    times = Counter(called)
    return [found[block] for block in called if times[block] == 1]


def block_forwards(model: nn.Module, inputs: Tree) -> tuple[BlockForward, BlockForward] | None:
    """The forward as a row of blocks, in training and in evaluation; None for a model without such a row."""
    # BatchNorm accepts no batch of one, and a synchronised one would wait for other ranks.
    resting = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    with evaluating(resting):
        paths = repeated_blocks(model, inputs)
        if len(paths) < 2:
            return None
        runner = BlockRunner(model, paths, inputs)
        train = runner.record(inputs)
    with evaluating(model.modules()):
        evaluation = runner.record(inputs)
    if train is None or evaluation is None:
        return None
    places = [[[place for place, _ in unit.takes] for unit in each.units] for each in (train, evaluation)]
    return (train, evaluation) if places[0] == places[1] else None


def block_segments(forward: BlockForward, begins: Sequence[int]) -> list[StageSegment]:
    """Split the forward before these nodes, each the first one of a unit."""
    units, numbers = forward.units, [forward.begins.index(begin) for begin in begins]
    return [
        StageSegment(
            tuple(place for place, _ in units[first].takes),
            tuple(place for place, _ in given),
            tuple(range(forward.runner.num_inputs)),
            tuple(
                dict.fromkeys(path for unit in units[first:end] for path in (*unit.modules, *unit.tensors))
            ),
            forward.runner.segment(units, first, end),
            tuple(example.requires_grad for _, example in given),
            any(unit.draws for unit in units[first:end]),
            trains_beside=True,  # where a weight is used is unknown: all gradients at once
        )
        for first, end in zip(numbers, [*numbers[1:], len(units)], strict=True)
        for given in [units[end].takes if end < len(units) else ()]
    ]


def _present(tensor: Tensor) -> Tensor:
    """The tensor itself, or the data that was received for it."""
    if not isinstance(tensor, AbsentTensor):
        return tensor
    if tensor.value is None:
        raise StageCannotRun(_needs("is used again"))
    return tensor.value


def _without_past(tensor: Tensor) -> Tensor:
    """The graph behind an example would keep the activations of the whole model."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _flat(call: Any) -> list[tuple[str, Any]]:
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(call)[0]]


def _at(call: Any, places: Any) -> list[Any]:
    found = dict(_flat(call))
    return [found.get(place) for place in places]


@contextlib.contextmanager
def _swapped(swaps: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    before = [(slots, name, slots[name]) for slots, name, _ in swaps]
    for slots, name, value in swaps:
        slots[name] = value
    try:
        yield
    finally:
        for slots, name, value in before:
            slots[name] = value


def _generators(inputs: Tree) -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    devices = {tensor.device for tensor in leaves(inputs) if tensor.device.type != "cpu"}
    return [*states, *(torch.get_device_module(device).get_rng_state(device) for device in devices)]


def _versions(model: nn.Module) -> dict[str, int]:
    return {name: buffer._version for name, buffer in model.named_buffers()}


def _attributes(block: nn.Module) -> list[tuple[Any, int | None]]:
    """Values of a block's attributes, and how much those hold that hold others."""
    values = [value for module in block.modules() for value in vars(module).values()]
    return [(value, len(value) if type(value) in (list, dict, set) else None) for value in values]


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
