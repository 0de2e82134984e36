"""Tables of `shoal.ps.connect()` in a checkpoint of the model that is trained on the same servers.

Such a checkpoint has the sequence marks of pushes, so a resumed script's repeated pushes are not
applied again; the rows that they produced must be in it too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.embedding.row_statistics import num_columns
from shoal.embedding.rules import rule_named
from shoal.errors import CheckpointMismatch
from shoal.parallel.protocol import Piece, PieceReader
from shoal.parallel.state import GONE
from shoal.ps.client.bulk_transfer import RowStamps, read_changes, write_evicted, write_rows
from shoal.ps.client.kv import declared_tables
from shoal.ps.client.server_group import Group
from shoal.runtime.transport.messages.client_server import TableSpec

_TABLES = "tables/"
_BLOCK_ROWS = 65536


def named_pieces(group: Group, changes: RowStamps | None) -> Iterator[Piece]:
    """Keys, whole rows, and (updates, evictions) of every table that this process declared by name."""
    for spec in declared_tables():
        (keys, values, state, *numbers), is_whole = read_changes(
            group, spec, f"{_TABLES}{spec.name}", changes
        )
        whole = np.concatenate([values, state], axis=1)
        of_keys = "" if is_whole else _keys(spec)
        if not is_whole:
            is_there = np.ones(len(keys), np.bool_)
            if spec.policy is not None:
                is_there = state[:, state.shape[1] - num_columns(spec.policy)] > 0
            yield _piece(GONE + of_keys, keys[~is_there])
            keys, whole = keys[is_there], whole[is_there]
        yield _piece(_keys(spec), keys, of_keys)
        yield _piece(f"{_TABLES}{spec.name}.rows", whole, of_keys)
        yield _piece(f"{_TABLES}{spec.name}.numbers", np.array(numbers, np.int64))


def load_named(group: Group, saved: PieceReader) -> None:
    """Set the rows of tables declared here to those that were saved."""
    tables = {spec.name: spec for spec in declared_tables()}
    for piece in saved.tensors:
        if not piece.startswith(_TABLES) or not piece.endswith(".keys"):
            continue
        name = piece.removeprefix(_TABLES).removesuffix(".keys")
        spec = tables.get(name)
        if spec is None:
            print(
                f"note: the checkpoint {saved.path} has the table '{name}', which the script did not declare before it trained: its "
                "rows were not restored",
                file=sys.stderr,
                flush=True,
            )
            continue
        rows = saved.tensors[f"{_TABLES}{name}.rows"].numpy()
        width = spec.dim + rule_named(spec.rule).state_dim(spec.dim) + num_columns(spec.policy)
        if rows.shape[1] != width or rows.dtype != np.dtype(spec.dtype):
            problem = f"table '{name}' has {rows.shape[1]} {rows.dtype} by row in the checkpoint and {width} {spec.dtype} here"
            raise CheckpointMismatch(path=saved.path, missing=[], unexpected=[], shapes=[problem])
        step, num_evicted = saved.tensors[f"{_TABLES}{name}.numbers"].tolist()
        keys = saved.tensors[piece].numpy()
        for first in range(0, len(keys), _BLOCK_ROWS):
            block = slice(first, first + _BLOCK_ROWS)
            values, state = (
                np.ascontiguousarray(part) for part in (rows[block, : spec.dim], rows[block, spec.dim :])
            )
            write_rows(group, spec, keys[block], values, state if state.shape[1] else None, step)
        if num_evicted:
            write_evicted(group, spec, num_evicted, step)


def _keys(spec: TableSpec) -> str:
    return f"{_TABLES}{spec.name}.keys"


def _piece(name: str, array: NDArray[Any], changed_keys: str = "") -> Piece:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), changed_keys)
