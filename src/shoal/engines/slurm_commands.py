"""Slurm's own commands: what it is asked, and its queue."""

from __future__ import annotations

import subprocess

from shoal.engines.protocol import EngineEntry, line_of
from shoal.errors import ConfigError

ASK_TIMEOUT_S = 20.0


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
    """Empty where Slurm does not know the job."""
    said = ask("scontrol", "show", "job", "-o", job, is_needed=False)
    return next((word[9:] for word in said.split() if word.startswith("JobState=")), "")


def ask(*command: str, is_needed: bool = True) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=is_needed)
    except (OSError, subprocess.SubprocessError) as error:
        if not is_needed:
            return ""
        said = getattr(error, "stderr", None) or str(error)
        raise ConfigError(
            f"Slurm cannot be reached from here ({command[0]}: {line_of(said, -1)}). Nothing was started; run this where sbatch "
            "works, or set SLURM_CONF."
        ) from None
    return done.stdout
