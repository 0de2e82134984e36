"""One chunk of dense parameters on a server, and the user's own torch.optim class over it.

Every chunk has an optimizer object of its own, so slots come, go and are
restored alone. What torch does with groups, steps and parameters without
gradient is what happens here. Where the optimizer treats every element alone,
parts that lie side by side are one parameter to it: a step over sixty small
tensors takes torch longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from shoal.ps.dense_plan import ELEMENT_WISE, num_elements, torch_dtype
from shoal.ps.server.dense_memory import DenseMemory
from shoal.runtime.transport.messages.client_server import ChunkSpec, Settings

State = Mapping[int, Mapping[str, torch.Tensor]]
"""By part, then by key."""


@dataclass(slots=True)
class _Run:
    """Parts that are one parameter to the optimizer."""

    numbers: list[int]
    tensor: torch.Tensor
    start: int
    """Its first element in the chunk."""


class Chunk:
    """Elements in one piece, parts as views of it, and an optimizer over runs of them.

    A run is cut into its parts for good once they differ in more than their
    elements: in having a gradient, or in what their state says of steps.
    """

    def __init__(
        self,
        spec: ChunkSpec,
        kind: type[torch.optim.Optimizer],
        groups: Sequence[Settings],
        memory: DenseMemory | tuple[torch.Tensor, tuple[int, int]],
    ) -> None:
        """In new memory, or in that of the chunk it stands for from now on."""
        self.spec, self.kind, self.groups = spec, kind, groups
        sizes = [num_elements(part) for part in spec.parts]
        self.flat, self.place = (
            memory.alloc(sum(sizes), torch_dtype(spec.dtype)) if isinstance(memory, DenseMemory) else memory
        )
        views = torch.split(self.flat, sizes)
        self.parts = [view.view(part.shape) for view, part in zip(views, spec.parts, strict=True)]
        self._sum: torch.Tensor | None = None
        # Groups without a part in this chunk are left out, so the optimizer's own list is shorter.
        self._numbers = sorted({part.group for part in spec.parts})
        self._run_over(self._together() if kind.__name__ in ELEMENT_WISE else self._apart())

    def sum_memory(self) -> torch.Tensor:
        """Where gradients are added."""
        if self._sum is None:
            self._sum = torch.empty_like(self.flat)
        return self._sum

    def update(self, grad: torch.Tensor, unused: Sequence[int], settings: Mapping[int, Settings]) -> None:
        """One step of the optimizer; parts that are `unused` have no gradient."""
        for number, group in zip(self._numbers, self.optimizer.param_groups, strict=True):
            if number in settings:
                group.update(_plain(settings[number]))
        without = frozenset(unused)
        if any(0 < len(without.intersection(run.numbers)) < len(run.numbers) for run in self._runs):
            self._cut()
        for run in self._runs:
            piece = grad[run.start : run.start + run.tensor.numel()]
            run.tensor.grad = None if run.numbers[0] in without else piece.view(run.tensor.shape)
        try:
            self.optimizer.step()
        finally:
            for run in self._runs:
                run.tensor.grad = None

    def state(self) -> list[tuple[int, str, torch.Tensor]]:
        """(part, key, tensor), by part and key."""
        found: list[tuple[int, str, torch.Tensor]] = []
        for run in self._runs:
            held = [
                (key, value)
                for key, value in sorted(self.optimizer.state.get(run.tensor, {}).items())
                if isinstance(value, torch.Tensor)
            ]
            at = 0
            for number in run.numbers:
                part = self.parts[number]
                for key, value in held:
                    is_whole = len(run.numbers) > 1 and value.dim() > 0
                    mine = value[at : at + part.numel()].view(part.shape) if is_whole else value
                    found.append((number, key, mine))
                at += part.numel()
        return found

    def set_state(self, state: State) -> None:
        """Go on from what `state` gave, under whatever chunking."""
        if not all(self._is_alike(run, state) for run in self._runs):
            self._cut()
        for run in self._runs:
            given = [state[number] for number in run.numbers if number in state]
            if len(run.numbers) == 1:
                together = [dict(each) for each in given]
            else:
                together = (
                    [{key: _joined([each[key] for each in given]) for key in given[0]}] if given else []
                )
            if together:
                self.optimizer.state[run.tensor] = together[0]

    def take_settings(self, other: Chunk) -> None:
        """Have the hyper-parameters of another chunk's last update."""
        for mine, theirs in zip(self.optimizer.param_groups, other.optimizer.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    # ---- parts that are one parameter -----------------------------------------------------------

    def _apart(self) -> list[list[int]]:
        return [[number] for number in range(len(self.parts))]

    def _together(self) -> list[list[int]]:
        """Neighbours of one group. Not those of no dimension: their state could not be told from a count of steps."""

        def of(number: int) -> tuple[int, int]:
            part = self.spec.parts[number]
            return part.group, -1 if part.shape else number

        return [list(numbers) for _, numbers in groupby(range(len(self.parts)), of)]

    def _run_over(self, runs: list[list[int]]) -> None:
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + part.numel())
        self._runs = [
            _Run(
                numbers,
                self.parts[numbers[0]]
                if len(numbers) == 1
                else self.flat[starts[numbers[0]] : starts[numbers[-1] + 1]],
                starts[numbers[0]],
            )
            for numbers in runs
        ]
        by_group: dict[int, list[torch.Tensor]] = {}
        for run in self._runs:
            by_group.setdefault(self.spec.parts[run.numbers[0]].group, []).append(run.tensor)
        make: Any = self.kind  # every class of torch.optim has defaults for the rest
        self.optimizer: torch.optim.Optimizer = make(
            [{"params": by_group[number], **_plain(self.groups[number])} for number in self._numbers]
        )

    def _cut(self) -> None:
        """From now on every part is a parameter of its own."""
        if all(len(run.numbers) == 1 for run in self._runs):
            return
        before: dict[int, dict[str, torch.Tensor]] = {}
        for number, key, value in self.state():
            before.setdefault(number, {})[key] = value.clone()
        settings = [
            {k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups
        ]
        self._run_over(self._apart())
        for group, same in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(same)
        self.set_state(before)

    def _is_alike(self, run: _Run, state: State) -> bool:
        """Whether its parts' state can be one: all have it or none, and the same numbers where it is not by element."""
        if len(run.numbers) == 1 or not any(number in state for number in run.numbers):
            return True
        if not all(number in state for number in run.numbers):
            return False
        first, *others = (state[number] for number in run.numbers)
        return all(
            each.keys() == first.keys()
            and all(value.dim() or torch.equal(value, first[key]) for key, value in each.items())
            for each in others
        )


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in values]) if values[0].dim() else values[0]


def _plain(settings: Settings) -> dict[str, Any]:
    # Pairs such as betas travel as lists; optimizers unpack either, but compare and save tuples.
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
