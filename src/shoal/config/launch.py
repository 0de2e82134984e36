"""Launch configuration: LaunchConfig as the user requests it, RunConfig as config.json keeps it.

A LaunchConfig refuses at construction what its values alone show to be impossible;
`cluster/launch/api.py` checks whether the script or a directory exists. A RunConfig is enough to
launch the job again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.config import parallel_options
from shoal.config import strategy as strategies
from shoal.config.faults import Faults
from shoal.config.hosts import HostsConfig, parse_journal
from shoal.config.job import VerifyPlan
from shoal.config.liveness import LivenessConfig
from shoal.config.parallel_options import ParallelOptions
from shoal.errors import ConfigError

_LIVENESS = LivenessConfig()

MAX_WORKERS = 1024
"""On one host. Beyond it a number is a slip of the hand."""

MAX_LAUNCHED_SERVERS = 64
"""On one host. Every worker is given a way to each of them."""

COLOCATED = "colocated"
"""Number of servers: one on each host that has workers."""

MAX_RESTARTS = 1000
"""Restarts of one worker without a step between. Beyond it a crash loop would fill the disk with its logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOption:
    """One option of `shoal run`, and its origin."""

    value: bool | int | float | str | None
    """Value as it was resolved."""

    origin: str
    """`command line`, `default`, the file of --config; what replaced it: `command line (resume)`, `resized`."""


