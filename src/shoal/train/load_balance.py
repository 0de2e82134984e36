"""Load balance: shares of a batch per worker, checked, reported and, for shares by speed, measured and agreed on.

For strategies whose workers compute every batch together. Shares by speed change only between
stretches of steps, and on all ranks at once: a rank's measurement counts after a reduce. Shares are
part of the position, so a replacement and a resumed run continue with the same.
"""

from __future__ import annotations

import statistics
import sys
import time
import zlib
from collections.abc import Iterator

import torch

from shoal.config.job import Job
from shoal.data.batches import Batches
from shoal.data.sharding import ByCost, BySpeed, DynamicRanges
from shoal.data.slice import Slice
from shoal.errors import ConfigError, TrainingError
from shoal.parallel.protocol import LossSum, Strategy
from shoal.runtime import events
from shoal.train.progress import Position

AGREE_EVERY = 50
"""Steps between two agreements on shares; there is also one at the beginning of every epoch."""

SMALLEST = 0.05
"""Minimum relative to the mean share: the recovery of a worker without samples would not be noticed."""

WORTH_IT = 0.1
"""Smaller changes of shares are not made."""


def refuse(batches: Batches, *, num_workers: int, strategy: str, what: str) -> None:
    """Refuse a division of batches that an exact strategy, or a script's own loop, does not support."""
    if num_workers == 1:
        return
    if isinstance(batches.sharding, DynamicRanges):
        raise ConfigError(
            f"shard('dynamic') hands whole batches to whichever worker is free, and '{strategy}' computes every batch on all "
            f"{num_workers} workers together, so that it gives the result of one process. Nothing was trained; use a relaxed "
            "strategy (ps:async, ps:ssp=K), or shard('weighted', weights='measured'), which gives slow workers less."
        )
    if isinstance(batches.sharding, BySpeed) and what != "fit":
        raise ConfigError(
            f"shard('weighted', weights='measured') needs somebody who measures, and {what} does not: only Trainer.fit does. "
            "Nothing was trained; give weights=[...], or use the Trainer."
        )


class LoadBalance:
    """The shares of one fit. Writes `weights` of the position."""

    def __init__(self, job: Job, strategy: Strategy, position: Position, batches: Batches) -> None:
        self._rank, self._num_workers = job.rank, job.num_data_ranks
        self._strategy, self._position, self._batches = strategy, position, batches
        refuse(batches, num_workers=self._num_workers, strategy=job.strategy, what="fit")
        # `shoal verify` compares with one process, which would have to know every agreement.
        measures = self._num_workers > 1 and not job.verify
        sharding = batches.sharding
        self._measured = sharding if isinstance(sharding, BySpeed) and measures else None
        self._pace_s: list[float] = []  # seconds per sample, step by step since the last agreement
        self._read_s = 0.0

    @property
    def measures(self) -> bool:
        return self._measured is not None

    def begin(self) -> None:
        """Report how even the shares are, and their cost."""
        if self._measured is not None and self._rank == 0:
            print(
                "note: shard('weighted', weights='measured'): shares follow the workers' speed, which differs from run to run, "
                "and so may the last bits of the weights",
                file=sys.stderr,
                flush=True,
            )
        sharding, position = self._batches.sharding, self._position
        if isinstance(sharding, ByCost) and self._num_workers > 1:
            mine, equal, cuts = self._batches.loads(
                epoch=position.epoch, start=position.next_index, num_workers=self._num_workers
            )
            self._refuse_different(zlib.crc32(repr(cuts).encode()))
            if self._rank == 0 and mine.num_batches:
                print(
                    f"note: shard('balanced') by {sharding.by}: the heaviest of {self._num_workers} workers has "
                    f"{mine.max_over_mean:.2f} times the mean load ({equal.max_over_mean:.2f} with equal parts), over "
                    f"{mine.num_batches} batches",
                    file=sys.stderr,
                    flush=True,
                )
                events.emit(
                    "sharding",
                    how=sharding.describe(),
                    max_over_mean=round(mine.max_over_mean, 4),
                    equal_max_over_mean=round(equal.max_over_mean, 4),
                    batches=mine.num_batches,
                )

    def begin_stretch(self) -> int | None:
        """Agree on shares if due; returns the number of steps for which they hold, None for all."""
        if self._measured is None:
            return None
        position = self._position
        is_time = position.step % AGREE_EVERY == 0 or position.next_index == 0
        if is_time and position.weights_at != position.step:
            self._agree()
        fits = len(position.weights) == self._num_workers
        self._measured.weights = tuple(position.weights) if fits else ()
        return AGREE_EVERY - position.step % AGREE_EVERY

    def timed(self, parts: Iterator[Slice]) -> Iterator[Slice]:
        """The parts, with their reading time measured."""
        while True:
            began = time.monotonic()
            part = next(parts, None)
            if part is None:
                return
            self._read_s = time.monotonic() - began
            yield part

    def ran(self, part: Slice, contributed: LossSum, began_at: float) -> None:
        """This rank has called a step's forward and backward since then."""
        if self._measured is not None and part.num_local and contributed.outputs is not None:
            if contributed.total.device.type != "cpu":  # a device has only queued the work
                torch.accelerator.synchronize(contributed.total.device)
            self._pace_s.append((time.monotonic() - began_at + self._read_s) / part.num_local)

    def _agree(self) -> None:
        position = self._position
        speeds = torch.zeros(self._num_workers, dtype=torch.float64)
        if len(self._pace_s) > 1:  # the first one has to warm up
            speeds[self._rank] = 1.0 / max(statistics.median(self._pace_s[1:]), 1e-9)
        agreed = self._strategy.reduce(speeds).tolist()
        weights = next_weights(agreed, position.weights)
        if weights != position.weights and self._rank == 0:
            rates = [round(speed, 2) for speed in agreed]
            events.emit("shares-agreed", step=position.step, weights=weights, samples_per_s=rates)
        position.weights, position.weights_at = weights, position.step
        self._pace_s = []

    def _refuse_different(self, cuts: int) -> None:
        """Refuse shares that differ between ranks: some samples would be trained twice and others never."""
        gathered = [int(each) for each in self._strategy.gather(torch.tensor([cuts]))]
        if len(set(gathered)) > 1:
            raise TrainingError(
                f"the workers cut the same batches differently, by {self._batches.sharding.describe()}: their costs differ. "
                "Nothing was trained; let the cost of a sample be the same in every process (an array drawn at random is not)."
            )


def next_weights(speeds: list[float], before: list[float]) -> list[float]:
    """Shares by measured speeds (samples a second; 0 if not measured); the previous ones if hardly anything changed."""
    known = [speed for speed in speeds if speed > 0]
    if not known:
        return before
    mean = sum(known) / len(known)
    fits = len(before) == len(speeds)
    weights = []
    for rank, speed in enumerate(speeds):
        last = before[rank] if fits else 1.0
        wanted = speed / mean if speed > 0 else last
        weights.append(round(max((last + wanted) / 2 if fits else wanted, SMALLEST), 4))
    if fits and all(abs(new / old - 1) < WORTH_IT for new, old in zip(weights, before, strict=True)):
        return before
    return weights
