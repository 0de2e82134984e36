"""Slurm's own commands: what it is asked, and its queue."""

from __future__ import annotations

import subprocess

from shoal.engines.protocol import EngineEntry, line_of
from shoal.errors import ConfigError

ASK_TIMEOUT_S = 20.0

UNKNOWN = "UNKNOWN"
"""State of a job of which Slurm gives no answer: it may wait or run."""


def queue(detail: str) -> list[EngineEntry]:
    """Jobs of all users in Slurm's queue."""
    partition = ("-p", detail.partition("=")[2] or detail) if detail else ()
    lines = ask("squeue", "-h", "-o", "%i|%j|%T|%u|%D|%C|%b|%R", *partition).splitlines()
    found = []
    for line in lines:
        id, name, state, user, nodes, cpus, gpus, note = line.split("|", 7)
        asks = f"{cpus} CPUs on {nodes} nodes" + (f", {gpus}" if gpus not in ("N/A", "(null)", "") else "")
        found.append(EngineEntry(id=id, name=name, state=state.lower(), user=user, asks=asks, note=note))
    return found


def job_state(job: str) -> str:
    """Empty where Slurm does not know the job, UNKNOWN where it gives no answer."""
    command = ["scontrol", "show", "job", "-o", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    state = next((word[9:] for word in done.stdout.split() if word.startswith("JobState=")), "")
    return state or ("" if "Invalid job id" in done.stderr else UNKNOWN)


def ask(*command: str, is_needed: bool = True) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=is_needed)
    except (OSError, subprocess.SubprocessError) as error:
        if not is_needed:
            return ""
        said = getattr(error, "stderr", None) or str(error)
        if isinstance(said, bytes):  # of one that took too long, whatever `text` says
            said = said.decode(errors="replace")
        raise ConfigError(
            f"Slurm cannot be reached from here ({command[0]}: {line_of(said, -1)}). Nothing was started; run this where sbatch "
            "works, or set SLURM_CONF."
        ) from None
    return done.stdout
