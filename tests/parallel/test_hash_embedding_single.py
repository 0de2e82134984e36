"""In one process a HashEmbedding is trained, clipped, left out and loaded as a sparse nn.Embedding of the same rows is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.config.row_policy import RowPolicy
from shoal.data.slice import Slice
from shoal.embedding import HashEmbedding
from shoal.embedding.kernels import slot_of
from shoal.errors import ConfigError
from shoal.parallel.loss import loss_rule
from shoal.parallel.protocol import PieceReader, TrainJob
from shoal.parallel.single import Single
from shoal.parallel.state import HashedRows, optimizer_settings
from shoal.ps.layout import TABLES_PER_MODEL

FAR = 10**17
NUM_IDS = 12
IDS = torch.arange(10 * 3).reshape(10, 3) * 7 % NUM_IDS
TARGET = torch.arange(10).double()[:, None].sin()
BATCH = Slice(batch=(IDS, TARGET), num_local=10, num_global=10)


class Model(nn.Module):
    def __init__(self, table: nn.Module, step: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.head, self.step = table, nn.Linear(3, 1), step

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids * self.step).sum(1))


def hashed() -> Model:
    return Model(HashEmbedding(3, scale=0.5), FAR).double()


def plain() -> Model:
    with torch.no_grad():
        rows = hashed().table(torch.arange(NUM_IDS) * FAR)
    return Model(nn.Embedding.from_pretrained(rows, freeze=False, sparse=True), 1).double()


def prepared(
    model: nn.Module, kind: str = "Adagrad", num_slices: int = 1, settings: Any = None, **options: Any
) -> Single:
    strategy = Single(num_slices=num_slices)
    job = TrainJob(
        model=model,
        loss=loss_rule(nn.MSELoss()),
        build_optimizer=lambda m: getattr(torch.optim, kind)(
            m.parameters(), **{"lr": 0.1, **(settings or {})}
        ),
        **options,
    )
    strategy.prepare(job)
    return strategy


def steps(strategy: Single, batches: list[Slice]) -> list[tuple[float, bool, float]]:
    verdicts = []
    for number, batch in enumerate(batches):
        assert strategy.optimizer is not None
        strategy.optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)  # as a scheduler does
        strategy.forward_backward(batch)
        verdicts.append(strategy.commit())
    return [(verdict.loss, verdict.applied, verdict.grad_norm or 0.0) for verdict in verdicts]


SPOILT = Slice(batch=(IDS, TARGET * float("nan")), num_local=10, num_global=10)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.3}, {"on_nonfinite": "skip"}, {"num_micro": 2}])
def test_its_rows_are_trained_as_those_of_a_sparse_embedding(
    kind: str, num_slices: int, options: dict[str, Any]
) -> None:
    batches = [BATCH, BATCH, *([SPOILT] if "on_nonfinite" in options else []), BATCH]
    models = hashed(), plain()
    told = [steps(prepared(model, kind, num_slices, **options), batches) for model in models]
    for ours, theirs in zip(*told, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12, nan_ok=True)
    with torch.no_grad():
        rows = models[0].table(torch.arange(NUM_IDS) * FAR)
    torch.testing.assert_close(rows, models[1].table.weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(models[0].head.weight, models[1].head.weight, rtol=1e-12, atol=1e-12)


def test_what_was_saved_goes_on_as_if_it_had_not_stopped() -> None:
    model = hashed()
    strategy = prepared(model, settings={"lr_decay": 0.1})
    steps(strategy, [BATCH, BATCH])
    assert strategy.optimizer is not None
    pieces = {piece.name: piece.tensor.clone() for piece in strategy.state()}
    saved = PieceReader(pieces, optimizer_settings(model, strategy.optimizer))
    assert pieces["model/table.keys"].tolist() == sorted({int(i) * FAR for i in IDS.flatten()})
    assert {"optimizer/table.rows/sum", "optimizer/table.rows/step"} <= pieces.keys()
    for number in range(2):
        other = hashed()
        resumed = prepared(other, settings={"lr_decay": 0.1})
        if number:  # rows of its own that the saved table has not
            steps(resumed, [Slice(batch=(IDS + 100, TARGET), num_local=10, num_global=10)])
        resumed.load(saved)
        assert {piece.name: piece.tensor.tolist() for piece in resumed.state()} == {
            name: tensor.tolist() for name, tensor in pieces.items()
        }
        for each in (strategy, resumed):
            each.load(saved)
            steps(each, [BATCH])
        assert torch.equal(other(IDS), model(IDS))


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_an_optimizer_without_a_rule_for_rows_is_refused_by_layer(kind: str) -> None:
    settings = {"momentum": 0.9} if kind == "SGD" else {}
    with pytest.raises(
        ConfigError, match=r"HashEmbedding 'table' cannot be trained .*: (Adam has no|SGD with mom)"
    ):
        prepared(hashed(), kind, settings=settings)


def test_who_follows_the_optimizer_by_a_hook_is_not_updated_twice() -> None:
    ours, theirs = hashed(), hashed()
    strategy = prepared(ours)
    assert strategy.optimizer is not None
    assert isinstance(ours.table, HashEmbedding)
    ours.table.follow(strategy.optimizer)
    assert steps(strategy, [BATCH, BATCH]) == steps(prepared(theirs), [BATCH, BATCH])
    assert torch.equal(ours(IDS), theirs(IDS))


def test_a_model_without_such_rows_has_nothing_to_apply() -> None:
    model = nn.Linear(2, 1)
    rows = HashedRows(model, torch.optim.Adam(model.parameters()))
    rows.apply(1.0)
    assert rows.sum_of_squares() == 0.0


def test_tables_with_a_limit_have_the_numbers_that_they_have_on_servers() -> None:
    limit = RowPolicy(max_rows=256, sweep_every=1)
    tables = [HashEmbedding(3, seed=seed, policy=limit) for seed in range(2)]
    ids = torch.arange(600)
    tables[1].load_state_dict(
        {"keys": ids, "rows": torch.ones(600, 3)}
    )  # its rows are there before it is trained
    model = nn.ModuleList([nn.Linear(1, 1), *tables])
    rows = HashedRows(model, torch.optim.SGD(model.parameters(), lr=0.1), number=2)
    tables[1](ids).sum().backward()
    rows.apply(1.0)
    found = [module.source.table for module in tables]  # type: ignore[union-attr]
    assert [table.spec.number for table in found] == [2 * TABLES_PER_MODEL, 2 * TABLES_PER_MODEL + 1]
    left = found[1].read_all()[0]
    assert np.bincount(slot_of(found[1].spec.number, left)).max() == 1
    assert (len(left), found[1].num_evicted) == (
        len(np.unique(slot_of(found[1].spec.number, ids.numpy()))),
        600 - len(left),
    )
