"""Saved tables of `shoal.ps.connect()`: rows in safetensors files, the later ones incremental.

manifest.json names the valid files, with their hashes, and is replaced last: a kill leaves the
previous save or the new one, complete. Servers stamp rows that change, so a second save to the same
directory reads and writes only those. If another server answers by then, its slots are read
completely; when the files have twice the bytes of the rows, everything is rewritten.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.embedding.row_statistics import num_columns
from shoal.errors import CheckpointDamaged, CheckpointMismatch, CheckpointWriteFailed, NoCheckpoint
from shoal.ps.client.bulk_transfer import read_rows, write_evicted, write_rows
from shoal.ps.client.server_group import Group
from shoal.runtime.failpoints import failpoint
from shoal.runtime.transport.messages import client_server as msg

MANIFEST = "manifest.json"
FILE_BYTES = 64 << 20  # of one file, and so of what is in memory at a time
SPARE_BYTES = 1 << 20  # that files may have beyond twice the rows


class SavedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of rows."""

    name: str
    sha256: str
    num_bytes: int


class SavedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table: how it was declared, its updates so far, and by slot up to where its stamps were read."""

    spec: msg.TableSpec
    step: int
    num_bytes: int  # of all its rows
    read_to: list[tuple[str, int]]
    num_evicted: int = 0


class TablesManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that counts in a directory of saved tables."""

    tables: dict[str, SavedTable]
    files: list[SavedFile]
    generation: int = 1
    format: int = 1


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Size of a finished save."""

    num_rows: int
    num_bytes: int
    is_incremental: bool


def save_tables(group: Group, tables: Sequence[msg.TableSpec], path: Path) -> SaveResult:
    """Write all rows, or those that changed since the last save to this directory."""
    before = _read_manifest(path) if (path / MANIFEST).exists() else None
    known = before.tables if before is not None else {}
    is_more = before is not None and all(
        name in known and known[name].spec == spec for name, spec in ((table.name, table) for table in tables)
    )
    if before is not None and is_more:
        rows_bytes = sum(table.num_bytes for table in known.values())
        is_more = sum(file.num_bytes for file in before.files) <= 2 * rows_bytes + SPARE_BYTES
    generation = before.generation + 1 if before is not None else 1
    try:
        path.mkdir(parents=True, exist_ok=True)
        _remove_others(path, before)
        group.tell(lambda view: msg.Hold(view, True))
        try:
            writer = _Writer(path, generation)
            saved = _save_all(group, tables, known if is_more else {}, writer)
            if is_more and not _same_stamps(saved, known):
                # Stamped by other servers: the saved rows may be of another run, with rows that do not
                # exist here.
                is_more, writer = False, _Writer(path, generation)
                saved = _save_all(group, tables, {}, writer)
        finally:
            group.tell(lambda view: msg.Hold(view, False))
        writer.end()
        failpoint("worker: part of a checkpoint written")
        kept = before.files if before is not None and is_more else []
        manifest = TablesManifest({**(known if is_more else {}), **saved}, [*kept, *writer.files], generation)
        _replace(path / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        _remove_others(path, manifest)
    except OSError as error:
        previous = str(path) if before is not None else None
        raise CheckpointWriteFailed(
            path=str(path), reason=error.strerror or str(error), previous=previous
        ) from None
    return SaveResult(writer.num_rows, sum(file.num_bytes for file in writer.files), is_more)


def _save_all(
    group: Group, tables: Sequence[msg.TableSpec], known: dict[str, SavedTable], writer: _Writer
) -> dict[str, SavedTable]:
    return {table.name: _save_table(group, table, known.get(table.name), writer) for table in tables}


def _same_stamps(saved: dict[str, SavedTable], known: dict[str, SavedTable]) -> bool:
    """Whether every slot was read on by the stamps of the save before."""
    return all(
        now == before
        for name, table in saved.items()
        for (now, _), (before, _) in zip(table.read_to, known[name].read_to, strict=True)
    )


def _save_table(group: Group, table: msg.TableSpec, before: SavedTable | None, writer: _Writer) -> SavedTable:
    read_to, step, num_bytes, num_evicted = [], before.step if before is not None else 0, 0, 0
    since = before.read_to if before is not None else [("", 0)] * NUM_SLOTS
    for each in read_rows(group, table, is_tracked=True, since=since):
        width = table.dim + each.state.shape[1]
        writer.add(table.name, each.keys, np.concatenate([each.values, each.state], axis=1))
        read_to.append(each.stamp)
        step = max(step, each.step)
        num_bytes += each.num_rows * (8 + width * each.values.itemsize)
        num_evicted += each.num_evicted
    return SavedTable(table, step, num_bytes, read_to, num_evicted)


class _Writer:
    """Rows into files of a bounded size."""

    def __init__(self, path: Path, generation: int) -> None:
        self._path, self._generation = path, generation
        self._waiting: dict[str, list[tuple[NDArray[np.int64], NDArray[Any]]]] = {}
        self._num_waiting = 0
        self.files: list[SavedFile] = []
        self.num_rows = 0

    def add(self, table: str, keys: NDArray[np.int64], whole: NDArray[Any]) -> None:
        if len(keys):
            self._waiting.setdefault(table, []).append((keys, whole))
            self._num_waiting += keys.nbytes + whole.nbytes
            self.num_rows += len(keys)
        if self._num_waiting >= FILE_BYTES:
            self.end()

    def end(self) -> None:
        if not self._waiting:
            return
        tensors = {}
        for table, parts in self._waiting.items():
            tensors[f"{table}/keys"] = np.concatenate([keys for keys, _ in parts])
            tensors[f"{table}/rows"] = np.concatenate([whole for _, whole in parts])
        data = save(tensors)
        name = f"rows-{self._generation:06}-{len(self.files):03}.safetensors"
        _replace(self._path / name, data)
        self.files.append(SavedFile(name, hashlib.sha256(data).hexdigest(), len(data)))
        self._waiting, self._num_waiting = {}, 0


def load_tables(group: Group, tables: Sequence[msg.TableSpec], path: Path) -> list[str]:
    """Set the rows of these tables to those that were saved; the names of tables that were."""
    if not (path / MANIFEST).exists():
        raise NoCheckpoint(path=str(path), reason=f"it has no {MANIFEST}")
    manifest = _read_manifest(path)
    found = {table.name: table for table in tables if table.name in manifest.tables}
    for name, table in found.items():
        saved = manifest.tables[name].spec
        if _columns(saved) != _columns(table):
            shapes = [
                f"table '{name}' was saved with {_described(saved)}, and is declared with {_described(table)}"
            ]
            raise CheckpointMismatch(path=str(path), missing=[], unexpected=[], shapes=shapes)
    for file in manifest.files:  # before any row is set
        _check(path, file)
    for file in manifest.files:
        for name, keys, whole in _rows_in(path, file):
            if name in found:
                table, order = found[name], np.argsort(keys)
                values, state = whole[order, : table.dim], whole[order, table.dim :]
                _write(group, table, keys[order], values, state, manifest.tables[name].step)
    for name, table in found.items():
        if manifest.tables[name].num_evicted:
            write_evicted(group, table, manifest.tables[name].num_evicted, manifest.tables[name].step)
    return sorted(found)


def _columns(table: msg.TableSpec) -> tuple[object, ...]:
    return table.dim, table.dtype, table.rule, num_columns(table.policy)


def _described(table: msg.TableSpec) -> str:
    statistics = f", {num_columns(table.policy)} statistics" if table.policy is not None else ""
    return f"{table.dim} {table.dtype} by row, the rule {table.rule}{statistics}"


BLOCK_BYTES = 4 << 20


def _write(
    group: Group, table: msg.TableSpec, keys: Any, values: NDArray[Any], state: NDArray[Any], step: int
) -> None:
    num_rows = max(1, BLOCK_BYTES // (8 + table.dim * values.itemsize))
    for first in range(0, len(keys), num_rows):
        part = slice(first, first + num_rows)
        some = np.ascontiguousarray(state[part]) if state.shape[1] else None
        write_rows(group, table, keys[part], np.ascontiguousarray(values[part]), some, step)


def _rows_in(path: Path, file: SavedFile) -> Iterator[tuple[str, NDArray[np.int64], NDArray[Any]]]:
    try:
        tensors = load((path / file.name).read_bytes())
        for name in sorted(tensors):
            if name.endswith("/keys"):
                table = name.removesuffix("/keys")
                yield table, tensors[name], tensors[f"{table}/rows"]
    except (OSError, KeyError, SafetensorError) as error:
        raise CheckpointDamaged(path=str(path), problem=f"{file.name}: {error}") from None


def _check(path: Path, file: SavedFile) -> None:
    try:
        with open(path / file.name, "rb") as source:
            digest = hashlib.file_digest(source, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointDamaged(path=str(path), problem=f"{file.name}: {error.strerror}") from None
    if digest != file.sha256:
        raise CheckpointDamaged(
            path=str(path), problem=f"the bytes of {file.name} are not those that were written"
        )


def _read_manifest(path: Path) -> TablesManifest:
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=TablesManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointDamaged(path=str(path), problem=f"{MANIFEST}: {error}") from None
    if any(len(table.read_to) != NUM_SLOTS for table in manifest.tables.values()):
        raise CheckpointDamaged(path=str(path), problem=f"{MANIFEST}: not all slots are in it")
    for file in manifest.files:
        if os.path.basename(file.name) != file.name:
            raise CheckpointDamaged(path=str(path), problem=f"{MANIFEST}: it names a file elsewhere")
    return manifest


def _remove_others(path: Path, manifest: TablesManifest | None) -> None:
    """Remove files of a save that was killed, and of those that were written anew."""
    named = {file.name for file in manifest.files} if manifest is not None else set()
    for file in path.glob("rows-*.safetensors*"):
        if file.name not in named:
            file.unlink(missing_ok=True)


def _replace(target: Path, data: bytes) -> None:
    """The file whole, or as it was: synced before it has its name."""
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
