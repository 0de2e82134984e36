"""What is done to each layer of a model that is cut over `tp`, as rows of a table; and why a layer alone cannot be cut."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from shoal.parallel.tensor_parallel.packing import Packing

NORMS = (nn.LayerNorm, nn.RMSNorm)
"""Treat each position of a sequence alone, where they normalise over the last dim."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is done to one layer."""

    layer: str
    style: str
    """colwise, rowwise, heads (an attention), colwise alone (its output is gathered), sequence (runs on a part of it), or replicated."""

    reason: str


@dataclass(slots=True)
class Plan:
    """What is done to every layer that has parameters."""

    degree: int
    is_sequence: bool = False
    """Whether what lies between pairs holds a part of the sequence."""

    rows: dict[str, Row] = field(default_factory=dict)
    inside: set[str] = field(default_factory=set)
    """Layers without parameters that lie within a pair: they work on a part of the features."""

    parameters_inside: list[str] = field(default_factory=list)
    """Parameters that a forward uses within a pair."""

    packed: dict[str, int] = field(default_factory=dict)
    """Parameters that hold so many blocks of rows (q, k and v, say), of each of which every rank has a part."""

    taken_apart: set[str] = field(default_factory=set)
    """Modules whose forward takes the output of a layer with blocks apart."""

    given_inside: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules whose inputs of these names, such as a mask, are used within a pair; or whose result may hold a part of it."""

    closed: set[str] = field(default_factory=set)
    """Layers cut by columns whose output, in parts, only goes to one cut by rows."""

    fixed: set[str] = field(default_factory=set)
    """Layers that are read past their own forward: they are cut by heads, with the attention they belong to, or not at all."""

    def add(self, layer: str, style: str, reason: str) -> None:
        """Decide about a layer, once."""
        self.rows.setdefault(layer, Row(layer, style, reason))

    def is_settled(self, layer: str) -> bool:
        """Whether nobody may decide otherwise any more: it is cut, or the user has spoken."""
        row = self.rows.get(layer)
        if row is None:
            return False
        return row.style != "replicated" or row.reason.startswith("tensor_plan") or layer in self.fixed

    @property
    def num_cut(self) -> int:
        """Layers of which each rank holds a part."""
        return sum(row.style not in ("replicated", "sequence") for row in self.rows.values())

    def packing_of(self, model: nn.Module) -> Packing:
        """What follows for the state of the model."""
        parameters = dict(model.named_parameters())
        return Packing(
            self.degree, dict(self.packed), {name: parameters[name].shape[0] for name in self.packed}
        )

    def table(self) -> str:
        """For people: a line per layer."""
        width = max((len(name) for name in self.rows), default=0)
        lines = [f"  {row.layer:<{width}}  {row.style:<13} {row.reason}" for row in self.rows.values()]
        between = ", between its pairs a part of the sequence on each" if self.is_sequence else ""
        return "\n".join([f"tensor parallel over {self.degree}{between}:", *lines])


def why_not(module: nn.Module, style: str, degree: int) -> str | None:
    """Why a layer cannot be cut; None where it can."""
    if style == "sequence":
        return why_not_along(module)
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
        return "its rows are updated one by one"
    if isinstance(module, (nn.Linear, nn.Embedding)) and "weight" not in module._parameters:
        return "its weight is computed from other parameters"
    if isinstance(module, nn.Linear):
        size = module.out_features if style == "colwise" else module.in_features
        what = "outputs" if style == "colwise" else "inputs"
    elif isinstance(module, nn.Embedding):
        size = module.embedding_dim if style == "colwise" else module.num_embeddings
        what = "columns" if style == "colwise" else "rows"
    else:
        return f"it is a {type(module).__name__}, and linear layers and embeddings can be cut"
    return None if size % degree == 0 else f"its {size} {what} cannot be divided by {degree}"


def why_not_along(module: nn.Module) -> str | None:
    """Why a layer cannot run on a part of the sequence."""
    if isinstance(module, _DropoutNd):
        return None
    if not isinstance(module, NORMS):
        return f"it is a {type(module).__name__}, and dropout, LayerNorm and RMSNorm can run on a part of the sequence"
    dims = len(module.normalized_shape)
    return None if dims == 1 else f"it normalises over {dims} dims, of which the sequence may be one"


def tied_parameters(model: nn.Module) -> set[int]:
    """Parameters that more than one layer holds, by identity."""
    seen: set[int] = set()
    tied: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def is_tied(module: nn.Module, tied: set[int]) -> bool:
    """Whether a layer holds one of them."""
    return any(id(parameter) in tied for parameter in module.parameters(recurse=False))
