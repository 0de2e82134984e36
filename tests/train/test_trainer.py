"""The Trainer in one process computes what the loop does that everybody writes, and refuses what cannot be meant."""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torchmetrics
from by_hand import (
    IDS,
    LABEL,
    N,
    Rows,
    X,
    adam,
    assert_same,
    assert_same_bits,
    batches,
    dataset,
    mlp,
    numbers,
    sgd,
    train,
    trainer,
    weights,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shoal
from shoal.config.job import Job
from shoal.errors import ConfigError, NonFiniteLoss, TrainingError
from shoal.train.callbacks.base import Callback, StepLogs
from shoal.train.calls import build_optimizer, refuse_fp16, turns_of

# ---- the same weights ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "optimizer", "arrays"),
    [
        (mlp, sgd, (X, LABEL)),
        (mlp, adam, (X, LABEL)),
        (mlp, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), (X, LABEL)),
        (lambda: Rows(sparse=False), lambda p: torch.optim.Adagrad(p, lr=0.1), (IDS, LABEL)),
        (lambda: Rows(sparse=True), lambda p: torch.optim.Adagrad(p, lr=0.1), (IDS, LABEL)),
        (lambda: Rows(sparse=True), lambda p: torch.optim.SGD(p, lr=0.1), (IDS, LABEL)),
    ],
    ids=["sgd", "adam", "adamw", "adagrad", "adagrad sparse", "sgd sparse"],
)
def test_the_weights_are_those_of_the_loop_everybody_writes(
    build: Callable[[], nn.Module], optimizer: Any, arrays: tuple[Tensor, Tensor]
) -> None:
    ours, theirs = build().double(), build().double()
    history = trainer(ours, optimizer=optimizer).fit(batches(10, *arrays), epochs=2)
    losses = train(theirs, batches(10, *arrays), optimizer=optimizer(theirs.parameters()))
    assert_same(ours, theirs)
    sizes = [10, 10, 10, 7]
    means = [sum(s * v for s, v in zip(sizes, part, strict=True)) / N for part in (losses[:4], losses[4:])]
    assert history["loss"] == pytest.approx(means, rel=1e-12)


def test_clipping_is_torchs_own() -> None:
    ours, theirs = mlp(), mlp()
    norms: list[float] = []
    told: list[float | None] = []

    class Watch(Callback):
        def on_step_end(self, trainer: Any, logs: StepLogs) -> None:
            told.append(logs.grad_norm)

    trainer(ours, clip_norm=0.65, callbacks=[Watch()]).fit(batches(), epochs=3)
    clip: Callable[[], object] = lambda: norms.append(  # noqa: E731
        float(nn.utils.clip_grad_norm_(theirs.parameters(), 0.65))
    )
    train(theirs, batches(), optimizer=sgd(theirs.parameters()), epochs=3, after_backward=clip)
    assert_same(ours, theirs)
    assert told == pytest.approx(norms, rel=1e-12)
    assert min(norms) < 0.65 < max(norms), "both a clipped and an unclipped step belong to the test"


def test_clipping_counts_sparse_rows_once() -> None:
    ours, theirs = Rows(sparse=True).double(), Rows(sparse=False).double()
    for model in (ours, theirs):
        trainer(model, clip_norm=0.2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).fit(
            batches(10, IDS, LABEL), epochs=2
        )
    assert_same(ours, theirs)


@pytest.mark.parametrize("parts", [2, 3, 7, 50])
def test_accumulating_changes_nothing_but_memory(parts: int) -> None:
    masked = LABEL.clone()
    masked[::3] = -100
    ours, theirs = mlp(), mlp()
    done = trainer(ours, accumulate=parts, metrics=["accuracy"], optimizer=adam).fit(batches(10, X, masked))
    expected = trainer(theirs, metrics=["accuracy"], optimizer=adam).fit(batches(10, X, masked))
    assert_same(ours, theirs)
    assert done["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert done["accuracy"] == expected["accuracy"]


def test_an_auxiliary_number_beside_the_outputs_can_be_accumulated() -> None:
    class WithPenalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = self.body(x)
            return out, out.pow(2).sum()

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(output[0], target, reduction="sum") + output[1], len(target)

    ours, theirs = WithPenalty(), WithPenalty()
    trainer(ours, loss=loss, accumulate=3).fit(batches())
    trainer(theirs, loss=loss).fit(batches())
    assert_same(ours, theirs)


def test_bf16_runs_forward_in_bf16_and_keeps_the_weights_whole() -> None:
    seen = set()

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp().float()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x)
            seen.add(out.dtype)
            return out

    model = Seen()
    data = batches(10, X.float(), LABEL)
    # A mean of the user's own, over bf16 outputs, checked over halves that round differently.
    history = trainer(model, precision="bf16", accumulate=2, loss=lambda o, t: F.cross_entropy(o, t)).fit(
        data, epochs=6
    )
    assert seen == {torch.bfloat16}
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert history["loss"][-1] < 0.8 * history["loss"][0]


