"""Rules of rows against torch's optimizers on sparse gradients, and FTRL against its paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.embedding.row_table import RowTable
from shoal.embedding.rules import RULES, rule_of_optimizer
from shoal.errors import ConfigError
from shoal.runtime.transport.messages.client_server import TableSpec

NUM_ROWS, DIM = 12, 5
TOLERANCE = {"float32": 3e-6, "float64": 1e-12}
STEPS = st.lists(st.sets(st.integers(0, NUM_ROWS - 1)), min_size=1, max_size=8)
SMALL = st.floats(0.001, 0.5)


def table_of(rule: str, options: dict[str, float], dtype: Any) -> RowTable:
    return RowTable(TableSpec(0, "t", DIM, dtype, rule, options, num_rows=NUM_ROWS))


def run(
    rule: str, options: dict[str, float], dtype: Any, steps: list[set[int]], seed: int
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """First values, gradients of each step, and the last values."""
    rng = np.random.default_rng(seed)
    start = rng.standard_normal((NUM_ROWS, DIM)).astype(dtype)
    table = table_of(rule, options, dtype)
    table.set(np.arange(NUM_ROWS), start, None, 0)
    grads = []
    for keys in steps:
        key_array = np.array(sorted(keys), np.int64)
        values = rng.standard_normal((len(keys), DIM)).astype(dtype)
        table.apply(key_array, values, 0.5)
        grads.append((key_array, values * values.dtype.type(0.5)))
    out = np.empty_like(start)
    table.pull(np.arange(NUM_ROWS), out)
    return start, grads, out


def by_torch(
    optimizer: torch.optim.Optimizer, weight: torch.Tensor, grads: list[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    with torch.sparse.check_sparse_tensor_invariants(True):
        for keys, values in grads:
            weight.grad = torch.sparse_coo_tensor(
                torch.from_numpy(keys)[None], torch.from_numpy(values), weight.shape
            )
            optimizer.step()
    return weight.detach().numpy()


@settings(max_examples=60, deadline=None)
@given(
    steps=STEPS,
    dtype=st.sampled_from(["float32", "float64"]),
    name=st.sampled_from(["SGD", "Adagrad", "SparseAdam"]),
    lr=SMALL,
    other=SMALL,
    seed=st.integers(0, 1000),
)
def test_rows_do_what_torch_does_to_sparse_gradients(
    steps: list[set[int]], dtype: str, name: str, lr: float, other: float, seed: int
) -> None:
    options: dict[str, Any] = {
        "SGD": {},
        "Adagrad": {"lr_decay": other, "initial_accumulator_value": other, "eps": 1e-6},
        "SparseAdam": {"betas": (other, 0.99)},
    }[name]
    weight = torch.nn.Parameter(torch.zeros(NUM_ROWS, DIM, dtype=getattr(torch, dtype)))
    optimizer = getattr(torch.optim, name)([weight], lr=lr, **options)
    rule = rule_of_optimizer(name, optimizer.param_groups[0])
    assert not isinstance(rule, str)
    start, grads, found = run(*rule, dtype, steps, seed)
    weight.data.copy_(torch.from_numpy(start))
    expected = by_torch(optimizer, weight, grads)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=30, deadline=None)
@given(steps=STEPS, l1=st.floats(0, 1), l2=st.floats(0, 1), beta=SMALL, lr=SMALL, seed=st.integers(0, 1000))
def test_ftrl_is_the_papers(
    steps: list[set[int]], l1: float, l2: float, beta: float, lr: float, seed: int
) -> None:
    options = {"lr": lr, "beta": beta, "l1": l1, "l2": l2}
    start, grads, found = run("ftrl", options, "float64", steps, seed)
    w, z, n = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for keys, values in grads:
        for key, g in zip(keys, values, strict=True):
            sigma = (np.sqrt(n[key] + g**2) - np.sqrt(n[key])) / lr
            z[key] += g - sigma * w[key]
            n[key] += g**2
            shrunk = -(z[key] - np.sign(z[key]) * l1) / ((beta + np.sqrt(n[key])) / lr + l2)
            w[key] = np.where(np.abs(z[key]) <= l1, 0, shrunk)
    np.testing.assert_allclose(found, w, rtol=1e-12, atol=1e-12)


def test_rowwise_adagrad_keeps_one_number_per_row() -> None:
    start, grads, found = run("rowwise-adagrad", {"lr": 0.1, "eps": 0.01}, "float64", [{1, 3}, {3}], 0)
    assert table_of("rowwise-adagrad", {}, "float64").state_dim == 1
    w, total = start.copy(), np.zeros(NUM_ROWS)
    for keys, values in grads:
        for key, g in zip(keys, values, strict=True):
            total[key] += np.mean(g**2)
            w[key] -= 0.1 * g / (np.sqrt(total[key]) + 0.01)
    np.testing.assert_allclose(found, w, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_storing_and_adding(dtype: str) -> None:
    start, grads, found = run("add", {}, dtype, [{1, 3}, {3}], 0)
    expected = start.copy()
    for keys, values in grads:
        expected[keys] += values
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    start, grads, found = run("store", {}, dtype, [{1, 3}, {3}], 0)
    assert np.array_equal(found[3], 2 * grads[1][1][0])  # a factor is for gradients; what is stored is stored
    assert np.array_equal(found[0], start[0])


def test_settings_change_between_updates_and_an_empty_update_counts() -> None:
    table = table_of("adagrad", {"lr": 1.0, "lr_decay": 1.0}, "float64")
    none, key = np.empty(0, np.int64), np.array([2])
    table.apply(none, np.empty((0, DIM)), 1.0)
    assert table.step == 1
    table.settings = {"lr": 3.0}
    table.apply(key, np.ones((1, DIM)), 1.0)
    out = np.empty((1, DIM))
    table.pull(key, out)
    np.testing.assert_allclose(out, -3.0 / 2.0)


def test_equal_updates_give_equal_bits() -> None:
    for rule in RULES:
        runs = [run(rule, {}, "float32", [{1, 2, 3}, {2, 7}], 4)[2] for _ in range(2)]
        assert runs[0].tobytes() == runs[1].tobytes()


def test_what_no_rule_does_is_said() -> None:
    weight = [torch.nn.Parameter(torch.zeros(1))]
    for optimizer, why in (
        (torch.optim.SGD(weight, momentum=0.9), "momentum=0.9"),
        (torch.optim.Adagrad(weight, weight_decay=0.1), "weight_decay=0.1"),
        (torch.optim.Adam(weight), "Adam has no rule"),
    ):
        answer = rule_of_optimizer(type(optimizer).__name__, optimizer.param_groups[0])
        assert isinstance(answer, str)
        assert why in answer


@pytest.mark.parametrize(
    ("rule", "options", "says"),
    [
        ("ftrl", {"lr": 0.0}, "'lr' of the rule 'ftrl' has to be above 0, got 0.0"),
        ("ftrl", {"lr": 1e-60}, "above 0"),  # zero in float32
        ("ftrl", {"lr": -0.1}, "above 0"),
        ("ftrl", {"l1": -1.0}, "'l1' of the rule 'ftrl' has to be at least 0, got -1.0"),
        ("ftrl", {"l2": float("inf")}, "a finite number, got inf"),
        ("ftrl", {"beta": -1}, "at least 0"),
        ("sgd", {"lr": float("nan")}, "a finite number, got nan"),
        ("sgd", {"lr": -1.0}, "at least 0"),
        ("sgd", {"lr": "0.1"}, "a finite number, got '0.1'"),
        ("adagrad", {"eps": 0.0}, "above 0"),
        ("rowwise-adagrad", {"initial_accumulator_value": -1.0}, "at least 0"),
        ("adam", {"eps": 0.0}, "above 0"),
        ("adam", {"beta1": 1.0}, "at least 0 and below 1, got 1.0"),
        ("adam", {"beta2": -0.1}, "at least 0 and below 1"),
    ],
)
def test_settings_with_which_rows_would_be_no_numbers_are_refused(
    rule: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        table_of(rule, options, "float32")
    assert "Nothing was changed; " in str(refused.value)


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.defaults])
def test_the_edges_of_what_settings_may_be_give_numbers(rule: str) -> None:
    edges = {name: 0.0 for name in RULES[rule].defaults if name not in RULES[rule].divides_by}
    table = table_of(rule, edges, "float32")
    for gradient in (0.0, 1e-20, 2.0):
        table.apply(np.arange(NUM_ROWS), np.full((NUM_ROWS, DIM), gradient, np.float32), 1.0)
    out = np.empty((NUM_ROWS, DIM), np.float32)
    table.pull(np.arange(NUM_ROWS), out)
    assert np.isfinite(out).all()
