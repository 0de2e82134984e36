"""What a rank of a pipeline holds of the model: its own stages; of the others nothing but names and shapes.

Parameters and buffers of other stages become meta tensors in the user's own
module, so names, shapes and the optimizer's groups stay those of the whole
model on every rank. Pieces are brought to rank 0 one tensor at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.strategies.protocol import Piece
from shoal.strategies.sharded_tensors import whole


def let_go(modules: Iterable[nn.Module]) -> None:
    """Keep names and shapes of these modules' tensors, and nothing else."""
    made: dict[int, Tensor] = {}  # what was shared stays shared
    for root in modules:
        for module in root.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    if id(parameter) not in made:
                        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                        made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    if id(buffer) not in made:
                        made[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
                    module._buffers[name] = made[id(buffer)]


def own_pieces(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Those that are on this rank."""
    return (piece for piece in pieces if not piece.tensor.is_meta)


def pieces_on_rank_0(
    pieces: Sequence[Piece],
    *,
    rank: int,
    leaders: Sequence[int],
    gather: Callable[[Tensor], list[Tensor]],
    device: torch.device,
) -> Iterator[Piece]:
    """Whole pieces of all stages, on rank 0; the others get empty ones. `leaders`: the rank that tells for each stage.

    Collective: every rank goes through all of them, in the same order.
    """
    about = json.dumps([[piece.name, list(piece.global_shape), str(piece.tensor.dtype)] for piece in pieces])
    everybody = gather(torch.frombuffer(bytearray(about.encode()), dtype=torch.uint8))
    for leader in leaders:
        for number, (name, shape, dtype) in enumerate(json.loads(bytes(everybody[leader].tolist()))):
            kind = getattr(torch, dtype.removeprefix("torch."))
            tensor = torch.empty(0, dtype=kind)
            if rank == leader:
                tensor = pieces[number].tensor
                if rank != 0:
                    dist.send(tensor.to(device).contiguous(), 0)
                    tensor = torch.empty(0, dtype=kind)
            elif rank == 0:
                tensor = torch.empty(shape, dtype=kind, device=device)
                dist.recv(tensor, leader)
            yield Piece(name, tensor, tuple(shape), (0,) * len(shape))


def norm_over_stages(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, device: torch.device
) -> float:
    """The norm of the gradient of all parameters, of which each rank of the group has some.

    Added up in the model's order, so that it does not depend on where the cuts are.
    """
    squares = torch.zeros(len(parameters), dtype=torch.float64, device=device)
    for number, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is not None:
            dense = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
            squares[number] = float(whole(torch.linalg.vector_norm(dense))) ** 2
    dist.all_reduce(squares, group=group)
    return math.sqrt(sum(squares.tolist()))


class OwnReader(Mapping[str, Tensor]):
    """Whole tensors by name, without the optimizer's of other stages; of the weights of those, nothing is read."""

    def __init__(self, tensors: Mapping[str, Tensor], elsewhere: Mapping[str, Tensor]) -> None:
        """`elsewhere`: parameters and buffers that this rank does not hold, by the names of their pieces."""
        self._tensors, self._elsewhere = tensors, elsewhere

    def __getitem__(self, name: str) -> Tensor:
        return self._elsewhere[name] if name in self._elsewhere else self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tensors if not is_of(name, self._elsewhere))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def is_of(piece: str, elsewhere: Mapping[str, Tensor]) -> bool:
    """Whether a piece of the optimizer's state belongs to one of these parameters."""
    if not piece.startswith("optimizer/"):
        return False
    return f"model/{piece.removeprefix('optimizer/').rpartition('/')[0]}" in elsewhere
