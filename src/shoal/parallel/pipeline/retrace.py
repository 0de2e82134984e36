"""Retrace the forward for batch shapes the partition was not made for.

A forward that branches on a shape (`if x.shape[1] > 8`, `range(length)`) is
traced again for every shape, and cut before the same layers. All ranks of a
pipeline read the same batch, so each comes to the same segments by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from shoal.data.slice import Slice
from shoal.data.tree import leaves
from shoal.errors import ShapeDecides, ShapeLeadsElsewhere
from shoal.parallel.pipeline import p2p
from shoal.parallel.pipeline.partition import (
    Partition,
    branches_on_shape,
    decisions_of,
    layer_starts,
    live_at,
    segments_of,
)
from shoal.parallel.pipeline.plan import PipelineCut
from shoal.parallel.pipeline.stage import ModelStage, StageRole, num_held, roles_from
from shoal.parallel.pipeline.trace import TracedForward, attribute, forget

_MAX_SHAPES = 512  # for which roles are kept

Roles = Sequence[StageRole]
"""The roles of all stages, in their order."""


class RetracedRoles:
    """The roles of all stages by the shape of a batch."""

    def __init__(
        self,
        partition: Partition,
        cut: PipelineCut,
        all_stages: Sequence[ModelStage],
        own: Mapping[int, ModelStage],
    ) -> None:
        """`all_stages` are read and not kept; this rank's `own` stages are given the modules that new roles need."""
        self._model, self._meta_copy, self._opened, self._own = (
            partition.model,
            partition.meta_copy,
            partition.opened,
            own,
        )
        self._first = {
            True: [stage.train_role for stage in all_stages],
            False: [stage.evaluation_role for stage in all_stages],
        }
        traced = {True: partition.train, False: partition.evaluation}
        self._decides = {training: branches_on_shape(each) for training, each in traced.items()}
        self._decisions = {training: decisions_of(each) for training, each in traced.items()}
        self._node_texts = {training: each.node_texts() for training, each in traced.items()}
        self._held = [set(stage.targets) for stage in all_stages]
        seen: dict[str, int] = {}
        numbered = []
        for layer in cut.layers:
            seen[layer.name] = seen.get(layer.name, 0) + 1
            numbered.append((layer.name, seen[layer.name]))
        self._begins = [numbered[begin] for begin in cut.begins]
        self._found: dict[object, Roles] = {}
        self._num_cuts = 0

    def roles(self, piece: Slice, *, training: bool) -> Roles:
        """The roles for a micro-batch; refuses a shape whose forward needs layers of other stages."""
        if self._meta_copy is None or not self._decides[training]:
            return self._first[training]
        shapes = [tuple(leaf.shape[1:]) for leaf in leaves(piece.inputs) if isinstance(leaf, Tensor)]
        key = (training, num_held(piece), *shapes)
        if key not in self._found:
            if len(self._found) >= _MAX_SHAPES:
                self._found.clear()
            self._found[key] = self._find(piece, training=training)
        return self._found[key]

    def _find(self, piece: Slice, *, training: bool) -> Roles:
        assert self._meta_copy is not None
        decisions = self._decisions[training]
        if decisions is not None:
            with contextlib.suppress(ShapeDecides):
                decisions(list(leaves(piece.inputs)))
                return self._first[training]
        traced = self._meta_copy.trace(
            piece.inputs, lambda path, module: path in self._opened, training=training
        )
        if traced is None or traced.node_texts() == self._node_texts[training]:
            return self._first[training]
        try:
            return self._cut(traced, piece, training=training)
        finally:
            forget(traced)

    def _cut(self, traced: TracedForward, piece: Slice, *, training: bool) -> Roles:
        shapes = [tuple(leaf.shape) for leaf in leaves(piece.inputs) if isinstance(leaf, Tensor)]
        constants = self._renamed(traced)
        begins = self._begins_in(traced, shapes)
        segments = segments_of(traced, begins, training=training)
        for number, segment in enumerate(segments):
            for path in segment.targets:
                if path not in self._held[number] and path not in constants and self._has_tensors(path):
                    raise ShapeLeadsElsewhere(
                        shapes=shapes,
                        why=f"it needs '{path}' in stage {number}, and that is {self._home_of(path)}",
                    )
        for number, begin in enumerate(begins[1:], start=1):
            values = [node.meta["example"] for node in live_at(traced, begin)]
            odd = p2p.why_not(values)
            if odd is None and training and not any(tensor.requires_grad for tensor in p2p.pack(values)[0]):
                odd = "nothing that is trained"
            if odd is not None:
                raise ShapeLeadsElsewhere(shapes=shapes, why=f"{odd} would go to stage {number}")
        for number, stage in self._own.items():
            stage.held.hold(self._model, segments[number].targets, constants)
        return roles_from(segments)

    def _begins_in(self, traced: TracedForward, shapes: Sequence[tuple[int, ...]]) -> list[int]:
        """Node numbers of the same layers; where one is skipped, of the first layer that the stage before does not have."""
        marks = layer_starts(traced)
        at_name = {(name, nth): at for at, (_, name, nth) in enumerate(marks)}
        begins = [0]
        for number, wanted in enumerate(self._begins[1:], start=1):
            rest = range(begins[-1] + 1, len(marks))
            others = (at for at in rest if marks[at][1] not in self._held[number - 1])
            at = at_name.get(wanted) or next(others, None)
            if at is None or at not in rest:
                raise ShapeLeadsElsewhere(shapes=shapes, why=f"no layer is left for stage {number}")
            begins.append(at)
        return [0, *(marks[at][0] for at in begins[1:])]

    def _renamed(self, traced: TracedForward) -> dict[str, Tensor]:
        """Constants, renamed so that no two traces share a name."""
        names = {name: f"{name}_{self._num_cuts}" for name in traced.constants}
        self._num_cuts += 1
        for node in traced.graph.nodes:
            if node.op == "get_attr" and node.target in names:
                node.target = names[str(node.target)]
        return {names[name]: tensor for name, tensor in traced.constants.items()}

    def _has_tensors(self, path: str) -> bool:
        assert self._meta_copy is not None
        held = attribute(self._meta_copy.model, path)
        if isinstance(held, nn.Module):
            return any(True for _ in (*held.parameters(), *held.buffers()))
        return True

    def _home_of(self, path: str) -> str:
        home = next((number for number, held in enumerate(self._held) if path in held), None)
        return "in no stage, since the first batch did not need it" if home is None else f"in stage {home}"