def test_bf16_rounds_the_layers_and_not_the_mean_of_the_loss() -> None:
    torch.manual_seed(3)
    model = nn.Linear(6, 4)
    x, label = numbers(4000, 6, seed=5, dtype=torch.float32), torch.arange(4000) % 4
    run = trainer(model, precision="bf16-mixed")
    data = dataset(x, label).batch(1000)
    rounded = run.predict(data)
    assert rounded.dtype == torch.bfloat16
    expected = float(F.cross_entropy(rounded.double(), label))
    assert run.evaluate(data)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_model_trains_the_same_and_keeps_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler's own threads outlive the test.
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    # Compiling torch's headers in advance takes longer than the loops of this model, and minutes on a busy machine.
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own compiler warns of itself
        ours, theirs = mlp().float(), mlp().float()
        data = dataset(X[:20].float(), LABEL[:20]).batch(10)
        assert trainer(ours, compile=True).fit(data, max_steps=2)["loss"][0] > 0
    trainer(theirs).fit(data, max_steps=2)
    assert_same(ours, theirs, tolerance=1e-5)


# ---- model and optimizer -------------------------------------------------------------------------


def test_an_optimizer_instance_is_the_one_that_steps() -> None:
    ours, theirs = mlp(), mlp()
    optimizer = torch.optim.SGD(
        [{"params": ours[0].parameters(), "lr": 0.2}, {"params": ours[2].parameters()}],  # type: ignore[index]
        lr=0.01,
    )
    run = trainer(ours, optimizer=optimizer)
    run.fit(batches(), epochs=1)
    assert run.strategy.optimizer is optimizer
    assert run.learning_rates == [0.2, 0.01]
    groups = [{"params": theirs[0].parameters(), "lr": 0.2}, {"params": theirs[2].parameters()}]  # type: ignore[index]
    train(theirs, batches(), optimizer=torch.optim.SGD(groups, lr=0.01), epochs=1)
    assert_same(ours, theirs)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model, other = mlp(), mlp()
    before = weights(model)
    with pytest.raises(ConfigError, match=r"not the model's.*Build it on model\.parameters\(\)"):
        trainer(model, optimizer=torch.optim.SGD(other.parameters(), lr=0.1)).fit(batches())
    assert_same_bits(weights(model), before)


def test_frozen_parameters_are_not_handed_to_the_optimizer() -> None:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    before = weights(model)
    trainer(model).fit(batches())
    after = weights(model)
    assert [name for name in after if torch.equal(after[name], before[name])] == ["0.weight", "0.bias"]


def test_a_model_factory_is_called_once_under_the_trainers_seed() -> None:
    built = []

    def factory() -> nn.Module:
        built.append(nn.Sequential(nn.Linear(6, 4)).double())
        return built[-1]

    first, again, other = trainer(factory, seed=1), trainer(factory, seed=1), trainer(factory, seed=2)
    torch.manual_seed(99)  # what the script drew before is no part of it
    for run in (first, again, other):
        run.fit(batches())
        run.evaluate(batches())
    assert len(built) == 3
    assert_same_bits(weights(first.model), weights(again.model))
    assert not torch.equal(first.model.state_dict()["0.bias"], other.model.state_dict()["0.bias"])


def test_a_lazy_layer_is_refused_by_name_until_it_has_seen_a_sample() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    trainer = shoal.Trainer(model, loss=nn.CrossEntropyLoss(), progress=False)
    data = shoal.Dataset.from_arrays((torch.randn(4, 3), torch.zeros(4).long())).batch(2)
    with pytest.raises(ConfigError, match=r"'0\.weight' is not known yet.* call the model once"):
        trainer.evaluate(data)
    model(torch.randn(1, 3))
    assert shoal.Trainer(model, loss=nn.CrossEntropyLoss(), progress=False).evaluate(data)["loss"] > 0


