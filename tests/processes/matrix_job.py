"""Trains the models of the matrix one after the other, each from a fresh Trainer, and writes down what came of it.

Launched once for each way of spreading; tests call `train` themselves for
what one process computes.

    matrix_job.py OUT [MODEL ...] [--steps N] [--keep FOLDER] [--resume FOLDER]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matrix_models import CASES, Scored
from safetensors.torch import save_file
from torch import Tensor

import shoal
from shoal.data.tree import leaves
from shoal.errors import ShoalError
from shoal.parallel import fsdp as fsdp_cut
from shoal.parallel.single import Single
from shoal.parallel.tensor_parallel import plan as tensor_plan

BATCH = 8


@dataclass(frozen=True)
class Trained:
    """What is left of a training."""

    tensors: dict[str, Tensor]
    """Weights, buffers, the optimizer's state by parameter, and predictions; whole on rank 0, and only there."""

    numbers: dict[str, float] = field(default_factory=dict)
    """Losses while it trained and afterwards; the same on every rank."""


def trainer_of(name: str, num_micro: int, device: str | None = None) -> shoal.Trainer:
    """A fresh one, with everything that a step may hold: clipping, a schedule, an optimizer with state."""
    case = CASES[name]
    torch.manual_seed(3)
    return shoal.Trainer(
        case.build().double(),
        loss=case.loss,
        optimizer=case.optimizer,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        seed=5,
        clip_norm=1.0,
        accumulate=num_micro,
        device=device,
        progress=False,
    )


def train(
    name: str,
    *,
    num_slices: int = 1,
    num_micro: int = 1,
    num_steps: int = 2,
    resume: str | None = None,
    keep: Path | None = None,
    device: str | None = None,
) -> Trained:
    """Train one model up to a step, from the beginning or from a checkpoint; `keep`: where to write one then.

    In one process: run batches as the slices of so many workers in turn, and
    those as so many micro-batches.
    """
    trainer = trainer_of(name, num_micro, device)
    if num_slices > 1:
        trainer._strategy = Single(num_slices=num_slices)
    data = shoal.Dataset.from_arrays(CASES[name].arrays)
    history = trainer.fit(data.shuffle(seed=4).batch(BATCH), max_steps=num_steps, resume=resume)
    evaluated = trainer.evaluate(data.batch(BATCH))
    predicted = trainer.predict(data.batch(BATCH))
    tensors = {piece.name: piece.tensor.detach().to("cpu", copy=True) for piece in trainer.strategy.state()}
    assert name != "own loss" or (type(predicted) is Scored and list(predicted) == ["logits"])
    for number, tensor in enumerate(each for each in leaves(predicted) if each is not None):
        tensors[f"predicted/{number}"] = tensor.to("cpu", copy=True)
    if keep is not None:
        trainer.save_checkpoint(str(keep))
    return Trained(tensors, {"trained": history["loss"][-1], "evaluated": evaluated["loss"]})


def main(out: Path, names: list[str], *, num_steps: int, keep: Path | None, resume: Path | None) -> None:
    """Train all of them and write one file for each rank."""
    torch.set_num_threads(1)
    # So that there is something to cut in models this small.
    fsdp_cut.UNIT_BYTES, tensor_plan.ALONE_BYTES = 3000, 100
    tensors: dict[str, Tensor] = {}
    report: dict[str, dict[str, float] | str] = {}
    for name in names or list(CASES):
        print(name, flush=True)  # the last one named is where a job that hangs does so
        begun = [str(path) for path in (resume / name).iterdir()] if resume is not None else [None]
        try:
            trained = train(name, num_steps=num_steps, resume=begun[0], keep=keep and keep / name)
        except ShoalError as error:
            report[name] = f"{type(error).__name__}: {error}"
            continue
        report[name] = trained.numbers
        tensors |= {f"{name}/{key}": tensor.contiguous() for key, tensor in trained.tensors.items()}
    if shoal.rank() == 0:
        save_file(tensors, out / "tensors.safetensors")
    (out / f"rank-{shoal.rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="write a checkpoint of each model here")
    parser.add_argument("--resume", type=Path, help="go on from those that another job kept here")
    given = parser.parse_args()
    main(given.out, given.names, num_steps=given.steps, keep=given.keep, resume=given.resume)
