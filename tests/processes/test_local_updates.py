"""`--sync-every`: what workers train apart and average is what one process computes in their stead."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import Launched
from torch import nn

import shoal
from shoal.cluster.launch.api import resume_config
from shoal.config.faults import Faults
from shoal.config.launch import LaunchConfig
from shoal.errors import ConfigError, Interrupted, NonFiniteLoss
from shoal.train.checkpoint.checkpoint import open_checkpoint

SCRIPT = """
import json, sys, torch, shoal
from torch import nn
from shoal.train.checkpoint import saving

saving.EVERY_STEPS = 4
how = {"samples": 97, "batchnorm": False, "lr": 0.1, "momentum": 0.9, "epochs": 2, **json.loads(sys.argv[1])}
generator = torch.Generator().manual_seed(0)
x = torch.randn(how["samples"], 6, generator=generator, dtype=torch.float64)
y = (x[:, 0] > x[:, 1] * x[:, 2]).long()
y[: how.get("masked", 0)] = -100
for sample in how.get("spoilt", ()):
    x[sample] = torch.nan
torch.manual_seed(0)
middle = nn.BatchNorm1d(33) if how["batchnorm"] else nn.Tanh()
model = nn.Sequential(nn.Linear(6, 33), middle, nn.Linear(33, 2)).double()

def optimizer(params):
    if how.get("adam"):
        return torch.optim.Adam(params, lr=how["lr"])
    return torch.optim.SGD(params, lr=how["lr"], momentum=how["momentum"])

trainer = shoal.Trainer(
    model, loss=nn.CrossEntropyLoss(), optimizer=optimizer, seed=0, metrics=["accuracy"], clip_norm=how.get("clip_norm"),
    on_nonfinite=how.get("on_nonfinite", "raise"),
    callbacks=[shoal.callbacks.ModelCheckpoint(every_steps=how["save_every"])] if "save_every" in how else [],
)
data = shoal.Dataset.from_arrays((x, y))
history = trainer.fit(data.shuffle(seed=0).batch(16), epochs=how["epochs"], max_steps=how.get("max_steps"),
                      validation_data=data.batch(40))
result = trainer.evaluate(data.batch(40))
predicted = trainer.predict(data.batch(40))
if shoal.rank() == 0:
    print("result", json.dumps({
        "weights": {name: value.tolist() for name, value in model.state_dict().items()},
        "loss": result["loss"], "predicted": predicted.tolist(), "skipped": trainer.num_skipped_steps,
        "validation": [epoch["val_loss"] for epoch in history.epochs], "training": [epoch["loss"] for epoch in history.epochs],
    }))
"""

Launch = Callable[..., Launched]


def result(done: Launched) -> dict[str, Any]:
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    [line] = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    return dict(json.loads(line.removeprefix("result ")))


def by_hand(
    workers: int,
    sync_every: int,
    *,
    outer: tuple[float, float] = (1.0, 0.0),
    samples: int = 97,
    batchnorm: bool = False,
    adam: bool = False,
    momentum: float = 0.9,
    lr: float = 0.1,
    clip_norm: float | None = None,
    masked: int = 0,
) -> tuple[dict[str, Any], list[float]]:
    """The same training in one process, one worker's model after the other; weights, and the mean loss of each epoch."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    y = (x[:, 0] > x[:, 1] * x[:, 2]).long()
    y[:masked] = -100
    batches = shoal.Dataset.from_arrays((x, y)).shuffle(seed=0).batch(16)

    def fresh() -> nn.Sequential:
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(33) if batchnorm else nn.Tanh()
        return nn.Sequential(nn.Linear(6, 33), middle, nn.Linear(33, 2)).double()

    common, apart = fresh(), [fresh() for _ in range(workers)]
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=lr)
        if adam
        else torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        for model in apart
    ]
    outside = torch.optim.SGD(common.parameters(), lr=outer[0], momentum=outer[1], nesterov=outer[1] > 0)
    trained = [0] * workers
    losses = []

    def meet() -> None:
        if not any(trained):
            return
        shares = [number / sum(trained) for number in trained]
        states = [model.state_dict() for model in apart]
        averages = {
            name: sum(share * state[name] for share, state in zip(shares, states, strict=True))
            if states[0][name].is_floating_point()
            else states[0][name]
            for name in states[0]
        }
        for name, parameter in common.named_parameters():
            parameter.grad = parameter.detach() - averages[name]
        outside.step()
        for name, buffer in common.named_buffers():
            buffer.copy_(averages[name])
        for model in apart:
            model.load_state_dict(common.state_dict())
        trained[:] = [0] * workers

    for epoch in range(2):
        parts = [
            batches.slices(epoch=epoch, start=0, rank=rank, num_workers=workers) for rank in range(workers)
        ]
        total, counted, num_steps = 0.0, 0, 0
        for slices in zip(*parts, strict=True):
            for rank, part in enumerate(slices):
                if part.borrowed:
                    continue
                inputs, target = x[list(part.indices)], y[list(part.indices)]
                count = int((target >= 0).sum())
                if not count:
                    continue  # nothing to learn from
                optimizers[rank].zero_grad()
                loss = nn.functional.cross_entropy(apart[rank](inputs), target)
                loss.backward()
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(apart[rank].parameters(), clip_norm)
                optimizers[rank].step()
                trained[rank] += count
                total, counted = total + float(loss.detach()) * count, counted + count
            num_steps += 1
            if num_steps % sync_every == 0:
                meet()
        if num_steps % sync_every:
            meet()
        losses.append(total / counted)
    return {name: value.tolist() for name, value in common.state_dict().items()}, losses


