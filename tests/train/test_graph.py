"""Graph of a model: what is recorded of one forward, and that training does not notice."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.observe import drawing
from shoal.parallel.protocol import LayerPlace
from shoal.train.graph import FILE_NAME, GraphRecorder, GraphReport, describe


class Residual(nn.Module):
    """Branches, a residual sum, a layer used twice, an argument by name, a parameter of its own, and control flow."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 4)
        self.dense = nn.Linear(3, 4)
        self.shared = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, features: Tensor, *, ids: Tensor) -> Tensor:
        both = self.rows(ids) + self.dense(features.log1p())
        for _ in range(2):  # which no tracer of shapes has to follow
            both = both + torch.relu(self.shared(both))
        mixed, _ = self.attention(both[:, None], both[:, None], both[:, None])
        return mixed[:, 0] + self.shift


def recorded() -> GraphRecorder:
    model = Residual()
    recorder = GraphRecorder(model)
    model(torch.rand(5, 3), ids=torch.arange(5))
    assert recorder.is_done
    return recorder


def test_layers_joins_sources_and_edges_are_those_of_the_forward() -> None:
    found = recorded()
    assert [name for name, layer in found.layers.items() if not layer.get("is_join")] == [
        "rows",
        "dense",
        "shared",
        "attention",
    ]
    assert {
        ("ids", "rows"),
        ("input 0", "dense"),
        ("rows", "add"),
        ("dense", "add"),
        ("add", "shared"),
    } <= found.edges.keys()
    assert {
        ("add", "add 2"),
        ("shared", "add 2"),
        ("add 2", "shared"),
        ("add 3", "attention"),
    } <= found.edges.keys()
    assert ("parameter shift", "add 4") in found.edges
    assert found.sources.keys() == {"input 0", "ids", "parameter shift"}
    assert found.layers["rows"]["shape"] == "N×4"


def test_recording_leaves_no_hook_and_changes_no_bit() -> None:
    torch.manual_seed(0)
    model, inputs, ids = Residual(), torch.rand(5, 3), torch.arange(5)
    before = model(inputs, ids=ids)
    recorder = GraphRecorder(model)
    assert torch.equal(model(inputs, ids=ids), before)
    assert recorder.is_done
    assert not model._forward_pre_hooks
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_forward_that_fails_leaves_training_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 1))
    recorder = GraphRecorder(model)
    try:
        model(torch.rand(2, 3))
    except RuntimeError:
        recorder.close()
    assert torch.overrides._get_current_function_mode() is None
    assert not nn.modules.module._global_forward_hooks


def test_places_stages_and_bytes_are_put_together() -> None:
    places = {
        "rows": LayerPlace(
            "rows", "servers 0-1", "rows by key", is_cut=True, stage=0, sends=(("pull rows", {}),)
        ),
        "dense": LayerPlace(
            "dense", "worker 0", stage=0, sends=(("all-reduce of gradients", {"parameters": 1.0}),)
        ),
        "shared": LayerPlace(
            "shared", "worker 1", stage=1, sends=(("all-reduce of outputs", {"output": 2.0}),)
        ),
    }
    graph = describe(recorded(), {}, places, num_local=10, num_workers=2)  # twice the samples that were seen
    sent = {(each.get("layer"), each["what"]): each["bytes"] for each in graph["communication"]}
    assert sent["rows", "pull rows"] is None
    assert sent["dense", "all-reduce of gradients"] == (3 * 4 + 4) * 4
    assert sent["shared", "all-reduce of outputs"] == 2 * (10 * 4 * 4)
    crossing = {(edge["from"], edge["to"]) for edge in graph["edges"] if edge.get("sent")}
    assert ("add", "shared") in crossing
    assert ("rows", "add") not in crossing
    picture = drawing.svg(graph)
    assert "send to stage 1" in picture
    assert "servers 0-1 · rows by key" in picture


