"""Numbers of workers and hosts that a running job may have.

A new number is checked here before any worker is asked to stop; the supervisor then stops them, and
`api.py` launches the job again with the returned config.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.cluster.hosts import placement
from shoal.cluster.hosts.hosts import HEAD, Hosts
from shoal.cluster.launch.preflight import refuse_without_room
from shoal.cluster.launch.threads import available_cores
from shoal.config.launch import LaunchConfig, RunConfig
from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Resize:
    """Configuration of the next launch, when all workers have saved and left."""

    config: LaunchConfig
    why: str
    leaving: int | None = None
    """Host that leaves the job."""


class Elastic:
    """Numbers that the user asked for, and those in use now."""

    def __init__(self, config: LaunchConfig, described: RunConfig, name: str, hosts: Hosts) -> None:
        self._hosts = hosts
        self._rule = described.exchange_rule  # of the number of workers that was launched
        self.asked = self.current = replace(
            config,
            name=name,
            again=False,
            overwrite=False,
            resume=True,
            seed=described.seed,
            script=described.script,
            cwd=described.cwd,
            exchange_rule=self._rule,
            faults=None,  # they were planned for the workers of the first launch
        )

    def with_workers(self, num_workers: int) -> Resize:
        """The job with this many workers; ConfigError if that is impossible."""
        if num_workers == self.current.workers:
            raise ConfigError(f"it has {num_workers} workers already. Nothing was changed")
        if self.asked.hosts is not None and self.asked.hosts.roles:
            raise ConfigError(
                f"its {self.asked.workers} workers are services, which were counted at the start. Nothing was changed; end its "
                f"coordinator, and go on with `shoal resume RUN -n {num_workers}`"
            )
        cores = self._hosts.cores()
        room = sum(cores.values())
        if self._hosts.num_hosts > 1 and num_workers > room and not self.asked.oversubscribe:
            raise ConfigError(
                f"its hosts have {room} cores, and each of {num_workers} workers needs one. Nothing was changed; let another host "
                "join (`shoal scale RUN --hosts N` makes room for it), or start the job with --oversubscribe"
            )
        config = self._resized(num_workers, cores)
        refuse_without_room(config, available_cores())
        return Resize(config, f"{num_workers} workers were asked for")

    def open_seats(self, num_hosts: int) -> None:
        """Let this many hosts join. Nothing stops: joined hosts get workers at the next Resize."""
        hosts = self.current.hosts
        if hosts is None or self._hosts.cluster is None:
            raise ConfigError(
                "it was started without --hosts and --bind, so there is no address at which a host could join. Nothing was changed; "
                "end it, and go on with `shoal resume RUN --hosts N --bind ADDRESS`"
            )
        if hosts.on:
            raise ConfigError(
                f"its hosts are slots of {hosts.on}, which were asked for at the start. Nothing was changed; end it, and go on with "
                "`shoal resume` and more of them"
            )
        if num_hosts <= hosts.num_hosts:
            raise ConfigError(
                f"it may have {hosts.num_hosts} host{'s' if hosts.num_hosts > 1 else ''} already. Nothing was changed; a host leaves by `shoal leave RUN --host K`"
            )
        self.asked, self.current = (
            replace(each, hosts=each.hosts and each.hosts.with_seats(num_hosts, each.workers))
            for each in (self.asked, self.current)
        )
        assert self.current.hosts is not None
        self._hosts.open_seats(self.current.hosts)

    def without(self, host: int) -> Resize:
        """The job without a host; ConfigError if the others have no capacity for its workers."""
        if host == HEAD:
            raise ConfigError("host 0 is the head, without which there is no job. Nothing was changed")
        if not 0 < host < self._hosts.num_hosts or not self._hosts.is_here(host):
            here = ", ".join(str(each) for each in range(self._hosts.num_hosts) if self._hosts.is_here(each))
            raise ConfigError(f"it has no host {host} at present; there are {here}. Nothing was changed")
        cores = self._hosts.cores(without=host)
        config = self._fitting(cores)
        if config is None and self.asked.hosts is not None and self.asked.hosts.on:
            config = self.current  # all save, and wait for the host that the engine gives in its place
        if config is None:
            allowed = self.asked.min_workers or self.asked.workers
            raise ConfigError(
                f"without host {host} there are {sum(cores.values())} cores, and {allowed} workers need one each. Nothing was "
                "changed; let another host join first, or start the job with --min-workers or --oversubscribe"
            )
        return Resize(config, f"host {host} was asked to leave", leaving=host)

    def fitting(self, *, is_short: bool) -> Resize | None:
        """Fewer workers if some have no host (`is_short`), more if there is capacity again; None: no change."""
        config = self._fitting(self._hosts.cores())
        if config is None:
            return None
        if is_short and config.workers < self.current.workers:
            return Resize(config, f"the hosts that are left have room for {config.workers} workers")
        if not is_short and config.workers > self.current.workers:
            return Resize(config, f"there is room for {config.workers} workers again")
        return None

    def _fitting(self, cores: dict[int, int]) -> LaunchConfig | None:
        """The requested workers that fit on these hosts; None if those are too few."""
        asked, room = self.asked, sum(cores.values())
        if asked.hosts is None or asked.oversubscribe or room >= asked.workers:
            return asked
        homes = {asked.hosts.host_of(rank, asked.workers) for rank in range(asked.workers)}
        if homes <= cores.keys():
            return asked
        for num_workers in range(room, (asked.min_workers or asked.workers) - 1, -1):
            try:
                return self._resized(num_workers, cores)
            except ConfigError:  # for example, the degrees of a mesh do not divide it
                continue
        return None

    def _resized(self, num_workers: int, cores: dict[int, int]) -> LaunchConfig:
        hosts = self.asked.hosts
        if hosts is not None:
            hosts = replace(hosts, workers=placement.spread(num_workers, cores, hosts.num_hosts))
        return replace(
            self.asked,
            workers=num_workers,
            hosts=hosts,
            min_workers=min(least, num_workers) if (least := self.asked.min_workers) else None,
            exchange_rule="",  # other workers compute the sums, so their order need not be kept
        )
