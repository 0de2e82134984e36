"""`powersgd`: each matrix as the product of two thin ones, found by one step of power iteration from the last (Vogels 2019).

Both factors are sums over the ranks, so they travel by all-reduce whatever
the number of ranks. What the product misses is added to the next step's
gradient; vectors travel as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.collectives.compression.compressor import Gradient, Traffic
from shoal.collectives.reducer import Reducer


class _Matrix(NamedTuple):
    """A gradient seen as a matrix, in its bucket."""

    view: Tensor
    key: str
    start: Tensor


class _Work(NamedTuple):
    flat: Tensor
    before: Tensor
    matrices: list[_Matrix]
    left: list[Tensor]
    sums: list[Any]
    plain: Tensor
    places: list[tuple[int, int]]
    number: int


class PowerSgd:
    """Matrices by their largest `rank` directions."""

    def __init__(self, rank: int = 4) -> None:
        self._rank = rank
        self.traffic = Traffic()
        self._residuals: dict[int, Tensor] = {}
        self._right: dict[str, Tensor] = {}
        self._pending: dict[int, Tensor] = {}
        self._pending_right: dict[str, Tensor] = {}

    def start(self, number: int, flat: Tensor, layout: Sequence[Gradient], reducer: Reducer) -> Any:
        """Begin to sum the left factors, and what is not worth factors."""
        if number in self._residuals:
            flat.add_(self._residuals[number].to(flat.device))  # a checkpoint brings them to the host
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
        return _Work(flat, flat.clone(), matrices, left, sums, plain, places, number)

    def finish(self, work: Any, reducer: Reducer, operation: str) -> None:
        """The left factors give the right ones, and both the sum."""
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
        """What was missed is added the next time, and the next search begins where this one ended."""
        self._residuals |= self._pending
        self._right |= self._pending_right
        self.abandon()

    def abandon(self) -> None:
        """As if the step had not been."""
        self._pending, self._pending_right = {}, {}

    def state(self) -> dict[str, Tensor]:
        """What was missed, by bucket; and the right factors, which all ranks have alike."""
        residuals = {str(number): residual for number, residual in sorted(self._residuals.items())}
        return residuals | {f"same/{key}": right for key, right in sorted(self._right.items())}

    def load(self, state: Mapping[str, Tensor], num_ranks_before: int) -> None:
        """Take it over."""
        self._residuals = {
            int(name): value.clone() for name, value in state.items() if not name.startswith("same/")
        }
        self._right = {
            name.removeprefix("same/"): value.clone()
            for name, value in state.items()
            if name.startswith("same/")
        }

    def _start_of(self, key: str, columns: int, like: Tensor) -> Tensor:
        if key in self._right and self._right[key].shape == (columns, self._rank):
            return self._right[key].to(like.device)
        # The same on every rank, or the factors would be of nothing.
        generator = torch.Generator().manual_seed(sum(key.encode()) * 1_000_003 + columns)
        return torch.randn(columns, self._rank, generator=generator).to(like)
