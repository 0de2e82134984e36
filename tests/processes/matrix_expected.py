"""Expected outcome of each cell of the matrix: equality, unless it is listed here with words of the refusal.

A refusal is right when it names the layers and the reason, in one paragraph
that also says that nothing was trained. By strategy and number of workers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import matrix_job
import torch
from matrix_models import CASES
from safetensors.torch import load_file

from shoal.config import strategy as strategies
from shoal.config.strategy import Axes

TOLERANCE = 1e-9

SIZES = (2, 3, 4)

Words = tuple[str, ...]

REFUSED: dict[tuple[str, int], dict[str, Words]] = {
    ("pp", 4): {"lstm": ("cannot be cut into 4 stages: of its 3 layers in a row",)},
}


class OneProcess:
    """What one process computes, each model once for every way of running a batch that matters to it."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int, int], matrix_job.Trained] = {}

    def __call__(self, name: str, axes: Axes, *, num_steps: int) -> matrix_job.Trained:
        """The reference for a model that is cut over `axes`."""
        case = CASES[name]
        # Where layers do not care how a batch is cut, the whole batch at once is the reference for every cut.
        num_slices = axes.num_data_ranks if case.mixes or case.draws else 1
        num_micro = 2 * axes.pp if case.draws and axes.pp > 1 else 1
        key = name, num_slices, num_micro, num_steps
        if key not in self._known:
            num_threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                self._known[key] = matrix_job.train(
                    name, num_slices=num_slices, num_micro=num_micro, num_steps=num_steps, device="cpu"
                )
            finally:
                torch.set_num_threads(num_threads)
        return self._known[key]


def problems(
    folder: Path,
    one_process: OneProcess,
    strategy: str,
    workers: int,
    names: Sequence[str] = tuple(CASES),
    *,
    num_steps: int = 2,
) -> dict[str, str]:
    """What is wrong with the cells of a launch, by model; nothing is how it should be."""
    reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(workers)]
    tensors = load_file(folder / "tensors.safetensors")
    refusals = REFUSED.get((strategy, workers), {})
    named = strategies.parse_axes(strategy)
    axes = strategies.fill_axes(named, workers, strategy) if named is not None else Axes(dp=workers)
    found: dict[str, str] = {}
    for name in names:
        said = [report[name] for report in reports]
        wrong = (
            _wrong_refusal(said, refusals[name])
            if name in refusals
            else _difference(said, _of(name, tensors), one_process(name, axes, num_steps=num_steps))
        )
        if wrong is not None:
            found[name] = wrong
    return found


def _of(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = f"{name}/"
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _wrong_refusal(said: Sequence[object], words: Words) -> str | None:
    for rank, told in enumerate(said):
        if not isinstance(told, str):
            return f"rank {rank} trained it, and it should be refused with {words}"
        if "\n" in told or not all(word in told for word in (*words, "Nothing was trained")):
            return f"rank {rank} says {told!r}, without {words}"
    return None


def _difference(
    said: Sequence[object], tensors: Mapping[str, torch.Tensor], alone: matrix_job.Trained
) -> str | None:
    for rank, told in enumerate(said):
        if not isinstance(told, dict):
            return f"rank {rank} refused it: {told}"
        for what, value in alone.numbers.items():
            if abs(told[what] - value) > TOLERANCE * max(1.0, abs(value)):
                return f"rank {rank} has {what} {told[what]}, one process {value}"
    if tensors.keys() != alone.tensors.keys():
        return f"only one of the two has {sorted(tensors.keys() ^ alone.tensors.keys())}"
    for key, expected in alone.tensors.items():
        try:
            torch.testing.assert_close(tensors[key], expected, rtol=TOLERANCE, atol=TOLERANCE)
        except AssertionError as error:
            return f"{key}: {' '.join(str(error).split())}"
    return None
