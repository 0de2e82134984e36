"""The ledger section of `shoal status`: samples by worker, who holds the rest, and whether epochs came out whole.

Text and plain values only; the ledger itself is `shoal.cluster.ledger.ledger`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.cluster.coordinator.lease_service import LeaseService
    from shoal.cluster.ledger.ledger import Epoch, RankTotals, Span

MAX_RANGES = 4
"""Named in a sentence; more are counted."""


def read(path: Path, *, is_alive: bool) -> dict[str, Any]:
    """A run's ledger in plain values; empty where nothing is in it."""
    from shoal.cluster.coordinator.journal_reader import leases_of, ledger_of, read_launches
    from shoal.cluster.ledger import trained_file

    launches = read_launches(path)
    ledger = ledger_of(launches, trained_file.read(path))
    current = ledger.current
    if current is None:
        return {}
    epochs = [epoch for epoch in ledger.epochs.values() if epoch.spans or epoch.again]
    numbers = sorted({epoch.trainer for epoch in epochs})  # of those that trained
    return {
        "workers": _workers(ledger.by_rank),
        "launches": [
            {"launch": launch, "workers": _workers(by_rank)} for launch, by_rank in ledger.by_launch.items()
        ],
        "launch": launches[-1].number,
        "epochs": [{**_epoch(epoch), "trainer": numbers.index(epoch.trainer)} for epoch in epochs],
        "remainder": _remainder(current, leases_of(launches[-1])) if is_alive else None,
        "replaced": [
            {"launch": launch, "rank": rank, "incarnation": incarnation}
            for launch, rank, incarnation in ledger.replaced
        ],
    }


def _epoch(epoch: Epoch) -> dict[str, Any]:
    from shoal.cluster.ledger.ledger import joined

    return {
        "data": epoch.data,
        "epoch": epoch.number,
        "samples": epoch.total,
        "trained": epoch.reached,
        "is_over": epoch.end is not None,
        "is_exact": epoch.is_exact,
        "left_out": epoch.num_left_out,
        "skipped": sorted(epoch.skipped),
        "handed_out_twice": epoch.num_samples_twice,
        "repeated": epoch.num_repeated,
        "missing": epoch.missing if epoch.end is not None else [],
        "doubled": epoch.doubled,
        "workers": _workers(epoch.by_rank),
        "ranges": [_span(span) for span in joined(epoch.spans)],
        "again": [_span(span) for span in joined(epoch.again)],
    }


def _workers(by_rank: Mapping[int, RankTotals]) -> dict[str, dict[str, int]]:
    return {str(rank): {"batches": had.batches, "samples": had.samples} for rank, had in by_rank.items()}


def _span(span: Span) -> dict[str, Any]:
    return {
        "start": span.start,
        "stop": span.stop,
        "launch": span.launch,
        "workers": span.num_workers,
        "sharding": span.sharding,
        "by_rank": {str(rank): had.samples for rank, had in span.by_rank.items()},
    }


def _remainder(epoch: Epoch, desk: LeaseService) -> dict[str, Any] | None:
    """Ranges left of the running epoch, by holder."""
    if epoch.end is not None:
        return None
    held = desk.holdings
    if held is None:
        left = None if epoch.total is None else epoch.total - epoch.reached
        return {"together": left}
    config, by_rank, num_todo = held
    return {
        "by_rank": {
            str(rank): [[lease.start, lease.stop] for lease in map(config.lease, numbers)]
            for rank, numbers in sorted(by_rank.items())
        },
        "to_hand_out": num_todo * config.samples_per_lease,
    }


def worker(ledger: dict[str, Any], rank: int) -> str:
    """One worker's samples in the newest launch, for its line."""
    now = [each for each in ledger.get("launches", []) if each["launch"] == ledger["launch"]]
    had = now[0]["workers"].get(str(rank)) if now else None
    said = f"; {_had(had)}" if had else ""
    holds = ((ledger.get("remainder") or {}).get("by_rank") or {}).get(str(rank))
    return f"{said}; holds {ranges(holds)}" if holds else said


def before(ledger: dict[str, Any]) -> Iterator[str]:
    """Samples of former launches that count, a line for each launch."""
    for each in ledger.get("launches", []):
        if each["launch"] != ledger["launch"] and each["workers"]:
            by_rank = "; ".join(f"rank {rank} {_had(had)}" for rank, had in each["workers"].items())
            yield f"launch {each['launch']}, before: {by_rank}"


