"""User errors: the right exit code and one paragraph that names the thing and the cure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched

from shoal.errors import (
    BatchTooSmall,
    CallsDiffer,
    CheckpointError,
    CheckpointMismatch,
    CheckpointWriteFailed,
    EmptyDataset,
    LossDoesNotRecombine,
    ModelsDiffer,
    NonFiniteLoss,
    OptimizerMismatch,
    ScriptFailed,
    TrainingError,
)
from shoal.train.checkpoint.checkpoint import list_checkpoints, open_checkpoint

Launch = Callable[..., Launched]

PRELUDE = """
import pathlib, sys
import torch, shoal
from torch import nn
from shoal.callbacks import Callback, ModelCheckpoint

rank = shoal.rank()
x, y = torch.arange(80.0).reshape(40, 2) / 80, torch.arange(40) % 3
data = shoal.Dataset.from_arrays((x, y))

def trainer(model=None, **options):
    settings = dict(loss=nn.CrossEntropyLoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1)) | options
    return shoal.Trainer(model or nn.Linear(2, 3), **settings)

"""


def script(source: str) -> str:
    return PRELUDE + textwrap.dedent(source)


def refused(done: Launched, kind: type[Exception], *said: str, code: int = 3) -> str:
    """The message, if it is one paragraph of the right kind that says all this, once."""
    assert isinstance(done.error, kind), (done.error, done.stderr)
    message = str(done.error)
    assert done.exit_code == done.summary["exit"] == code
    for words in said:
        assert words in message, message
    assert "Traceback" not in message + done.stderr + done.stdout
    assert "\n" not in message
    return message


# ---- the script's own errors ---------------------------------------------------------------------


def test_a_script_that_raises_at_import_shows_its_traceback_once(
    launch_script: Launch, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("import json\njson.loads('{')\n")
    done = launch_script("import shoal\nimport beside\n", workers=3)
    assert isinstance(done.error, ScriptFailed)
    assert done.exit_code == 1
    message = str(done.error)
    assert message.count("Traceback (most recent call last)") == 1
    assert message.count("JSONDecodeError") == 1
    assert f'File "{tmp_path / "beside.py"}", line 2' in message
    assert "/src/shoal/" not in message
    assert "Traceback" not in done.stdout + done.stderr


def test_a_forward_that_fails_on_one_rank_shows_the_users_lines_alone(launch_script: Launch) -> None:
    done = launch_script(
        script(
            """
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.body = nn.Linear(2, 3)
                def forward(self, x):
                    if rank == 2 and self.training:
                        raise KeyError("only here")
                    return self.body(x)

            trainer(Net()).fit(data.batch(10))
            """
        ),
        workers=4,
    )
    assert isinstance(done.error, ScriptFailed)
    assert (done.exit_code, done.error.rank) == (1, 2)
    message = str(done.error)
    assert message.count("Traceback") == 1
    assert "KeyError: 'only here'" in message
    assert "trainer(Net()).fit(data.batch(10))" in message
    assert 'raise KeyError("only here")' in message
    assert "shoal/train" not in message
    assert "shoal/parallel" not in message
    assert "The script failed on rank 2 of 4" in message


def test_what_a_callback_raises_on_rank_0_ends_all_ranks(launch_script: Launch) -> None:
    done = launch_script(
        script(
            """
            class Fails(Callback):
                def on_epoch_end(self, trainer, logs):
                    open("no/such/file")

            trainer(callbacks=[Fails()]).fit(data.batch(10), epochs=2)
            """
        ),
        workers=2,
    )
    assert isinstance(done.error, ScriptFailed)
    assert (done.exit_code, done.error.rank) == (1, 0)
    assert "FileNotFoundError" in str(done.error)


# ---- data ----------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_names_rank_step_and_samples(launch_script: Launch) -> None:
    done = launch_script(
        script(
            """
            x[17, 1] = float("nan")
            trainer(callbacks=[ModelCheckpoint(every_steps=1)]).fit(data.batch(12), epochs=2)
            """
        ),
        workers=3,
    )
    error = done.error
    message = refused(done, NonFiniteLoss, "on rank 1 at step 2", "(indices 16, 17, 18, 19)", "clip_norm=1.0")
    assert isinstance(error, NonFiniteLoss)
    assert (error.rank, error.step, error.samples) == (1, 2, [16, 17, 18, 19])
    assert f"the newest checkpoint is {done.run_dir / 'checkpoints/step-000000001'}" in message


def test_samples_of_a_shuffled_dataset_are_named_as_the_dataset_knows_them(launch_script: Launch) -> None:
    done = launch_script(
        script(
            """
            x[29] = float("inf")
            trainer().fit(data.shuffle(seed=3).batch(8), epochs=1)
            """
        ),
        workers=2,
    )
    refused(done, NonFiniteLoss)
    assert isinstance(done.error, NonFiniteLoss)
    assert 29 in done.error.samples
    assert len(done.error.samples) == 4


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_an_empty_dataset_is_named_by_its_call(launch_script: Launch, call: str) -> None:
    done = launch_script(script(f"trainer().{call}(data.split(40, 0)[1].batch(10))"), workers=2)
    refused(done, EmptyDataset, f"given to {call} has no samples", "split()")


@pytest.mark.parametrize(
    "call",
    ["fit(data.batch(3))", "evaluate(data.batch(3))", "fit(data.batch(8), validation_data=data.batch(3))"],
)
def test_a_batch_smaller_than_the_workers_is_refused(launch_script: Launch, call: str) -> None:
    done = launch_script(script(f"trainer().{call}\npathlib.Path('done').touch()"), workers=4)
    refused(done, BatchTooSmall, "a batch of 3 cannot be cut over 4 workers", "batch(3, per_worker=True)")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("data.split(40 - rank, rank)[0].batch(10)", ("samples=40", "samples=39")),
        ("data.batch(10 + rank)", ("batch=10", "batch=11")),
        ("data.shuffle(seed=rank).batch(10)", ("seeds=[0]", "seeds=[1]")),
    ],
)
def test_data_that_differ_between_ranks_are_told_by_what_differs(
    launch_script: Launch, source: str, said: tuple[str, str]
) -> None:
    done = launch_script(script(f"trainer().fit({source})"), workers=2)
    message = refused(done, CallsDiffer, *said, "give every rank the same data")
    assert message.index("rank 0 called fit(") < message.index(said[0]) < message.index("rank 1 called fit(")


# ---- models and losses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nn.Linear(2, 3, bias=rank == 0)", "'bias' is (3,) torch.float32 on rank 0 and absent on rank 1"),
        (
            "nn.Sequential(nn.Linear(2, 4 + rank), nn.Linear(4 + rank, 3))",
            "'0.weight' is (4, 2) torch.float32 on rank 0 and (5, 2) torch.float32 on rank 1",
        ),
        ("nn.Linear(2, 3).to(torch.float64 if rank else torch.float32)", "(3, 2) torch.float64 on rank 1"),
        (
            "(lambda m: (m.bias.requires_grad_(rank == 0), m)[1])(nn.Linear(2, 3))",
            "'bias' is (3,) torch.float32 on rank 0 and (3,) torch.float32, frozen on rank 1",
        ),
    ],
)
def test_models_that_differ_between_ranks_are_told_by_name_and_shape(
    launch_script: Launch, model: str, said: str
) -> None:
    done = launch_script(script(f"trainer({model}).fit(data.batch(10))"), workers=2)
    refused(done, ModelsDiffer, said, "Nothing was trained")


def test_a_loss_that_does_not_recombine_is_refused_with_its_numbers(launch_script: Launch) -> None:
    done = launch_script(
        script(
            """
            def spread(output, target):
                return nn.functional.cross_entropy(output, target) + output.std()

            trainer(loss=spread).fit(data.batch(10))
            """
        ),
        workers=2,
    )
    refused(done, LossDoesNotRecombine, "the loss 'spread' does not recombine", "a pair (sum, count)")
    assert isinstance(done.error, LossDoesNotRecombine)
    assert done.error.whole != pytest.approx(done.error.recombined)


def test_a_loss_of_something_without_samples_is_refused(launch_script: Launch) -> None:
    done = launch_script(
        script(
            """
            class Pairs(nn.Linear):
                def forward(self, x):
                    out = super().forward(x)
                    return (out @ out.T)[: len(x) - 1]

            trainer(Pairs(2, 3), loss=lambda output: output.mean()).fit(shoal.Dataset.from_arrays(x).batch(10))
            """
        ),
        workers=2,
    )
    refused(done, TrainingError, "does not hold the 5 samples of the slice", "(sum, count)")


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("if rank == 0:\n    run.evaluate(data.batch(10))", ("rank 0 called evaluate(", "rank 1 ended its script after 1 call")),
        ("if rank == 0:\n    run.save('model')\nrun.evaluate(data.batch(10))", ("rank 0 called save(model)", "rank 1 called evaluate(")),
        ("if rank == 1:\n    sys.exit()\nrun.predict(data.batch(10))", ("rank 0 called predict(", "rank 1 ended its script after 1 call")),
    ],
)  # fmt: skip
def test_ranks_that_part_ways_hear_who_did_what(
    launch_script: Launch, tmp_path: Path, source: str, said: tuple[str, str]
) -> None:
    done = launch_script(script(f"run = trainer()\nrun.fit(data.batch(10))\n{source}"), workers=2)
    refused(done, CallsDiffer, "call 2 into shoal", *said, "`if shoal.rank() == 0`")
    assert not (tmp_path / "model").exists()


# ---- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_names_keys_and_shapes(launch_script: Launch) -> None:
    done = launch_script(
        script(
            """
            trainer().save("saved")
            wide = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3))
            wide.weight = nn.Parameter(torch.zeros(7, 2))
            trainer(wide).load("saved")
            """
        ),
        workers=2,
    )
    refused(
        done,
        CheckpointMismatch,
        "the model has 0.weight, 0.bias, 1.weight, 1.bias, the checkpoint has not",
        "the checkpoint has bias, the model has not",
        "weight is float32[3, 2] in the checkpoint and float32[7, 2] in the model",
        "Nothing was loaded",
    )


RESUMED = """
before = pathlib.Path("before").exists()
{}
run.fit(data.split({}, seed=None)[0].batch(8), max_steps=4 if before else 9, epochs=9)
"""


@pytest.mark.parametrize(
    ("build", "samples", "kind", "said"),
    [
        ("run = trainer(callbacks=[ModelCheckpoint(every_steps=1)])", "40 if before else 32", CheckpointError,
         ("a dataset of 40 samples", "one of 32", "trainer.load()")),
        ("kind = torch.optim.SGD if before else torch.optim.Adam\n"
         "run = trainer(optimizer=lambda p: kind(p, lr=0.1), callbacks=[ModelCheckpoint(every_steps=1)])", "40",
         OptimizerMismatch, ("it is SGD, the script builds Adam", "step-000000004", "trainer.load()")),
    ],
    ids=["length", "optimizer"],
)  # fmt: skip
def test_resuming_with_what_does_not_fit_is_refused(
    launch_script: Launch,
    tmp_path: Path,
    build: str,
    samples: str,
    kind: type[Exception],
    said: tuple[str, ...],
) -> None:
    source = script(RESUMED.format(build, samples))
    (tmp_path / "before").touch()
    assert launch_script(source, workers=2, name="run").exit_code == 0
    (tmp_path / "before").unlink()
    done = launch_script(source, workers=2, name="run", resume=True)
    refused(done, kind, *said)
    assert len(list_checkpoints(done.run_dir / "checkpoints")) == 3, "nothing was touched"


@pytest.mark.parametrize("how", ["flipped", "torn"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_is_used(
    launch_script: Launch, tmp_path: Path, how: str
) -> None:
    build = "run = trainer(callbacks=[ModelCheckpoint(every_steps=1)])"
    source = script(RESUMED.format(build, "40") + "print('step', run.step)\n")
    (tmp_path / "before").touch()
    assert launch_script(source, workers=2, name="run").stdout == "step 4\n"
    (tmp_path / "before").unlink()
    damaged = tmp_path / "runs/run/checkpoints/step-000000004/model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 4
    damaged.write_bytes(content if how == "flipped" else content[:-1])
    done = launch_script(source, workers=2, name="run", resume=True)
    assert (done.exit_code, done.stdout) == (0, "step 9\n")
    assert done.stderr.count(f"the checkpoint {damaged.parent} is damaged: model.safetensors has") == 1
    assert f"going on from {damaged.parent.with_name('step-000000003')}: step 3" in done.stderr


def test_a_disk_that_fills_up_ends_the_job_and_keeps_the_checkpoint_before(
    launch_script: Launch, small_disk: Callable[[Path, int], None], tmp_path: Path
) -> None:
    small_disk(tmp_path / "disk", 1536)
    done = launch_script(
        script(
            """
            class Grows(Callback):
                def on_step_end(self, trainer, logs):
                    if logs.step == 2:
                        (trainer.run_dir / "grown").write_bytes(b"x" * 400_000)

            # 400 KB of weights: two checkpoints fit beside the file, a third does not.
            wide = nn.Sequential(nn.Linear(2, 16_000), nn.Linear(16_000, 3))
            trainer(wide, callbacks=[Grows(), ModelCheckpoint(every_steps=2)]).fit(data.batch(8), epochs=9)
            """
        ),
        workers=2,
        run_dir=str(tmp_path / "disk"),
    )
    checkpoints = done.run_dir / "checkpoints"
    message = refused(
        done,
        CheckpointWriteFailed,
        f"the checkpoint {checkpoints / 'step-000000006'} could not be written: No space left on device",
        f"the previous one, {checkpoints / 'step-000000004'}, is whole",
    )
    assert "MiB are needed" in message
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000000002", "step-000000004"]
    assert open_checkpoint(checkpoints / "step-000000004").progress["step"] == 4