def test_a_class_is_a_factory() -> None:
    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 4, dtype=torch.float64)

    assert isinstance(trainer(Net).model, Net)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "resnet"}, "model must be an nn.Module"),
        ({"model": lambda: None}, "returned a NoneType, not an nn.Module"),
        ({"optimizer": 0.1}, "optimizer must be a function"),
        ({"optimizer": lambda params: 0.1}, "returned a float, not an optimizer"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS runs the model several times"),
        ({"callbacks": [Callback]}, "callbacks must hold instances"),
        ({"loss": 3}, "loss must be callable"),
        ({"loss": nn.MSELoss(reduction="none")}, "reduction='none'"),
        ({"accumulate": 0}, "accumulate must be a positive integer"),
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
        ({"precision": "fp8"}, "'float32', 'bf16'"),
        ({"on_nonfinite": "ignore"}, "'raise', 'skip'"),
        ({"scheduler_every": "batch"}, "'step', 'epoch'"),
        ({"optimizer": None}, "fit needs an optimizer"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(options: dict[str, Any], said: str) -> None:
    model = options.pop("model", None)
    with pytest.raises(ConfigError, match=said):
        trainer(model, **options).fit(batches())


@pytest.mark.parametrize("limits", [{"epochs": 0}, {"max_steps": -1}, {"epochs": 1.5}])
def test_limits_are_positive_whole_numbers(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be a positive integer"):
        trainer().fit(batches(), **limits)


def test_without_an_optimizer_it_evaluates_and_predicts() -> None:
    run = trainer(optimizer=None)
    assert run.evaluate(batches())["loss"] > 0
    assert run.predict(batches()).shape == (N, 4)


def test_calls_do_not_nest() -> None:
    class Nests(Callback):
        def on_epoch_end(self, trainer: Any, logs: dict[str, float]) -> None:
            trainer.evaluate(batches())

    with pytest.raises(ConfigError, match="evaluate was called inside a running fit"):
        trainer(callbacks=[Nests()]).fit(batches())


# ---- schedulers ----------------------------------------------------------------------------------


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, trainer: Any, logs: StepLogs) -> None:
        self.seen.append(logs.lr)


def test_a_scheduler_moves_every_step() -> None:
    ours, theirs, rates = mlp(), mlp(), Rates()
    trainer(ours, scheduler=lambda o: lr_scheduler.StepLR(o, 3, 0.5), callbacks=[rates]).fit(
        batches(), epochs=2
    )
    optimizer = sgd(theirs.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, 3, 0.5)
    train(theirs, batches(), optimizer=optimizer, after_step=lambda value: scheduler.step())
    assert_same(ours, theirs)
    assert rates.seen == [0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025, 0.025]


def test_a_scheduler_moves_every_epoch_when_asked() -> None:
    ours, theirs, rates = mlp(), mlp(), Rates()
    build = lambda o: lr_scheduler.ExponentialLR(o, 0.5)  # noqa: E731
    trainer(ours, scheduler=build, scheduler_every="epoch", callbacks=[rates]).fit(batches(), epochs=3)
    optimizer = sgd(theirs.parameters())
    scheduler = build(optimizer)
    train(theirs, batches(), optimizer=optimizer, epochs=3, after_epoch=scheduler.step)
    assert_same(ours, theirs)
    assert rates.seen == [0.1] * 4 + [0.05] * 4 + [0.025] * 4


def test_a_plateau_is_of_the_validation_loss_by_epochs() -> None:
    run = trainer(
        scheduler=lambda o: lr_scheduler.ReduceLROnPlateau(
            o, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs"
        ),
        scheduler_every="epoch",
    )
    history = run.fit(batches(), epochs=3, validation_data=batches(20))
    # No epoch is better than the first by so much, so each after it halves the rate.
    assert run.learning_rates == [0.025]
    assert run.scheduler.best == history["val_loss"][0]


def test_a_plateau_is_of_the_steps_loss_by_steps() -> None:
    losses: list[float] = []

    class Losses(Callback):
        def on_step_end(self, trainer: Any, logs: StepLogs) -> None:
            losses.append(logs.loss)

    run = trainer(scheduler=lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=100), callbacks=[Losses()])
    run.fit(batches(), epochs=2)
    best = losses[0]
    for loss in losses:
        best = loss if loss < best * (1 - 1e-4) else best
    assert run.scheduler.best == best


# ---- how long ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "steps", "epochs"),
    [
        ({}, 4, 1),
        ({"epochs": 3}, 12, 3),
        ({"max_steps": 6}, 6, 1),
        ({"max_steps": 9, "epochs": 2}, 8, 2),
        ({"max_steps": 3, "epochs": 2}, 3, 0),
        ({"max_steps": 8}, 8, 2),
    ],
)
def test_it_ends_with_the_first_limit(limits: dict[str, int], steps: int, epochs: int) -> None:
    run = trainer()
    run.fit(batches(), **limits)
    assert (run.step, run.epoch) == (steps, epochs)


