"""Graph of a model as it was run: sources, layers and edges, recorded during its first forward, by rank 0.

Nothing is traced or run for it. While the model's own forward runs for the first time, every tensor
carries the name of the layer it came from; a module that called no other is a layer, and so is an
operation that joins several of them. The strategy reports where it put each layer and what it sends
(`Places`). `graph.json` of the run directory is drawn by the dashboard and `shoal graph`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.weak import WeakIdKeyDictionary

from shoal.cluster.launch.run_directory import write_atomically
from shoal.parallel.protocol import LayerPlace, Places, Strategy

FILE_NAME = "graph.json"
MAX_LAYERS = 5000


class _Provenance(TorchFunctionMode):
    """Name of the layer or source of each tensor; a tensor with several gets a name by `join`."""

    def __init__(self, join: Callable[[list[str], str, Any], str]) -> None:
        super().__init__()
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._join = join
        self.is_off = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_off:
            return result
        with contextlib.suppress(Exception):  # on any error training goes on
            results = _tensors(result)
            names = self.of((args, kwargs)) if results else []
            if names:
                called = getattr(func, "__name__", "join").strip("_")
                name = names[0] if len(names) == 1 else self._join(names, called, results[0])
                for tensor in results:
                    self._names[tensor] = name
        return result

    def of(self, tree: Any) -> list[str]:
        found = (self._names.get(tensor) for tensor in _tensors(tree))  # type: ignore[no-untyped-call]
        return list(dict.fromkeys(name for name in found if name is not None))

    def name(self, tree: Any, name: str) -> None:
        for tensor in _tensors(tree):
            self._names[tensor] = name


class GraphRecorder:
    """Waits for the first forward of a model on real tensors and records it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._provenance: _Provenance | None = None
        self._calls: list[tuple[str, bool]] = []  # of modules under way: path, whether it called another
        self._numbers: dict[str, int] = {}  # of joins, by what they are called
        self.layers: dict[str, dict[str, Any]] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.edges: dict[tuple[str, str], dict[str, Any]] = {}
        self.num_samples = 0
        self.is_done = False
        # The model's own hook sees its keyword arguments; hooks of all modules do not.
        self._handles = [
            model.register_forward_pre_hook(self._guarded(self._begin), with_kwargs=True),
            register_module_forward_pre_hook(self._guarded(self._enter)),
            register_module_forward_hook(self._guarded(self._leave), always_call=True),
        ]

    def close(self) -> None:
        self._stop()
        # Modes are popped by position: one that the model's code has entered since must stay.
        innermost = _get_current_function_mode()  # type: ignore[no-untyped-call]
        if self._provenance is not None and innermost is self._provenance:
            self._provenance.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._provenance = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _stop(self) -> None:
        self.is_done = True
        if self._provenance is not None:
            self._provenance.is_off = True

    def _guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Ignore any error: an unusual model must train all the same."""

        def run(*args: Any) -> None:
            try:
                hook(*args)
            except Exception:
                self._stop()  # closed when the model's forward is over, outside of contexts it may have entered

        return run

    def _enter(self, module: nn.Module, args: Any) -> None:
        path = self._paths.get(id(module))
        if path is None or path == "" or self._provenance is None or self.is_done:
            return
        self._calls[-1] = (self._calls[-1][0], True)
        self._calls.append((path, False))

    def _is_plain(self, args: Any) -> bool:
        """Whether this is a forward on data, not another tool's trace."""
        return (
            not torch.compiler.is_compiling()
            and _get_current_dispatch_mode() is None
            and all(
                isinstance(leaf, Tensor) or not hasattr(leaf, "node") for leaf in _pytree.tree_leaves(args)
            )
        )

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._provenance is not None or self.is_done or not self._is_plain((args, kwargs)):
            return
        provenance = _Provenance(self._join)
        for name, parameter in self._model.named_parameters():
            provenance.name(parameter, f"parameter {name}")
        self._calls = [("", False)]
        self._provenance = provenance
        provenance.__enter__()  # type: ignore[no-untyped-call]
        for given in (args, kwargs):
            for path, leaf in _pytree.tree_flatten_with_path(given)[0]:
                if isinstance(leaf, Tensor):
                    keys = [str(getattr(key, "key", getattr(key, "idx", ""))) for key in path]
                    # A dict that is the only argument: its keys are the names.
                    name = ".".join(keys[1:] if len(keys) > 1 and keys[0] == "0" and len(args) == 1 else keys)
                    self._add_source(f"input {name}" if name.isdigit() else name or "input", leaf)

    def _add_source(self, name: str, tensor: Tensor) -> None:
        assert self._provenance is not None
        self._provenance.name(tensor, name)
        if not self.num_samples and tensor.dim():
            self.num_samples = tensor.shape[0]
        self.sources[name] = {"name": name, "shape": self._shape(tensor), "bytes": tensor.nbytes}

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        path, provenance = self._paths.get(id(module)), self._provenance
        if path is None or provenance is None:
            return
        if path == "":
            try:
                if not self.is_done:
                    self._end(args, output, is_layer=not self._calls.pop()[1] and not self.layers)
            finally:
                self.close()
            return
        if self.is_done:
            return
        _, called_another = self._calls.pop()
        if called_another or len(self.layers) >= MAX_LAYERS:
            return
        self._add_layer(path, module, args, output)

    def _end(self, args: Any, output: Any, *, is_layer: bool) -> None:
        assert self._provenance is not None
        if is_layer:
            self._add_layer(type(self._model).__name__, self._model, args, output)
        self._forget_unused(self._provenance.of(output))

    def _join(self, names: list[str], called: str, result: Tensor) -> str:
        """Node for a value computed from several: a sum, a concatenation, a product."""
        if len(self.layers) >= MAX_LAYERS:
            return names[0]
        inside = self._calls[-1][0]
        path = f"{inside}.{called}" if inside else called
        number = self._numbers.get(path, 0) + 1
        while (name := path if number == 1 else f"{path} {number}") in self.layers:
            number += 1
        self._numbers[path] = number
        self._connect(names, name)
        self.layers[name] = {
            "name": name,
            "kind": called,
            "shape": self._shape(result),
            "output_bytes": result.nbytes,
            "input_bytes": 0,
            "parameters": 0,
            "parameter_bytes": 0,
            "is_join": True,
        }
        return name

    def _connect(self, names: list[str], to: str, num_bytes: int | None = None) -> None:
        for name in names:
            if name != to:
                if name not in self.layers and name not in self.sources:
                    self.sources[name] = {"name": name, "shape": "", "bytes": 0}
                made = (
                    self.layers[name]["output_bytes"] if name in self.layers else self.sources[name]["bytes"]
                )
                self.edges[name, to] = {
                    "from": name,
                    "to": to,
                    "bytes": made if num_bytes is None else num_bytes,
                }

    def _forget_unused(self, results: list[str]) -> None:
        """Drop joins without consumers: they are inside a layer, which is drawn as one."""
        before: dict[str, list[str]] = {}
        for start, end in self.edges:
            before.setdefault(end, []).append(start)
        left = [*results, *(name for name, layer in self.layers.items() if not layer.get("is_join"))]
        used = set(left)
        while left:
            new = [name for name in before.get(left.pop(), ()) if name not in used]
            used.update(new)
            left += new
        self.layers = {name: layer for name, layer in self.layers.items() if name in used}
        self.edges = {ends: edge for ends, edge in self.edges.items() if ends[1] in used}
        self.sources = {name: source for name, source in self.sources.items() if name in used}

    def _add_layer(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        assert self._provenance is not None
        outputs = _tensors(output)
        if not outputs:
            return
        known = self.layers.get(path)
        inputs = _tensors(args)
        for tensor in inputs:
            names = self._provenance.of(tensor)
            if not names:  # from code that is not followed: a kernel of its own, or a constant
                names = [f"input {len(self.sources)}"]
                self._add_source(names[0], tensor)
            self._connect(names, path, tensor.nbytes)
        if known is None:
            own = list(module.parameters())
            self.layers[path] = {
                "name": path,
                "kind": type(module).__name__,
                "shape": self._shape(outputs[0]),
                "output_bytes": sum(tensor.nbytes for tensor in outputs),
                "input_bytes": sum(tensor.nbytes for tensor in inputs),
                "parameters": sum(parameter.numel() for parameter in own),
                "parameter_bytes": sum(parameter.numel() * parameter.element_size() for parameter in own),
            }
        self._provenance.name(output, path)

    def _shape(self, tensor: Tensor) -> str:
        sizes = [str(size) for size in tensor.shape]
        if sizes and tensor.shape[0] == self.num_samples:
            sizes[0] = "N"
        return "×".join(sizes) or "scalar"


def shapes_of(model: nn.Module) -> dict[str, list[int]]:
    """Shapes of a model's parameters by name."""
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


class GraphReport:
    """`graph.json` of a run: begun before the strategy has the model, written after its first step.

    An unusual model or strategy has no graph, and trains all the same.
    """

    def __init__(self, model: nn.Module, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._recorder: GraphRecorder | None = None
        with contextlib.suppress(Exception):
            # The model is whole now; afterwards a rank may have a part of it.
            self._shapes = shapes_of(model)
            self._parameters = {
                name: [
                    (parameter.numel(), parameter.element_size())
                    for parameter in module.parameters(recurse=not any(True for _ in module.children()))
                ]
                for name, module in model.named_modules()
            }
            if not any(_is_compiled(module) for module in model.modules()):
                self._recorder = GraphRecorder(model)

    def write(self, strategy: Strategy, *, num_local: int, num_workers: int) -> None:
        """Write the recorded graph, once. `num_local`: samples of this worker in a step."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        with contextlib.suppress(Exception):
            recorder.close()
            places = (
                {place.layer: place for place in strategy.places()} if isinstance(strategy, Places) else {}
            )
            graph = describe(recorder, self._parameters, places, num_local=num_local, num_workers=num_workers)
            write_atomically(self._path, json.dumps(graph | {"model": self._shapes}).encode())

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None


def describe(
    recorder: GraphRecorder,
    parameters: dict[str, list[tuple[int, int]]],
    places: dict[str, LayerPlace],
    *,
    num_local: int,
    num_workers: int,
) -> dict[str, Any]:
    """The graph in plain values. Bytes are of one worker and one step: of the recorded forward, for its slice."""
    scale = num_local / recorder.num_samples if recorder.num_samples else 1.0
    before: LayerPlace | None = None
    layers, communication = [], []
    placed: dict[str, LayerPlace] = {}
    for layer in recorder.layers.values():
        whole = parameters.get(layer["name"], [])
        sizes = {
            "parameters": sum(numel for numel, _ in whole) or layer["parameters"],
            "parameter_bytes": sum(numel * size for numel, size in whole) or layer["parameter_bytes"],
        }
        # A layer without a place has that of the layer before it.
        place = _place_of(layer["name"], places) or _follows(before)
        placed[layer["name"]] = before = place
        layers.append(
            {**layer, **sizes, "output_bytes": round(layer["output_bytes"] * scale)}
            | {"where": place.where, "how": place.how, "is_cut": place.is_cut}
        )
        for what, moved in place.sends:
            number = {
                "output": layer["output_bytes"] * scale,
                "input": layer["input_bytes"] * scale,
                "parameters": sizes["parameter_bytes"],
            }
            total = sum(number[kind] * times for kind, times in moved.items())
            if total or not moved:
                communication.append({"layer": layer["name"], "what": what, "bytes": round(total) or None})
    edges, sent = [], set[tuple[str, int | None]]()
    for edge in recorder.edges.values():
        ends = [placed.get(edge[side]) for side in ("from", "to")]
        crosses = ends[0] is not None and ends[1] is not None and ends[0].stage != ends[1].stage
        found = {**edge, "bytes": round(edge["bytes"] * scale)}
        if crosses and ends[1] is not None:
            found["sent"] = f"send to stage {ends[1].stage}"
        if crosses and ends[1] is not None and (edge["from"], ends[1].stage) not in sent:
            sent.add((edge["from"], ends[1].stage))  # once, however many there use it
            communication.append(
                {
                    "edge": [edge["from"], edge["to"]],
                    "what": "activations and their gradients between stages",
                    "bytes": 2 * found["bytes"],
                }
            )
        edges.append(found)
    return {
        "version": 1,
        "note": f"from the first forward on worker-0; N = {num_local} samples of a worker in a step; bytes are by shapes",
        "num_samples": num_local,
        "workers": num_workers,
        "sources": list(recorder.sources.values()),
        "layers": layers,
        "edges": edges,
        "communication": communication,
    }


def _place_of(layer: str, places: dict[str, LayerPlace]) -> LayerPlace | None:
    """Place of a layer, of a module around it, or of one inside it."""
    parts = layer.split(".")
    for length in range(len(parts), 0, -1):
        if (found := places.get(".".join(parts[:length]))) is not None:
            return found
    inside = (place for name, place in places.items() if name.startswith(f"{layer}."))
    return next(inside, None)


def _follows(before: LayerPlace | None) -> LayerPlace:
    stage = before.stage if before is not None else None
    where = before.where if before is not None and stage is not None else "each worker"
    return LayerPlace("", where, stage=stage)


def _is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, by `module.compile()` or `torch.compile(module)`: Dynamo would
    trace the recording too, or break its graph.
    """
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # imported where something was compiled
    return getattr(module, "_compiled_call_impl", None) is not None or (
        eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)
    )


def _tensors(tree: Any) -> list[Tensor]:
    return list(_leaves(tree))


def _leaves(tree: Any) -> Iterator[Tensor]:
    """Tensors in arguments or results; of objects of a class of its own (a model's output), their fields."""
    for leaf in _pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dataclass_fields__"):
            yield from (value for value in vars(leaf).values() if isinstance(value, Tensor))
