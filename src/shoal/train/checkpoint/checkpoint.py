"""Checkpoints: a directory of safetensors files and a manifest with their hashes.

`write_checkpoint` lays pieces out in files and describes them; `open_checkpoint`
trusts nothing before sizes and hashes match the manifest. Pieces are whole
tensors or parts of one: a reader gets whole tensors by name, whoever wrote
them. Steps are in the names of the directories (`step-000000500`), so that
nothing needs to be read to put them in order. Atomic writes are storage.py's.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointWriteFailed,
    ConfigError,
    NoCheckpoint,
)
from shoal.parallel.protocol import Piece
from shoal.runtime.serialization import from_plain, to_plain
from shoal.train.checkpoint import manifest, safetensors_file
from shoal.train.checkpoint.manifest import FileRecord, Manifest, PieceRecord
from shoal.train.checkpoint.storage import Place, remove, step_name, step_of, writing

MODEL = "model/"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was found whole."""

    path: str
    """As it was asked for."""

    progress: dict[str, Any]
    """What `write_checkpoint` was given beside the tensors."""

    pieces: Pieces
    """Whole tensors by piece name, read when asked for."""


def write_checkpoint(
    url: str | os.PathLike[str],
    pieces: Iterable[Piece],
    *,
    progress: dict[str, Any],
    previous: str | None = None,
) -> None:
    """Write a checkpoint to `url`, whole or not at all.

    A piece "model/<key>" goes to model.safetensors as <key>, and so on by the
    first word of its name. `previous` is named as safe when writing fails.
    """
    held = list(pieces)  # all of it, before the disk can fail: giving pieces may be collective
    layout = _lay_out(held)
    plain = to_plain(progress, "progress")
    place = Place.at(url)
    # Libraries for remote storage raise what they like; a local disk raises OSError, and the rest is our own mistake.
    refusals: type[Exception] = OSError if place.local is not None else Exception
    try:
        with writing(place) as open_file:
            files = {}
            for name, file in layout.files.items():
                with open_file(name) as sink:
                    written = safetensors_file.write(sink, file.tensors, {"format": "pt", **file.aliases})
                files[name] = FileRecord(written.num_bytes, written.sha256)
            text = manifest.encode(
                Manifest(
                    manifest.FORMAT, version("shoal"), str(torch.__version__), plain, files, layout.records
                )
            )
            with open_file(manifest.NAME) as sink:
                sink.write(text)
    except refusals as error:
        reason = _reason(error, place, sum(piece.tensor.nbytes for piece in held))
        raise CheckpointWriteFailed(path=place.url, reason=reason, previous=previous) from error


def _why_none(names: list[str]) -> str:
    """Why a directory that holds `names` is no checkpoint."""
    steps = [name for name in names if name.startswith("step-")]
    if steps:
        return f"it holds checkpoints and is none itself; name one of them, the newest is {steps[-1]}"
    if "checkpoints" in names:
        return "it is the directory of a run; name one of those in its checkpoints directory"
    return f"it has no {manifest.NAME}, so it was never finished" if names else "it does not exist"


def open_checkpoint(url: str | os.PathLike[str], *, verify: bool = True) -> Checkpoint:
    """The checkpoint at `url`, once every file has the size and the hash that were written.

    `verify=False` reads no file but the manifest and looks at the sizes alone:
    for a rank that reads what another has just verified.
    """
    place = Place.at(url)
    if not place.has(manifest.NAME):
        raise NoCheckpoint(path=place.url, reason=_why_none(place.names()))
    try:
        with place.open(manifest.NAME) as source:
            text = source.read()
    except OSError as error:
        raise CheckpointDamaged(path=place.url, problem=f"{manifest.NAME} cannot be read: {error}") from error
    described = manifest.decode(text, place.url)
    for name, record in described.files.items():
        problem = _problem(place, name, record, verify)
        if problem is not None:
            raise CheckpointDamaged(path=place.url, problem=problem)
    return Checkpoint(place.url, from_plain(described.progress), Pieces(place, described))


