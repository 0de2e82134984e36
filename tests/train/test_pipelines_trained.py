"""The Trainer on datasets with weights, without end, with skipped samples and drawn samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import LABEL, N, X, assert_same_bits, dataset, mlp, trainer, weights
from torch.nn import functional as F

import shoal
from shoal.errors import ConfigError, TooManySkipped

WEIGHT = torch.linspace(0, 3, N)


def test_a_weighted_step_is_that_of_the_weighted_mean() -> None:
    run = trainer(optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    run.fit(dataset().with_weights(WEIGHT).batch(N), epochs=1)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    each = F.cross_entropy(model(X), LABEL, reduction="none")
    ((each * WEIGHT).sum() / WEIGHT.sum()).backward()
    optimizer.step()
    for name, tensor in weights(run.model).items():
        torch.testing.assert_close(tensor, weights(model)[name])


def test_weights_count_in_the_loss_of_evaluate_and_not_in_its_metrics() -> None:
    run = trainer(metrics=["accuracy"], optimizer=None)
    with torch.no_grad():
        each = F.cross_entropy(run.model(X), LABEL, reduction="none")
    measured = run.evaluate(dataset().with_weights(WEIGHT).batch(8))
    assert measured["loss"] == pytest.approx(float((each * WEIGHT).sum() / WEIGHT.sum()))
    assert measured["accuracy"] == run.evaluate(dataset().batch(8))["accuracy"]
    assert torch.equal(run.predict(dataset().with_weights(WEIGHT).batch(8)), run.predict(dataset().batch(8)))


def test_equal_weights_change_nothing() -> None:
    one, other = trainer(), trainer()
    one.fit(dataset().shuffle(seed=1).batch(10), epochs=2)
    other.fit(dataset().with_weights([1.0] * N).shuffle(seed=1).batch(10), epochs=2)
    for name, tensor in weights(one.model).items():
        torch.testing.assert_close(tensor, weights(other.model)[name])


def test_data_without_end_is_trained_for_so_many_steps_and_gone_on_with() -> None:
    endless = dataset().shuffle(seed=2).repeat().batch(10)
    one, other = trainer(), trainer()
    one.fit(endless, max_steps=9)
    other.fit(endless, max_steps=4)
    other.fit(endless, max_steps=5)
    assert (one.position.next_index, one.epoch) == (90, 0)
    assert_same_bits(weights(one.model), weights(other.model))


def test_data_without_end_is_resumed_in_the_middle(tmp_path: Path) -> None:
    def data() -> Any:
        return dataset().augment(lambda s, g: (s[0] + torch.rand(6, generator=g), s[1])).repeat().batch(10)

    whole = trainer()
    whole.fit(data(), max_steps=8)
    first = trainer()
    first.fit(data(), max_steps=3)
    path = first.save_checkpoint(str(tmp_path))
    second = trainer()
    second.fit(data(), max_steps=8, resume=path)
    assert_same_bits(weights(second.model), weights(whole.model))


def test_data_without_end_needs_a_number_of_steps() -> None:
    endless = dataset().repeat().batch(10)
    for call in (
        lambda: trainer().fit(endless),
        lambda: trainer().fit(endless, epochs=2),
        lambda: trainer().evaluate(endless),
        lambda: trainer().predict(endless),
        lambda: trainer().fit(dataset().batch(10), validation_data=endless),
    ):
        with pytest.raises(ConfigError, match="no end"):
            call()


def test_skipped_samples_are_as_if_they_had_not_been_there() -> None:
    def fragile(sample: Any) -> Any:
        if int((sample[0] == X).all(1).nonzero()) % 3 == 0:
            raise ValueError("bad")
        return sample

    kept = torch.arange(N) % 3 != 0
    one, other = trainer(metrics=["accuracy"]), trainer(metrics=["accuracy"])
    skipping = dataset().map(fragile, on_error="skip")
    history = one.fit(skipping.batch(N), epochs=3, validation_data=skipping.batch(4))
    without = shoal.Dataset.from_arrays((X[kept], LABEL[kept]))
    expected = other.fit(without.batch(N), epochs=3, validation_data=without.batch(4))
    for name, tensor in weights(one.model).items():
        torch.testing.assert_close(tensor, weights(other.model)[name])
    assert history["val_loss"] == pytest.approx(expected["val_loss"])
    assert history["accuracy"] == pytest.approx(expected["accuracy"])
    torch.testing.assert_close(one.predict(skipping.batch(4)), one.predict(without.batch(4)))
    with pytest.raises(TooManySkipped):
        trainer().fit(dataset().map(fragile, on_error="skip", max_skips=5).batch(N), epochs=1)


def test_a_custom_loop_goes_on_without_skipped_samples() -> None:
    def fragile(sample: Any) -> Any:
        if sample[1] == 0:
            raise ValueError("bad")
        return sample

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = shoal.setup(model, optimizer, dataset().map(fragile, on_error="skip").batch(N))
    for x, y in data:
        optimizer.zero_grad()
        each = F.cross_entropy(model(x), y, reduction="none")
        shoal.mean(each.sum(), len(each)).backward()
        optimizer.step()
    plain, kept = mlp(), LABEL != 0
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.1)
    F.cross_entropy(plain(X[kept]), LABEL[kept]).backward()
    by_hand.step()
    for name, tensor in weights(model).items():
        torch.testing.assert_close(tensor, weights(plain)[name])
