"""Device placement: a device for each worker of a host, from `--device` and the visible accelerators.

Pure and torch-free, but for `of_job` at the end, which asks torch for the visible devices. All
workers of a host see the same devices and compute the same placement, each for all of them: that is
how they agree on the exchange.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shoal.config import strategy as strategies
from shoal.errors import ConfigError, DeviceMissing

if TYPE_CHECKING:
    from shoal.config.job import Job

AUTO = "auto"
CPU = "cpu"

TAKES_TURNS = "cuda"
"""Accelerators on which workers that share one can still exchange as if each had its own: slowly, for
trying a partition (NCCL).
"""

KINDS = (AUTO, CPU, "cuda", "xpu", "mps", "mtia", "hpu", "npu")

OTHER_NAMES = {"gpu": "cuda"}
"""Names of other libraries for a kind of device."""

FORMS = {
    AUTO: "an accelerator for every worker where there are enough of them, else the CPU for all",
    CPU: "the CPU",
    "cuda": "one accelerator of this kind per worker, by local rank",
    "cuda:1": "this one",
    "cuda:0,cpu,...": "one for each worker: of different kinds, they share batches by measured speed",
}

_WORD = re.compile(r"(?P<kind>[a-z][a-z0-9]*)(:(?P<index>[0-9]{1,4}))?")


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """A device for each worker, and notes for the user."""

    devices: tuple[str, ...]
    notes: tuple[str, ...] = ()
    homes: tuple[int, ...] = ()
    """Host of each worker, where there are several: each has a `cuda:0` of its own."""

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(device.partition(":")[0] for device in self.devices)

    @property
    def accelerator(self) -> str | None:
        return next(iter(self.kinds - {CPU}), None)

    @property
    def is_mixed(self) -> bool:
        return len(self.kinds) > 1

    @property
    def has_own_devices(self) -> bool:
        """Whether every worker has an accelerator to itself: then those can exchange by themselves (NCCL)."""
        return CPU not in self.kinds and not self.is_shared

    @property
    def is_shared(self) -> bool:
        """Whether several workers compute on one accelerator, by turns."""
        return any(count > 1 for count in self.num_sharing.values())

    @property
    def num_sharing(self) -> Counter[tuple[int, str]]:
        """Workers of each accelerator, by host and device."""
        homes = self.homes or (0,) * len(self.devices)
        placed = zip(homes, self.devices, strict=True)
        return Counter((home, device) for home, device in placed if device != CPU)


def parse(said: str, num_workers: int) -> list[tuple[str, int | None]]:
    """(kind, index or None) of each worker; a single word counts for all. ConfigError for anything else."""
    words = said.lower().split(",")
    found = [_WORD.fullmatch(word.strip()) for word in words]
    if not all(found) or any(match["index"] and match["kind"] in (AUTO, CPU) for match in found if match):
        raise ConfigError(
            f"'{said}' names no device. Nothing was started; --device takes {', '.join(FORMS)}."
        )
    wanted = [
        (OTHER_NAMES.get(match["kind"], match["kind"]), int(match["index"]) if match["index"] else None)
        for match in found
        if match
    ]
    for kind in (kind for kind, _ in wanted if kind not in KINDS):
        from difflib import get_close_matches

        # Other backends bring names of their own, so only what is almost a known one is refused.
        if guess := get_close_matches(kind, KINDS, n=1):
            raise ConfigError(f"'{said}' names no device. Did you mean '{guess[0]}'? Nothing was started.")
    if len(wanted) == 1:
        return wanted * num_workers
    if any(kind == AUTO for kind, _ in wanted):
        raise ConfigError(
            f"--device {said} names 'auto' among others, and auto is said of all workers. Nothing was started; name a device for "
            "each worker (cuda:0,cpu), or say auto alone."
        )
    if len(wanted) != num_workers:
        raise ConfigError(
            f"--device {said} names {len(wanted)} devices, and there are {num_workers} workers. Nothing was started; name one "
            "for each worker (cuda:0,cpu), or one word for all."
        )
    return wanted


def check(said: str, *, num_workers: int, strategy: str, is_mesh: bool) -> None:
    """Refuse, before anything starts, a placement that no host could have."""
    wanted = parse(said, num_workers)
    if not is_mesh or num_workers == 1:
        return
    kinds = {kind for kind, _ in wanted}
    named = [each for each in wanted if each[1] is not None]
    is_shared = len(set(named)) < len(named) or 0 < len(named) < len(wanted)
    if len(kinds) > 1 or (is_shared and kinds != {TAKES_TURNS}):
        what = "devices of different kinds" if len(kinds) > 1 else "one device for several workers"
        raise ConfigError(
            f"--device {said} gives {what}, and '{strategy}' cuts the model over devices that exchange its parts by "
            f"themselves. Nothing was started; give each of the {num_workers} workers a device of one kind, or use ddp or ps."
        )


def place(
    said: str,
    *,
    num_workers: int,
    visible: Mapping[str, int],
    is_soft: bool = False,
    homes: tuple[int, ...] = (),
) -> DevicePlacement:
    """A device for each worker. `visible` counts the accelerators of a host, by kind.

    `homes` are the workers' hosts, where there are several; all are taken to have the same accelerators.
    """
    wanted = parse(said, num_workers)
    if wanted[0][0] == AUTO:
        return _automatic(num_workers, visible, homes)
    devices: list[str] = []
    notes: list[str] = []
    hosts = homes or (0,) * num_workers
    named = {
        (host, kind, index) for host, (kind, index) in zip(hosts, wanted, strict=True) if index is not None
    }
    taken: Counter[tuple[int, str]] = Counter()
    for rank, (host, (kind, index)) in enumerate(zip(hosts, wanted, strict=True)):
        if kind == CPU:
            devices.append(CPU)
            continue
        # By local rank, counted over those that want this kind, past those that are asked for by number.
        number = index if index is not None else taken[host, kind]
        while index is None and (host, kind, number) in named:
            number += 1
        if index is None:
            taken[host, kind] = number + 1
        device = f"{kind}:{number}"
        if number < visible.get(kind, 0):
            devices.append(device)
        elif is_soft:
            devices.append(CPU)
            notes.append(f"worker {rank} computes on the CPU: there is no {device} (--soft-placement)")
        else:
            raise DeviceMissing(device=device, rank=rank, num_workers=num_workers, visible=visible)
    placed = DevicePlacement(tuple(devices), tuple(notes), homes)
    return replace(placed, notes=(*notes, _by_turns(placed))) if placed.is_shared else placed


def _by_turns(placed: DevicePlacement) -> str:
    (_, device), count = placed.num_sharing.most_common(1)[0]
    return f"{count} workers share {device} and take turns on it: right for trying things out, and slower than one alone"


def _automatic(num_workers: int, visible: Mapping[str, int], homes: tuple[int, ...]) -> DevicePlacement:
    hosts = homes or (0,) * num_workers
    for kind, count in visible.items():
        if count >= max(Counter(hosts).values()):
            devices = (f"{kind}:{hosts[:rank].count(host)}" for rank, host in enumerate(hosts))
            return DevicePlacement(tuple(devices), homes=homes)
    notes = [
        f"{count} {kind} and {num_workers} workers: all compute on the CPU; to use both, say which with --device "
        f"{','.join([f'{kind}:{number}' for number in range(count)] + [CPU] * (num_workers - count))}"
        for kind, count in visible.items()
        if count and num_workers <= 16 and not homes
    ]
    return DevicePlacement((CPU,) * num_workers, tuple(notes), homes)


def visible_devices() -> dict[str, int]:
    """Accelerators that torch can use in this process, by kind."""
    import torch

    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return {}
    return {kind.type: torch.accelerator.device_count()}


def of_server(said: str, number: int) -> str:
    """The device of a server's dense parameters: servers take turns over those of a kind, "auto" may find none."""
    if said == CPU:
        return CPU
    visible = visible_devices()
    [(kind, index)] = parse(said, 1)
    if kind == AUTO:
        kind = next(iter(visible), CPU)
    if kind == CPU:
        return CPU
    count = visible.get(kind, 0)
    if (index or 0) >= count:
        there = ", ".join(f"{each} {name}" for name, each in visible.items()) or "no accelerator"
        raise ConfigError(
            f"--server-device {said}: server {number} sees {there}. Nothing was trained; use --server-device auto, or cpu."
        )
    return f"{kind}:{number % count if index is None else index}"


