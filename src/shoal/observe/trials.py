"""Short runs of a script, to measure how fast it trains: the baseline of a report, the sweep of `shoal bench scale`.

Each is a run of its own in a process of its own, ended by SIGTERM once enough of it
was measured. A script that cannot be run twice (a file it refuses to overwrite, a
database it fills) fails here as it would by hand, and its last lines are shown.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ClusterError
from shoal.observe import record as records
from shoal.observe import runs

POLL_S = 0.2
END_S = 90.0
"""From SIGTERM to the end, in which it finishes its step and saves."""


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

    def run(self, *, seconds: float, start_timeout_s: float = 600.0) -> dict[str, Any]:
        """Measure it for so long after its first step, or to its end; its figures."""
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
            *("--name", self.name, "--overwrite", *self.options, self.script, *self.args),
        ]
        path = self.run_dir / self.name
        with subprocess.Popen(
            command, cwd=self.cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        ) as process:
            try:
                self._watch(process, path, seconds, start_timeout_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
                try:
                    _, errors = process.communicate(timeout=END_S)
                except subprocess.TimeoutExpired:
                    process.kill()  # its children go with it
                    _, errors = process.communicate()
        found = runs.read_json(path / "config.json")
        rate = records.samples_per_s(records.read(path)) if found else None
        if rate is None:
            last = "\n".join(errors.decode(errors="replace").splitlines()[-12:])
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
        self, process: subprocess.Popen[bytes], path: Path, seconds: float, start_timeout_s: float
    ) -> None:
        deadline = time.monotonic() + start_timeout_s
        stepped = False
        with contextlib.suppress(FileNotFoundError):
            for old in (path / "activity").glob("*.jsonl"):  # of a run that is overwritten in a moment
                old.unlink()
        while process.poll() is None and time.monotonic() < deadline:
            if not stepped and any(
                line.get("steps") for lines in records.read_activity(path).values() for line in lines
            ):
                stepped, deadline = True, time.monotonic() + seconds
            time.sleep(POLL_S)
