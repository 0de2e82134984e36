"""Batches by lease: the coordinator hands out ranges of the data, and this worker trains them.

In relaxed strategies one worker trains whole batches, and a fast one more of them. A worker asks
for the next lease while it works on one, so a coordinator that is away for some seconds delays
nobody. A lease is finished when the servers have acknowledged the last of its batches; or given up,
when another worker with a backup of it has finished first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch

from shoal.data.batches import Batches
from shoal.data.sharding import ByCost, BySpeed, ByWeight, DynamicRanges, EqualParts, Sharding, weighted_cuts
from shoal.data.slice import Slice
from shoal.errors import ConfigError
from shoal.parallel.ps.relaxed import Naming, PsRelaxed
from shoal.runtime.transport.messages.worker_coordinator import Leases, NoMoreLeases
from shoal.train.progress import Position
from shoal.train.reports import data_identity

LEASES_PER_WORKER = 8
"""Minimum number per epoch, so that a slow worker delays the others only by its last one."""

MAX_BATCHES = 32
"""Largest lease: the work that a killed worker leaves to be repeated."""

ENDLESS = 1 << 20
"""Epochs of a fit that ends by its steps."""

NEAR_STEPS = 16
"""Steps per worker before a fit's last step in which every push is acknowledged before the next batch begins."""

POLL_EVERY_S = 0.05
"""Poll interval at an epoch's end, when another worker may be faster with the same lease."""

ANSWER_S = 0.25
"""Time-out of such a poll: a coordinator that is away must not delay training."""


_OVER = object()


class _Lease(NamedTuple):
    number: int
    epoch: int  # of the fit, from 0
    start: int
    stop: int


