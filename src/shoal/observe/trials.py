"""Short runs of a script, to measure how fast it trains: the baseline of a report, the sweep of `shoal
bench scale`, a plan.

Each is a run of its own in a process of its own, ended by SIGTERM once enough of it was measured. A
script that cannot be run twice (a file it refuses to overwrite, a database it fills) fails here as
it would by hand, and its last lines are shown.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import system
from shoal.errors import ClusterError
from shoal.observe import record as records
from shoal.observe import runs

POLL_S = 0.2
LAST_BYTES = 8 << 10
END_S = 90.0
"""From SIGTERM to the end, in which it finishes its step and saves."""


def _end_with_parent() -> None:
    """End the run, after saving, when the measuring process ends in any way; it would otherwise train on for hours."""
    system.program_dies_with_parent(signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One short run."""

    script: str
    args: tuple[str, ...]
    workers: int
    options: tuple[str, ...] = ()
    """Of `shoal run`."""

    cwd: str | None = None
    name: str
    run_dir: Path
    keeps_former: bool = False
    """An ended run of this name is kept as NAME.1, not removed."""

    threads: int | None = None
    """Of each worker, at most; None: its share of the cores."""

    def run(self, *, seconds: float, min_steps: int = 1, start_timeout_s: float = 600.0) -> dict[str, Any]:
        """Measure it for this long after its first step and for this many steps, or to its end; returns its figures."""
        command = [
            *(
                sys.executable,
                "-m",
                "shoal",
                "run",
                "-n",
                str(self.workers),
                "--run-dir",
                str(self.run_dir.absolute()),
            ),
            *(
                "--name",
                self.name,
                "--again" if self.keeps_former else "--overwrite",
                *self.options,
                self.script,
                *self.args,
            ),
        ]
        path, began = self.run_dir / self.name, time.time()
        env = os.environ | ({"OMP_NUM_THREADS": str(self.threads)} if self.threads is not None else {})
        # Into a file: an unread pipe would block a script that prints much.
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                command,
                cwd=self.cwd,
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            try:
                self._watch(process, path, seconds, min_steps, start_timeout_s, began)
            finally:
                process.terminate()
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()  # its children go with it
                    process.wait()
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - LAST_BYTES))
            last = "\n".join(errors.read().decode(errors="replace").splitlines()[-12:])
        found = runs.read_json(path / "config.json")
        is_this = isinstance(found.get("started"), float) and found["started"] >= began
        rate = records.samples_per_s(records.read(path)) if is_this else None
        if rate is None:
            raise ClusterError(
                f"the script could not be measured with {self.workers} worker{'s' if self.workers > 1 else ''}: it ended with code "
                f"{process.returncode} before it had trained for long enough. The run that is reported on was not touched; what it "
                f"left is in {path}. Its last lines:\n{last}"
            )
        return {
            "run": self.name,
            "workers": self.workers,
            "threads": found.get("threads"),
            "strategy": found.get("strategy"),
            "samples_per_s": rate,
        }

    def _watch(
        self,
        process: subprocess.Popen[bytes],
        path: Path,
        seconds: float,
        min_steps: int,
        start_timeout_s: float,
        began: float,
    ) -> None:
        end = time.monotonic() + start_timeout_s
        measured = None
        while process.poll() is None and time.monotonic() < end:
            steps = max(
                (
                    # Earlier lines are of a run that is replaced in a moment.
                    sum(line.get("steps", 0) for line in lines if line["at"] >= began)
                    for lines in records.read_activity(path).values()
                ),
                default=0,
            )
            if steps and measured is None:
                measured = time.monotonic() + seconds
            if measured is not None and steps >= min_steps and time.monotonic() >= measured:
                return
            time.sleep(POLL_S)
