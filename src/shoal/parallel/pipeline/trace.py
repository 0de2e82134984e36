"""Trace a model's forward into a graph, on example inputs or on a meta copy.

torch.fx records, and every value carries an example beside it: branches on shapes follow the
example and are checked again whenever the graph runs; branches on data cannot be traced. Modules
that are not opened stay whole, with their hooks, their mode and the user's own objects: nothing of
the model is copied and no name changes.

A meta copy has shapes and no data. A rank of a pipeline holds only its own weights, and its layers
may be partitioned and sharded; the copy is made before that.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import linecache
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.data.tree import Tree, leaves, map_tensors
from shoal.errors import ShapeDecides, TrainingError
from shoal.parallel.compute import ModelCall, evaluating, is_run_again
from shoal.parallel.state import attribute, first_line
from shoal.runtime import user_frames

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FACTORIES = (
    "arange", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm",
    "tensor", "as_tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
_SHAPES = {"size", "dim", "ndim", "shape", "numel", "nelement", "dtype", "device", "is_floating_point", "is_cuda", "ndimension",
           "stride", "requires_grad", "is_sparse", "layout", "is_nested", "element_size", "is_complex", "is_contiguous"}  # fmt: skip


class Untraceable(Exception):
    """Internal: a module whose forward is no graph, with the reason. It stays whole, or becomes a ConfigError."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path, self.reason = path, reason


@dataclass(frozen=True, slots=True)
class TracedForward:
    """One forward as a graph.

    Of each node's `meta`: "example", "no_grad", "draws" (random numbers), "changes" (nodes it writes into) and "at" (the
    module whose forward it is in).
    """

    graph: fx.Graph
    constants: Mapping[str, Tensor]
    """Tensors that forward uses and no module holds, by their names in the graph."""

    def signature(self) -> list[tuple[str, str]]:
        """Module path and text of every node, for comparing two traces."""
        return [
            (str(n.meta.get("at", "")), f"{n.op} {n.target} {n.args} {n.kwargs}") for n in self.graph.nodes
        ]

    def node_texts(self) -> list[str]:
        return [text for _, text in self.signature()]


@dataclass(frozen=True, slots=True)
class StageSegment:
    """Consecutive operations of a forward as a function of their own: one stage's work."""

    takes: tuple[str, ...]
    """Names of the values that it takes from the segment before."""

    gives: tuple[str, ...]
    """Names of the values that it gives to the next; empty for the last, which gives the model's output."""

    inputs: tuple[int, ...]
    """Numbers of the model's inputs that it reads itself."""

    targets: tuple[str, ...]
    """Paths of the modules, parameters and buffers that it uses."""

    run: Callable[..., Any]
    """Called with a SegmentModule, the inputs and the taken values."""

    needs_grad: tuple[bool, ...]
    """Whether each given tensor needs a gradient, in packing order."""

    draws: bool
    """Whether it draws random numbers."""

    trains_beside: bool
    """Whether some trained values in it do not depend on its inputs."""


def forget(traced: TracedForward) -> None:
    """Release the example values, and with them weights: nodes form reference cycles, which are collected late."""
    for node in traced.graph.nodes:
        node.meta.clear()


def expect(value: object, seen: object, line: str) -> None:
    """Check that a branch on a shape has the same outcome as when forward was traced."""
    if value != seen:
        raise ShapeDecides(seen=seen, value=value, line=line)


def check(value: object, expected: bool, line: str) -> None:
    """Run a check of forward's own, such as `if labels.max() >= self.num_classes: raise ...`, on this batch."""
    if bool(value) != expected:
        raise TrainingError(
            f"a check in the model's own forward failed{line}: it would have raised an error there. Nothing of this step was applied; "
            "run the script in one process to see its message."
        )


class _Value(fx.Proxy):
    """Proxy for a value while a forward is traced."""

    tracer: _Tracer

    def __index__(self) -> int:
        return int(self.tracer.settle(self, "is used as a number"))

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.tracer.settle(self, "is used as a number"))

    def __len__(self) -> int:
        example = self.node.meta["example"]
        if isinstance(example, Tensor):
            return _Value.__index__(self.size(0))  # type: ignore[arg-type]  # a _Value too
        return len(example)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __contains__(self, item: object) -> bool:
        example = self.node.meta["example"]
        if isinstance(example, Mapping):
            return item in example
        raise TypeError("it is asked what is in a value")


