"""Scenarios of the simulated parameter server, and its planted bugs."""

from __future__ import annotations

from simulation import ps_planted_hurried  # noqa: F401  # plants its own
from simulation.ps_hurried import Hurried
from simulation.ps_jobs import Exact, Job, Relaxed
from simulation.ps_merged import Merged
from simulation.ps_planted import PLANTED_PS

__all__ = ["PLANTED_PS", "PS_SCENARIOS"]

PS_SCENARIOS: dict[str, type[Job]] = {
    "ps-exact": Exact,
    "ps-relaxed": Relaxed,
    "ps-hurried": Hurried,
    "ps-merged": Merged,
}
