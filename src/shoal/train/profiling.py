"""`--profile`: torch.profiler over a few steps of every worker, for `shoal trace`."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from shoal.config import job as jobs
from shoal.runtime import recorder

WARMUP_STEPS = 5
"""Skipped: they compile, allocate and connect."""


class StepProfiler:
    """Profiles some steps of this process, once. Later steps cost one comparison."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._profile: Any = None
        self._is_over = False

    def after_step(self) -> None:
        """A step is over."""
        if self._is_over:
            return
        job = jobs.current()
        if not job.profile or not job.launched:
            self._is_over = True
            return
        self._num_steps += 1
        if self._num_steps == WARMUP_STEPS:
            self._profile = torch.profiler.profile(record_shapes=False)
            self._profile.start()
        elif self._num_steps == WARMUP_STEPS + job.profile:
            self.finish()

    def finish(self) -> None:
        """Write the profile; also if training ended before all of its steps."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        self._is_over = True
        job = jobs.current()
        profile.stop()
        path = recorder.trace_folder(job.run_dir) / f"worker-{job.rank}.{job.incarnation}.profile.json.gz"
        try:
            with contextlib.suppress(FileExistsError):
                path.parent.mkdir(mode=0o700, parents=True)
            path.unlink(missing_ok=True)
            profile.export_chrome_trace(str(path))
        except OSError as error:
            print(f"note: the profile of this worker was not written: {error}", file=sys.stderr, flush=True)


PROFILER = StepProfiler()
"""This process's."""
