"""Clouds by SkyPilot: its task file. The first node is the head and takes part; the others join it.

A spot instance that is about to be taken gets a SIGTERM, by which its host leaves: all workers
save. SkyPilot's managed jobs start it again.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from shoal.config.hosts import DEFAULT_PORT, Resources
from shoal.engines.protocol import KEY_VARIABLE

CLOUDS = ("aws", "gcp")


def render(
    *,
    cloud: str,
    name: str,
    script: str,
    args: Sequence[str],
    num_workers: int,
    num_hosts: int,
    resources: Resources,
    accelerator: str,
    use_spot: bool,
) -> dict[str, Any]:
    """Task file as SkyPilot reads it. The join key is one of its secrets: `sky launch --secret SHOAL_JOIN_KEY`."""
    wanted: dict[str, Any] = {"infra": cloud, "cpus": f"{resources.cpus:g}+", "use_spot": use_spot}
    wanted |= {"memory": f"{resources.memory_gb:g}+"} if resources.memory_gb else {}
    wanted |= {"accelerators": f"{accelerator}:{resources.gpus}"} if resources.gpus else {}
    there = shlex.join(["--name", name, script, *args])
    run = f"""set -e
head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
if [ "$SKYPILOT_NODE_RANK" = 0 ]; then
  if [ "$SKYPILOT_NUM_NODES" = 1 ]; then exec shoal run -n {num_workers} {there}; fi
  exec shoal run --hosts "$SKYPILOT_NUM_NODES" --bind "$head:{DEFAULT_PORT}" -n {num_workers} {there}
fi
exec shoal join "shoal://$head:{DEFAULT_PORT}" --timeout 600
"""
    return {
        "name": name,
        "num_nodes": num_hosts,
        "resources": wanted,
        "workdir": ".",
        "secrets": {KEY_VARIABLE: None},
        "setup": "pip install ./shoal-*.whl",  # in workdir
        "run": run,
    }
