"""What a fit sent over the group for its gradients: told once it ends, for events.jsonl, summary.json and `shoal status`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shoal.cluster.supervisor import progress_text
from shoal.collectives.compression.compressor import Traffic
from shoal.runtime import events

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


class TrafficNotes:
    """Of one fit: of this rank's own bytes, which are the same on every rank."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._first_step = trainer, trainer.position.step
        before = self._traffic()
        self._before = (before.raw_bytes, before.sent_bytes, before.num_sums) if before else (0, 0, 0)

    def tell(self) -> None:
        """The fit is over, well or not. Rank 0 speaks."""
        job, traffic = self._trainer.job, self._traffic()
        if traffic is None or self._trainer.rank != 0:
            return
        raw, sent, num_sums = (
            now - then
            for now, then in zip(
                (traffic.raw_bytes, traffic.sent_bytes, traffic.num_sums), self._before, strict=True
            )
        )
        num_steps = self._trainer.position.step - self._first_step
        if not num_sums or not sent or num_steps < 1:
            return
        facts = {
            "exchange": job.exchange_rule if job.exchange == "auto" and job.exchange_rule else job.exchange,
            "compress": job.compress,
            "steps": num_steps,
            # What the gradients of a step are, and what of it a worker handed to the exchange.
            "raw_bytes_per_step": round(raw / num_sums),
            "sent_bytes_per_step": round(sent / num_steps),
            "ratio": round(raw / num_sums * num_steps / sent, 2),
            "loss_curve": "metrics.jsonl",
        }
        events.emit("exchanged", **facts)
        if facts["ratio"] != 1:
            print(f"note: {progress_text.exchanged(facts)}", file=sys.stderr, flush=True)

    def _traffic(self) -> Traffic | None:
        found = getattr(self._trainer.strategy, "traffic", None)
        return found if isinstance(found, Traffic) else None
