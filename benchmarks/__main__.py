"""Runs the benchmarks, one after the other: `python -m benchmarks [NAME ...] [--quick]`."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = ("trainer_overhead", "ddp_step", "launch", "recovery")


def main() -> None:
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise SystemExit(f"no benchmark '{unknown[0]}'; there are: {', '.join(BENCHMARKS)}")
    for name in names:
        importlib.import_module(f"benchmarks.{name}").main(quick="--quick" in sys.argv)


if __name__ == "__main__":
    main()
