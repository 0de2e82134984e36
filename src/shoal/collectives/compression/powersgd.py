"""`powersgd` compression: each matrix as the product of two thin ones, by one step of power iteration from the last (Vogels 2019).

Both factors are sums over the ranks, so they are all-reduced whatever the
number of ranks. The error of the product is added to the next step's gradient
(error feedback); vectors are sent uncompressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.collectives.compression import ErrorFeedback, Gradient
from shoal.collectives.reducer import Reducer


class _Matrix(NamedTuple):
    """A gradient seen as a matrix, in its bucket."""

    view: Tensor
    key: str
    start: Tensor


class _PowerSgdWork(NamedTuple):
    flat: Tensor
    before: Tensor
    matrices: list[_Matrix]
    left: list[Tensor]
    sums: list[Any]
    plain: Tensor
    places: list[tuple[int, int]]
    number: int


class PowerSgd(ErrorFeedback):
    """Matrices by their largest `rank` directions."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self._rank = rank
        self._right: dict[str, Tensor] = {}  # equal on all ranks; the start of the next iteration
        self._pending_right: dict[str, Tensor] = {}

    def start(self, number: int, flat: Tensor, layout: Sequence[Gradient], reducer: Reducer) -> Any:
        """Start summing the left factors, and the gradients too small to factor."""
        self._add_residual(number, flat)
        matrices, places = [], []
        for index, gradient in enumerate(layout):
            numel = torch.Size(gradient.shape).numel()
            rows = gradient.shape[0] if gradient.shape else 1
            columns = numel // max(rows, 1)
            if min(rows, columns) > 1 and self._rank * (rows + columns) < numel:
                view = flat[gradient.offset : gradient.offset + numel].view(rows, columns)
                key = f"{number}.{index}"
                matrices.append(_Matrix(view, key, self._start_of(key, columns, flat)))
            else:
                places.append((gradient.offset, numel))
        left = [matrix.view @ matrix.start for matrix in matrices]
        plain = torch.cat([flat[at : at + length] for at, length in places]) if places else flat[:0]
        sums = [reducer.start_all_reduce(factor) for factor in left]
        sums.append(reducer.start_all_reduce(plain))
        self.traffic.count(flat, *left, *(matrix.start for matrix in matrices), plain)
        return _PowerSgdWork(flat, flat.clone(), matrices, left, sums, plain, places, number)

    def finish(self, work: Any, reducer: Reducer, operation: str) -> None:
        """Compute the right factors from the left ones, and the sum from both."""
        for sum_ in work.sums:
            reducer.finish(sum_, operation)
        mine = []
        for matrix, left in zip(work.matrices, work.left, strict=True):
            left.copy_(torch.linalg.qr(left.float()).Q.to(left.dtype))
            mine.append(matrix.view.T @ left)
        right = [each.clone() for each in mine]
        for sum_ in [reducer.start_all_reduce(each) for each in right]:
            reducer.finish(sum_, operation)
        residual = torch.zeros_like(work.before)
        begin = work.flat.data_ptr()
        for matrix, left, own, whole in zip(work.matrices, work.left, mine, right, strict=True):
            at = (matrix.view.data_ptr() - begin) // work.flat.element_size()
            missed = matrix.view - left @ own.T
            residual[at : at + missed.numel()] = missed.reshape(-1)
            matrix.view.copy_(left @ whole.T)
            self._pending_right[matrix.key] = whole
        at = 0
        for offset, length in work.places:
            work.flat[offset : offset + length] = work.plain[at : at + length]
            at += length
        self._pending[work.number] = residual

    def commit(self) -> None:
        self._right |= self._pending_right
        super().commit()

    def abandon(self) -> None:
        super().abandon()
        self._pending_right = {}

    def state(self) -> dict[str, Tensor]:
        return super().state() | {f"same/{key}": right for key, right in sorted(self._right.items())}

    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load({k: v for k, v in state.items() if not k.startswith("same/")})
        same = {name: value for name, value in state.items() if name.startswith("same/")}
        self._right = {name.removeprefix("same/"): value.clone() for name, value in same.items()}

    def _start_of(self, key: str, columns: int, like: Tensor) -> Tensor:
        if key in self._right and self._right[key].shape == (columns, self._rank):
            return self._right[key].to(like.device)
        # Equal on every rank, or the factors would be meaningless.
        generator = torch.Generator().manual_seed(sum(key.encode()) * 1_000_003 + columns)
        return torch.randn(columns, self._rank, generator=generator).to(like)