def largest_difference(some: dict[str, Any], others: dict[str, Any]) -> float:
    return max(float((torch.tensor(some[name]) - torch.tensor(others[name])).abs().max()) for name in some)


@pytest.mark.parametrize(
    ("workers", "options", "how", "reference"),
    [
        # 7 batches to an epoch, the last of one sample: workers 1 and 2 have nothing to train on there.
        (3, {"exchange": "ring"}, {}, {}),
        (
            3,
            {"outer": "nesterov:lr=0.6,momentum=0.8"},
            {"adam": True, "lr": 0.02, "batchnorm": True, "samples": 96, "clip_norm": 0.3},
            {"outer": (0.6, 0.8)},
        ),
        (4, {"exchange": "native", "outer": "nesterov"}, {}, {"outer": (0.7, 0.9)}),
    ],
    ids=["average", "Adam, BatchNorm, Nesterov, clipped", "four workers"],
)
def test_apart_and_averaged_is_that_of_one_process(
    launch_script: Launch,
    workers: int,
    options: dict[str, Any],
    how: dict[str, Any],
    reference: dict[str, Any],
) -> None:
    weights, losses = by_hand(workers, 3, **how, **reference)
    undisturbed = result(
        launch_script(SCRIPT, workers=workers, sync_every=3, args=(json.dumps(how),), **options)
    )
    assert largest_difference(undisturbed["weights"], weights) < 1e-12
    assert undisturbed["training"] == pytest.approx(losses, rel=1e-12)
    assert undisturbed["validation"][-1] == undisturbed["loss"]
    if workers == 3 and not how:
        return  # killed is the one of three with more to lose, and the one of four
    faults = Faults().kill("worker-1", at_step=9, at="worker: before commit")
    killed = launch_script(
        SCRIPT, workers=workers, sync_every=3, args=(json.dumps(how),), faults=faults, **options
    )
    assert result(killed) == undisturbed
    [went_back] = [event for event in killed.events if event["event"] == "went-back"]
    assert went_back["to_step"] == 6  # the first meeting after EVERY_STEPS


def test_one_step_apart_with_plain_sgd_is_ddp(launch_script: Launch) -> None:
    # A third of the samples counts for nothing, so that workers differ in what their losses are a mean of.
    how = {"momentum": 0.0, "masked": 33}
    weights, losses = by_hand(1, 1, **how)  # one process, whole batches
    apart, rarely = (launch_script(SCRIPT, workers=3, sync_every=k, args=(json.dumps(how),)) for k in (1, 7))
    assert largest_difference(result(apart)["weights"], weights) < 1e-12
    assert result(apart)["training"] == pytest.approx(losses, rel=1e-12)
    # 7 steps to an epoch: what is sent for each of them goes down by 7.
    sent = [done.summary["exchange"]["sent_bytes_per_step"] for done in (apart, rarely)]
    num_bytes = 8 * sum(torch.tensor(value).numel() for value in weights.values())
    assert sent[0] == pytest.approx(num_bytes, rel=0.05)  # and a flag for each parameter
    assert sent[1] == pytest.approx(sent[0] / 7, abs=1)


