"""Ray: one actor per host in a placement group; `--on ray` starts Ray here or joins the one that runs, `--on ray:ADDRESS` another.

Core actors, not ray.train: an actor runs `shoal join` and nothing else. The join
key is an argument of its method, which Ray shows nowhere. A killed actor takes
its host with it; Ray gives another in the same bundle, on another node where the
first is gone. Bundles that find no room wait, by which Ray's autoscaler adds nodes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.config.hosts import Resources
from shoal.engines.protocol import EngineEntry, Ticket, join_function, reach
from shoal.errors import ConfigError

GB = 1 << 30

REPORT_S = 8.0
"""A Ray that has just started tells of its autoscaler only after some seconds."""

_OWN = threading.Event()
"""Set where this process started the Ray that it uses."""


def is_local(detail: str) -> bool:
    """One machine, and no autoscaler that may add others."""
    import ray

    connect(detail)
    machines = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    return machines == {socket.gethostname()} and (_OWN.is_set() or not _can_grow())


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
            # Hosts are told apart by their address: one on a node, unless all are here.
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
                code, said = ray.get(end)
                ended[host] = (
                    f"its actor's `shoal join` ended with exit code {code}: {said or 'it said nothing'}"
                )
            except ray.exceptions.RayError as error:
                ended[host] = f"its actor died: {_first_line(error)}"
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
        """Why hosts wait: what they ask for beside what there is. Empty where Ray has placed them."""
        import ray

        if self._group is None or ray.util.placement_group_table(self._group)["state"] == "CREATED":
            return ""
        present, free = ray.cluster_resources(), ray.available_resources()
        each = ", ".join(_shown(name, amount) for name, amount in self._bundle.items())
        there = ", ".join(
            f"{_shown(name, present.get(name, 0))} ({_shown(name, free.get(name, 0))} free)"
            for name in self._bundle
        )
        nodes = sum(node["Alive"] for node in ray.nodes())
        where = "" if self._is_local else ", each on a node of its own"
        return f"Ray has found no room: {len(self._bundles)} hosts ask for {each} each{where}, and its {nodes} nodes have {there} in all"

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
            asked = ", ".join(f"{_shown(name, bundle[name] * num_hosts)}" for name in short)
            there = ", ".join(f"{_shown(name, present.get(name, 0))}" for name in short)
            raise ConfigError(
                f"{num_hosts} host{'s' if num_hosts > 1 else ''} need {asked}, and this Ray has {there}. Nothing was started; use "
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


def queue(detail: str) -> list[EngineEntry]:
    """Placement groups of Ray, as it has them: one for each job of shoal, by the name of its run."""
    import ray

    connect(detail)
    try:
        groups = ray.util.placement_group_table().values()
    finally:
        ray.shutdown()
    return [
        EngineEntry(
            id=group["placement_group_id"][:12],
            name=group["name"],
            state=group["state"].lower(),
            user="",
            asks="; ".join(
                ", ".join(_shown(name, amount) for name, amount in bundle.items())
                for bundle in group["bundles"].values()
            ),
            note=", ".join(sorted({node[:12] for node in group["bundles_to_node_id"].values() if node})),
        )
        for group in groups
        if group["state"] != "REMOVED"
    ]


def connect(address: str) -> None:
    """Connect to Ray. ConfigError where it does not answer."""
    import ray

    if ray.is_initialized():
        return
    asked = address or os.environ.get("RAY_ADDRESS", "")
    if asked in ("", "auto"):
        is_wanted, asked = asked == "auto", _running()
        if is_wanted and asked == "local":
            raise ConfigError(
                "no Ray that runs on this machine was found. Nothing was started; give its address (--on ray:HOST:6379; one started with "
                "--temp-dir is found by its address alone), or start one with `ray start --head`."
            )
    own: dict[str, Any] = {}
    try:
        if asked == "local":
            own = {"include_dashboard": False}
            print("shoal: no Ray runs here; one is started for this job", file=sys.stderr, flush=True)
        else:
            reach(asked)
        ray.init(address=asked, logging_level=logging.ERROR, log_to_driver=False, **own)
        if own:
            _OWN.set()
    except Exception as error:  # Ray raises what it likes, of other versions too
        # All of it: of a Ray of another version the lines after the first say which.
        said = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise ConfigError(
            f"Ray cannot be reached at {asked}: {said}. Nothing was started; start it with "
            "`ray start --head`, or leave the address out, and a Ray is started here."
        ) from None


def _can_grow() -> bool:
    """Whether Ray has an autoscaler, or may have: its monitor names the types of nodes, and without one "node_" and their ids."""
    from ray.experimental.internal_kv import _internal_kv_get

    deadline = time.monotonic() + REPORT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):  # not there yet, or of another version
            types = json.loads(_internal_kv_get("__autoscaling_status"))["autoscaler_report"]["active_nodes"]
            if types:
                return not all(name.startswith("node_") for name in types)
        time.sleep(0.2)
    return True


def _running() -> str:
    """Address of the Ray that runs on this machine; "local", which is one of its own, where none does."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        found = Path(folder, "ray", "ray_current_cluster").read_text().strip()
        reach(found)  # one that was killed leaves its address behind, which Ray itself tries for minutes
    except (OSError, ValueError):
        return "local"
    return found


def _shown(name: str, amount: float) -> str:
    return f"{amount / GB:.1f} GB of memory" if name == "memory" else f"{amount:g} {name}s"


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip().rstrip(".")