def of_job(job: Job, said: str | None = None) -> DevicePlacement:
    """The placement of a job's workers on this host; `said` overrides the job's `device`."""
    placed = _placed(
        said if said is not None else job.device, job.num_workers, job.soft_placement, job.rank_hosts
    )
    if placed.is_mixed and strategies.parse(job.strategy).base == "mesh":
        # Only --soft-placement comes here: a device requested by name has been refused.
        note = (
            f"all workers compute on the CPU: the parts of '{job.strategy}' have to be on devices of one kind"
        )
        return DevicePlacement((CPU,) * job.num_workers, (*placed.notes, note), placed.homes)
    return placed


def groups_on_devices(job: Job) -> bool:
    """Whether the workers' accelerators exchange directly: each has its own, or the user requested it."""
    placed = of_job(job)
    if placed.accelerator is None or placed.is_mixed:
        return False
    # Two that share a device are faster through host memory; a mesh has no path through it.
    is_told = job.exchange == "native" or strategies.parse(job.strategy).base == "mesh"
    return placed.has_own_devices or (is_told and placed.accelerator == TAKES_TURNS)


@functools.lru_cache(maxsize=8)
def _placed(said: str, num_workers: int, is_soft: bool, homes: tuple[int, ...]) -> DevicePlacement:
    # Visible devices do not change in a process's life; and torch need not be asked unless a device is
    # requested.
    visible = {} if said == CPU else visible_devices()
    return place(said, num_workers=num_workers, visible=visible, is_soft=is_soft, homes=homes)