def lines(ledger: dict[str, Any]) -> Iterator[str]:
    """A sentence for each epoch: the whole ones together, where there are many."""
    whole = [epoch for epoch in ledger.get("epochs", []) if epoch["is_exact"]]
    if len(whole) > MAX_RANGES:
        yield f"{len(whole)} epochs, each: every sample trained exactly once"
        whole = []
    for epoch in ledger.get("epochs", []):
        if not epoch["is_exact"] or epoch in whole:
            yield sentence(epoch)
    left = ledger.get("remainder")
    if left and left.get("together"):
        yield f"left of the epoch: {left['together']:,} samples, cut over all workers batch by batch"
    elif left and left.get("to_hand_out"):
        yield f"left of the epoch: {left['to_hand_out']:,} samples to hand out, beside what workers hold"


def sentence(epoch: dict[str, Any]) -> str:
    name, total = f"epoch {epoch['epoch'] + 1}", epoch["samples"]
    if epoch["trainer"]:
        name += f" of trainer {epoch['trainer'] + 1}"
    of_all = f"{epoch['trained']:,}" + (f" of {total:,}" if total is not None else "") + " samples"
    if epoch["is_exact"]:
        said = f"{name}: all {epoch['trained']:,} samples trained exactly once"
    elif epoch["doubled"] or (epoch["is_over"] and epoch["missing"]):
        said = f"{name}: {of_all} trained"
        said += f"; TWICE: {ranges(epoch['doubled'])}" if epoch["doubled"] else ""
        said += f"; NOT trained: {ranges(epoch['missing'])}" if epoch["missing"] else ""
    elif epoch["is_over"]:
        said = f"{name}: {of_all} trained; who had how much of them is not known for all"
    else:
        said = f"{name}: {of_all} trained so far"
    again = sum(span["stop"] - span["start"] for span in epoch["again"])
    notes = {
        "left out with a last batch that is not full": epoch["left_out"],
        "bad and skipped": len(epoch["skipped"]),
        "computed twice, of which the first result counted": epoch["repeated"],
        "trained again after a job had died": again,
    }
    return "; ".join([said, *(f"{number:,} {what}" for what, number in notes.items() if number)])


def every_range(ledger: dict[str, Any]) -> Iterator[str]:
    """All of it, a line for each range."""
    for epoch in ledger.get("epochs", []):
        yield sentence(epoch)
        for span in epoch["ranges"]:
            yield f"  {_range([span['start'], span['stop']])}  launch {span['launch']}, {_who(span)}"
        for span in epoch["again"]:
            at = _range([span["start"], span["stop"]])
            yield f"  {at}  launch {span['launch']}, {_who(span)}: lost with it, and trained again"
        for index in epoch["skipped"]:
            yield f"  sample {index:,} skipped"
    for each in ledger.get("replaced", []):
        yield f"launch {each['launch']}: rank {each['rank']} was replaced, incarnation {each['incarnation']}"


def ranges(found: list[list[int]]) -> str:
    from shoal.cluster.ledger.ledger import merged

    joined = [list(each) for each in merged((start, stop) for start, stop in found)]
    said = ", ".join(_range(each) for each in joined[:MAX_RANGES])
    return said + (f" and {len(joined) - MAX_RANGES} more" if len(joined) > MAX_RANGES else "")


def _range(found: list[int]) -> str:
    start, stop = found
    return f"{start:,}..{stop - 1:,}"


def _who(span: dict[str, Any]) -> str:
    by_rank = span["by_rank"]
    if len(by_rank) == 1 and span["workers"] != 1:
        return f"rank {next(iter(by_rank))}"
    parts = ", ".join(f"rank {rank} {samples:,}" for rank, samples in by_rank.items())
    how = re.sub(r" \([0-9a-f]{12}\)", "", span["sharding"])  # of costs: for programs
    return f"{how} over {_count(span['workers'], 'worker', 'workers')}" + (f": {parts}" if parts else "")


def _had(had: dict[str, int]) -> str:
    return f"{_count(had['batches'], 'batch', 'batches')}, {_count(had['samples'], 'sample', 'samples')}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
