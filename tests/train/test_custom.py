"""A loop of the user's own, four lines changed, is the loop it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import LABEL, X, assert_same, assert_same_bits, batches, dataset, mlp, sgd, train, weights
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import ConfigError, EmptyDataset


@pytest.mark.parametrize("built", ["before", "after"])
def test_the_weights_are_those_of_the_loop_without_shoal(built: str) -> None:
    models = [mlp(), mlp()]
    for number, model in enumerate(models):
        optimizer, data = sgd(model.parameters()), batches()
        if built == "before":
            scheduler = lr_scheduler.StepLR(optimizer, 3, 0.5)
        if number == 0:
            model, optimizer, data = shoal.setup(model, optimizer, data)
            assert len(data) == 4
        if built == "after":
            scheduler = lr_scheduler.StepLR(optimizer, 3, 0.5)
        step = scheduler.step
        train(model, data, optimizer=optimizer, after_step=lambda value, step=step: step())  # type: ignore[misc]
    assert_same_bits(weights(models[0]), weights(models[1]))


def test_setup_gives_back_the_objects_it_was_given() -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    same_model, same_optimizer, data = shoal.setup(
        model, optimizer, DataLoader(TensorDataset(X, LABEL), batch_size=10)
    )
    assert same_model is model
    assert same_optimizer is optimizer
    assert isinstance(optimizer, torch.optim.SGD)
    assert torch.equal(torch.cat([x for x, _ in data]), X)


def test_several_backward_passes_before_a_step_add_up() -> None:
    ours, theirs = mlp(), mlp()
    for model, spread in ((ours, True), (theirs, False)):
        optimizer: Any = sgd(model.parameters())
        data: Any = batches()
        if spread:
            _, optimizer, data = shoal.setup(model, optimizer, data)
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            (1e-3 * sum(p.pow(2).sum() for p in model.parameters())).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert_same(ours, theirs)


def test_every_pass_over_the_data_is_the_next_epoch() -> None:
    model = mlp()
    _, _, data = shoal.setup(model, sgd(model.parameters()), batches())
    first, second = ([x for x, _ in data] for _ in range(2))
    assert not torch.equal(first[0], second[0])
    plain = batches()
    assert all(torch.equal(a, b[0]) for a, b in zip(first, plain, strict=True))
    assert all(torch.equal(a, b[0]) for a, b in zip(second, plain, strict=True))


def test_two_models_may_be_trained_in_turn_on_one_batch() -> None:
    def in_turn(spread: bool) -> list[nn.Module]:
        models = [mlp(seed=1), mlp(seed=2)]
        optimizers: list[Any] = [
            sgd(models[0].parameters()),
            torch.optim.Adam(models[1].parameters(), lr=0.01),
        ]
        data: Any = batches()
        if spread:
            source = data
            for number in range(2):
                _, optimizers[number], data = shoal.setup(models[number], optimizers[number], source)
        for x, y in data:
            for number in range(2):
                optimizers[number].zero_grad()
                other = models[1 - number](x).detach()
                (F.cross_entropy(models[number](x), y) + F.mse_loss(models[number](x), other)).backward()
                optimizers[number].step()
        return models

    for ours, theirs in zip(in_turn(True), in_turn(False), strict=True):
        assert_same(ours, theirs)


def test_the_same_model_and_optimizer_take_other_data() -> None:
    ours, theirs = mlp(), mlp()
    _, optimizer, first = shoal.setup(ours, sgd(ours.parameters()), batches())
    train(ours, first, optimizer=optimizer, epochs=1)
    _, again, second = shoal.setup(ours, optimizer, dataset(X[:20], LABEL[:20]).batch(5))
    assert again is optimizer
    train(ours, second, optimizer=optimizer, epochs=1)
    plain = sgd(theirs.parameters())
    train(theirs, batches(), optimizer=plain, epochs=1)
    train(theirs, dataset(X[:20], LABEL[:20]).batch(5), optimizer=plain, epochs=1)
    assert_same_bits(weights(ours), weights(theirs))


def test_an_optimizer_belongs_to_one_model() -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    shoal.setup(model, optimizer, batches())
    with pytest.raises(ConfigError, match="build an optimizer for each model"):
        shoal.setup(mlp(), optimizer, batches())


def test_what_cannot_be_spread_is_refused() -> None:
    model = mlp()
    _, optimizer, data = shoal.setup(model, sgd(model.parameters()), batches())
    with pytest.raises(ConfigError, match="before the first batch was taken"):
        optimizer.step()
    with pytest.raises(ConfigError, match="before the first batch was taken"):
        shoal.mean(torch.ones(()), 1)
    next(iter(data))
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(EmptyDataset, match="given to setup"):
        shoal.setup(model, optimizer, dataset(X[:0], LABEL[:0]).batch(10))


def test_one_process_reduces_to_itself_and_is_not_asked_to_stop() -> None:
    assert shoal.reduce(2.5) == 2.5
    assert torch.equal(shoal.reduce(torch.arange(3)), torch.arange(3))
    assert not shoal.should_stop()
    assert (shoal.rank(), shoal.num_workers()) == (0, 1)


def test_a_mean_over_a_mask_is_the_mean_over_the_mask() -> None:
    model = mlp()
    _, _, data = shoal.setup(model, sgd(model.parameters()), batches())
    for x, y in data:
        kept = y != 0
        losses = F.cross_entropy(model(x), y, reduction="none")
        torch.testing.assert_close(shoal.mean((losses * kept).sum(), kept.sum()), losses[kept].mean())
        nothing = shoal.mean((losses * 0).sum(), 0)
        assert nothing == 0