def test_the_report_is_written_once_after_the_first_step(tmp_path: Path) -> None:
    class Told:
        def places(self) -> Iterator[LayerPlace]:
            yield LayerPlace("0", "each worker")

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    report = GraphReport(model, tmp_path)
    model(torch.rand(2, 3))
    report.write(Told(), num_local=2, num_workers=3)  # type: ignore[arg-type]
    found = json.loads((tmp_path / FILE_NAME).read_text())
    assert [(layer["name"], layer["where"]) for layer in found["layers"]] == [
        ("0", "each worker"),
        ("1", "each worker"),
    ]


def test_names_are_escaped_and_a_damaged_graph_is_drawn_as_none() -> None:
    layers = [{"name": "<script>", "kind": '"&', "shape": "1"}]
    assert "<script>" not in drawing.svg({"layers": layers})
    for damaged in ({}, {"layers": 3}, {"layers": [None, 4]}, {"edges": [{"from": 1}]}):
        assert "no graph was recorded" in drawing.svg(damaged)


def test_a_model_of_hundreds_of_layers_is_drawn_in_blocks() -> None:
    names = [f"blocks.{k}.{part}" for k in range(40) for part in ("norm", "up", "down")]
    edges = [{"from": a, "to": b, "bytes": 4} for a, b in itertools.pairwise(names)]
    picture = drawing.svg({"layers": [{"name": name, "kind": "Linear"} for name in names], "edges": edges})
    assert picture.count("block of 3 layers") == 2 * 40  # as text and as its title


def test_a_hook_that_fails_leaves_the_contexts_of_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entered(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Entering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            with Entered() as entered:
                found = self.inner(inputs)
                assert torch.overrides._get_current_function_mode() is entered
            return found + 1

    model = Entering()
    recorder = GraphRecorder(model)
    monkeypatch.setattr(recorder, "_add_layer", None)
    model(torch.rand(2, 3))
    assert recorder.is_done
    assert torch.overrides._get_current_function_mode() is None
    assert not nn.modules.module._global_forward_hooks


def test_a_model_of_one_module_is_recorded_to_its_end() -> None:
    model = nn.Linear(3, 1)
    recorder = GraphRecorder(model)
    model(torch.rand(2, 3))
    assert recorder.is_done
    assert list(recorder.layers) == ["linear"]
    assert torch.overrides._get_current_function_mode() is None


def test_thousands_of_joins_are_counted_and_those_that_lead_nowhere_dropped() -> None:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            state, unused = self.first(inputs), inputs
            for _ in range(1500):
                state = state + inputs
                unused = unused * state
            return state

    model = Unrolled()
    recorder = GraphRecorder(model)
    model(torch.rand(2, 3))
    assert len(recorder.layers) == 1 + 1500
    assert "add 1500" in recorder.layers
    assert "mul" not in recorder.layers


def test_what_cannot_be_recorded_or_described_ends_no_training(tmp_path: Path) -> None:
    class Untold:
        def places(self) -> Iterator[LayerPlace]:
            raise RuntimeError("no places")

    model = nn.Sequential(nn.Linear(3, 4))
    report = GraphReport(model, tmp_path)
    model(torch.rand(2, 3))
    report.write(Untold(), num_local=2, num_workers=3)  # type: ignore[arg-type]
    model[0]._compiled_call_impl = model[0]._call_impl  # as after .compile(), without importing Dynamo
    for strange in (model, None):
        report = GraphReport(strange, tmp_path)  # type: ignore[arg-type]
        assert not nn.modules.module._global_forward_hooks
        report.write(Untold(), num_local=2, num_workers=3)  # type: ignore[arg-type]
        report.close()
    assert not list(tmp_path.iterdir())


def test_a_graph_without_blocks_is_bounded_too() -> None:
    layers = [{"name": f"add_{k}", "kind": "add", "is_join": True} for k in range(2000)]
    edges = [{"from": f"add_{k}", "to": f"add_{k + 1}"} for k in range(1999)]
    picture = drawing.svg({"layers": layers, "edges": edges})
    assert picture.count("<g>") == drawing.MAX_BOXES
    assert "block of 1929 layers" in picture
