"""Construction of a view's reducer from `--exchange`; the registry is `shoal.config.choices.EXCHANGES`."""

from __future__ import annotations

import platform
from dataclasses import replace

# Loaded with this module, so that the fork server has its compiled kernels before it forks.
import shoal.collectives.shm  # noqa: F401
from shoal.collectives.adapters import BySize, HostStaged, Threaded
from shoal.collectives.native import Native
from shoal.collectives.p2p import TorchWires
from shoal.collectives.reducer import Reducer
from shoal.config import exchange_rule, placement
from shoal.config.choices import EXCHANGES
from shoal.config.job import Job


def open_exchange(job: Job, native: Native) -> Reducer:
    """Build the reducer of a new view over its group. Collective."""
    if job.num_workers == 1:
        return native
    placed = placement.of_job(job)
    reducer = _automatic(job, native) if job.exchange == "auto" else _named(job, native)
    # Of devices that can exchange by themselves, torch's own is the fastest; the others work in the host's memory.
    if placed.accelerator is None or (placement.meet_on_devices(job) and job.exchange in ("auto", "native")):
        return reducer
    return HostStaged(reducer)


def _automatic(job: Job, native: Native) -> Reducer:
    rule = job.exchange_rule or exchange_rule.built_in(num_hosts=job.num_hosts, processor=platform.machine())
    parts = [(most, _named(replace(job, exchange=name), native)) for most, name in exchange_rule.parse(rule)]
    is_one = len(parts) == 1 and placement.of_job(job).accelerator is None
    return parts[0][1] if is_one else BySize(native, parts)


def _named(job: Job, native: Native) -> Reducer:
    if job.exchange == "native":
        return native
    made = EXCHANGES[job.exchange].load()
    if isinstance(made, type):
        reducer: Reducer = made.open(job, native)  # type: ignore[attr-defined]  # a class of the registry has it
        return reducer
    wires = TorchWires(native)
    return Threaded(native, lambda flat: made(wires, flat))