class Leasing:
    """The leases of one worker in one fit."""

    def __init__(
        self,
        strategy: PsRelaxed,
        batches: Batches,
        *,
        call: int,
        first: tuple[int, int],
        num_epochs: int | None,
        num_workers: int,
        position: Position,
        trainer: int = 0,
        kept: dict[str, Any] | None = None,
    ) -> None:
        """`first` is the epoch and the step at which the fit began, and from which leases count. It
        continues at `position`, or at the position `kept` by a relaxed strategy in a checkpoint.
        """
        num_samples, size = batches.num_samples, batches.batch_size(1)
        if num_samples is None or not size:
            raise ConfigError(
                "a relaxed strategy hands out ranges of samples, so it needs data of known length and batch size. Nothing "
                "was trained; use shoal.Dataset, or an exact strategy (ps, ddp)."
            )
        num_left_out = batches.num_left_out(1)
        num_samples -= num_left_out
        first_epoch, self._first_step = first
        num_batches = self._num_batches = -(-num_samples // size)
        self._began_whole = kept is not None or position.step > self._first_step or not position.next_index
        per_lease = max(1, min(MAX_BATCHES, num_batches // (num_workers * LEASES_PER_WORKER)))
        if kept is not None:  # names of pushes, and so the sequence marks, depend on it
            per_lease = kept["samples_per_lease"] // size
        num_leases = -(-num_batches // per_lease)
        epoch = position.epoch - first_epoch
        first_lease = epoch * num_leases
        done_below = (
            kept["done_below"]
            if kept is not None
            else first_lease + position.next_index // (per_lease * size)
        )
        counted = _counted(kept, done_below)
        # Batches that are applied already.
        self._skip = {lease: everywhere for lease, _, everywhere in counted}
        done_in_epoch = min((done_below - first_lease) * per_lease * size, num_samples)
        self._strategy, self._batches, self._size = strategy, batches, size
        self._request_fields: dict[str, Any] = {
            "call": call,
            "num_samples": num_samples,
            "samples_per_lease": per_lease * size,
            "num_epochs": num_epochs or ENDLESS,
            "first_epoch": epoch,
            "done": (
                *range(first_lease, done_below),
                *(
                    lease
                    for lease, _, everywhere in counted
                    if everywhere >= min(per_lease, num_batches - lease % num_leases * per_lease)
                ),
            ),
            "num_workers": num_workers,
            "from_epoch": first_epoch,
            "trainer": trainer,
            "batch_size": size,
            "num_left_out": num_left_out,
            "near": batches.near(per_lease * size),
            "data": data_identity(batches.describe()),
            **_lease_settings(batches.sharding, num_leases, num_workers),
        }
        self._first_request_fields = {"counted": [(lease, in_slot_0) for lease, in_slot_0, _ in counted]}
        self._naming = Naming(
            call,
            num_leases,
            per_lease * size,
            first_epoch,
            done_below,
            push_every=strategy.push_every,
            num_samples=num_samples,
            singly=frozenset(self._skip),
        )
        strategy.lease_by(self._naming, size)
        self._first_epoch = first_epoch
        self._held: deque[_Lease] = deque()
        self._taken: set[int] = set()
        self._working_on: int | None = None
        self._dropped: set[int] = set()
        self._finished: list[int] = []
        self._busy_s: list[float] = []  # of each of them
        self._worked_s, self._since = 0.0, 0.0  # on the present one; when the current batch was given out
        self._waited_before = 0.0
        self._is_over = self._is_ending = False
        self._requested_at = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leases")
        self._answer: Future[Leases | NoMoreLeases] | None = None
        self._steps_before, self._updates_before = position.step, strategy.updates
        self._epoch_before, self._samples_before = position.epoch, position.samples - done_in_epoch

    def slices(self, epoch: int) -> Iterator[Slice]:
        """Whole batches of an epoch, as long as there are leases of it; the strategy prefetches the next one."""
        self._lay_out(epoch)
        flow = self._flow(epoch)
        part = self._draw(flow)
        while part is not None:
            began_at = time.monotonic()
            # At an epoch's end another worker may have the next batch by then.
            coming = None if self._is_ending else next(flow, _OVER)
            if isinstance(coming, Slice):
                self._worked_s += time.monotonic() - began_at
                self._strategy.prefetch(coming)
            self._since, self._waited_before = time.monotonic(), self._strategy.waited_s
            yield part
            part = self._draw(flow) if coming is None else coming if isinstance(coming, Slice) else None

    def _lay_out(self, epoch: int) -> None:
        """Lay out the model on the servers, by all workers together, including those that will get no lease."""
        if not self._strategy.is_laid_out:
            whole = self._batches.slices(epoch=epoch, start=0, stop=1, rank=0, num_workers=1)
            self._strategy.lay_out(next(whole))
            getattr(whole, "close", lambda: None)()

    def _draw(self, flow: Iterator[Slice | None]) -> Slice | None:
        """Wait for the next batch; None at the end of the epoch. No batch of this worker may be in training."""
        while True:
            part = next(flow, _OVER)
            if part is not None:
                return part if isinstance(part, Slice) else None
            self._receive()

    def _flow(self, epoch: int) -> Iterator[Slice | None]:
        """Batches of the present leases; None if there is none and the caller has to wait for one."""
        while True:
            if self._answer is not None and self._answer.done():
                self._receive()
            if not self._held and not self._is_over:
                if self._naming.done_below >= (epoch + 1 - self._first_epoch) * self._naming.num_leases:
                    return  # others hold all of the next epoch
                yield None
                continue
            if not self._held or self._held[0].epoch + self._first_epoch > epoch:
                return
            lease = self._held.popleft()
            self._taken.add(lease.number)
            self._working_on = lease.number
            # Batches already applied by the checkpoint are not repeated; the last one is, to finish the
            # lease with.
            skipped = min(self._skip.get(lease.number, 0) * self._size, lease.stop - lease.start - 1)
            start = lease.start + skipped // self._size * self._size
            for part in self._batches.slices(
                epoch=epoch, start=start, stop=lease.stop, rank=0, num_workers=1
            ):
                if lease.number in self._dropped:
                    break
                yield part

    def trained(self, part: Slice, position: Position, *, last_step: int | None = None) -> int:
        """Record a pushed batch; returns the number of updates since this worker's last, its own included if it was one.

        Near `last_step` the acknowledgement is awaited: it has the number of the others' updates.
        """
        near = NEAR_STEPS * self._request_fields["num_workers"]
        if last_step is not None and position.step + near >= last_step:
            self._strategy.settle()
        waited_s = self._strategy.waited_s - self._waited_before
        self._worked_s += max(time.monotonic() - self._since - waited_s, 0.0)
        lease = part.start // self._naming.samples_per_lease
        stop = min((lease + 1) * self._naming.samples_per_lease, self._request_fields["num_samples"])
        if part.start + part.num_global >= stop:
            self._strategy.settle()  # a finished lease is not run again
            number = (part.epoch - self._first_epoch) * self._naming.num_leases + lease
            if self._naming.stream(number) not in self._strategy.left_out:
                self._finished.append(number)
                self._busy_s.append(self._worked_s)
            self._worked_s = 0.0
            if self._answer is not None and self._answer.done():
                self._receive()
            if self._answer is None:
                self._request()
            if self._is_ending and self._held:
                self._poll()
        elif self._is_ending:
            if self._answer is None and time.monotonic() >= self._requested_at + POLL_EVERY_S:
                self._request()
            self._poll()
        updates = self._strategy.updates
        step = self._steps_before + updates - self._updates_before
        num_new = max(1, step - position.step)
        if self._began_whole:
            # At an epoch's end a batch may be handed to two workers: for the later one it was no update.
            epochs = part.epoch + 1 - self._first_epoch
            num_new = max(0, min(num_new, self._first_step + epochs * self._num_batches - position.step))
        position.step += num_new
        position.samples += num_new * self._size
        position.next_index = part.start + part.num_global
        return num_new

    def end(self) -> None:
        """Give all leases back, so that no worker waits for this one; waiting workers are told that it is over."""
        self._strategy.flush()
        self._strategy.push_residuals()
        self._strategy.settle()
        if not self._is_over:
            self._is_over = True
            finished, self._finished = self._finished, []
            busy_s, self._busy_s = self._busy_s, []
            self._strategy.session.ask_lease(
                finished=finished, busy_s=busy_s, is_last=True, **self._request_fields
            )

    def epoch_is_over(self, position: Position, *, over: bool) -> bool:
        """No worker continues the epoch: all agree where it ended, and whether the fit is over with it."""
        self._strategy.push_residuals()
        self._strategy.rest()  # others may still be a batch ahead of a worker that has stopped
        # Equal everywhere, except for a worker that joined halfway.
        first_update = self._updates_before - self._steps_before
        mine = [self._strategy.updates, int(over), self._naming.done_below, -first_update]
        gathered = torch.stack(self._strategy.gather(torch.tensor(mine)))
        newest, is_over, done_below, before = gathered.max(0).values.tolist()
        self._strategy.updates, self._naming.done_below = newest, done_below
        num_samples = self._request_fields["num_samples"]
        num_done = newest + before - self._first_step
        if is_over and num_done < (position.epoch + 1 - self._first_epoch) * self._num_batches:
            # Halfway: the next fit hands out again what is not known to be done.
            within = done_below - (position.epoch - self._first_epoch) * self._naming.num_leases
            position.step = self._first_step + num_done
            position.samples = self._samples_before + (newest - self._updates_before) * self._size
            position.next_index = min(max(within, 0) * self._naming.samples_per_lease, num_samples - 1)
            return True
        # Counted by the data if possible: a push that was repeated while a server was lost may count twice
        # here.
        if self._began_whole:
            position.step = self._first_step + (position.epoch + 1 - self._first_epoch) * self._num_batches
        else:
            # Not this worker's own count: a batch that another had pushed before was no update.
            position.step = newest + before
        position.samples = self._samples_before + (position.epoch + 1 - self._epoch_before) * num_samples
        position.next_index = num_samples
        return bool(is_over)

    def share_statistics(self) -> None:
        """Average the workers' running statistics: each has seen other batches."""
        self._strategy.share_statistics()

    @property
    def state(self) -> dict[str, Any]:
        """State for a checkpoint: enough to hand out the rest; `counted` says which batches are applied already."""
        return {
            "samples_per_lease": self._naming.samples_per_lease,
            "num_leases": self._naming.num_leases,
            "done_below": self._naming.done_below,
            "counted": [[lease, *batches] for lease, batches in sorted(self._naming.counted.items())],
        }

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _request(self) -> None:
        finished, self._finished = self._finished, []
        busy_s, self._busy_s = self._busy_s, []
        self._requested_at = time.monotonic()
        self._answer = self._thread.submit(
            self._strategy.session.ask_lease,
            finished=finished,
            busy_s=busy_s,
            below=self._naming.done_below,
            **self._request_fields,
            **self._first_request_fields,
        )
        self._first_request_fields = {}

    def _receive(self) -> None:
        if self._answer is None:
            self._request()
        assert self._answer is not None
        if not self._answer.done():
            self._strategy.rest()  # no worker has to wait for an idle one
        answer, self._answer = self._answer.result(), None
        self._naming.done_below = max(self._naming.done_below, answer.done_below)
        self._drop_finished(answer)
        if isinstance(answer, NoMoreLeases):
            self._is_over = True
            return
        self._is_ending = answer.is_ending
        for number, epoch, start, stop in answer.leases:
            if number not in self._taken and all(held.number != number for held in self._held):
                self._held.append(_Lease(number, epoch, start, stop))

    def _poll(self) -> None:
        """Before the next batch, check whether others were faster; a worker that holds a lease is answered at once."""
        if self._answer is not None:
            wait([self._answer], timeout=ANSWER_S)
            if self._answer.done():
                self._receive()

    def _drop_finished(self, answer: Leases | NoMoreLeases) -> None:
        still = {lease[0] for lease in answer.leases} if isinstance(answer, Leases) else None

        def is_done(number: int) -> bool:
            return number < answer.done_below or (still is not None and number not in still)

        self._held = deque(held for held in self._held if not is_done(held.number))
        if self._working_on is not None and is_done(self._working_on):
            self._dropped.add(self._working_on)
            self._worked_s = 0.0


def _counted(kept: dict[str, Any] | None, done_below: int) -> list[tuple[int, int, int]]:
    """(lease, batches applied in slot 0, in all slots) of leases in progress at a checkpoint."""
    saved = kept.get("counted", []) if kept is not None else []
    return [(lease, in_slot_0, everywhere) for lease, in_slot_0, everywhere in saved if lease >= done_below]


def _lease_settings(sharding: Sharding, num_leases: int, num_workers: int) -> dict[str, Any]:
    match sharding:
        case ByCost() | BySpeed():
            raise ConfigError(
                f"shard('{sharding.name}') cuts a batch over all workers, by {sharding.describe()}, and a relaxed strategy gives "
                "every worker whole batches. Nothing was trained; leave shard() out: a fast worker takes more batches then "
                "and a slow one fewer. Or use an exact strategy (ps, ddp)."
            )
        case EqualParts():
            return {"shares": weighted_cuts(num_leases, [1.0] * num_workers)}
        case ByWeight(weights):
            sharding.check(num_workers)
            return {"shares": weighted_cuts(num_leases, weights) if num_workers > 1 else [0, num_leases]}
    dynamic = sharding if isinstance(sharding, DynamicRanges) else DynamicRanges()
    return {
        "backup": dynamic.backup,
        "drain_slower_than": dynamic.drain_slower_than or 0.0,
        "probe_every_s": dynamic.probe_every_s,
    }
