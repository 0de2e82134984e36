"""Ledger entries in the journal: samples trained by each rank, one entry per stretch, never one per step.

In the exact strategies rank 0's Trainer reports where it begins and how far it has come, with each
worker's share. With leased ranges the coordinator records which worker finished which; the workers'
own files (`trained_file.py`) record who computed their batches.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from shoal.runtime.transport.messages.message import Count


class _Fact(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    pass


class TrainedStretch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Samples start..stop-1 of an epoch, and each worker's share of them, by rank."""

    start: Count
    stop: Count
    samples: list[Count]
    batches: list[Count]  # batches it took part in


class TrainingBegan(_Fact, frozen=True, tag="training-began"):
    """A fit trains from here on. Training beyond this point by it, or by a later call, no longer counts."""

    call: Count
    trainer: Count
    data: str  # identity of the data
    epoch: Count
    start: Count
    num_samples: Count | None  # of an epoch, that are to be trained; None for a stream
    num_workers: Count
    sharding: str
    batch_size: Count = 0  # 0 where batches are of any size
    num_left_out: Count = 0  # per epoch: samples of an incomplete last batch
    is_leased: bool = False
    again: list[tuple[Count, Count, Count]] = []  # (epoch, start, stop) trained before, and lost
    before: TrainedStretch | None = None  # the last of this epoch before `start`, where a checkpoint knows it
    # Leased: (epoch, start, stop) beyond `start` that a checkpoint has.
    kept: list[tuple[Count, Count, Count]] = []


class TrainingReached(_Fact, frozen=True, tag="training-reached"):
    """A stretch was trained, by all workers together."""

    call: Count
    epoch: Count
    stretch: TrainedStretch
    is_end: bool = False  # end of the epoch


class RangesTrained(_Fact, frozen=True, tag="ranges-trained"):
    """These ranges, (start, stop) each, are done; the reporting worker need not have trained all of them."""

    call: Count
    rank: Count
    epoch: Count
    ranges: list[tuple[Count, Count]]


class EpochLeased(_Fact, frozen=True, tag="epoch-leased"):
    """All ranges of an epoch are done; so many samples were handed to two workers."""

    call: Count
    epoch: Count
    num_samples_twice: Count


class SampleSkipped(_Fact, frozen=True, tag="sample-skipped"):
    """A bad sample was left out."""

    rank: Count
    epoch: Count
    index: int
    where: str = ""
    reason: str = ""


LedgerFact: TypeAlias = TrainingBegan | TrainingReached | RangesTrained | EpochLeased | SampleSkipped


def of_event(kind: str, rank: int, facts: dict[str, Any]) -> LedgerFact | None:
    """Ledger entry of a worker's event; None if it has none."""
    if kind != "sample skipped":
        return None
    known: dict[str, Any] = {"type": "sample-skipped", "rank": rank}
    known |= {name: facts[name] for name in ("epoch", "index", "where", "reason") if name in facts}
    try:
        return msgspec.convert(known, SampleSkipped)
    except msgspec.ValidationError:
        return None


_decoder: msgspec.json.Decoder[LedgerFact] = msgspec.json.Decoder(LedgerFact)


def encode(fact: LedgerFact) -> str:
    return msgspec.json.encode(fact).decode()


def decode(text: str) -> LedgerFact | None:
    """Decode an entry; None for one of another version."""
    try:
        return _decoder.decode(text)
    except msgspec.MsgspecError:
        return None