def test_a_checkpoint_holds_every_workers_optimizer_and_goes_on_anywhere(
    launch_script: Launch, tmp_path: Path
) -> None:
    how = {"adam": True, "lr": 0.02}
    options = {"workers": 3, "sync_every": 3, "outer": "nesterov", "compress": "topk:ratio=0.5"}
    whole = result(launch_script(SCRIPT, args=(json.dumps(how),), **options))
    # Wished for after steps 5 and 10: written where the workers meet, after 6 and 10 of 14.
    stopped = json.dumps({**how, "max_steps": 10, "save_every": 5})
    launch_script(SCRIPT, args=(stopped,), name="one", **options)
    saved = sorted(path.name for path in (tmp_path / "runs/one/checkpoints").iterdir())
    assert saved == ["step-000000006", "step-000000010"]
    shutil.copytree(tmp_path / "runs/one", tmp_path / "runs/two")
    script, resumed = str(tmp_path / "script.py"), {}
    for name, workers in (("one", 3), ("two", 2)):
        # Without the script's own limits: the run that goes on is the whole one.
        written = tmp_path / "runs" / name / "config.json"
        written.write_text(json.dumps({**json.loads(written.read_text()), "args": [json.dumps(how)]}))
        config = resume_config(tmp_path / "runs" / name, workers=workers)
        options = {field: getattr(config, field) for field in ("sync_every", "outer", "compress", "strategy")}
        done = launch_script(
            Path(script), workers=workers, name=name, resume=True, args=(json.dumps(how),), **options
        )
        resumed[workers] = result(done)
    assert resumed[3] == whole
    assert resumed[2]["loss"] == pytest.approx(whole["loss"], rel=0.2)  # from an average of all optimizers
    path = tmp_path / "runs/one/checkpoints/step-000000010"
    assert goes_on_alone(path) < 0.6  # ln 2 at first
    saved = torch_tensors(path)
    rows = [saved[f"workers/{rank}/optimizer/0.weight/exp_avg"] for rank in range(3)]
    assert torch.equal(saved["optimizer/0.weight/exp_avg"], (rows[0] + rows[1] + rows[2]) / 3)
    assert not torch.equal(rows[0], rows[1])


def goes_on_alone(path: Path) -> float:
    """The rest of the training, in one process."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(97, 6, generator=generator, dtype=torch.float64)
    data = shoal.Dataset.from_arrays((x, (x[:, 0] > x[:, 1] * x[:, 2]).long()))
    trainer = shoal.Trainer(
        nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 2)).double(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.Adam(params, lr=0.5),
        metrics=["accuracy"],
        progress=False,
    )
    trainer.fit(data.shuffle(seed=0).batch(16), epochs=2, resume=str(path))
    assert trainer.step == 14
    assert trainer.learning_rates == [0.02]
    return trainer.evaluate(data.batch(40))["loss"]


def torch_tensors(path: Path) -> dict[str, torch.Tensor]:
    found = open_checkpoint(str(path)).pieces
    return {name: found[name] for name in found}


def test_asked_to_leave_they_meet_and_save_before_the_round_is_over(
    launch_script: Launch, at_file: Callable[..., None], tmp_path: Path
) -> None:
    at_file(tmp_path / "at-work", lambda: os.kill(os.getpid(), signal.SIGINT))
    done = launch_script(
        """
        import pathlib, time, torch, shoal
        from torch import nn

        class Uneven(nn.Linear):
            def forward(self, x):
                time.sleep(0.001 * shoal.rank())
                if self.calls == 5 and shoal.rank() == 2:
                    pathlib.Path("at-work").touch()
                while self.calls == 5 and not pathlib.Path("at-work").exists():
                    time.sleep(0.001)  # or on a busy machine they are a million steps ahead, which the last has to make up
                self.calls += 1
                return super().forward(x)

        torch.manual_seed(0)
        model = Uneven(6, 2)
        model.calls = 0
        data = shoal.Dataset.from_arrays((torch.randn(60, 6), torch.arange(60) % 2))
        trainer = shoal.Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), seed=0)
        trainer.fit(data.repeat(100_000).batch(12), epochs=1)
        """,
        workers=3,
        sync_every=1_000_000,
    )
    assert isinstance(done.error, Interrupted), done.error
    assert done.exit_code == 130
    assert 5 < done.error.step < 500_000
    assert str(done.error.checkpoint).endswith(f"step-{done.error.step:09}")
    assert json.loads((Path(str(done.error.checkpoint)) / "manifest.json").read_text())


def test_what_is_not_finite_is_left_out_where_it_was_or_ends_the_job_by_name(launch_script: Launch) -> None:
    skipped = result(
        launch_script(
            SCRIPT, workers=3, sync_every=3, args=(json.dumps({"spoilt": [5, 6], "on_nonfinite": "skip"}),)
        )
    )
    assert (
        skipped["skipped"] == 4
    )  # a slice for each of them in each epoch, and nothing of the other workers'
    assert all(math.isfinite(loss) for loss in skipped["training"])
    raised = launch_script(SCRIPT, workers=3, sync_every=3, args=(json.dumps({"spoilt": [5]}),))
    assert isinstance(raised.error, NonFiniteLoss)
    assert raised.error.samples


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sync_every": 0}, "--sync-every 0 is no number of steps"),
        ({"sync_every": 4, "strategy": "fsdp"}, "whose workers share what they train at every step"),
        ({"sync_every": 4, "strategy": "ps", "servers": 1}, "whose workers share what they train"),
        ({"sync_every": 4, "workers": 1}, "one process, which has nobody to average with"),
        ({"sync_every": 4, "batchnorm": "sync"}, "with --sync-every they train apart"),
        ({"outer": "nesterov"}, "add --sync-every 10"),
        ({"sync_every": 4, "outer": "nestrov"}, "Did you mean 'nesterov'"),
        ({"sync_every": 4, "outer": "nesterov:lr=50"}, "lr from 1e-06 to 10"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        LaunchConfig(script="train.py", **{"workers": 3, **options})


OWN_LOOP = """
import json, sys, torch, shoal
from torch import nn
how = sys.argv[1]
x = torch.randn(97, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
y = (x[:, 0] > x[:, 1] * x[:, 2]).long()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 2)).double()
data = shoal.Dataset.from_arrays((x, y)).shuffle(seed=0).batch(16)
model, optimizer, data = shoal.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), data)
scaler = torch.amp.GradScaler("cpu", enabled=how == "scaler")
batches = iter(data) if how == "iterator" else data
saved = 0
for epoch in range(3 if how == "break" else 2):
    for at, (features, label) in enumerate(batches):
        if how == "break" and epoch == 2:
            break  # a batch was taken, and nothing trained
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(features), label)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        if how == "raise" and shoal.rank() == 1 and at == 4:
            raise KeyError("of the script")
        scaler.step(optimizer)
        saved += shoal.checkpoint(every=2, epoch=epoch) is not None
        if how == "break" and epoch == 1 and at == 6:
            break
