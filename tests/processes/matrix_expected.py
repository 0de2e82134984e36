"""What the matrix expects of each cell: equality, unless it is listed here with words of the refusal.

A refusal is right when it names the layer or the kind of model and the
reason. Rows are by strategy, at any number of workers unless one is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import matrix_job
import torch
from matrix_models import CASES
from safetensors.torch import load_file

from shoal.core import mesh_names

TOLERANCE = 1e-9

Words = tuple[str, ...]

NO_SEQUENCE: Words = ("cannot be cut into", "only a model that is an nn.Sequential")

REFUSED: dict[str, dict[str, Words]] = {
    "pp": dict.fromkeys(("lstm", "resnet", "vae", "bert", "gpt", "tree", "clicks"), NO_SEQUENCE),
}


def expected_refusals(strategy: str) -> Mapping[str, Words]:
    """By model, for a strategy or a product of several: whatever one of them refuses is refused."""
    axes = [part.partition("=")[0] for part in strategy.split(",")]
    return {name: words for axis in axes for name, words in REFUSED.get(axis, {}).items()}


class OneProcess:
    """What one process computes, each model once for every number of slices that is asked for."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], matrix_job.Trained] = {}

    def __call__(self, name: str, *, num_slices: int, num_steps: int) -> matrix_job.Trained:
        """Where layers do not care how a batch is cut, the whole batch at once is the reference for every cut."""
        num_slices = num_slices if CASES[name].sees_its_slice else 1
        key = name, num_slices, num_steps
        if key not in self._known:
            num_threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                self._known[key] = matrix_job.train(name, num_slices=num_slices, num_steps=num_steps)
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
    num_steps: int = 3,
) -> dict[str, str]:
    """What is wrong with the cells of a launch, by model; nothing is how it should be."""
    reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(workers)]
    tensors = load_file(folder / "tensors.safetensors")
    refusals = expected_refusals(strategy)
    axes = mesh_names.parse(strategy)
    num_slices = mesh_names.fill(axes, workers, strategy).num_data_ranks if axes is not None else workers
    found: dict[str, str] = {}
    for name in names:
        said = [report[name] for report in reports]
        wrong = (
            _wrong_refusal(said, refusals[name])
            if name in refusals
            else _difference(
                said, _of(name, tensors), one_process(name, num_slices=num_slices, num_steps=num_steps)
            )
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
