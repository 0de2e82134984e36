"""Counting and joining: map, combine and reduce over a dataset, by all workers of a job together.

    python examples/map_reduce.py words README.md         how often each word occurs
    python examples/map_reduce.py ids --workers 2         ids of a click log by frequency, in two processes
    shoal run -n 3 examples/map_reduce.py join            orders and their customers, by three workers

Whoever is free takes a task. A second run of `ids` finds the counts of the first: they are kept by data and functions.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset

import shoal
from shoal.data import generated


def add(key: Any, values: Iterable[int]) -> int:
    return sum(values)


# ---- word count: one sample at a time ----


def words_of(line: str) -> Iterator[tuple[str, int]]:
    return ((word.strip('.,;:()`*"').lower(), 1) for word in line.split())


def words(options: argparse.Namespace) -> None:
    lines = shoal.Dataset.from_torch(Path(options.text).read_text().splitlines())
    counts = lines.map_reduce(words_of, combine=add, workers=options.workers)
    for word, count in heapq.nlargest(5, counts.items(), key=lambda item: item[1]):
        print(f"{count:6d}  {word}")
    print(f"{len(counts)} different words, {sum(counts.values())} in all")


# ---- id frequencies: a batch at a time, and only what is frequent is kept ----


def frequencies(batch: Any) -> Iterator[tuple[int, int]]:
    inputs, _label = batch
    ids, counts = torch.unique(inputs["ids"], return_counts=True)
    return zip(ids.tolist(), counts.tolist(), strict=True)


def at_least_ten(key: int, counts: list[int]) -> int | None:
    total = sum(counts)
    return total if total >= 10 else None


def ids(options: argparse.Namespace) -> None:
    log = generated.clicks(options.samples, num_ids=5000)
    counts = log.map_reduce(frequencies, add, at_least_ten, batched=4096, workers=options.workers)
    table = counts.all_gather()  # a dict, on every host
    print(f"{len(table)} ids occur ten times or more, the most frequent {max(table.values())} times")


# ---- a join: samples of two kinds meet under their key ----


def by_customer(row: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    yield row["customer"], row


def joined(customer: int, rows: Iterable[dict[str, Any]]) -> list[tuple[str, float]] | None:
    rows = list(rows)
    names = [row["name"] for row in rows if "name" in row]
    amounts = [row["amount"] for row in rows if "amount" in row]
    return [(name, amount) for name in names for amount in amounts] or None


def join(options: argparse.Namespace) -> None:
    draws = np.random.default_rng(0)
    customers = [{"customer": number, "name": f"customer {number}"} for number in range(500)]
    bought = zip(draws.integers(0, 600, 2000).tolist(), draws.integers(1, 100, 2000).tolist(), strict=True)
    orders = [{"customer": customer, "amount": amount} for customer, amount in bought]
    both = shoal.Dataset.from_torch(ConcatDataset([customers, orders]))
    found = both.map_reduce(by_customer, reduce=joined, workers=options.workers)
    spent = {pairs[0][0]: sum(amount for _, amount in pairs) for pairs in found.values()}
    best = max(spent, key=lambda name: spent[name])
    print(f"{len(spent)} customers ordered {sum(map(len, found.values()))} times; {best} for {spent[best]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Word count, id frequencies, a join.")
    parser.add_argument("what", choices=["words", "ids", "join"])
    parser.add_argument("text", nargs="?", default=__file__, help="words: the file to count in")
    parser.add_argument("--samples", type=int, default=50_000, help="ids: lines of the click log")
    parser.add_argument("--workers", type=int, default=1, help="processes, besides those of a job")
    options = parser.parse_args()
    {"words": words, "ids": ids, "join": join}[options.what](options)
