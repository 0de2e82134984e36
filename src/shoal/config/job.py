"""The job of this process, and its rank in it.

A worker's launcher calls `enter` before the script starts; under plain `python train.py` nothing
does, and the process is rank 0 of 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.config import strategy as strategies
from shoal.config.faults import Fault
from shoal.config.launchers import world_of
from shoal.config.liveness import LivenessConfig
from shoal.config.parallel_options import ParallelOptions
from shoal.config.strategy import Axes
from shoal.errors import OtherLauncher


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPlan:
    """Run of `shoal verify`: a few steps, in a given precision, with the weights written to disk."""

    dtype: str
    """"float64" or "float32": model and floating inputs are cast to it."""

    num_steps: int
    """The first fit (or custom loop) ends after this many steps, and with it the script."""

    dump_to: str
    """Directory where rank 0 writes state.safetensors and report.json."""

    num_slices: int = 1
    """In one process: run every batch as the slices of so many workers in turn, with the workers' seeds."""

    num_micro: int | None = None
    """Micro-batches of one process: run every slice in so many parts, as the micro-batches of a pipeline; None: as the script says."""

    at_rest: tuple[str, ...] = ()
    """Modules that stay in evaluation mode: those whose result depends on how a batch is cut."""

    dry_runs: tuple[tuple[int, int], ...] = ()
    """For `shoal plan`, in one process: ranks that share a batch and shards of fsdp, whose memory report.json is to tell."""

    stands_for: int = 1
    """Workers of which one process is the reference. What they are given each, it is given for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """A task of `--strategy mapreduce`: this process trains one part of one round, and ends."""

    state: str
    """File with the job as it was when the round began."""

    num_steps: int
    """Steps of the round."""

    result: str = ""
    """File that the task leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(ParallelOptions):
    """Everything a process knows about its job at its start."""

    name: str
    """The run's name; also in the process title."""

    run_dir: Path
    """`<run-dir>/<name>`. Under plain python it is only created when something is written to it."""

    rank: int = 0
    """This worker's number."""

    num_workers: int = 1
    """How many workers share one global batch."""

    num_hosts: int = 1
    """Machines that the workers are on."""

    rank_hosts: tuple[int, ...] = ()
    """Home host of each rank, fixed at launch; empty on one host."""

    shares_run_dir: bool = True
    """Whether all hosts see the run directory; else each has one of its own, and rank 0's is the job's."""

    host_address: str = ""
    """Address of this worker's host, as the other hosts reach it; empty on one host."""

    bind_address: str = ""
    """Address of the interface that leads to them: another one behind NAT."""

    interfaces: str = ""
    """Names of the network interfaces for connections between hosts, with commas; empty: that of `bind_address`."""

    connections: int = 0
    """As given to --connections; 0: one where its host has at most two cores per process, else two."""

    head_address: str = ""
    """The head's; empty on one host."""

    incarnation: int = 0
    """How often this rank was started again; only fences."""

    launch: int = 1
    """Number of the launch within its run: `shoal resume` begins the next."""

    strategy: str = "single"
    """Strategy as given to --strategy."""

    launched: bool = False
    """True under `shoal run`: there is a supervisor, a coordinator and a run directory."""

    resume: bool = False
    """`shoal resume`: the first fit goes on from the newest checkpoint of the run directory."""

    seed: int = 0
    """Seeds the script's global generators on every rank alike, so that ranks build the same things."""

    coordinator: str | None = None
    """Address of the coordinator: the path of its Unix socket, or `tls://ip:port` from another host."""

    num_servers: int = 0
    """Servers of the parameter server, at launch; `shoal scale` changes how many there are, never this."""

    num_replicas: int = 1
    """Copies of everything on the servers, the one that answers among them."""

    servers: tuple[str, ...] = ()
    """Addresses of the servers by number, for as many as there may ever be."""

    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    """Heartbeats, and how long a silent process is tolerated: within a step, at a call, at the coordinator."""

    can_recover: bool = False
    """Whether a worker that dies is replaced. Else its death ends the job."""

    verify: VerifyPlan | None = None
    """Set by `shoal verify`."""

    task: TaskPlan | None = None
    """Set in the tasks of mapreduce, whose rank is the number of their part."""

    faults: tuple[Fault, ...] = ()
    """Injected faults of this job's processes, by failpoint."""

    profile: int = 0
    """Steps of every worker that torch.profiler records, for `shoal trace`; 0: none."""

    fingerprints: str | None = None
    """Directory where every rank writes the hashes of its final weights, for `shoal chaos`."""

    @property
    def num_data_ranks(self) -> int:
        """Parts into which a batch is cut: as many as workers, unless some of them compute the same part."""
        return self._axes.num_data_ranks if self._axes else self.num_workers

    @property
    def data_rank(self) -> int:
        return self._axes.data_rank(self.rank) if self._axes else self.rank

    @property
    def counts_samples(self) -> bool:
        """Whether this rank is the first of those that compute the same samples."""
        return self._axes is None or self.rank in self._axes.speakers()

    @property
    def batch_ranks(self) -> list[int]:
        """Workers over which this one's batches are spread, each with the same layers; itself among them."""
        axes = self._axes
        if axes is None:
            return list(range(self.num_workers))
        at = axes.coordinates(self.rank)
        return [
            rank
            for rank in range(self.num_workers)
            if (axes.coordinates(rank).pp, axes.coordinates(rank).tp) == (at.pp, at.tp)
        ]

    @property
    def _axes(self) -> Axes | None:
        axes = strategies.parse_axes(self.strategy)
        return axes and strategies.fill_axes(axes, self.num_workers, self.strategy)

    @property
    def host(self) -> int:
        """Number of this worker's home."""
        return self.host_of(self.rank)

    def host_of(self, rank: int) -> int:
        return self.rank_hosts[rank] if self.rank_hosts else 0

    @property
    def is_on_several_hosts(self) -> bool:
        return self.num_hosts > 1

    @property
    def num_sharers(self) -> int:
        """Workers that share this one's machine, at home: its memory and cores are theirs together."""
        return len(self.local_ranks)

    @property
    def local_ranks(self) -> list[int]:
        """Ranks whose home is this worker's host."""
        return [rank for rank in range(self.num_workers) if self.host_of(rank) == self.host]