class _Tracer(fx.Tracer):
    """Records the forward of a model; `is_open` chooses the modules to open."""

    proxy_buffer_attributes = True

    def __init__(self, inputs: Tree, is_open: Callable[[str, nn.Module], bool]) -> None:
        super().__init__()
        self._inputs, self._is_open = inputs, is_open
        self.is_concrete = False
        self.constants: dict[str, Tensor] = {}
        self._autocast = _autocast_state()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return bool(path) and not self._is_open(path, module)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.is_concrete or not self._is_held(m):
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Untraceable:
            raise
        except Exception as error:  # a user's forward may do anything to a tracer
            raise Untraceable(self.path_of_module(m), first_line(error) + _users_line(error)) from None

    def _is_held(self, module: nn.Module) -> bool:
        """Whether a module is the model's own, and not created by its forward, as a loss often is."""
        assert isinstance(self.root, nn.Module)
        if any(True for _ in (*module.parameters(), *module.buffers())):
            return True
        return any(module is each for each in self.root.modules())

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        return attr_val if self.is_concrete else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        assert isinstance(self.root, nn.Module)
        call = ModelCall(self.root)
        examples = list(leaves(self._inputs))
        proxies = iter([self.create_proxy("placeholder", f"input_{n}", (), {}) for n in range(len(examples))])
        for value, example in zip(self.graph.nodes, examples, strict=True):
            value.meta["example"] = example
        tree = map_tensors(lambda _: next(proxies), self._inputs)
        return lambda root: call(tree), [self.root]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter) and a not in self.tensor_attrs:
            assert isinstance(self.root, nn.Module)
            if not any(a is buffer for buffer in self.root.buffers()):
                if a.grad_fn is not None:  # of this batch alone
                    why = "it uses a value that a layer computed and left in an attribute, or one of parameters outside of the layers they belong to, which no stage hands on"
                    raise Untraceable(self.scope.module_path, why + _users_line())
                name = f"_constant_{len(self.constants)}"
                self.constants[name] = a
                return self.create_node("get_attr", name, (), {})
        return super().create_arg(a)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any
    ) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, *more, **named)
        node.meta |= {
            "no_grad": not torch.is_grad_enabled(),
            "at": self.scope.module_path,
            "changes": [],
            "draws": False,
        }
        if kind not in ("placeholder", "output"):
            if _autocast_state() != self._autocast:
                raise Untraceable(self.scope.module_path, "it switches autocast on or off inside")
            with self.concrete():
                node.meta["example"] = self._run(node)
        return node

    @contextlib.contextmanager
    def concrete(self) -> Iterator[None]:
        """Run a call instead of recording it."""
        before, self.is_concrete = self.is_concrete, True
        try:
            yield
        finally:
            self.is_concrete = before

    def _run(self, node: fx.Node) -> Any:
        assert isinstance(self.root, nn.Module)
        if node.op == "get_attr":
            return (
                self.constants[node.target]
                if node.target in self.constants
                else attribute(self.root, str(node.target))
            )
        examples = {given: given.meta["example"] for given in node.all_input_nodes}
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: examples[n])
        versions = {n: [t._version for t in _tensors(held)] for n, held in examples.items()}
        before, asked = _generators(self.root), _Draws()
        # Fake tensors draw nothing, so random operations are recorded instead.
        has_data = not any(isinstance(t, FakeTensor) for held in examples.values() for t in _tensors(held))
        with contextlib.nullcontext() if has_data else asked:
            value = self._call(node, args, kwargs)
        node.meta["draws"] = asked.may_draw or any(
            not torch.equal(state, now) for state, now in zip(before, _generators(self.root), strict=True)
        )
        node.meta["changes"] = [
            n for n, held in examples.items() if versions[n] != [t._version for t in _tensors(held)]
        ]
        for changed in node.meta["changes"]:
            if changed.op == "placeholder":
                raise Untraceable(self.scope.module_path, "it changes its inputs in place")
        return value

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_module":
            assert isinstance(self.root, nn.Module)
            return self.root.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def settle(self, value: fx.Proxy, use: str) -> Any:
        """The example's value, for Python to continue with; checked again when the graph runs."""
        example = value.node.meta["example"]
        if isinstance(example, Tensor) or is_of_data(value.node):
            raise Untraceable(self.scope.module_path, f"a value computed from the data {use}{_users_line()}")
        self.create_proxy("call_function", expect, (value, example, _users_line()), {})
        return example

    def to_bool(self, obj: Any) -> bool:
        if _is_never(obj.node):
            return False
        example = obj.node.meta["example"]
        if isinstance(example, Tensor) or is_of_data(obj.node):
            passes = _outcome_of_check()
            if passes is not None:
                self.create_proxy("call_function", check, (obj, passes, _users_line()), {})
                return passes
        return bool(self.settle(obj, "decides what is done next"))

    def iter(self, obj: Any) -> Iterator[Any]:
        return iter([obj[number] for number in range(len(obj))])

    def keys(self, obj: Any) -> Any:
        example = obj.node.meta["example"]
        return list(example.keys()) if isinstance(example, Mapping) else super().keys(obj)


