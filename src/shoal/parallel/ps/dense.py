"""The dense parameters of a model on their way to and from the servers, chunk by chunk.

A chunk's gradient leaves as soon as backward has made the last of it; a pull
is copied into the parameters, which are this process's own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.cluster.coordinator.slot_map import NUM_SLOTS, evenest_seed, place
from shoal.ps.client.pulls import DenseLook, DensePull
from shoal.ps.client.server_group import Group
from shoal.ps.client.step import Step
from shoal.ps.dense_plan import plan_chunks
from shoal.ps.server.dense import as_flat
from shoal.runtime.transport.messages.client_server import ChunkSpec


@dataclass(slots=True)
class _Chunk:
    spec: ChunkSpec
    dtype: torch.dtype
    numel: int
    views: list[tuple[nn.Parameter, int, int, int]] = field(default_factory=list)
    """Per part: its parameter, first element there, first element here, elements."""

    missing: int = 0
    """Parameters whose gradient backward has not made yet."""

    is_sent: bool = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class DensePart:
    """Every trained parameter that is not rows."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter, int]],
        *,
        optimizer: str,
        num_servers: int,
        num_copies: int,
        first_chunk: int,
        is_exact: bool,
    ) -> None:
        """`named`: name, parameter and its group in the optimizer. In exact steps weights are read where they lie."""
        self._is_exact = is_exact
        described = [(name, tuple(p.shape), _name(p.dtype), group) for name, p, group in named]
        specs = plan_chunks(
            described, optimizer=optimizer, slots_by_server=slots_at_launch(num_servers, num_copies)
        )
        parameters = {name: parameter for name, parameter, _ in named}
        self._chunks: list[_Chunk] = []
        self._of_parameter: dict[int, list[_Chunk]] = {}
        for spec in specs:
            spec = _numbered(spec, first_chunk + spec.number)
            chunk = _Chunk(spec, getattr(torch, spec.dtype), 0)
            for part in spec.parts:
                parameter = parameters[part.parameter]
                numel = torch.Size(part.shape).numel()
                chunk.views.append((parameter, part.offset, chunk.numel, numel))
                chunk.numel += numel
                self._of_parameter.setdefault(id(parameter), []).append(chunk)
            self._chunks.append(chunk)
        self._step: Step | None = None
        self.newest = 0
        """The most updates that anything pulled so far had behind it."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            for _, parameter, _ in named
        ]

    @property
    def specs(self) -> list[ChunkSpec]:
        """As they are declared."""
        return [chunk.spec for chunk in self._chunks]

    # ---- pushing --------------------------------------------------------------------------------

    def arm(self, step: Step) -> None:
        """Gradients that backward makes from now on belong to this step and are its last."""
        self._step = step
        for chunk in self._chunks:
            chunk.missing, chunk.is_sent = len({id(view[0]) for view in chunk.views}), False

    def send_rest(self) -> None:
        """Backward is over: what it did not reach has no gradient on this worker."""
        for chunk in self._chunks:
            if not chunk.is_sent:
                self._send(chunk)
        self._step = None

    def disarm(self) -> None:
        """Whatever backward makes now is nobody's."""
        self._step = None

    def _ready(self, parameter: Tensor) -> None:
        if self._step is None:
            return
        for chunk in self._of_parameter[id(parameter)]:
            chunk.missing -= 1
            if not chunk.missing:
                self._send(chunk)

    def _send(self, chunk: _Chunk) -> None:
        assert self._step is not None
        chunk.is_sent = True
        memory = self._step.chunk_memory(chunk.spec.number, chunk.spec.slot, chunk.nbytes)
        flat = torch.frombuffer(memory, dtype=chunk.dtype)
        unused = []
        for number, (parameter, offset, at, numel) in enumerate(chunk.views):
            here = flat[at : at + numel]
            gradient = parameter.grad
            if gradient is None:
                here.zero_()
                unused.append(number)
            else:
                if gradient.layout is torch.sparse_coo:
                    gradient = gradient.to_dense()
                here.copy_(gradient.reshape(-1)[offset : offset + numel])
        self._step.push_dense(chunk.spec.number, unused)

    # ---- pulling --------------------------------------------------------------------------------

    def pull(self, clock: int) -> DensePull | DenseLook:
        """All chunks, as an operation to start and finish."""
        chunks = [(c.spec.number, c.spec.slot, c.nbytes) for c in self._chunks]
        return DenseLook(chunks, clock=clock) if self._is_exact else DensePull(chunks, clock=clock)

    @torch.no_grad()
    def take(self, pull: DensePull | DenseLook) -> None:
        """Copy what was pulled into the parameters."""
        self.newest = max(self.newest, pull.updates)
        for chunk in self._chunks:
            flat = as_flat(pull.arrived[chunk.spec.number], chunk.dtype)
            for parameter, offset, at, numel in chunk.views:
                target = parameter.detach().view(-1) if parameter.is_contiguous() else None
                if target is not None:
                    target[offset : offset + numel].copy_(flat[at : at + numel])
                else:
                    whole = parameter.detach().reshape(-1).clone()
                    whole[offset : offset + numel] = flat[at : at + numel]
                    parameter.copy_(whole.view(parameter.shape))
        pull.release()

    def flat(self, chunk: ChunkSpec) -> Tensor:
        """A chunk's elements, from the parameters of this process."""
        found = next(each for each in self._chunks if each.spec.number == chunk.number)
        return torch.cat(
            [p.detach().reshape(-1)[offset : offset + numel].cpu() for p, offset, _, numel in found.views]
        )

    def refresh(self, group: Group, clock: int) -> None:
        """Pull everything and wait for it."""
        pull = self.pull(clock)
        group.run(pull)
        self.take(pull)


def slots_at_launch(num_servers: int, num_copies: int) -> list[list[int]]:
    """The slots of each server as the job began: what chunks are balanced over, whoever is there by now."""
    names = [f"server-{number}" for number in range(num_servers)]
    weights = dict.fromkeys(names, 1.0)
    seed = evenest_seed(weights, [1.0] * NUM_SLOTS, num_copies=num_copies) if num_servers > 1 else 0
    placed = place(weights, num_copies=num_copies, seed=seed)
    return [[slot for slot, holders in enumerate(placed) if holders[0] == name] for name in names]


def _numbered(spec: ChunkSpec, number: int) -> ChunkSpec:
    import msgspec

    return msgspec.structs.replace(spec, number=number)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's settings as they travel."""
    return {
        key: float(value)
        if isinstance(value, Tensor)
        else [float(each) for each in value]
        if isinstance(value, (tuple, list))
        else value
        for key, value in group.items()
        if key != "params"
    }