weights = {name: value.tolist() for name, value in model.state_dict().items()}
print("result", json.dumps({"weights": weights, "saved": saved}), file=sys.stdout if shoal.rank() == 0 else sys.stderr)
"""
REFUSED = """
import sys, torch, shoal
class Saves(shoal.callbacks.Callback):
    ranks = "every"
    def on_step_end(self, trainer, logs):
        trainer.save_checkpoint()
how = sys.argv[1]
trainer = shoal.Trainer(
    torch.nn.Linear(2, 1), loss=torch.nn.MSELoss(),
    optimizer=lambda p: torch.optim.SGD(p, lr=1e38 if how == "spoilt" else 0.1),
    scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau if how == "plateau" else None,
    callbacks=[Saves()] if how == "saves" else [],
)
trainer.fit(shoal.Dataset.from_arrays((torch.ones(8, 2), torch.full((8, 1), 1e3))).batch(4))
"""


@pytest.mark.parametrize(
    ("source", "how", "exit_code", "says"),
    [
        (OWN_LOOP, "iterator", 2, "a batch is taken outside of a `for` over the data. Nothing was trained"),
        (OWN_LOOP, "scaler", 2, "a GradScaler would skip a step by this worker's own overflow"),
        (REFUSED, "plateau", 2, "use scheduler_every='epoch'"),
        (REFUSED, "saves", 2, "call trainer.wish_checkpoint() instead"),
        (REFUSED, "spoilt", 3, "are not finite at step 1 ('weight' first)"),
    ],
)
def test_what_workers_apart_cannot_do_is_refused_by_name(
    launch_script: Launch, source: str, how: str, exit_code: int, says: str
) -> None:
    refused = launch_script(source, workers=2, sync_every=1 if how == "spoilt" else 4, args=(how,))
    assert refused.exit_code == exit_code
    assert says in str(refused.error)


def test_a_loop_of_ones_own_is_that_of_the_trainer_however_it_ends(launch_script: Launch) -> None:
    weights, _ = by_hand(3, 3, clip_norm=0.3)
    for how in ("to the end", "break"):
        done = launch_script(OWN_LOOP, workers=3, sync_every=3, args=(how,))
        mine = result(done)
        assert largest_difference(mine["weights"], weights) < 1e-12
        others = [line.partition("result ")[2] for line in done.stderr.splitlines() if "result " in line]
        assert [json.loads(other) for other in others] == [mine] * 2
        assert mine["saved"] == 4  # after steps 3, 6, 10 and 13, where workers met
    failed = launch_script(OWN_LOOP, workers=3, sync_every=3, args=("raise",), step_timeout_s=20.0)
    assert failed.exit_code == 1  # and no worker waits for the one that is gone
    assert "of the script" in str(failed.error)