def _is_never(node: fx.Node) -> bool:
    """Whether a probability is zero, as in `if torch.rand([]) < self.layerdrop` of a model that drops no layer."""
    if node.target is not operator.lt or len(node.args) != 2:
        return False
    drawn, chance = node.args
    is_drawn = isinstance(drawn, fx.Node) and getattr(drawn.target, "__name__", "") == "rand"
    return is_drawn and isinstance(chance, (int, float)) and chance <= 0


class _Factories(TorchFunctionMode):
    """Records factory calls, so that new tensors are made when the graph runs, not once when it is traced."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer
        self._known = {getattr(torch, name) for name in _FACTORIES}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._known and not self._tracer.is_concrete:
            return self._tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says nothing of its types
    """Notices operations that may draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.may_draw = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.may_draw |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@functools.cache  # one object for one class, so that two traces of it are alike
def _applying(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` as an operation of a graph: recorded whole, or its own backward would be lost."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's own

    apply.__name__ = apply.__qualname__ = f"apply_{function.__name__}"
    return apply


def trace(model: nn.Module, inputs: Tree, is_open: Callable[[str, nn.Module], bool]) -> TracedForward:
    tracer, own_thread = _Tracer(inputs, is_open), threading.get_ident()

    def recorded(factory: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            # Other threads go on meanwhile: they read batches and send tensors.
            if tracer.is_concrete or threading.get_ident() != own_thread:
                return factory(*args, **kwargs)
            return tracer.create_proxy("call_function", factory, args, kwargs)

        return make

    applied = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]  # of a class method

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if tracer.is_concrete or threading.get_ident() != own_thread:
            return applied(function, *args, **kwargs)
        return tracer.create_proxy("call_function", _applying(function), args, kwargs)

    # A reference taken by `f = Function.apply` earlier is not the patched one. It calls this first, and
    # then forward, without the class.
    functorch = torch._functorch.utils
    unwrap = getattr(functorch, "unwrap_dead_wrappers", None)

    def unwrap_values(args: tuple[Any, ...]) -> Any:
        if any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(args)):
            why = "it calls the apply of an autograd.Function by another name, and its backward would be lost"
            raise Untraceable(tracer.scope.module_path, why + _users_line())
        return unwrap(args)  # type: ignore[misc]  # replaced only where there is one

    with contextlib.ExitStack() as stack:
        if unwrap is not None:
            stack.enter_context(mock.patch.object(functorch, "unwrap_dead_wrappers", unwrap_values))
        stack.enter_context(unchanged(model))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)))
        for name in _FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, recorded(getattr(torch, name))))
        stack.enter_context(_Factories(tracer))
        graph = tracer.trace(model)
    _take_apart_early(graph)
    return TracedForward(graph, tracer.constants)


def _take_apart_early(graph: fx.Graph) -> None:
    """Read the fields of a module's result object right after the call: only tensors are sent between stages."""
    for node in list(graph.nodes):
        if node.target not in (getattr, operator.getitem) or not isinstance(node.args[0], fx.Node):
            continue
        source, *keys = node.args
        is_part = source.op == "call_module" or source.meta.get("is_part", False)
        if (
            is_part
            and not isinstance(source.meta["example"], Tensor)
            and not any(isinstance(key, fx.Node) for key in keys)
        ):
            node.meta["is_part"] = True
            source.append(node)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore buffers and generators at the end."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _generators(model: nn.Module) -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _autocast_state() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def is_of_data(node: fx.Node) -> bool:
    """Whether a non-tensor value was read out of a tensor's data, and not out of its shape."""
    todo, seen = [node], set()
    while todo:
        node = todo.pop()
        if node in seen or isinstance(node.meta["example"], Tensor):
            continue
        seen.add(node)
        reads = any(_tensors(given.meta["example"]) for given in node.all_input_nodes)
        name = node.args[1] if node.target is getattr else getattr(node.target, "__name__", node.target)
        if reads and name not in _SHAPES and not _tensors(node.meta["example"]):
            return True
        todo += node.all_input_nodes
    return False


def _outcome_of_check() -> bool | None:
    """Outcome of the user's line if it only checks: false for `if x: raise`, true for `assert x`; else None."""
    for frame in inspect.stack(0)[1:]:
        if frame.filename.startswith(_TORCH) or user_frames.is_ours(frame.filename):
            continue
        for node in ast.walk(_source(frame.filename)):
            if not isinstance(node, (ast.If, ast.Assert)):
                continue
            if not node.test.lineno <= frame.lineno <= (node.test.end_lineno or 0):
                continue
            if any(isinstance(each, ast.Not) for each in ast.walk(node.test)):
                return None
            if isinstance(node, ast.Assert):
                return True
            return (
                False if not node.orelse and all(isinstance(each, ast.Raise) for each in node.body) else None
            )
        return None
    return None


@functools.cache
def _source(filename: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ast.Module([], [])


def _users_line(error: BaseException | None = None) -> str:
    """The line of the user's code, as far as it can be determined."""
    frames = (
        [(frame.filename, frame.lineno) for frame in inspect.getinnerframes(error.__traceback__)]
        if error is not None and error.__traceback__ is not None
        else [(frame.filename, frame.lineno) for frame in reversed(inspect.stack(0))]
    )
    # By the package's own folder: a project may be in a folder called shoal.
    own = [
        (f, n)
        for f, n in frames
        if not (f.startswith((_TORCH, "<frozen", "<string>")) or user_frames.is_ours(f))
    ]
    return f" (line {own[-1][1]} of {own[-1][0].rpartition('/')[2]})" if own else ""


class MetaCopy:
    """A copy of a model with shapes and no data, in the model's mode."""

    def __init__(self, model: nn.Module) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Plain tensor attributes are shared with the model.
        plain = [leaf for module in model.modules() for leaf in pytree.tree_leaves(vars(module))]
        memo: dict[int, Any] = {id(leaf): leaf for leaf in plain if isinstance(leaf, (Tensor, np.ndarray))}
        for tensor in (*model.parameters(), *model.buffers()):
            like = self._like(tensor)
            if isinstance(tensor, nn.Parameter):
                like = nn.Parameter(like, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = like
        self.model = copy.deepcopy(model, memo)
        for module in self.model.modules():
            if is_run_again(module):
                del module.forward  # it runs the model's forward, and here nothing runs again

    def trace(
        self, inputs: Tree, is_open: Callable[[str, nn.Module], bool], *, training: bool
    ) -> TracedForward | None:
        modules = list(self.model.modules())
        resting = [each for each in modules if isinstance(each, _BatchNorm)] if training else modules
        try:
            with evaluating(resting):
                traced = trace(self.model, map_tensors(self._like, inputs), is_open)
        except Exception:  # torch's or the user's: then stages run as they are, and report what does not fit
            return None
        return None if any(isinstance(each, FakeTensor) for each in traced.constants.values()) else traced

    def _like(self, tensor: Tensor) -> Tensor:
        with self._mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def meta_copy_of(model: nn.Module) -> MetaCopy | None:
    """The meta copy; None for a model that cannot be copied."""
    try:
        return MetaCopy(model)
    except Exception:  # a user's module may hold anything: a lock, a socket, a tensor with a graph
        return None
