"""Chunks put together to whole parameters with their optimizer state, and cut again, maybe otherwise.

Pure. So a checkpoint knows parameters and not how they were cut: it loads on
any number of servers. A tensor of state that has an element per element of
its part is cut as the part is; any other (a step counter) is the same in all
parts of a parameter. A parameter whose rule looks at it as a whole is in one
part, and so is all of its state, whatever its shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from shoal.errors import CheckpointError
from shoal.ps.dense_plan import num_elements
from shoal.ps.server.dense import StateEntry
from shoal.runtime.transport.messages.client_server import ChunkSpec, DensePart

Read: TypeAlias = tuple[torch.Tensor, list[StateEntry], list[torch.Tensor]]
"""What DenseStore.read gives."""


@dataclass(slots=True)
class WholeParameter:
    """A parameter, flat, and its state: flat too where it goes by element."""

    elements: torch.Tensor
    by_element: dict[str, torch.Tensor] = field(default_factory=dict)
    alike: dict[str, torch.Tensor] = field(default_factory=dict)
    """State that is not cut."""


def put_together(chunks: Iterable[tuple[ChunkSpec, Read]]) -> dict[str, WholeParameter]:
    """The parameters of these chunks, by name. Their own memory."""
    given = list(chunks)
    sizes: dict[str, int] = {}
    for spec, _ in given:
        for part in spec.parts:
            end = part.offset + num_elements(part)
            sizes[part.parameter] = max(sizes.get(part.parameter, 0), end)
    wholes: dict[str, WholeParameter] = {}
    for spec, (flat, entries, tensors) in given:
        pieces = torch.split(flat, [num_elements(part) for part in spec.parts])
        for part, piece in zip(spec.parts, pieces, strict=True):
            size = sizes[part.parameter]
            whole = wholes.setdefault(part.parameter, WholeParameter(flat.new_zeros(size)))
            whole.elements[_run(part)] = piece
        for (number, key, _, _), tensor in zip(entries, tensors, strict=True):
            part = spec.parts[number]
            whole = wholes[part.parameter]
            if not _goes_by_element(part, tensor):
                whole.alike[key] = tensor.clone()
                continue
            if key not in whole.by_element:
                whole.by_element[key] = tensor.new_zeros(sizes[part.parameter])
            whole.by_element[key][_run(part)] = tensor.reshape(-1)
    return wholes


def cut(spec: ChunkSpec, wholes: Mapping[str, WholeParameter]) -> Read:
    """This chunk of those parameters: what DenseStore.write takes."""
    pieces, entries, tensors = [], [], []
    for number, part in enumerate(spec.parts):
        whole = wholes.get(part.parameter)
        if whole is None or whole.elements.numel() < part.offset + num_elements(part):
            have = "is not there" if whole is None else f"has {whole.elements.numel()} elements"
            raise CheckpointError(
                f"chunk {spec.number} needs elements {part.offset} to {part.offset + num_elements(part)} of parameter "
                f"'{part.parameter}', which {have}. Nothing was loaded; the model must be the one that was saved."
            )
        pieces.append(whole.elements[_run(part)])
        state = {key: tensor[_run(part)].reshape(part.shape) for key, tensor in whole.by_element.items()}
        for key, tensor in sorted({**state, **whole.alike}.items()):
            entries.append((number, key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
            tensors.append(tensor)
    return torch.cat(pieces), entries, tensors


def _goes_by_element(part: DensePart, tensor: torch.Tensor) -> bool:
    # A parameter of one element and no dim has state of the same shape of either kind; alike is right for it.
    return (
        list(tensor.shape) == list(part.shape)
        and math.prod(part.shape) == tensor.numel()
        and tensor.dim() > 0
    )


def _run(part: DensePart) -> slice:
    return slice(part.offset, part.offset + num_elements(part))