@pytest.mark.parametrize("first", [{"epochs": 1}, {"max_steps": 3}, {"max_steps": 6}])
def test_two_fits_in_a_row_are_one_longer_fit(first: dict[str, int]) -> None:
    ours, theirs = mlp(), mlp()
    whole = trainer(theirs, optimizer=adam).fit(batches(), epochs=3)
    run = trainer(ours, optimizer=adam)
    run.fit(batches(), **first)
    rest = run.fit(batches(), max_steps=12 - run.step)
    assert_same_bits(weights(ours), weights(theirs))
    assert rest["loss"][-1] == whole["loss"][-1]
    assert (run.step, run.epoch) == (12, 3)


def test_a_second_fit_on_other_data_begins_at_its_beginning() -> None:
    run = trainer()
    run.fit(batches(), max_steps=2)
    seen: list[Tensor] = []
    few = dataset(X[:15], LABEL[:15]).batch(5).map(lambda batch: (seen.append(batch[0]), batch)[1])
    run.fit(few, epochs=1)
    assert torch.equal(torch.cat(seen), X[:15])
    assert run.step == 5


def test_stop_in_a_callback_ends_after_the_step_it_is_decided_with() -> None:
    class Stops(Callback):
        def on_step_end(self, trainer: Any, logs: StepLogs) -> None:
            if logs.step == 2:
                trainer.stop()

    run = trainer(callbacks=[Stops()])
    run.fit(batches(), epochs=9)
    assert run.step == 3
    run.fit(batches(), max_steps=3)
    assert run.step == 6, "a wish to stop is for one fit"


def test_stop_after_an_epoch_ends_before_the_next() -> None:
    class Stops(Callback):
        def on_epoch_end(self, trainer: Any, logs: dict[str, float]) -> None:
            trainer.stop()

    run = trainer(callbacks=[Stops()])
    run.fit(batches(), epochs=9)
    assert (run.step, run.epoch) == (4, 1)


# ---- what is not finite --------------------------------------------------------------------------


def poisoned() -> tuple[Tensor, Tensor]:
    x = X.clone()
    x[13, 2] = torch.nan
    return x, LABEL


def test_a_loss_that_is_not_a_number_names_step_and_samples() -> None:
    run = trainer()
    data = dataset(*poisoned()).batch(10)
    with pytest.raises(NonFiniteLoss) as raised:
        run.fit(data, epochs=2)
    error = raised.value
    assert (error.rank, error.step, error.samples) == (0, 2, list(range(10, 20)))
    assert "indices 10, 11, 12, 13, 14, 15, 16, 17, ..." in str(error)
    assert "on_nonfinite='skip'" in str(error)
    assert run.step == 1


def test_skipped_steps_are_counted_and_leave_no_trace() -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4)).double()

    ours, theirs = build(), build()
    rates = Rates()
    run = trainer(
        ours,
        on_nonfinite="skip",
        scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.5),
        callbacks=[rates],
        metrics=["accuracy"],
    )
    history = run.fit(dataset(*poisoned()).batch(10), epochs=2)
    assert (run.num_skipped_steps, run.step) == (2, 8)
    kept = [(X[i : i + 10], LABEL[i : i + 10]) for i in (0, 20, 30)]
    optimizer = sgd(theirs.parameters())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses = train(theirs, kept, optimizer=optimizer, after_step=lambda value: scheduler.step())
    assert_same(ours, theirs)
    assert history["loss"][0] == pytest.approx((losses[0] * 10 + losses[1] * 10 + losses[2] * 7) / 27)
    assert rates.seen[:3] == [0.05, 0.05, 0.025]


