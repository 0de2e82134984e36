"""HashEmbedding in one process: any id, trained like a sparse nn.Embedding."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from shoal.embedding import HashEmbedding
from shoal.embedding.hash_embedding import rows_left_out
from shoal.embedding.lookup import LocalRows
from shoal.embedding.row_table import RowTable
from shoal.errors import ConfigError, TrainingError

IDS = torch.tensor([[-(2**63), 7], [2**63 - 1, 7], [0, 12345678901234567]])


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "SparseAdam"])
def test_it_trains_as_a_sparse_embedding_of_the_same_first_rows(name: str) -> None:
    ours = HashEmbedding(3, dtype=torch.float64, scale=0.5)
    keys, places = torch.unique(IDS, return_inverse=True)
    with torch.no_grad():
        theirs = nn.Embedding.from_pretrained(ours(keys).clone(), freeze=False, sparse=True)
    tied = nn.Parameter(torch.zeros(len(keys), 3, dtype=torch.float64))  # so that ours has an optimizer too
    kind = getattr(torch.optim, name)
    optimizers = kind([tied], lr=0.1), kind(theirs.parameters(), lr=0.1)
    ours.follow(optimizers[0])
    with torch.sparse.check_sparse_tensor_invariants(True):
        for step in range(4):
            lookups = ours(IDS[: step + 1]), theirs(places[: step + 1])
            assert lookups[0].shape == (min(step + 1, 3), 2, 3)
            for lookup, optimizer in zip(lookups, optimizers, strict=True):
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
                (lookup.square().sum() + lookup[..., 0].sum()).backward()
            tied.grad = torch.sparse_coo_tensor(
                torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.float64), tied.shape
            )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(ours(keys), theirs.weight, rtol=1e-12, atol=1e-12)


def test_only_an_update_makes_rows() -> None:
    module = HashEmbedding(3)
    assert isinstance(module.source, LocalRows)
    with torch.no_grad():
        first = module(IDS)
    module.source.train_by("sgd", {"lr": 0.0})
    looked_up = module(IDS)
    looked_up.sum().backward()
    assert torch.equal(looked_up, first)
    assert module.source.table.num_rows == 0
    module.source.apply()
    assert module.source.table.num_rows == 5
    assert list(module.parameters()) == []


def test_rows_nobody_trained_are_a_function_of_seed_and_id_whatever_the_table() -> None:
    module = HashEmbedding(3, seed=4)
    other = RowTable(module.table_spec(rule="adagrad", settings={}, number=1002))
    keys = torch.unique(IDS).numpy()
    out = np.empty((len(keys), 3), np.float32)
    other.pull(keys, out)
    assert torch.equal(module(torch.from_numpy(keys)), torch.from_numpy(out))
    assert not torch.equal(HashEmbedding(3, seed=5)(torch.from_numpy(keys)), torch.from_numpy(out))


def test_values_alone_leave_rows_their_state() -> None:
    source = HashEmbedding(2, dtype=torch.float64).source
    assert isinstance(source, LocalRows)
    source.train_by("adagrad", {"lr": 1.0})
    source.push(np.array([1, 2, 3]), np.full((3, 2), 2.0))
    source.apply()
    source.replace_values(np.array([2, 9]), np.ones((2, 2)))
    keys, values, state = source.table.read_rows(np.arange(source.table.num_rows))
    assert (keys.tolist(), values.tolist()) == ([2, 9], [[1, 1], [1, 1]])
    assert (state.tolist(), source.table.step) == ([[4, 4], [0, 0]], 1)


def test_loading_leaves_no_row_that_was_not_saved() -> None:
    empty, trained = HashEmbedding(3), HashEmbedding(3)
    assert isinstance(trained.source, LocalRows)
    trained.source.train_by("sgd", {"lr": 1.0})
    trained(IDS).sum().backward()
    trained.source.apply()
    trained.load_state_dict(empty.state_dict())
    assert trained.source.table.num_rows == 0
    assert torch.equal(trained(IDS), empty(IDS))
    with rows_left_out():
        assert not trained.state_dict()


def test_gradients_that_nobody_would_apply_are_refused() -> None:
    module = HashEmbedding(3)
    with pytest.raises(TrainingError, match=r"call `embedding.follow\(optimizer\)`"):
        module(IDS).sum().backward()


def test_gradients_add_up_until_they_are_applied_or_dropped() -> None:
    module = HashEmbedding(2, init="zeros", dtype=torch.float64)
    source = module.source
    assert isinstance(source, LocalRows)
    source.train_by("sgd", {"lr": 1.0})
    ids = torch.tensor([4, 4, 9])
    module(ids).sum().backward()
    source.drop_gradients()
    for _ in range(2):
        module(ids).sum().backward()
    assert source.sum_of_squares() == 2 * (4.0**2 + 2.0**2)
    source.apply(0.5)
    source.apply()  # nothing waits: no update
    assert source.table.step == 1
    assert module(torch.tensor([4, 9, 1])).tolist() == [[-2, -2], [-1, -1], [0, 0]]


def test_rows_are_saved_loaded_and_copied_with_the_module() -> None:
    model = nn.Sequential(HashEmbedding(3, name="users"), nn.Linear(3, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
    hashed = model[0]
    assert isinstance(hashed, HashEmbedding)
    hashed.follow(optimizer)
    model(IDS).sum().backward()
    optimizer.step()
    state = model.state_dict()
    assert state["0.keys"].tolist() == sorted(set(IDS.flatten().tolist()))
    other = nn.Sequential(HashEmbedding(3), nn.Linear(3, 1))
    other.load_state_dict(state)
    copied = copy.deepcopy(model)
    assert torch.equal(other(IDS), model(IDS))
    assert torch.equal(copied(IDS), model(IDS))
    with pytest.raises(RuntimeError, match="rows"):
        nn.Sequential(HashEmbedding(4), nn.Linear(3, 1)).load_state_dict(state)


def test_what_it_cannot_do_is_said() -> None:
    module, weight = HashEmbedding(3), [nn.Parameter(torch.zeros(1))]
    with pytest.raises(ConfigError, match=r"momentum=0\.9"):
        module.follow(torch.optim.SGD(weight, momentum=0.9))
    with pytest.raises(ConfigError, match="Adam has no rule for rows"):
        module.follow(torch.optim.Adam(weight))
    with pytest.raises(ConfigError, match="embedding_dim of at least 1"):
        HashEmbedding(0)
    with pytest.raises(ConfigError, match="'ones'"):
        HashEmbedding(3, init="ones")  # type: ignore[arg-type]
