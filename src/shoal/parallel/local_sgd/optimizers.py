"""Checkpoint pieces of local SGD: each worker's own optimizer, and the outer one that all have alike.

optimizer/<parameter>/<key>                   the average of all: for other strategies, other numbers of workers
workers/<rank>/optimizer/<parameter>/<key>    each worker's own
workers/number                                how many they were
outer/<parameter>                             the outer optimizer's momentum
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from shoal.parallel.optimizer_state import PREFIX as OPTIMIZER
from shoal.parallel.optimizer_state import optimizer_pieces
from shoal.parallel.protocol import Piece

_WORKERS, _NUMBER, _OUTER, _MOMENTUM = "workers/", "workers/number", "outer/", "momentum_buffer"


def pieces(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, rank: int, num_workers: int
) -> Iterator[Piece]:
    """The state of one worker's optimizer, and the number of workers."""
    yield _piece(_NUMBER, torch.tensor(num_workers))
    for piece in optimizer_pieces(model, optimizer):
        yield _piece(f"{_WORKERS}{rank}/{piece.name}", piece.tensor)


def gathered(
    own: Iterator[Piece],
    gather: Callable[[Tensor | None], list[Tensor]],
    *,
    rank: int,
    num_workers: int,
) -> Iterator[Piece]:
    """Every worker's pieces, and their average; on rank 0, one tensor after the other. Collective.

    A worker may lack some: a parameter that none of its samples used has no state there.
    """
    mine = {
        piece.name.removeprefix(f"{_WORKERS}{rank}/"): piece.tensor for piece in own if piece.name != _NUMBER
    }
    raw = torch.frombuffer(bytearray(json.dumps(list(mine)).encode()), dtype=torch.uint8)
    names = dict.fromkeys(name for part in gather(raw) for name in json.loads(bytes(part.tolist())))
    if rank == 0 and names:
        yield _piece(_NUMBER, torch.tensor(num_workers))
    for name in names:
        rows = gather(mine.get(name))
        if rank:
            continue
        there = {worker: row for worker, row in enumerate(rows) if row.numel()}
        for worker, row in there.items():
            yield _piece(f"{_WORKERS}{worker}/{name}", row)
        if there:
            yield _piece(name, _average(list(there.values())))


def of_rank(saved: Mapping[str, Tensor], rank: int, num_workers: int) -> Mapping[str, Tensor]:
    """The pieces as a worker is to load them: with its own optimizer, where it was saved by as many workers."""
    own = f"{_WORKERS}{rank}/"
    if _NUMBER not in saved or int(saved[_NUMBER]) != num_workers:
        return _Renamed(saved, {name: name for name in saved if not name.startswith(_WORKERS)})
    names = {name: name for name in saved if not name.startswith((_WORKERS, OPTIMIZER))}
    return _Renamed(saved, names | {name.removeprefix(own): name for name in saved if name.startswith(own)})


def outer_pieces(model: nn.Module, outer: torch.optim.Optimizer) -> Iterator[Piece]:
    """The outer optimizer's momentum, where it has any."""
    for name, parameter in model.named_parameters():
        momentum = outer.state[parameter].get(_MOMENTUM) if parameter in outer.state else None
        if momentum is not None:
            yield _piece(_OUTER + name, momentum)


def load_outer(model: nn.Module, outer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Load what `outer_pieces` gave; without it the outer optimizer begins anew."""
    outer.state.clear()
    for name, parameter in model.named_parameters():
        if _OUTER + name in saved:
            outer.state[parameter][_MOMENTUM] = torch.empty_like(parameter, requires_grad=False).copy_(
                saved[_OUTER + name]
            )


class _Renamed(Mapping[str, Tensor]):
    """Tensors under other names, read when asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], names: dict[str, str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _average(rows: list[Tensor]) -> Tensor:
    if not rows[0].is_floating_point():
        return rows[0]
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total / len(rows)


def _piece(name: str, tensor: Tensor) -> Piece:
    return Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())