def test_an_infinite_gradient_of_a_finite_loss_is_refused_where_it_is_seen() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - output.detach()).abs().sqrt().mean()  # 0, with an infinite slope

    with pytest.raises(TrainingError, match="gradient's norm became"):
        trainer(loss=loss, clip_norm=1.0).fit(batches())
    # Where nobody looks at gradients, the weights are spoilt; the next step's samples are not blamed for it.
    with pytest.raises(
        TrainingError, match=r"loss of step 2 is not finite because the weights are not \('0\.weight'"
    ):
        trainer(loss=loss).fit(batches())
    model = mlp()
    before = weights(model)
    run = trainer(model, loss=loss, on_nonfinite="skip")
    run.fit(batches(), max_steps=3)
    assert run.num_skipped_steps == 3
    assert_same_bits(weights(model), before)


# ---- layers that keep something of the batch -----------------------------------------------------


def normalised() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)).double()


def test_a_frozen_batchnorm_stays_frozen_after_validation() -> None:
    model = normalised()
    model[1].eval()
    kept = {name: t for name, t in weights(model).items() if "running" in name}
    trainer(model).fit(batches(), epochs=2, validation_data=batches())
    assert_same_bits({name: weights(model)[name] for name in kept}, kept)
    trainer(model).fit(batches(), epochs=1)
    trainer(model).evaluate(batches())
    assert_same_bits({name: weights(model)[name] for name in kept}, kept)
    assert [module.training for module in model] == [True, False, True, True]


def test_a_model_handed_over_in_evaluation_mode_is_trained() -> None:
    ours, theirs = normalised(), normalised()
    trainer(ours.eval()).fit(batches())
    trainer(theirs).fit(batches())
    assert_same_bits(weights(ours), weights(theirs))


def test_validation_does_not_disturb_what_training_draws() -> None:
    ours, theirs = normalised(), normalised()
    trainer(ours, seed=7).fit(batches(), epochs=2, validation_data=batches(5))
    trainer(theirs, seed=7).fit(batches(), epochs=2)
    assert_same_bits(weights(ours), weights(theirs))
    trainer(other := normalised(), seed=8).fit(batches(), epochs=2)
    assert not torch.equal(other[0].weight, ours[0].weight)


def test_a_batch_of_one_under_batchnorm_fails_as_in_torch_and_says_what_helps() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        trainer(normalised()).fit(batches(6))  # 37 = 6 * 6 + 1
    assert "drop_last=True" in raised.value.__notes__[0]


# ---- batches and models of every kind ------------------------------------------------------------


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, scale = self.encode(x).chunk(2, dim=1)
        z = mean + scale.exp() * torch.randn_like(mean)
        return {"x": x, "out": self.decode(z), "mean": mean, "scale": scale}


def elbo(output: dict[str, Tensor]) -> Tensor:
    divergence = (output["mean"] ** 2 + output["scale"].exp() ** 2 - 2 * output["scale"] - 1).sum(1) / 2
    return (F.mse_loss(output["out"], output["x"], reduction="none").sum(1) + divergence).mean()


