"""Layout of dense parameters on servers: nothing lost, nothing twice, evenly."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.ps.layout import check_optimizer, num_elements, optimizer_class, plan_chunks

SHAPES = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 3000)),
        st.tuples(st.integers(0, 90), st.integers(1, 90)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(
    shapes=SHAPES,
    optimizer=st.sampled_from(["Adam", "Adafactor"]),
    num_servers=st.integers(1, 4),
    chunk_bytes=st.integers(256, 20_000),
    dtypes=st.lists(st.sampled_from(["float32", "float64"]), min_size=12, max_size=12),
)
def test_every_element_is_in_exactly_one_chunk(
    shapes: list[tuple[int, ...]], optimizer: str, num_servers: int, chunk_bytes: int, dtypes: list[str]
) -> None:
    params = [(f"p{i}", shape, dtypes[i], i % 2) for i, shape in enumerate(shapes)]
    slots = [list(range(server, 256, num_servers)) for server in range(num_servers)]
    chunks = plan_chunks(params, optimizer=optimizer, slots_by_server=slots, chunk_bytes=chunk_bytes)
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    for name, shape, dtype, group in params:
        parts = [(part, chunk) for chunk in chunks for part in chunk.parts if part.parameter == name]
        covered = Counter(
            element for part, _ in parts for element in range(part.offset, part.offset + num_elements(part))
        )
        assert covered == Counter(range(math.prod(shape)))
        assert all(chunk.dtype == dtype and part.group == group for part, chunk in parts)
        if len(parts) == 1:
            assert parts[0][0].shape == list(shape)
        else:
            assert optimizer == "Adam"
    size = {"float32": 4, "float64": 8}
    if optimizer == "Adam":
        limit = max(chunk_bytes, 64 * 8)
        assert all(sum(map(num_elements, chunk.parts)) * size[chunk.dtype] <= limit for chunk in chunks)


def test_servers_get_equal_shares_where_parameters_may_be_cut() -> None:
    params = [
        ("big", (1000, 1000), "float32", 0),
        ("bias", (1000,), "float32", 0),
        ("more", (700, 999), "float32", 0),
    ]
    slots = [[0, 3], [1], [2]]
    chunks = plan_chunks(params, optimizer="Adam", slots_by_server=slots, chunk_bytes=1 << 20)
    load = Counter(
        {
            server: sum(sum(map(num_elements, c.parts)) for c in chunks if c.slot in owned)
            for server, owned in enumerate(slots)
        }
    )
    assert max(load.values()) < 1.01 * sum(load.values()) / 3
    assert {chunk.slot for chunk in chunks} == {0, 1, 2, 3}


@pytest.mark.parametrize(("num_inputs", "num_chunks"), [(300, 1), (416, 2), (800, 4), (4_000, 4)])
def test_a_small_model_is_on_as_many_servers_as_have_a_chunk_worth_its_messages(
    num_inputs: int, num_chunks: int
) -> None:
    params = [("weight", (num_inputs, 128), "float32", 0), ("bias", (128,), "float32", 0)]
    chunks = plan_chunks(params, optimizer="Adagrad", slots_by_server=[[0], [1], [2], [3]])
    sizes = [4 * sum(map(num_elements, chunk.parts)) for chunk in chunks]
    assert {chunk.slot for chunk in chunks} == set(range(num_chunks))
    assert sum(sizes) == 4 * 128 * (num_inputs + 1)
    assert max(sizes) - min(sizes) <= 4 * 64 * num_chunks
    assert num_chunks == 1 or min(sizes) >= 96 << 10


def test_only_optimizers_of_torch_that_a_server_can_run_are_taken() -> None:
    class Mine(torch.optim.Adam):
        pass

    weights = [torch.zeros(2, requires_grad=True)]
    assert check_optimizer(torch.optim.AdamW(weights)) == "AdamW"
    assert check_optimizer(torch.optim.SparseAdam, dense=False) == "SparseAdam"
    with pytest.raises(ConfigError, match=r"is not one of torch\.optim"):
        check_optimizer(Mine(weights))
    with pytest.raises(ConfigError, match="LBFGS cannot run on a parameter server"):
        check_optimizer(torch.optim.LBFGS(weights))
    for name in ("Optimizer", "lr_scheduler", "nothing", "__doc__"):
        with pytest.raises(ConfigError, match="no optimizer"):
            optimizer_class(name)
    with pytest.raises(ConfigError, match="no server holds a slot"):
        plan_chunks([("a", (1,), "float32", 0)], optimizer="Adam", slots_by_server=[[]])
