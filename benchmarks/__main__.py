"""Runs the benchmarks, one after the other: `python -m benchmarks [NAME ...] [--quick]`, or `peers`."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

BENCHMARKS = (
    "trainer_overhead",
    "on_device",
    "device_cache",
    "ddp_step",
    "exchange_shm",
    "ddp_shm",
    "mesh_step",
    "large_model",
    "checkpoint_stall",
    "table_increments",
    "compress_slow_link",
    "launch",
    "first_start",
    "migration",
    "models",
    "recovery",
    "ps_channel",
    "hosts_transport",
    "hosts_ddp",
    "engines",
    "hosts_loss",
    "coordinator_load",
    "ps_kv",
    "scaling",
    "ps_recovery",
    "ps_memory",
    "ps_quality",
    "ps_tables",
    "ps_relaxed",
    "data_arrays",
    "data_parquet",
    "data_memory",
    "data_workers",
    "data_dynamic",
    "observe_cost",
    "planner",
    "dashboard",
)


def main() -> None:
    if sys.argv[1:2] == ["peers"]:  # installs other people's software, so only when it is asked for
        importlib.import_module("benchmarks.peers.compare").main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all without")
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it runs at all")
    parser.add_argument(
        "--part",
        action="append",
        default=[],
        help="of recovery, ps_recovery, engines, planner, scaling and migration: only this part",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="of recovery, engines, planner, scaling, device_cache and ps_*: how long at most",
    )
    parser.add_argument(
        "--workers", type=int, action="append", default=[], help="of recovery: only so many workers"
    )
    parser.add_argument(
        "--odd", help="of *recovery and planner: a folder for the run directories of runs worth a look"
    )
    options = parser.parse_args()
    names = options.names or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise SystemExit(f"no benchmark '{unknown[0]}'; there are: {', '.join(BENCHMARKS)}")
    for name in names:
        importlib.import_module(f"benchmarks.{name}").main(quick=options.quick, **_more(name, options))


def _more(name: str, options: argparse.Namespace) -> dict[str, Any]:
    of_recovery = {"parts": options.part, "minutes": options.minutes, "odd": options.odd}
    match name:
        case "recovery":
            return {**of_recovery, "workers": options.workers}
        case "ps_recovery":
            return of_recovery
        case "engines" | "scaling":
            return {"parts": options.part, "minutes": options.minutes}
        case "planner":
            return of_recovery
        case "migration":
            return {"parts": options.part}
        case "ps_memory" | "ps_quality" | "device_cache":
            return {"minutes": options.minutes}
    return {}


if __name__ == "__main__":
    main()
