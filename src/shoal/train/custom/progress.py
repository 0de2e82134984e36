"""Progress of a loop of the script's own: steps, samples per second, and the lines of metrics.jsonl.

A step is counted at the first commit after a batch was taken, so two optimizers
on one batch are one step. Values that the script logs belong to the step whose
batch was taken last, whether they are logged before its commit or after it.
"""

from __future__ import annotations

import math
import time
from typing import Any

from shoal.cluster.worker import session
from shoal.config import job as jobs
from shoal.train.reports import MetricsLog


class LoopProgress:
    """Counts on every rank; rank 0 of a launched job writes."""

    def __init__(self) -> None:
        self.step = 0
        self.newest: str | None = None
        """The newest checkpoint, and the step it was written after."""
        self.saved_step = 0
        self.ends_itself = False
        """Whether the loop calls shoal.checkpoint or shoal.should_stop, by which it leaves on request."""
        self._samples = 0
        self._has_new_batch = False
        self._line: dict[str, Any] | None = None  # of the newest step, until the next batch is taken
        self._last_line: dict[str, Any] | None = None
        self._logged: dict[str, float] = {}
        self._newest: dict[str, float] = {}
        self._log: MetricsLog | None = None
        self._began: tuple[float, int] | None = None  # when, and at which sample
        self._counted_at = 0.0

    def batch_taken(self) -> None:
        """The previous step's line is complete: later logs do not belong to it."""
        self.flush()
        self._has_new_batch = True
        if self._began is None:
            self._counted_at = time.monotonic()
            self._began = self._counted_at, self._samples
            session.at_end(self.flush)

    def log(self, values: dict[str, float]) -> None:
        self._logged |= values
        self._newest |= values
        if self._line is None and not self._has_new_batch:  # after an epoch's last step: a line of its own
            self._line = self._last_line and {
                key: value for key, value in self._last_line.items() if key in ("step", "epoch")
            }
            self.flush()

    def committed(self, *, epoch: int, samples: int, step: int | None = None) -> None:
        """A step of `samples` samples is committed; `step` is its number if other workers take steps of their own."""
        if not self._has_new_batch:
            return  # another optimizer's commit on the same batch
        self._has_new_batch = False
        is_update = step is None or step > self.step  # else another worker had trained this batch before
        self.step = self.step + 1 if step is None else step
        self._samples += samples
        self._line = {"step": self.step, "epoch": epoch, "samples": samples} if is_update else None
        now = time.monotonic()
        session.summary(metrics=self._newest, samples=samples, seconds=now - self._counted_at, steps=1)
        self._counted_at = now
        assert self._began is not None
        began_at, began_samples = self._began
        loss = self._newest.get("loss")
        session.report(
            phase="train",
            epoch=epoch + 1,
            num_epochs=None,
            step=self.step,
            num_steps=None,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            metrics={name: value for name, value in self._newest.items() if name != "loss"},
            samples=self._samples - began_samples,
            samples_per_s=(self._samples - began_samples) / max(now - began_at, 1e-9),
            eta_s=None,
        )

    def flush(self) -> None:
        """Write the line of the newest step, with its logged values."""
        line, self._line = self._line, None
        if line is None:
            return
        job = jobs.current()
        line |= {"time": time.time(), **self._logged}
        self._logged, before, self._last_line = {}, self._last_line, line
        if job.launched and job.rank == 0:
            if self._log is None:
                from_step = before["step"] if before is not None else line["step"] - 1
                self._log = MetricsLog(job.run_dir / "metrics.jsonl", from_step=from_step)
                if before is not None:  # in a replacement: its predecessor may have died before writing it
                    self._log.make_up_for(before)
            self._log.write(line)

    # ---- in checkpoints, and for a replacement --------------------------------------------------

    def saved(self, path: str) -> None:
        self.newest, self.saved_step = path, self.step

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "samples": self._samples,
            "line": self._last_line,
            "newest": self.newest,
            "saved_step": self.saved_step,
            "ends_itself": self.ends_itself,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.step, self._samples, self._last_line = state["step"], state["samples"], state["line"]
        self.newest, self.saved_step = state["newest"], state["saved_step"]
        self.ends_itself = state["ends_itself"]
