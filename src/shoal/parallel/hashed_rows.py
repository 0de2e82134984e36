"""Rows of HashEmbeddings, which are no parameters: trained in this process beside them, saved and loaded with them.

Pieces are named and ordered alike wherever the rows are: "model/<path>.keys"
and "model/<path>.rows" by increasing key, "optimizer/<path>.rows/<state>" in
the same order. Rows on servers are `served_model.py`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.embedding import HashEmbedding
from shoal.embedding.hash_embedding import rows_left_out
from shoal.embedding.row_source import LocalRows
from shoal.embedding.rules import RULES, rule_of_optimizer
from shoal.errors import ConfigError
from shoal.parallel.optimizer_state import PREFIX
from shoal.parallel.protocol import Piece, PieceReader

MODEL = "model/"


def hash_embeddings(model: nn.Module) -> dict[str, HashEmbedding]:
    """Those of a model, by the name of their rows in its state_dict."""
    return {
        f"{path}.rows" if path else "rows": module
        for path, module in model.named_modules()
        if isinstance(module, HashEmbedding)
    }


def keys_name(rows_name: str) -> str:
    """What the keys are called that belong to these rows."""
    return rows_name.removesuffix("rows") + "keys"


def cannot_follow(rows_name: str, why: str) -> ConfigError:
    """The refusal of an optimizer that has no rule for rows."""
    return ConfigError(
        f"the rows of the HashEmbedding '{layer_of(rows_name)}' cannot be trained by this optimizer: {why}. Nothing was "
        "trained; use SGD without momentum and weight decay, Adagrad without weight decay, or SparseAdam."
    )


def layer_of(rows_name: str) -> str:
    """The layer whose rows are called so."""
    return rows_name.removesuffix("rows").removesuffix(".") or "the model itself"


class HashedRows:
    """Those of one model in this process, trained by its optimizer: what a parameter's `grad` and `step()` are to it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._modules = optimizer, hash_embeddings(model)
        self._follow()

    def sum_of_squares(self) -> float:
        """Of all gradients that wait."""
        return sum(rows.sum_of_squares() for rows in self._sources())

    def apply(self, factor: float) -> None:
        """One update, with the optimizer's settings as they are now and the gradients times `factor`."""
        for rows in self._follow():
            rows.apply(factor)

    def drop_gradients(self) -> None:
        """Forget them: the step is left out."""
        for rows in self._sources():
            rows.drop_gradients()

    def _follow(self) -> list[LocalRows]:
        for name, module in self._modules.items():
            rule = rule_of_optimizer(type(self._optimizer).__name__, self._optimizer.param_groups[0])
            if isinstance(rule, str):
                raise cannot_follow(name, rule)
            if isinstance(module.source, LocalRows):
                module.source.train_by(*rule)
        return self._sources()

    def _sources(self) -> list[LocalRows]:
        found = [module.source for module in self._modules.values()]
        return [source for source in found if isinstance(source, LocalRows)]


# ---- pieces -------------------------------------------------------------------------------------------


def local_pieces(model: nn.Module) -> Iterator[Piece]:
    """The rows that are in this process, and their optimizer state."""
    for name, module in hash_embeddings(model).items():
        if isinstance(module.source, LocalRows):
            table = module.source.table
            keys, values, state = table.read_rows(np.arange(table.num_rows))
            yield from pieces_of(name, table.spec.rule, keys, values, state, table.step)


def pieces_of(
    name: str, rule: str, keys: NDArray[np.int64], values: NDArray[Any], state: NDArray[Any], step: int
) -> Iterator[Piece]:
    """One table, by increasing key, under the names that every strategy knows."""
    tensors = {MODEL + keys_name(name): torch.from_numpy(keys), MODEL + name: torch.from_numpy(values)}
    for key, columns in RULES[rule].state_columns(values.shape[1]).items():
        tensors[f"{PREFIX}{name}/{key}"] = torch.from_numpy(np.ascontiguousarray(state[:, columns]))
        tensors[f"{PREFIX}{name}/step"] = torch.tensor(float(step))
    for piece, tensor in tensors.items():
        yield Piece(piece, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def saved_table(name: str, pieces: PieceReader) -> tuple[NDArray[np.int64], NDArray[Any]] | None:
    """Keys and values as they were saved; None where they were not."""
    if MODEL + name not in pieces.tensors:
        return None
    keys, values = (pieces.tensors[MODEL + each].contiguous().numpy() for each in (keys_name(name), name))
    return keys, values


def saved_state(name: str, rule: str, saved: PieceReader | None) -> tuple[NDArray[Any] | None, int]:
    """State of rows as a rule keeps it, and the number of updates; None and 0 where it was not saved."""
    names = [f"{PREFIX}{name}/{key}" for key in RULES[rule].state]
    if saved is None or saved.optimizer_settings is None or not all(n in saved.tensors for n in names):
        return None, 0
    state = torch.cat([saved.tensors[each] for each in names], dim=1).numpy() if names else None
    step = saved.tensors.get(f"{PREFIX}{name}/step")
    return state, int(step) if step is not None else 0


def load_local(model: nn.Module, pieces: PieceReader) -> None:
    """Rows in this process become those that were saved, and no others."""
    for name, module in hash_embeddings(model).items():
        table, source = saved_table(name, pieces), module.source
        if table is None or not isinstance(source, LocalRows):
            continue
        if pieces.optimizer_settings is None:  # weights alone: the optimizer keeps what it has, here too
            source.replace_values(*table)
        else:
            state, step = saved_state(name, source.table.spec.rule, pieces)
            source.replace(*table, state, step)


def expected_shapes(model: nn.Module) -> dict[str, tuple[tuple[int | None, ...], torch.dtype]]:
    """Shape (None: any) and dtype of what a checkpoint has to hold of a model's rows, by key of its state_dict."""
    shapes: dict[str, tuple[tuple[int | None, ...], torch.dtype]] = {}
    for name, module in hash_embeddings(model).items():
        shapes[keys_name(name)] = ((None,), torch.int64)
        shapes[name] = ((None, module.embedding_dim), module.dtype)
    return shapes


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's state_dict without rows of HashEmbeddings: tensors of the model itself, no copies."""
    with rows_left_out():
        return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