_current: Job | None = None

_is_shared = False


def enter(job: Job) -> None:
    """Make `job` the job of this process. Called once, by the launcher."""
    global _current
    _current = job


def current() -> Job:
    """The job of this process; rank 0 of 1 without a launcher."""
    global _current
    if _current is None:
        _join_world()
        script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "python"
        run_dir = Path("runs") / (script or "python")
        # Of `shoal run --name`: its checkpoints and metrics are its own.
        while (run_dir / "config.json").exists():
            run_dir = run_dir.with_name(f"{run_dir.name}-python")
        _current = Job(name=run_dir.name, run_dir=run_dir)
    return _current


def has_several_workers() -> bool:
    """Whether this process was launched as one of several. Makes no job where there is none."""
    return _current is not None and _current.num_workers > 1


def share() -> Job:
    """The job of this process, for work that its workers divide among them."""
    global _is_shared
    _is_shared = True
    return current()


def is_shared() -> bool:
    """Whether the script has divided any work among the workers; one that never does is run N times over."""
    return _is_shared


def rank() -> int:
    return share().rank


def num_workers() -> int:
    job = share()
    return job.tasks or job.num_workers


# ---- other launchers --------------------------------------------------------------------------------


def refuse_others(env: Mapping[str, str] = os.environ) -> None:
    """Refuse to be one of several processes that another launcher started: each would train by itself."""
    if (world := world_of(env)) is not None:
        raise OtherLauncher(launcher=world.launcher, num_processes=world.size, engine=world.engine)


def _join_world() -> None:
    """Hand a script that another launcher started several times over to `shoal run --on`, in this process.

    Nothing was trained yet, so the script begins anew there. A script that has a process group
    already, or is a module or no file, cannot, and is refused.
    """
    world = world_of(os.environ)
    if world is None:
        return
    distributed = sys.modules.get("torch.distributed")
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    has_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if has_group or script is None or getattr(main, "__spec__", None) is not None:
        refuse_others()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    run = ["run", "--on", world.engine, "-n", str(world.size), str(script), *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, "-m", "shoal", *run])