def test_a_batch_without_target_trains_on_the_whole_output() -> None:
    run = trainer(Vae().double(), loss=elbo, optimizer=adam)
    data = shoal.Dataset.from_arrays(X).shuffle(seed=1).batch(10)
    history = run.fit(data, epochs=15, validation_data=shoal.Dataset.from_arrays(X).batch(20))
    assert history["loss"][-1] < history["loss"][0]
    assert set(history) == {"loss", "val_loss"}
    predicted = run.predict(shoal.Dataset.from_arrays(X).batch(9))
    assert {name: t.shape[0] for name, t in predicted.items()} == dict.fromkeys(
        ("x", "out", "mean", "scale"), N
    )
    assert torch.equal(predicted["x"], X)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(6, 4).double(), nn.Linear(3, 4).double()

    def forward(self, x: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
        out = self.left(x).tanh() + self.right(wide)
        return out, out.mean(1)


def test_positional_keyword_and_whole_dict_inputs_are_the_same_model() -> None:
    class Whole(TwoInputs):
        def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(**batch)

    wide = numbers(N, 3, seed=2)
    loss = lambda output, target: F.cross_entropy(output[0], target) + output[1].pow(2).mean()  # noqa: E731
    models = [TwoInputs(), TwoInputs(), Whole()]
    inputs: list[Any] = [(X, wide, LABEL), ({"x": X, "wide": wide}, LABEL), ({"x": X, "wide": wide}, LABEL)]
    for model, arrays in zip(models, inputs, strict=True):
        run = trainer(model, loss=loss, metrics=["accuracy"])
        run.fit(batches(10, *arrays), epochs=2)
        first, second = run.predict(dataset(*arrays).batch(8))
        assert (first.shape, second.shape) == ((N, 4), (N,))
    assert_same_bits(weights(models[0]), weights(models[1]))
    assert_same_bits(weights(models[0]), weights(models[2]))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataloader_is_read_as_it_is(num_workers: int) -> None:
    ours, theirs = mlp(), mlp()
    loader: DataLoader[Any] = DataLoader(TensorDataset(X, LABEL), batch_size=10, num_workers=num_workers)
    run = trainer(ours)
    run.fit(loader, epochs=2, validation_data=loader)
    train(theirs, DataLoader(TensorDataset(X, LABEL), batch_size=10), optimizer=sgd(theirs.parameters()))
    assert_same(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(run.predict(loader), theirs(X))


def test_a_distributed_sampler_is_not_applied_twice() -> None:
    sampler = DistributedSampler(TensorDataset(X, LABEL), num_replicas=3, rank=1, shuffle=True, seed=5)  # type: ignore[var-annotated]
    loader: DataLoader[Any] = DataLoader(TensorDataset(X, LABEL), batch_size=4, sampler=sampler)
    run = trainer()
    run.fit(loader, epochs=1)
    assert run.position.samples >= N, "all of the data, not a third"
    assert run.predict(loader).shape[0] >= N


def test_what_is_no_batches_is_refused_with_the_cure() -> None:
    with pytest.raises(ConfigError, match=r"data\.batch\(1024\)"):
        trainer().fit(dataset())
    with pytest.raises(ConfigError, match=r"from_arrays\(\(inputs, target\)\)\.batch\(1024\)"):
        trainer().fit("images.npy")
    with pytest.raises(ConfigError, match="DataLoader"):
        trainer().fit(TensorDataset(X, LABEL))


# ---- metrics, history, saving --------------------------------------------------------------------


def test_metrics_by_name_and_by_object_agree_with_the_whole_data_at_once() -> None:
    run = trainer(metrics=["accuracy", "top2", torchmetrics.classification.MulticlassF1Score(num_classes=4)])
    history = run.fit(batches(), epochs=1, validation_data=dataset().batch(8))
    logits = run.predict(dataset().batch(37))
    expected = {
        "loss": float(F.cross_entropy(logits, LABEL)),
        "accuracy": float((logits.argmax(1) == LABEL).double().mean()),
        "top2": float((logits.topk(2).indices == LABEL[:, None]).any(1).double().mean()),
        "f1_score": float(
            torchmetrics.functional.f1_score(logits, LABEL, "multiclass", num_classes=4, average="macro")
        ),
    }
    assert run.evaluate(dataset().batch(5)) == pytest.approx(expected, rel=1e-6)
    assert {name: history[f"val_{name}"][0] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert set(history) == {*expected, *(f"val_{name}" for name in expected)}


def test_log_puts_a_value_into_this_steps_line_alone() -> None:
    run = trainer()
    run.log("mine", 1.0)
    assert run.take_logged() == {"mine": 1.0}
    assert run.take_logged() == {}


def test_a_saved_model_is_plain_safetensors_and_loads_into_another_trainer(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    first, second = trainer(), trainer(mlp(seed=9))
    first.fit(batches())
    first.save(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "model.safetensors",
    ]
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), weights(first.model))
    second.load(tmp_path / "out")
    assert_same_bits(weights(second.model), weights(first.model))
    assert second.step == 0


def overflowing() -> shoal.Trainer:
    """fp16 of a loss whose gradient overflows at the first scales, then no more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return shoal.Trainer(
        model,
        loss=lambda output, target: (output - 300 * target).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9),
        precision="16-mixed",
    )


def test_fp16_skips_steps_that_overflow_and_resumes_at_the_same_scale(tmp_path: Path) -> None:
    x = torch.randn(40, 3)
    data = shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).batch(8)
    whole, first, second = (overflowing() for _ in range(3))
    whole.fit(data, epochs=4)
    scale = whole.train_job.loss_scale
    assert scale is not None
    assert 1 < scale.value < 65536
    assert whole.progress.num_skipped_steps == math.log2(65536 / scale.value)
    first.fit(data, epochs=4, max_steps=7)
    saved = first.save_checkpoint(str(tmp_path / "half"))
    second.fit(data, epochs=4, resume=saved)
    assert_same_bits(weights(second.model), weights(whole.model))
    assert second.train_job.loss_scale == scale


def test_fp16_of_a_loss_that_is_no_number_ends_by_name_once_the_scale_cannot_fall() -> None:
    run = shoal.Trainer(
        nn.Linear(3, 1),
        loss=lambda output, target: output.mean() * float("nan"),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        precision="fp16",
    )
    with pytest.raises(NonFiniteLoss, match="step 17"):
        run.fit(shoal.Dataset.from_arrays((torch.randn(40, 3), torch.randn(40, 1))).batch(2), epochs=1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "ps:async", "num_servers": 1}, "each worker's push is an update of its own"),
        ({"strategy": "ddp", "sync_every": 4}, "each worker steps alone"),
        ({"strategy": "ddp", "compress": "topk:ratio=0.1"}, "keeps what it left out"),
    ],
)
def test_fp16_is_refused_where_workers_do_not_decide_together(options: dict[str, Any], says: str) -> None:
    job = Job(name="x", run_dir=Path("x"), num_workers=3, **options)
    with pytest.raises(ConfigError, match=says):
        refuse_fp16(job)


def test_a_trainer_takes_a_loss_or_a_training_step() -> None:
    with pytest.raises(ConfigError, match="given neither"):
        shoal.Trainer(nn.Linear(2, 1))
    with pytest.raises(ConfigError, match="given both"):
        shoal.Trainer(nn.Linear(2, 1), loss=nn.MSELoss(), training_step=print)
    with pytest.raises(ConfigError, match="needs training_step="):
        shoal.Trainer(nn.Linear(2, 1), loss=nn.MSELoss(), optimizer={"weight": torch.optim.SGD})
    trainer = shoal.Trainer(nn.Linear(2, 1), training_step=print)
    with pytest.raises(ConfigError, match="Nothing was evaluated"):
        trainer.evaluate([(torch.ones(2), torch.ones(1))])


def test_several_optimizers_name_parts_of_the_model_and_are_of_one_class() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    with pytest.raises(ConfigError, match=r"'c'.*it has a, b"):
        build_optimizer({"a": torch.optim.SGD, "c": torch.optim.SGD}, model)
    with pytest.raises(ConfigError, match="SGD and Adam"):
        build_optimizer({"a": torch.optim.SGD, "b": torch.optim.Adam}, model)
    whole = build_optimizer(
        {"a": lambda p: torch.optim.SGD(p, lr=1.0), "b": lambda p: torch.optim.SGD(p, lr=2.0)}, model
    )
    assert [group["lr"] for group in whole.param_groups] == [1.0, 2.0]
    first, second = turns_of({"a": None, "b": None}, model)
    assert first is not None
    assert second is not None
    assert (first.name, list(first.others)) == ("a", list(model["b"].parameters()))


def test_parts_of_the_command_line_and_of_the_script_that_differ_are_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.config.job._current", Job(name="test", run_dir=run_dir, accumulate=4))
    trainer(mlp(), accumulate=4)
    with pytest.raises(ConfigError, match=r"--accumulate 4 and accumulate=2 .* contradict"):
        trainer(mlp(), accumulate=2)


def test_a_model_with_a_train_of_its_own_goes_through_it_before_the_first_step() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.layer(x))  # type: ignore[no-any-return]

    model = Frozen()
    trainer = shoal.Trainer(
        model, loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1), progress=False
    )
    trainer.fit(shoal.Dataset.from_arrays((torch.randn(8, 2), torch.randn(8, 2))).batch(4))
    assert model.norm.num_batches_tracked == 0