def check_fits(
    expected: Mapping[str, tuple[tuple[int | None, ...], torch.dtype]],
    reader: Mapping[str, Tensor],
    path: str,
) -> None:
    """Refuse a checkpoint of another model. `expected` is by key of the model's state_dict; None in a shape is any size."""
    found = {name.removeprefix(MODEL) for name in reader if name.startswith(MODEL)}
    shapes = []
    for key, (shape, dtype) in expected.items():
        if key in found:
            saved_shape, saved_dtype = _described(reader, MODEL + key)
            if dtype != saved_dtype or not _is_like(saved_shape, shape):
                shapes.append(
                    f"{key} is {_shown(saved_shape, saved_dtype)} in the checkpoint and {_shown(shape, dtype)} in the model"
                )
    missing = [key for key in expected if key not in found]
    unexpected = sorted(found - expected.keys())
    if missing or unexpected or shapes:
        raise CheckpointMismatch(path=path, missing=missing, unexpected=unexpected, shapes=shapes)


class Pieces(Mapping[str, Tensor]):
    """Whole tensors by piece name. Each look-up reads from the files into fresh memory."""

    def __init__(self, place: Place, described: Manifest) -> None:
        self._place = place
        self._num_bytes = {name: record.bytes for name, record in described.files.items()}
        self._entries: dict[str, dict[str, safetensors_file.Entry]] = {}
        self._parts: dict[str, list[PieceRecord]] = {}
        for record in described.pieces:
            self._parts.setdefault(record.name, []).append(record)

    def __getitem__(self, name: str) -> Tensor:
        parts = self._parts[name]
        if len(parts) == 1 and parts[0].shape == parts[0].global_shape:
            return self._read(parts[0])
        shape, dtype = self.describe(name)
        whole = torch.empty(shape, dtype=dtype)
        covered = torch.zeros(shape, dtype=torch.bool)
        for part in parts:
            there = tuple(slice(at, at + size) for at, size in zip(part.offset, part.shape, strict=True))
            whole[there] = self._read(part)
            covered[there] = True
        if not covered.all():
            raise CheckpointDamaged(
                path=self._place.url,
                problem=f"its parts of {name} leave {int((~covered).sum())} of {covered.numel()} numbers out",
            )
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the whole tensor, without reading it."""
        record = self._parts[name][0]
        return tuple(record.global_shape), safetensors_file.dtype_of(record.dtype)

    def _read(self, record: PieceRecord) -> Tensor:
        try:
            with self._place.open(record.file) as source:
                if record.file not in self._entries:
                    self._entries[record.file] = safetensors_file.read_header(
                        source, self._num_bytes[record.file]
                    )
                entry = self._entries[record.file][record.key]
                if (list(entry.shape), entry.dtype) != (
                    record.shape,
                    safetensors_file.dtype_of(record.dtype),
                ):
                    raise ValueError(f"'{record.key}' is not what {manifest.NAME} says")
                return safetensors_file.read_tensor(source, entry)
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointDamaged(
                path=self._place.url, problem=f"{record.file} cannot be read: {error}"
            ) from error


@dataclass(frozen=True, slots=True)
class _File:
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    """Keys that are another key's tensor; kept in the file's metadata, where other readers of the format look."""


@dataclass(frozen=True, slots=True)
class _Layout:
    files: dict[str, _File]
    records: list[PieceRecord]


def _lay_out(pieces: list[Piece]) -> _Layout:
    """Assign each piece a file and a key. Tied weights, one memory under two names, are stored once."""
    layout = _Layout({}, [])
    stored: dict[Any, str] = {}
    for piece in pieces:
        tensor = piece.tensor
        word, _, key = piece.name.partition("/")
        name = f"{word}.safetensors"
        file = layout.files.setdefault(name, _File({}, {}))
        if tuple(tensor.shape) != piece.global_shape:
            key = f"{key}@{','.join(map(str, piece.offset))}"
        memory = (name, tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in stored:
            file.aliases[key] = stored[memory]
            key = stored[memory]
        elif key in file.tensors:
            raise ValueError(f"two pieces are called {piece.name}")
        else:
            file.tensors[key] = tensor
            stored[memory] = key
        layout.records.append(
            PieceRecord(
                name=piece.name,
                file=name,
                key=key,
                dtype=safetensors_file.dtype_code(tensor.dtype, piece.name),
                shape=list(tensor.shape),
                global_shape=list(piece.global_shape),
                offset=list(piece.offset),
            )
        )
    return layout


def _problem(place: Place, name: str, record: FileRecord, verify: bool) -> str | None:
    """The problem with a file, if any."""
    if not place.has(name):
        return f"{name} is missing"
    try:
        num_bytes = place.fs.size(place.file(name))
        if num_bytes != record.bytes:
            return f"{name} has {num_bytes} bytes, {record.bytes} were written"
        if verify:
            with place.open(name) as source:
                found = hashlib.file_digest(source, "sha256").hexdigest()
            if found != record.sha256:
                return f"{name} has changed since it was written: its sha256 is {found[:12]}..., not {record.sha256[:12]}..."
    except OSError as error:
        return f"{name} cannot be read: {error}"
    return None


def _reason(error: Exception, place: Place, needed_bytes: int) -> str:
    said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    if place.local is None or not isinstance(error, OSError) or error.errno != errno.ENOSPC:
        return said
    there = next((path for path in place.local.parents if path.exists()), Path("/"))
    free_bytes = shutil.disk_usage(there).free
    return f"{said} ({needed_bytes / 2**20:.1f} MiB are needed and {free_bytes / 2**20:.1f} MiB are free in {there})"


def _described(reader: Mapping[str, Tensor], name: str) -> tuple[tuple[int, ...], torch.dtype]:
    if isinstance(reader, Pieces):
        return reader.describe(name)
    tensor = reader[name]
    return tuple(tensor.shape), tensor.dtype


def _is_like(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        size in (None, given) for given, size in zip(shape, wanted, strict=True)
    )


def _shown(shape: tuple[int | None, ...], dtype: torch.dtype) -> str:
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    return f"{str(dtype).removeprefix('torch.')}[{sizes}]"


def step_path(directory: str | os.PathLike[str], step: int) -> str:
    return Place.at(directory).child(step_name(step)).url


def list_checkpoints(directory: str | os.PathLike[str]) -> list[str]:
    """The paths of the finished ones, oldest step first."""
    return [place.url for place in _steps(directory) if place.has(manifest.NAME)]


def newest_checkpoint(
    directory: str | os.PathLike[str], on_damaged: Callable[[CheckpointDamaged], None]
) -> Checkpoint | None:
    """The newest that is whole; every newer one that is not is told to `on_damaged`. None when there is none."""
    for place in reversed(_steps(directory)):
        try:
            return open_checkpoint(place.url)
        except CheckpointDamaged as damage:
            on_damaged(damage)
        except NoCheckpoint as error:
            on_damaged(CheckpointDamaged(path=place.url, problem=error.reason))
    return None


def prune(directory: str | os.PathLike[str], keep_last: int, protect: Iterable[str] = ()) -> list[str]:
    """Remove all but the last `keep_last` and those in `protect`; return what went.

    The newest that is whole always stays: the one before is given up only
    once a newer one has been read back and verified.
    """
    if keep_last < 1:
        raise ConfigError(
            f"keep_last must be at least 1, got {keep_last}: a run without a checkpoint cannot go on."
        )
    kept = {os.fspath(path).rstrip("/").rpartition("/")[2] for path in protect}
    places = [place for place in _steps(directory)[:-keep_last] if _name(place) not in kept]
    if not places:
        return []
    newest = newest_checkpoint(directory, on_damaged=lambda damage: None)
    if newest is None:
        return []  # nothing is whole, so nothing is spare
    going = [place for place in places if place.url != newest.path]
    for place in going:
        remove(place)
    return [place.url for place in going]


def set_aside(directory: str | os.PathLike[str], *, after_step: int) -> str | None:
    """Move checkpoints of later steps into a folder `before-<n>` of their own; return it, None when there are none.

    Whoever has just saved a step cannot have written a later one: those are
    of a run that began here earlier. Left in place, they would be the newest.
    """
    place = Place.at(directory)
    names = place.names()
    later = [name for name in names if (step := step_of(name)) is not None and step > after_step]
    if not later:
        return None
    aside = place.child(next(name for n in count(1) if (name := f"before-{n}") not in names))
    place.fs.makedirs(aside.path, exist_ok=True)
    for name in later:
        place.fs.mv(place.child(name).path, aside.child(name).path, recursive=True)
    return aside.url


def _steps(directory: str | os.PathLike[str]) -> list[Place]:
    place = Place.at(directory)
    found = [(step, name) for name in place.names() if (step := step_of(name)) is not None]
    return [place.child(name) for _, name in sorted(found)]


def _name(place: Place) -> str:
    return place.url.rpartition("/")[2]
