"""Construction of a view's reducer from `--exchange`, and torch's point-to-point p2p under the schemes.

The registry is `shoal.config.choices.EXCHANGES`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.collectives.reducer import BySize, HostStaged, Native, Reducer, Threaded
from shoal.config import exchange_rule, placement
from shoal.config.choices import EXCHANGES
from shoal.config.job import Job
from shoal.runtime.transport import tls


class TorchP2P:
    """P2P over torch's group; `ranks` are the participants, by their numbers there. Another tag is another connection."""

    def __init__(self, group: Native, ranks: list[int] | None = None, *, tag: int = 0) -> None:
        self._group, self._tag = group, tag
        self._ranks = ranks if ranks is not None else list(range(group.num_workers))
        self.rank, self.num_ranks = self._ranks.index(group.rank), len(self._ranks)

    def swap(self, to: int, outgoing: Tensor, source: int, incoming: Tensor) -> None:
        self.wait(self.receive(source, incoming), self.send(to, outgoing))

    def send(self, to: int, tensor: Tensor) -> Any:
        return self._start(dist.isend, f"sending to rank {self._ranks[to]}", tensor, self._ranks[to])

    def receive(self, source: int, tensor: Tensor) -> Any:
        return self._start(
            dist.irecv, f"receiving from rank {self._ranks[source]}", tensor, self._ranks[source]
        )

    def _start(self, act: Callable[..., Any], operation: str, tensor: Tensor, peer: int) -> Any:
        if not tensor.numel():
            return None
        with self._group.during(operation):
            # As bytes: gloo supports only some dtypes; NCCL supports all, and bytes too.
            return operation, act(tensor.view(torch.uint8), peer, tag=self._tag)

    def wait(self, *works: Any) -> None:
        for work in works:
            if work is not None:
                # Without a time-out of its own: gloo aborts a send or a receive whose wait was too short.
                # The thread that waits for the sum checks the connections meanwhile.
                with self._group.during(work[0]):
                    work[1].wait()


def open_exchange(job: Job, group: Native) -> Reducer:
    """Build the reducer of a new view over its group. Collective."""
    if job.num_workers == 1:
        return group
    group.scatters_rows = job.num_hosts > 1
    placed = placement.of_job(job)
    reducer = _automatic(job, group) if job.exchange == "auto" else _named(job, group)
    # For devices that can exchange directly, torch's own is the fastest; the others work in host memory.
    if placed.accelerator is None or (
        placement.groups_on_devices(job) and job.exchange in ("auto", "native")
    ):
        return reducer
    return HostStaged(reducer)


def _automatic(job: Job, group: Native) -> Reducer:
    rule = job.exchange_rule or exchange_rule.built_in(
        num_workers=job.num_workers, num_hosts=job.num_hosts, processor=platform.machine()
    )
    parts = [(most, _named(replace(job, exchange=name), group)) for most, name in exchange_rule.parse(rule)]
    is_one = len(parts) == 1 and placement.of_job(job).accelerator is None
    return parts[0][1] if is_one else BySize(group, parts)


def _named(job: Job, group: Native) -> Reducer:
    if job.exchange == "native":
        return group
    if job.tls:
        from shoal.collectives.tls_ring import TlsRing  # needs ssl, which a job on one host does not

        return TlsRing(job, group, tls.mine())
    made = EXCHANGES[job.exchange].load()
    if isinstance(made, type):
        reducer: Reducer = made.open(job, group)  # type: ignore[attr-defined]  # a class of the registry has it
        return reducer
    p2p = TorchP2P(group)
    return Threaded(group, lambda flat: made(p2p, flat))
