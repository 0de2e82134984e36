"""Several models on the same servers: each counts its own steps, and so do its rules, also after slots have moved."""

from __future__ import annotations

import numpy as np
import torch
from serverbench import Bench

from shoal.ps.layout import FIRST_NAMED, TABLES_PER_MODEL
from shoal.runtime.transport.messages.client_server import (
    DeclareMode,
    DeclareTable,
    PushRows,
    ReadRows,
    RowsRead,
    TableSpec,
    WriteRows,
)
from slot_digests import slot_digests

KEYS = np.array([1, 5])
SETTINGS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
FIRST, SECOND, NAMED = 0, TABLES_PER_MODEL, FIRST_NAMED + 7


def spec(number: int) -> TableSpec:
    return TableSpec(number, f"rows {number}", 2, "float64", "adam", SETTINGS)


def gradients(step: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.random.default_rng(step).normal(size=(2, 2))


def by_torch(num_steps: int) -> torch.Tensor:
    """What SparseAdam makes of so many steps of one model alone."""
    weight = torch.nn.Parameter(torch.zeros(6, 2, dtype=torch.float64))
    optimizer = torch.optim.SparseAdam([weight], lr=0.1, betas=(0.9, 0.99))
    for step in range(num_steps):
        values = torch.from_numpy(gradients(step))
        weight.grad = torch.sparse_coo_tensor(
            torch.from_numpy(KEYS)[None], values, (6, 2), is_coalesced=True, check_invariants=True
        )
        optimizer.step()
    return weight.detach()[torch.from_numpy(KEYS)]


def push(bench: Bench, table: int, model: int, *, name: int, step: int, is_exact: bool) -> None:
    stream, seq = (0, name) if is_exact else (table + 1, step + 1)
    bench.ask(1, PushRows(1, stream, seq, table), [KEYS, gradients(step)])
    bench.end(0, seq, stream=stream, num_pushes=1, model=model)


def test_steps_of_one_model_are_not_those_of_another() -> None:
    for kind in ("exact", "async"):
        bench = Bench(DeclareMode(1, kind), spec=spec(FIRST))  # type: ignore[arg-type]
        tables = [(FIRST, 0), (SECOND, 1)] + [(NAMED, 0)] * (kind == "async")
        for table, _ in tables[1:]:
            bench.ask(1, DeclareTable(spec(table)))
        # The second model joins in late, and makes a step where the first makes two.
        turns = [(FIRST, 0, 0), (FIRST, 0, 1), (SECOND, 1, 0), (FIRST, 0, 2), (FIRST, 0, 3), (SECOND, 1, 1)]
        turns += [(NAMED, 0, 0), (FIRST, 0, 4), (NAMED, 0, 1)] if kind == "async" else []
        for name, (table, model, step) in enumerate(turns, start=1):
            push(bench, table, model, name=name, step=step, is_exact=kind == "exact")
        contents = bench.core.state.contents
        for table, _ in tables:
            num_steps = sum(each == table for each, _, _ in turns)
            out = np.zeros((2, 2))
            contents.tables[table].pull(KEYS, out)
            np.testing.assert_allclose(out, by_torch(num_steps).numpy(), rtol=1e-12)


def test_the_count_goes_with_its_slot_and_with_a_checkpoint() -> None:
    bench, other = (Bench(DeclareMode(1, "exact"), spec=spec(FIRST)) for _ in range(2))
    for each in (bench, other):
        each.ask(1, DeclareTable(spec(SECOND)))
    for name, (table, model, step) in enumerate([(FIRST, 0, 0), (FIRST, 0, 1), (SECOND, 1, 0)], start=1):
        push(bench, table, model, name=name, step=step, is_exact=True)
    for slot in range(256):
        record, frames = bench.core.state.write_slot(slot)
        other.core.state.take_slot(slot, record, frames)  # type: ignore[arg-type]
    assert slot_digests(other.core.state) == slot_digests(bench.core.state)
    for table, num_steps in ((FIRST, 2), (SECOND, 1)):
        (reply,) = other.ask(1, ReadRows(1, table, 0))
        assert reply.message == RowsRead(4, num_steps)  # type: ignore[union-attr]
    other.ask(1, WriteRows(1, SECOND, 9), [KEYS, np.zeros((2, 2)), b""])
    assert {*other.core.state.applied.steps(1).tolist()} == {1, 9}
    assert {*other.core.state.applied.steps(0).tolist()} == {2}
