"""A table in memory, shuffled, against torch's DataLoader and against indexing by hand.

2 M rows of 39 columns and a label, batches of 1,024. The DataLoader is
measured over its first batches, as an epoch of it takes a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
from benchmarks.data_tables import arrays, per_million, with_rates
from benchmarks.harness import Report, alternate

BATCH = 1024


def by_hand(columns: list[torch.Tensor]) -> Iterator[Any]:
    """What anybody writes first."""
    order = torch.randperm(len(columns[0]))
    for begin in range(0, len(order), BATCH):
        chosen = order[begin : begin + BATCH]
        yield [column[chosen] for column in columns]


def compare(report: Report, name: str, columns: list[torch.Tensor], tree: Any, *, quick: bool) -> None:
    num_rows = len(columns[0])
    steps, rounds = (100, 3) if quick else (1000, 9)
    batches = shoal.Dataset.from_arrays(tree).shuffle(seed=0).batch(BATCH)

    def ours() -> float:
        return per_million(batches, min(steps, num_rows // BATCH - 2), BATCH)

    values = alternate(ours, lambda: per_million(by_hand(columns), steps, BATCH), rounds=rounds)
    shape = {"rows": num_rows, "columns": name, "batch": BATCH, "threads": torch.get_num_threads()}
    report.add(
        "time per 1 M samples: shoal / x[permutation[i:j]]",
        with_rates(values),
        **shape,
        aim="ratio <= 1.25 (0.8x)",
    )
    for num_workers in (0, 2):
        loader = DataLoader(TensorDataset(*columns), BATCH, shuffle=True, num_workers=num_workers)
        values = alternate(
            ours,
            lambda loader=loader: per_million(loader, 20 if quick else 100, BATCH),
            rounds=2 if quick else 5,
        )
        report.add(
            f"time per 1 M samples: shoal / DataLoader(TensorDataset), {num_workers} workers",
            with_rates(values),
            **shape,
            aim="ratio < 0.1 (10x)",
        )


def main(quick: bool = False) -> None:
    report = Report("data_arrays")
    dense, ids, label = arrays(200_000 if quick else 2_000_000)
    compare(
        report,
        "2 matrices of 13 and 26, and a label",
        [dense, ids, label],
        ({"dense": dense, "ids": ids}, label),
        quick=quick,
    )
    columns = [column.contiguous() for column in (*dense.unbind(1), *ids.unbind(1), label)]
    tree = {f"column_{number}": column for number, column in enumerate(columns[:-1])}
    compare(report, "39 of one number each, and a label", columns, (tree, label), quick=quick)
    report.save()


if __name__ == "__main__":
    main()
