"""Dense chunks on a server do what torch does to the whole parameters, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.errors import ConfigError
from shoal.ps.layout import num_elements, plan_chunks
from shoal.ps.server.dense import DenseStore
from shoal.runtime.transport.messages.client_server import ChunkSpec

SHAPES = {"embed": (37, 41), "bias": (41,), "scale": (), "wide": (300, 7), "short": (5,)}
GROUPS = {"embed": 0, "bias": 1, "scale": 1, "wide": 0, "short": 0}
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"fused": True}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"foreach": True}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
    ("Adagrad", {"initial_accumulator_value": 0.5}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {"lr": 0.1}),
    ("ASGD", {"t0": 2}),
    ("Rprop", {}),
    ("Adafactor", {}),
    ("Muon", {"lr": 0.01}),
]


class Pair:
    """The same parameters under torch and in a store."""

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        *,
        chunk_bytes: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.device = device
        torch.manual_seed(5)
        shapes = {key: shape for key, shape in SHAPES.items() if name != "Muon" or len(shape) == 2}
        self.params = {key: nn.Parameter(torch.randn(shape, dtype=dtype)) for key, shape in shapes.items()}
        by_group = [
            {"params": [p for key, p in self.params.items() if GROUPS[key] == group]} for group in (0, 1)
        ]
        self.torch = getattr(torch.optim, name)([group for group in by_group if group["params"]], **options)
        self.name = name
        self.chunks = self.plan(chunk_bytes)
        self.store = self.new_store(self.chunks)
        for chunk in self.chunks:
            self.store.write(chunk.number, self.of(chunk, self.params))

    def plan(self, chunk_bytes: int) -> list[ChunkSpec]:
        dtype = str(next(iter(self.params.values())).dtype).removeprefix("torch.")
        return plan_chunks(
            [(key, tuple(p.shape), dtype, GROUPS[key]) for key, p in self.params.items()],
            optimizer=self.name,
            slots_by_server=[[0, 1], [2]],
            chunk_bytes=chunk_bytes,
        )

    def groups(self) -> list[dict[str, Any]]:
        return [
            {key: list(v) if isinstance(v, tuple) else v for key, v in group.items() if key != "params"}
            for group in self.torch.param_groups
        ]

    def new_store(self, chunks: list[ChunkSpec]) -> DenseStore:
        store = DenseStore(self.device)
        store.declare(chunks, self.name, self.groups())
        return store

    def of(self, chunk: ChunkSpec, tensors: dict[str, Any]) -> torch.Tensor:
        runs = [
            tensors[p.parameter].detach().reshape(-1)[p.offset : p.offset + num_elements(p)]
            for p in chunk.parts
        ]
        return torch.cat(runs)

    def step(self, number: int, *, unused: str | None = None) -> None:
        for key, param in self.params.items():
            param.grad = None if key == unused else torch.randn_like(param)
        for group in self.torch.param_groups:
            group["lr"] *= 0.9
        grads = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in self.params.items()}
        for chunk in self.chunks:
            without = [i for i, part in enumerate(chunk.parts) if part.parameter == unused]
            self.store.update(chunk.number, self.of(chunk, grads), without, self.groups())
        self.torch.step()

    def is_equal(self) -> bool:
        return all(
            torch.equal(self.store.read(chunk.number)[0], self.of(chunk, self.params))
            for chunk in self.chunks
        )


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_equal_torch_on_whole_parameters_to_the_bit(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    pair = Pair(name, options, chunk_bytes=3000, dtype=dtype)
    for number in range(4):
        pair.step(number, unused="bias" if number in (0, 2) else None)
    assert pair.is_equal()


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_parts_that_were_one_parameter_may_come_to_differ(name: str, options: dict[str, Any]) -> None:
    pair = Pair(name, options, chunk_bytes=1 << 20, dtype=torch.float32)
    for number in range(4):
        pair.step(number, unused="short" if number == 2 else None)
    assert pair.is_equal()


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Muon"])
def test_a_store_on_a_device_takes_and_gives_what_one_in_shared_memory_does(name: str) -> None:
    pairs = [
        Pair(name, {"lr": 0.1}, chunk_bytes=1 << 20, dtype=torch.float32, device=device)
        for device in (None, torch.device("cpu"))
    ]
    for pair in pairs:
        torch.manual_seed(7)
        pair.step(0)
        copied = pair.new_store(pair.chunks)
        for chunk in pair.chunks:
            copied.write(chunk.number, *pair.store.read(chunk.number))  # as a replica is filled
        pair.store = copied
        pair.step(1, unused="wide")  # parts that were one parameter are cut
        assert pair.is_equal()
    chunk = pairs[0].chunks[0]
    shared, on_device = (pair.store.read(chunk.number) for pair in pairs)
    assert is_same(shared, on_device)
    out = torch.empty_like(shared[0])
    pairs[1].store.pull(chunk.number, out.numpy())
    assert torch.equal(out, shared[0])
    assert pairs[0].store.memory.sizes
    assert not pairs[1].store.memory.sizes  # nothing that a client could map


def is_same(one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> bool:
    tensors = zip([one[0], *one[2]], [other[0], *other[2]], strict=True)
    return bool(one[1] == other[1]) and all(torch.equal(a, b) for a, b in tensors)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_written_chunk_is_the_one_read(name: str) -> None:
    pair = Pair(name, {"lr": 0.1}, chunk_bytes=3000, dtype=torch.float32)
    pair.step(0)
    other = pair.new_store(pair.chunks)
    for chunk in pair.chunks:
        flat, entries, tensors = pair.store.read(chunk.number)
        frames = [bytes(memoryview(tensor.reshape(-1).numpy()).cast("B")) for tensor in tensors]
        other.write(chunk.number, flat.numpy().tobytes(), entries, frames)
        assert is_same(other.read(chunk.number), (flat, entries, tensors))
        other.update(chunk.number, torch.ones_like(flat))
        assert not is_same(other.read(chunk.number), (flat, entries, tensors))


def test_contributions_are_summed_in_rank_order_and_left_alone() -> None:
    pair = Pair("SGD", {"lr": 1.0}, chunk_bytes=1 << 20, dtype=torch.float32)
    chunk = pair.chunks[0]
    size = len(pair.of(chunk, pair.params))
    ranks = [torch.randn(size) * 10.0**power for power in (0, 4, -3)]
    before = [rank.clone() for rank in ranks]
    total = pair.store.summed(chunk.number, [rank.numpy().tobytes() for rank in ranks])
    assert torch.equal(total, (ranks[0] + ranks[1]) + ranks[2])
    assert torch.equal(pair.store.summed(chunk.number, ranks), total)
    assert all(torch.equal(a, b) for a, b in zip(ranks, before, strict=True))
    assert pair.store.sum_of_squares(chunk.number, total) == pytest.approx(
        float(total.double().square().sum())
    )


def test_a_factor_multiplies_the_gradient() -> None:
    pair = Pair("SGD", {"lr": 1.0}, chunk_bytes=1 << 20, dtype=torch.float64)
    chunk = pair.chunks[0]
    before = pair.of(chunk, pair.params)
    pair.store.update(chunk.number, torch.ones_like(before), factor=0.25)
    out = torch.empty_like(before)
    pair.store.pull(chunk.number, out.numpy())
    assert torch.equal(out, before - 0.25)


def test_settings_of_the_last_update_stay_over_a_write() -> None:
    pair = Pair("SGD", {"lr": 1.0}, chunk_bytes=1 << 20, dtype=torch.float64)
    zeros = torch.zeros_like(pair.of(pair.chunks[0], pair.params))
    pair.store.update(0, zeros, (), [{"lr": 0.5}, {"lr": 0.5}])
    pair.store.write(0, zeros)
    pair.store.update(0, torch.ones_like(zeros))
    assert torch.equal(pair.store.read(0)[0], zeros - 0.5)


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    pair = Pair("Adam", {}, chunk_bytes=3000, dtype=torch.float32)
    before = copy.deepcopy(pair.store.read(0))
    with pytest.raises(ConfigError, match="elements of float32, but 3 came"):
        pair.store.update(0, torch.ones(3))
    with pytest.raises(ConfigError, match="state came for part 99"):
        pair.store.write(
            0, pair.of(pair.chunks[0], pair.params), [(99, "step", "float32", [])], [torch.ones(())]
        )
    with pytest.raises(ConfigError, match="no whole number"):
        pair.store.update(0, b"12345")
    with pytest.raises(ConfigError, match="parameter group"):
        DenseStore().declare(pair.chunks, "Adam", [])
    assert is_same(pair.store.read(0), before)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.tuples(st.integers(500, 9000), st.integers(500, 9000)), steps=st.integers(1, 3))
def test_where_parameters_are_cut_changes_no_bit(sizes: tuple[int, int], steps: int) -> None:
    a, b = (Pair("Adam", {}, chunk_bytes=size, dtype=torch.float32) for size in sizes)
    for pair in (a, b):
        torch.manual_seed(7)
        for number in range(steps):
            pair.step(number)
        assert pair.is_equal()
