"""Trains public models one after the other and writes down what came of each: OUT MODEL [MODEL ...].

A model that fails ends the job: the others are launched anew by the benchmark.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import shoal
from benchmarks.public_models import Case, available
from shoal.data.tree import tensors as tensors_of
from shoal.errors import ShoalError
from shoal.parallel import fsdp as fsdp_cut
from shoal.parallel.single import Single
from shoal.parallel.tensor_parallel import plan as tensor_plan

BATCH = 8


def train(case: Case, *, num_slices: int = 1, num_micro: int = 1) -> dict[str, Tensor]:
    """Weights, buffers, optimizer state, predictions and losses after two steps, the last of them uneven."""
    torch.manual_seed(3)
    trainer = shoal.Trainer(
        case.build().double(),
        loss=case.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        seed=5,
        accumulate=num_micro,
        progress=False,
    )
    if num_slices > 1:
        trainer._strategy = Single(num_slices=num_slices)
    data: Any = shoal.Dataset.from_arrays(case.batch())
    history = trainer.fit(data.shuffle(seed=4).batch(BATCH), max_steps=2)
    evaluated = trainer.evaluate(data.batch(BATCH))
    predicted = tensors_of(trainer.predict(data.batch(BATCH)))
    found = {piece.name: piece.tensor.detach().clone().contiguous() for piece in trainer.strategy.state()}
    found |= {f"predicted/{number}": tensor.contiguous() for number, tensor in enumerate(predicted)}
    losses = [history["loss"][-1], evaluated["loss"]]
    return {**found, "losses": torch.tensor(losses, dtype=torch.float64)}


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # So that there is something to cut in models this small.
    fsdp_cut.UNIT_BYTES, tensor_plan.ALONE_BYTES = 3000, 100
    cases = available()
    for name in names:
        print(f"model: {name}", flush=True)
        told = ""
        try:
            found = train(cases[name])
        except ShoalError as error:
            told = f"{type(error).__name__}: {error}"
        if shoal.rank() == 0:
            if not told:
                save_file(found, out / f"{name}.safetensors")
            (out / f"{name}.json").write_text(json.dumps({"refused": told}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