def overlaid(options: dict[str, GivenOption], origin: str, **values: Any) -> dict[str, GivenOption]:
    """Options with the values of `origin` in place of theirs; None: it said nothing of them."""
    return options | {
        name: GivenOption(value=value, origin=origin) for name, value in values.items() if value is not None
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig(ParallelOptions):
    """One job, as its user requested it. Refuses invalid values at construction."""

    script: str
    """Path of the Python file to run."""

    module: str = ""
    """Name of the module to run instead, as by `python -m`."""

    args: tuple[str, ...] = ()
    """The script's sys.argv[1:]."""

    options: dict[str, GivenOption] = field(default_factory=dict, compare=False)
    """Options of the command line with the origin of each, for config.json. They decide nothing."""

    workers: int = 1
    """How many workers share one global batch."""

    strategy: str | None = None
    """How the model is spread. None: "single" for one worker, "ddp" for more."""

    servers: int | str | None = None
    """How many servers hold the weights; "colocated": one on each host that has workers. None: as many as the cluster names,
    else one for the strategies of the parameter server and none for others."""

    replicas: int | None = None
    """On how many servers everything is kept. None: two where there are two servers or more."""

    name: str | None = None
    """Name of the run. None: the script's name and the first free number."""

    again: bool = False
    """Where there is a run of this name: keep it aside as NAME.1, NAME.2 ... and start anew."""

    overwrite: bool = False
    """Where there is a run of this name: remove it and start anew."""

    run_dir: str = "runs"
    """Parent of run directories."""

    seed: int | None = None
    """Seeds the script's global generators alike on every rank. None: drawn, and written in config.json."""

    step_timeout_s: float = _LIVENESS.step_timeout_s
    """How long a rank waits for the others within one step before it gives up and names them."""

    join_timeout_s: float = _LIVENESS.join_timeout_s
    """How long ranks wait for each other at a call into shoal."""

    grace_s: float = 60.0
    """How long workers that were asked to leave may take to finish their step and save."""

    max_restarts: int = 3
    """How often a worker that dies is replaced without the job getting ahead. 0: its death ends the job."""

    hosts: HostsConfig | None = None
    """Hosts of the job. None: this machine alone."""

    journal: str | None = field(default=None, repr=False)
    """etcd://h1:2379,h2:2379,h3:2379, where another host takes over by itself when the head is lost. None: none does."""

    min_workers: int | None = None
    """Continue with fewer workers, at least this many, if a host was lost and no other has capacity.
    None: wait for a host.
    """

    oversubscribe: bool = False
    """Start it even if this machine seems too small for this many processes."""

    resume: bool = False
    """Go on from the newest checkpoint of the run directory, which must exist. See `resume_config`."""

    cwd: str | None = None
    """Folder the script runs in. None: where we are."""

    verify: VerifyPlan | None = None
    """Request of `shoal verify`."""

    faults: Faults | None = None
    """Injected faults."""

    fingerprints: str | None = None
    """Directory for the hashes of every rank's final weights."""

    profile: int = 0
    """Steps of every worker that torch.profiler records, for `shoal trace`; 0: none."""

    quiet: bool = False
    """No progress; the script's own output stays."""

    debug_rank: int | None = None
    """The rank that has this process's stdin, and whose stdout is shown: for breakpoint(). One worker alone always has it."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(
                f"{self.workers} workers cannot be started: give a number from 1 to {MAX_WORKERS} with -n. "
                "Nothing was started."
            )
        if self.strategy is not None and strategies.parse(self.strategy).base == "mapreduce":
            # One worker drives; what -n asks for are its tasks.
            object.__setattr__(self, "tasks", self.workers if self.workers > 1 else self.tasks or 1)
            object.__setattr__(self, "workers", 1)
        elif self.tasks:
            object.__setattr__(self, "tasks", 0)
        self.liveness  # validates the time-outs  # noqa: B018
        if self.debug_rank is not None and not 0 <= self.debug_rank < self.workers:
            raise ConfigError(
                f"--debug-rank {self.debug_rank} is none of the {self.workers} workers: their ranks are 0 to {self.workers - 1}. "
                "Nothing was started."
            )
        if not 0 < self.grace_s < 1e9:
            raise ConfigError(f"grace_s must be a positive number of seconds, got {self.grace_s}.")
        if self.min_workers is not None and not 1 <= self.min_workers <= self.workers:
            raise ConfigError(
                f"--min-workers {self.min_workers} cannot be: a job of {self.workers} workers goes on with 1 to {self.workers}. "
                "Nothing was started."
            )
        if not 0 <= self.max_restarts <= MAX_RESTARTS:
            raise ConfigError(f"max_restarts must be from 0 to {MAX_RESTARTS}, got {self.max_restarts}.")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed must be from 0 to 2^63-1, got {self.seed}.")
        if self.name is not None and (not self.name or "/" in self.name or self.name in (".", "..")):
            raise ConfigError(
                f"'{self.name}' cannot name a run: it becomes a folder's name. Nothing was started; use --run-dir for "
                "the place and --name for the name."
            )
        if self.again and self.overwrite:
            raise ConfigError(
                "--again keeps the former run of this name and --overwrite removes it. Nothing was started; give one of them."
            )
        if (self.again or self.overwrite) and (self.name is None or self.resume):
            raise ConfigError(
                f"--{'again' if self.again else 'overwrite'} is said of a run that starts anew under its --name. Nothing was "
                "started; runs without one are numbered, and none is in the way of another."
            )
        try:
            "\0".join([self.script, *self.args, self.name or "", self.run_dir]).encode()
        except UnicodeEncodeError:
            raise ConfigError(
                "a path or an argument of this job is not valid UTF-8, so it cannot be written down in config.json. "
                "Nothing was started; rename it."
            ) from None
        parallel_options.check(
            self,
            strategy=strategies.choose(self.strategy, self.workers),
            num_workers=self.workers,
            num_hosts=self.num_hosts,
        )
        self._check_hosts()
        self._place_servers()
        self._check_servers()
        if self.faults is not None:
            if not isinstance(self.faults, Faults):
                raise ConfigError(
                    f"faults must be a shoal.Faults(), got {self.faults!r}. Nothing was started."
                )
            self.faults.check(num_workers=self.workers, num_servers=self.num_servers)

    def notes(self) -> list[str]:
        """Notes at the start: options without effect, and placements that cost more than they must."""
        return [*self._ineffective(), *self._tp_between_hosts(), *self._copies_on_one_host()]

    def _copies_on_one_host(self) -> list[str]:
        if self.hosts is None or self.hosts.num_hosts == 1 or self.num_replicas == 1:
            return []
        homes = {self.hosts.host_of_server(number) for number in range(self.num_servers)}
        if len(homes) >= self.num_replicas:
            return []
        hosts = f"host{'s' if len(homes) > 1 else ''} {', '.join(map(str, sorted(homes)))}"
        return [
            f"note: the {self.num_servers} servers are on {hosts}, so {self.num_replicas} copies of everything share a host: its "
            "loss takes the job back to the newest checkpoint. --servers colocated has one on each host that has workers"
        ]

    def _tp_between_hosts(self) -> list[str]:
        axes = strategies.parse(strategies.choose(self.strategy, self.workers)).axes
        if axes is None or self.hosts is None:
            return []
        tp = strategies.fill_axes(axes, self.workers, str(self.strategy)).tp
        homes = [self.hosts.host_of(rank, self.workers) for rank in range(self.workers)]
        # Ranks along tp are neighbours: the first and the last of them tell.
        spanning = [first for first in range(0, self.workers, tp) if homes[first] != homes[first + tp - 1]]
        if not spanning:
            return []
        first = spanning[0]
        return [
            f"note: tp={tp} spans hosts: ranks {first} to {first + tp - 1}, on hosts {homes[first]} to {homes[first + tp - 1]}, "
            "exchange activations in every layer over the network. A tp that divides the workers of each host stays within "
            "one; dp, fsdp and pp between hosts send less"
        ]

    def _ineffective(self) -> list[str]:
        """Options without effect in one process, where a sweep over -n begins or a resumed run ends."""
        asked = [f"--exchange {self.exchange}"] if self.exchange != "auto" else []
        asked += [f"--compress {self.compress}"] if self.compress != "none" else []
        chosen = strategies.choose(self.strategy, self.workers)
        if not asked or self.workers > 1 or strategies.parse(chosen).has_servers:
            return []
        what = "does" if len(asked) == 1 else "do"
        return [
            f"note: {' and '.join(asked)} {what} nothing here: one worker has nobody to sum gradients with"
        ]

    @property
    def liveness(self) -> LivenessConfig:
        """Time-outs after which a silent process of this job is suspected or given up."""
        return LivenessConfig(step_timeout_s=self.step_timeout_s, join_timeout_s=self.join_timeout_s)

    @property
    def num_hosts(self) -> int:
        return self.hosts.num_places if self.hosts is not None else 1

    @property
    def is_mesh(self) -> bool:
        return strategies.parse(strategies.choose(self.strategy, self.workers)).base == "mesh"

    @property
    def num_servers(self) -> int:
        if self.servers is not None:
            return int(self.servers)
        named = sum(self.hosts.servers) if self.hosts is not None else 0
        return (named or 1) if self._has_servers else 0

    @property
    def num_replicas(self) -> int:
        """Copies of everything, the primary's among them."""
        if self.replicas is not None:
            return self.replicas
        return 2 if self.num_servers >= 2 else 1

    @property
    def _has_servers(self) -> bool:
        return strategies.parse(strategies.choose(self.strategy, self.workers)).has_servers

    @property
    def cores_per_host(self) -> int:
        """Cores of a host that an engine gives; 0 where the hosts have their own."""
        if self.hosts is None or not self.hosts.on:
            return 0
        return max(1, round(self.hosts.resources(self.workers, self.num_servers).cpus))

    def _check_hosts(self) -> None:
        if self.tls and (self.hosts is None or self.hosts.plaintext):
            why = "this job is on one machine" if self.hosts is None else "--plaintext asks for none"
            raise ConfigError(
                f"--tls encrypts what workers on several hosts exchange, and {why}. Nothing was started; leave --tls out."
            )
        if self.journal is not None:
            shown = parse_journal(self.journal).shown
            if (self.hosts is None or self.hosts.num_hosts == 1) and not self.resume:
                raise ConfigError(
                    f"--journal {shown} is for a job on several hosts, of which one takes over. Nothing was started; add --hosts, or "
                    "leave it out."
                )
        if self.hosts is None:
            return
        if self.hosts.on and self.journal is not None:
            raise ConfigError(
                f"--journal has another host take over when the head is lost, and a slot of {self.hosts.on} cannot ask for slots. "
                "Nothing was started; leave one of --journal and --on out."
            )
        if self.workers < self.hosts.num_hosts and not self.hosts.workers:
            raise ConfigError(
                f"{self.workers} workers cannot be on {self.hosts.num_hosts} hosts: each host needs one. Nothing was started; "
                f"give -n {self.hosts.num_hosts} or more, or fewer hosts."
            )
        if self.hosts.workers and sum(self.hosts.workers) != self.workers:
            raise ConfigError(
                f"the cluster's hosts have {sum(self.hosts.workers)} workers together, and -n asks for {self.workers}. Nothing "
                "was started; leave -n out, or change one of them."
            )

    def _place_servers(self) -> None:
        """Make a number of "colocated"; the hosts have the places."""
        if not isinstance(self.servers, str):
            return
        if self.servers != COLOCATED:
            raise ConfigError(
                f"--servers {self.servers} is no number of servers. Nothing was started; give a number, or '{COLOCATED}' for one "
                "on each host that has workers."
            )
        if not self._has_servers:
            raise ConfigError(
                f"the strategy '{strategies.choose(self.strategy, self.workers)}' has no servers, and --servers {COLOCATED} asks for "
                "some. Nothing was started; use --strategy ps, or leave --servers out."
            )
        hosts = self.hosts.with_a_server_on_each(self.workers) if self.hosts is not None else None
        object.__setattr__(self, "servers", sum(hosts.servers) if hosts is not None else 1)
        object.__setattr__(self, "hosts", hosts)

    def _check_servers(self) -> None:
        strategy = strategies.choose(self.strategy, self.workers)
        if not 0 <= self.num_servers <= MAX_LAUNCHED_SERVERS:
            raise ConfigError(
                f"{self.num_servers} servers cannot be started: give a number from 1 to {MAX_LAUNCHED_SERVERS} with "
                "--servers. Nothing was started."
            )
        if self.num_servers and not self._has_servers:
            raise ConfigError(
                f"the strategy '{strategy}' has no servers, and {self.num_servers} were asked for. Nothing was started; use "
                "--strategy ps, or leave --servers out."
            )
        if self._has_servers and not self.num_servers:
            raise ConfigError(
                f"the strategy '{strategy}' needs a server, and 0 were asked for. Nothing was started; use --servers 1."
            )
        if self.replicas is not None and not self._has_servers:
            raise ConfigError(
                f"the strategy '{strategy}' has no servers, so nothing is replicated. Nothing was started; leave "
                "--replicas out, or use --strategy ps."
            )
        if not 1 <= self.num_replicas <= max(1, self.num_servers):
            raise ConfigError(
                f"{self.num_replicas} replicas of everything need as many servers, and there are {self.num_servers}. "
                f"Nothing was started; give --replicas from 1 to {max(1, self.num_servers)}, or more --servers. One "
                "replica means: a server that dies takes the job back to its newest checkpoint."
            )


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Versions that a run's bits depend on."""

    python: str
    torch: str
    shoal: str


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One host of a job, in config.json."""

    number: int
    name: str
    address: str
    cores: int
    workers: list[int]
    servers: list[int]
    shares_run_dir: bool
    link_bytes_per_s: float = 0.0  # from the head over one connection, when it joined; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(ParallelOptions):
    """config.json of a run directory. A field that an earlier version did not write has its default."""

    script: str
    """Absolute path of the Python file."""

    module: str = ""
    """Its name, where it was run as a module."""

    args: list[str]
    """The script's sys.argv[1:]."""

    cwd: str
    """Folder the script ran in."""

    strategy: str
    """Strategy as given to --strategy, or chosen by the number of workers."""

    workers: int
    """How many workers shared one global batch."""

    servers: int = 0
    """How many servers there were at launch."""

    replicas: int = 1
    """On how many of them everything was kept."""

    seed: int
    """Given, or drawn."""

    threads: int
    """Threads of each worker."""

    step_timeout_s: float
    """How long a rank waited for the others within one step."""

    join_timeout_s: float
    """How long ranks waited for each other at a call into shoal."""

    grace_s: float
    """How long workers that were asked to leave might take."""

    max_restarts: int = 3
    """How often a worker that died was replaced without the job getting ahead."""

    options: dict[str, GivenOption] = field(default_factory=dict)
    """Every option of `shoal run` with the origin of its value."""

    hosts: list[HostFacts] = field(default_factory=list)
    """Hosts of the job, once all had joined; empty on one machine."""

    hosts_asked: HostsConfig | None = None
    """Hosts as they were asked for: those of a job that another host takes over."""

    min_workers: int | None = None
    """Smallest number of workers with which the job continues after the loss of a host."""

    oversubscribe: bool = False
    """Whether more workers than cores were wanted."""

    journal: str = ""
    """The etcd in which the head is recorded, without user and password; empty: none."""

    versions: Versions
    """Versions of what it ran with."""

    started: float
    """Seconds since 1970."""

    resumed: bool = False
    """Whether this launch went on with an earlier one."""
