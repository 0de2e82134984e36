"""Pipeline state: each rank holds its own stages; of the others, names and shapes only.

Parameters and buffers of other stages become meta tensors in the user's own
module, so names, shapes and the optimizer's groups stay those of the whole
model on every rank. Pieces are brought to rank 0 one tensor at a time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.collectives.reducer import gather_json
from shoal.errors import ConfigError
from shoal.parallel.protocol import Piece
from shoal.parallel.state import parameter_of, whole


@dataclass(frozen=True, slots=True)
class Ownership:
    """The ranks that hold each tensor of a model cut into stages, by name; all aliases of one are alike."""

    ranks: dict[str, tuple[int, ...]]
    """Ranks of the pipeline, in the order of their first stage with the tensor. The first one saves it."""

    rank: int
    """This rank's place in the pipeline."""

    def has(self, name: str) -> bool:
        return self.rank in self.ranks.get(name, ())

    def saves(self, piece: str) -> bool:
        return self.ranks.get(parameter_of(piece), (self.rank,))[0] == self.rank


def ownership_of(model: nn.Module, stages: Sequence[nn.Module], num_ranks: int, rank: int) -> Ownership:
    """The owners of all tensors, stages assigned to ranks in turn. Tensors that no stage uses belong to the first rank."""
    users: dict[int, list[int]] = {}
    for number, stage in enumerate(stages):
        for tensor in [*stage.parameters(), *stage.buffers()]:
            users.setdefault(id(tensor), []).append(number % num_ranks)
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return Ownership({name: tuple(dict.fromkeys(users.get(id(tensor), [0]))) for name, tensor in named}, rank)


def drop_foreign_tensors(model: nn.Module, ownership: Ownership) -> None:
    made: dict[int, Tensor] = {}  # shared tensors stay shared
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta and not ownership.has(prefix + name):
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and not ownership.has(prefix + name):
                if id(buffer) not in made:
                    made[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
                module._buffers[name] = made[id(buffer)]


@contextlib.contextmanager
def following(model: nn.Module, stage: nn.Module) -> Iterator[None]:
    """Give the model, under all their names, the parameters that replace a stage's inside the context."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    before = [
        (module, name, id(parameter))
        for module in stage.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    yield
    for module, name, held in before:
        for owner, key in places.get(held, ()):
            owner._parameters[key] = module._parameters[name]


def refuse_shared_on_one_rank(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Refuse a weight shared by two stages of one rank: FSDP shards each stage by itself, and a weight only once."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: set[int] = set()
    for stage in stages:
        own = {id(parameter) for parameter in stage.parameters()}
        for shared in seen & own:
            raise ConfigError(
                f"two stages of one worker share '{names[shared]}', and their weights are sharded stage by stage. Nothing was "
                "trained; use --schedule 1f1b or gpipe, where a worker has one stage, or pp without dp and fsdp."
            )
        seen |= own


class TiedGradients:
    """Weights used by stages of several ranks, each of which computes a part of their gradient."""

    def __init__(self, model: nn.Module, ownership: Ownership, group: dist.ProcessGroup) -> None:
        named = dict(model.named_parameters())
        self._rank, self._group = ownership.rank, group
        self._ranks = dist.get_process_group_ranks(group)
        self._shared = [
            (named[name], ranks)
            for name, ranks in ownership.ranks.items()
            if len(ranks) > 1 and name in named and named[name].requires_grad and ownership.has(name)
        ]

    def sum(self) -> None:
        """Sum the gradient over the ranks that hold the weight, in the order of the stages."""
        for parameter, (first, *others) in self._shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                # Stages that use a weight in different ways leave gradients with different placements.
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            if self._rank != first:
                dist.send(gradient.contiguous(), self._ranks[first], group=self._group)
                received = torch.empty_like(gradient).contiguous()
                dist.recv(received, self._ranks[first], group=self._group)
                gradient.copy_(received)
                continue
            for other in others:
                part = torch.empty_like(gradient).contiguous()
                dist.recv(part, self._ranks[other], group=self._group)
                gradient.add_(part)
            for other in others:
                dist.send(gradient.contiguous(), self._ranks[other], group=self._group)


def own_pieces(pieces: Iterable[Piece], ownership: Ownership) -> Iterator[Piece]:
    return (piece for piece in pieces if not piece.tensor.is_meta and ownership.saves(piece.name))


def pieces_on_rank_0(
    pieces: Sequence[Piece],
    *,
    rank: int,
    leaders: Sequence[int],
    ties: Mapping[str, str],
    gather: Callable[[Tensor], list[Tensor]],
    device: torch.device,
) -> Iterator[Piece]:
    """Whole pieces of all stages, on rank 0; the others get empty ones. `leaders`: the rank that saves each stage.

    `ties`: further names of a tensor, to its first one; it is sent once, and is one memory.

    Collective: every rank goes through all of them, in the same order.
    """
    about = [[piece.name, list(piece.global_shape), str(piece.tensor.dtype)] for piece in pieces]
    everybody = gather_json(gather, about)
    kept: dict[str, Tensor] = {}
    for leader in leaders:
        for number, (name, shape, dtype) in enumerate(everybody[leader]):
            kind = getattr(torch, dtype.removeprefix("torch."))
            tensor = torch.empty(0, dtype=kind)
            if ties.get(name) in kept:
                tensor = kept[ties[name]]
            elif rank == leader:
                tensor = pieces[number].tensor
                if rank != 0:
                    dist.send(tensor.to(device).contiguous(), 0)
                    tensor = torch.empty(0, dtype=kind)
            elif rank == 0:
                tensor = torch.empty(shape, dtype=kind, device=device)
                dist.recv(tensor, leader)
            if name in ties.values():
                kept[name] = tensor
            yield Piece(name, tensor, tuple(shape), (0,) * len(shape))


def norm_over_stages(
    parameters: Mapping[str, nn.Parameter],
    ownership: Ownership,
    group: dist.ProcessGroup,
    device: torch.device,
) -> float:
    """The gradient norm over the parameters of all stages.

    Summed in the model's order, so that it does not depend on the cut.
    """
    squares = torch.zeros(len(parameters), dtype=torch.float64, device=device)
    for number, (name, parameter) in enumerate(parameters.items()):
        gradient = parameter.grad
        if gradient is not None and ownership.saves(name):
            dense = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
            squares[number] = float(whole(torch.linalg.vector_norm(dense))) ** 2
    dist.all_reduce(squares, group=group)
    return math.sqrt(sum(squares.tolist()))
