"""What config.json of a run directory holds: enough to launch the job again."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shoal.config.parallel_options import ParallelOptions


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's bits depend on besides its own configuration."""

    python: str
    torch: str
    shoal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(ParallelOptions):
    """config.json: what was launched. What an earlier version did not write there has its default."""

    script: str
    """Absolute path of the Python file."""

    args: list[str]
    """What the script finds in sys.argv[1:]."""

    cwd: str
    """Folder the script ran in."""

    strategy: str
    """As given to --strategy, or chosen by the number of workers."""

    workers: int
    """How many workers shared one global batch."""

    servers: int = 0
    """How many servers there were at launch."""

    replicas: int = 1
    """On how many of them everything was kept."""

    seed: int
    """Given, or drawn."""

    threads: int
    """Of each worker."""

    step_timeout_s: float
    """How long a rank waited for the others within one step."""

    join_timeout_s: float
    """How long ranks waited for each other at a call into shoal."""

    grace_s: float
    """How long workers that were asked to leave might take."""

    max_restarts: int = 3
    """How often a worker that died was replaced without the job getting ahead."""

    pretend_hosts: int = 1
    """As how many hosts the machine was treated."""

    versions: Versions
    """Of what it ran with."""

    started: float
    """Seconds since 1970."""

    resumed: bool = False
    """Whether this launch went on with an earlier one."""
