"""A session with Ray: the connection, whether it can grow, and its queue. For actors (`ray.py`) and tasks (`tasks.py`)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shoal.engines.protocol import EngineEntry, reach
from shoal.errors import ConfigError

GB = 1 << 30

REPORT_S = 8.0
"""A Ray that has just started tells of its autoscaler only after some seconds."""

_OWN = threading.Event()
"""Set where this process started the Ray that it uses."""


def queue(detail: str) -> list[EngineEntry]:
    """Placement groups of Ray, as it has them: one for each job of shoal, by the name of its run."""
    if not (detail or os.environ.get("RAY_ADDRESS")) and _running() == "local":
        return []  # none runs here, and one would be started only to be asked
    import ray

    connect(detail)
    try:
        groups = ray.util.placement_group_table().values()
    finally:
        disconnect()
    return [
        EngineEntry(
            id=group["placement_group_id"][:12],
            name=group["name"],
            state=group["state"].lower(),
            user="",
            asks="; ".join(
                ", ".join(shown(name, amount) for name, amount in bundle.items())
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
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        if asked == "local":
            own = {"include_dashboard": False}
            print("shoal: no Ray runs here; one is started for this job", file=sys.stderr, flush=True)
        else:
            reach(asked)
        _init(address=asked, logging_level=logging.ERROR, log_to_driver=False, **own)
        (_OWN.set if own else _OWN.clear)()
    except Exception as error:  # Ray raises any type of error, and other versions others
        # All of it: of a Ray of another version the lines after the first say which.
        said = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise ConfigError(
            f"Ray cannot be reached at {asked}: {said}. Nothing was started; start it with "
            "`ray start --head`, or leave the address out, and a Ray is started here."
        ) from None
    except SystemExit:
        raise SystemExit(
            128 + signal.SIGTERM
        ) from None  # Ray takes SIGTERM for itself, and would end with 15
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)


def _init(**options: Any) -> None:
    """`ray.init`, retried where a Ray behind ray:// could not start the process that serves this connection.

    Its proxy forks beside gRPC's threads, and a child that inherits a held lock never begins (seen with Ray 2.60, soon after its start).
    """
    import ray

    for is_last in (False, False, True):
        try:
            ray.init(**options)
            return
        except (RuntimeError, ConnectionError) as error:
            if is_last or "Starting Ray client server failed" not in str(error):
                raise


def disconnect() -> None:
    """Close the connection, and end a Ray that this process started."""
    import ray

    ray.shutdown()
    _OWN.clear()


def can_grow() -> bool:
    """Whether Ray has an autoscaler, or may have; not one that this process started. Its monitor names the types of nodes, and without one "node_" and their ids."""
    from ray.experimental.internal_kv import _internal_kv_get

    if _OWN.is_set():
        return False
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


def shown(name: str, amount: float) -> str:
    return f"{amount / GB:.1f} GB of memory" if name == "memory" else f"{amount:g} {name}s"
