"""The click model and its data, for every framework alike: numbers and numpy only.

One definition, so that no side of a comparison trains something smaller. Ids
are exact Zipf over all rows, and popular ones lie anywhere in the table: with
the ranks as row numbers the hottest rows would share cache lines, which no
table of hashed ids does. Labels follow from the ids, so that a falling loss
shows that a peer really trains. Imported by the interpreters of all peers: no
torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_ROWS = 1_000_000
DIM = 16
NUM_COLUMNS = 26
HIDDEN = (128, 64)
BATCH = 1024
LR = 0.02
ZIPF_EXPONENT = 1.05
ROW_STD = 0.01
NUM_BATCHES = 384
"""Batches kept on disk; a run longer than that begins again. 26 ids of 8 bytes: 82 MB."""

DESCRIPTION = {
    "model": f"{NUM_COLUMNS} id columns, one table of {NUM_ROWS} x {DIM}, MLP {HIDDEN[0]}-{HIDDEN[1]}-1",
    "ids": f"Zipf {ZIPF_EXPONENT} over all rows",
    "optimizer": f"Adagrad, lr {LR}",
}


def write_data(folder: Path, *, seed: int = 0, num_batches: int = NUM_BATCHES) -> None:
    """Draw ids and labels, and keep them as ids.npy and label.npy: every peer maps the same two files."""
    generator = np.random.default_rng(seed)
    num_samples = num_batches * BATCH
    share = np.cumsum(np.arange(1, NUM_ROWS + 1, dtype=np.float64) ** -ZIPF_EXPONENT)
    rank = np.searchsorted(share / share[-1], generator.random((num_samples, NUM_COLUMNS)))
    ids = generator.permutation(NUM_ROWS)[np.minimum(rank, NUM_ROWS - 1)]
    taste = generator.normal(0.0, 0.4, NUM_ROWS)
    chance = 1 / (1 + np.exp(1.0 - taste[ids].sum(1)))
    np.save(folder / "ids.npy", ids.astype(np.int64))
    np.save(folder / "label.npy", (generator.random(num_samples) < chance).astype(np.float32))


def read_data(folder: str | Path) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids (samples x columns) and labels, mapped: processes of one machine share the pages."""
    ids, label = (np.load(Path(folder) / f"{name}.npy", mmap_mode="c") for name in ("ids", "label"))
    return ids, label


def batches(
    folder: str | Path, *, batch: int = BATCH, worker: int = 0, num_workers: int = 1
) -> Iterator[tuple[Any, Any]]:
    """One worker's batches of a stream that never ends: every num_workers-th, in order, from the start again."""
    ids, label = read_data(folder)
    num_batches = len(label) // batch
    number = worker
    while True:
        begin = number % num_batches * batch
        yield np.array(ids[begin : begin + batch]), np.array(label[begin : begin + batch])
        number += num_workers
