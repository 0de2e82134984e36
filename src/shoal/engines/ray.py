"""Ray: one actor per host in a placement group; `--on ray` starts Ray here or joins the running one,
`--on ray:ADDRESS` another.

Core actors, not ray.train: an actor runs `shoal join` and nothing else. The join key is an argument
of its method, which Ray does not display. A killed actor takes its host with it; Ray gives another
in the same bundle, on another node if the first is gone. Bundles without room wait, by which Ray's
autoscaler adds nodes.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any

from shoal.config.hosts import Resources
from shoal.engines.protocol import Ticket, join_ended, join_function, line_of
from shoal.engines.ray_session import GB, can_grow, connect, queue, shown
from shoal.errors import ConfigError

__all__ = ["Ray", "is_local", "open_engine", "queue"]


def is_local(detail: str) -> bool:
    """One machine, and no autoscaler that may add others."""
    import ray

    connect(detail)
    machines = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    return machines == {socket.gethostname()} and not can_grow()


def open_engine(detail: str, ticket: Ticket) -> Ray:
    return Ray(ticket, is_local=is_local(detail))


class Ray:
    """Actors of one job."""

    def __init__(self, ticket: Ticket, *, is_local: bool) -> None:
        self._ticket, self._is_local = ticket, is_local
        self._group: Any = None
        self._bundle: dict[str, float] = {}  # of each host
        self._bundles: dict[int, int] = {}  # by host
        self._actors: dict[int, Any] = {}
        self._ends: dict[int, Any] = {}  # of `shoal join`, as Ray promises it

    def start(self, hosts: Sequence[int], resources: Resources) -> None:
        import ray

        self._bundle = bundle = {"CPU": float(self._ticket.cores)}
        bundle |= {"GPU": float(resources.gpus)} if resources.gpus else {}
        bundle |= {"memory": resources.memory_gb * GB} if resources.memory_gb else {}
        if self._group is None:
            self._refuse_too_much(len(hosts), bundle)
            # Hosts are distinguished by their address: one per node, unless all are on this machine.
            strategy = "PACK" if self._is_local else "STRICT_SPREAD"
            self._group = ray.util.placement_group(
                [bundle] * len(hosts), strategy=strategy, name=self._ticket.job
            )
            self._bundles = {host: index for index, host in enumerate(hosts)}
        slot = ray.remote(_slot_class())
        for host in hosts:
            self._end(host)
            placed = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundles[host]
            )
            actor = slot.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                memory=bundle.get("memory"),
                scheduling_strategy=placed,
                max_restarts=0,
            ).remote()
            command = self._ticket.command("--as-host", str(host))
            self._actors[host] = actor
            self._ends[host] = actor.run.remote(command, self._ticket.environment())

    def watch(self) -> dict[int, str]:
        import ray

        ended = {}
        for host, end in self._ends.items():
            if not ray.wait([end], timeout=0)[0]:
                continue
            try:
                ended[host] = f"its actor's {join_ended(ray.get(end))}"
            except ray.exceptions.RayError as error:
                ended[host] = f"its actor died: {line_of(error)}"
        return ended

    def stop(self) -> None:
        import ray

        for host in list(self._actors):
            self._end(host)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        ray.shutdown()

    def logs(self, host: int) -> str:
        return self.watch().get(host, "") or self._unplaced()

    def _unplaced(self) -> str:
        """Reason why hosts wait: their request beside the capacity. Empty if Ray has placed them."""
        import ray

        if self._group is None or ray.util.placement_group_table(self._group)["state"] == "CREATED":
            return ""
        present, free = ray.cluster_resources(), ray.available_resources()
        each = ", ".join(shown(name, amount) for name, amount in self._bundle.items())
        there = ", ".join(
            f"{shown(name, present.get(name, 0))} ({shown(name, free.get(name, 0))} free)"
            for name in self._bundle
        )
        nodes = sum(node["Alive"] for node in ray.nodes())
        where = "" if self._is_local or len(self._bundles) == 1 else ", each on a node of its own"
        hosts = len(self._bundles)
        asking = f"{hosts} hosts ask for {each} each" if hosts > 1 else f"1 host asks for {each}"
        return f"Ray has found no room: {asking}{where}, and its {nodes} node{'s have' if nodes > 1 else ' has'} {there} in all"

    def _end(self, host: int) -> None:
        import ray

        if (actor := self._actors.pop(host, None)) is not None:
            with contextlib.suppress(Exception):  # it may be gone, with its node
                ray.wait([self._ends[host]], timeout=5)
                ray.kill(actor)

    def _refuse_too_much(self, num_hosts: int, bundle: dict[str, float]) -> None:
        """Refuse what a Ray on this machine that has no autoscaler can never give."""
        import ray

        present = ray.cluster_resources()
        short = [name for name, wanted in bundle.items() if wanted * num_hosts > present.get(name, 0)]
        if self._is_local and short:
            asked = ", ".join(f"{shown(name, bundle[name] * num_hosts)}" for name in short)
            there = ", ".join(f"{shown(name, present.get(name, 0))}" for name in short)
            raise ConfigError(
                f"{num_hosts} host{'s need' if num_hosts > 1 else ' needs'} {asked}, and this Ray has {there}. Nothing was started; use "
                "fewer workers, or ask for less with --resources."
            )


def _slot_class() -> type:
    """Class of the actors; made here, so that Ray sends it by value and a node needs nothing but `shoal join`."""
    run_join = join_function()

    class RaySlot:
        """Runs `shoal join`."""

        def run(self, command: list[str], environment: dict[str, str]) -> tuple[int, str]:
            return run_join(command, environment)

    return RaySlot
