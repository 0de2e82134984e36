"""Checkpoints: a directory of safetensors files and a manifest with their hashes.

`write_checkpoint` lays pieces out in files and describes them; `open_checkpoint` trusts nothing
before sizes and hashes match the manifest. Pieces are whole tensors or parts of one: a reader gets
whole tensors by name, whatever the writers' sharding was. Steps are in the names of the directories
(`step-000000500`), so that ordering them needs no read. Atomic writes are storage.py's.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

import shoal
from shoal.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointWriteFailed,
    ConfigError,
    NoCheckpoint,
)
from shoal.parallel.protocol import PartReader, Piece
from shoal.parallel.state import CHANGED, GONE
from shoal.runtime.failpoints import failpoint
from shoal.runtime.serialization import from_plain, to_plain
from shoal.train.checkpoint import safetensors_file
from shoal.train.checkpoint.changes import MergedKeys, merged
from shoal.train.checkpoint.storage import (
    MANIFEST,
    Place,
    begin_together,
    end_together,
    remove,
    shared_temporary,
    step_name,
    step_of,
    write_together,
    writing,
)

MODEL = "model/"

_LOOK_EVERY_S = 0.02  # poll interval for the parts of other ranks


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint."""

    path: str
    """Path as it was asked for."""

    progress: dict[str, Any]
    """Values given to `write_checkpoint` beside the tensors."""

    pieces: Pieces
    """Whole tensors by piece name, read when asked for."""


def write_checkpoint(
    url: str | os.PathLike[str],
    pieces: Iterable[Piece],
    *,
    progress: dict[str, Any],
    previous: str | None = None,
    base: str | None = None,
) -> None:
    """Write a checkpoint to `url`, whole or not at all.

    A piece "model/<key>" goes to model.safetensors as <key>, and so on by the
    first word of its name. `previous` is named as safe when writing fails.
    `base` is the checkpoint beside it that has the rows which did not change.
    """
    held = list(pieces)  # all of it, before the disk can fail: iterating pieces may be collective
    layout = _lay_out(held)
    plain = to_plain(progress, "progress")
    place = Place.at(url)
    # Libraries for remote storage raise any type of error; a local disk raises OSError, and anything else
    # is a bug here.
    refusals: type[Exception] = OSError if place.local is not None else Exception
    try:
        with writing(place) as open_file:
            files = {}
            for name, file in layout.files.items():
                with open_file(name) as sink:
                    written = safetensors_file.write(sink, file.tensors, {"format": "pt", **file.aliases})
                files[name] = FileRecord(*written)
            text = encode_manifest(
                Manifest(
                    FORMAT if base is None else FORMAT_WITH_BASE,
                    shoal.__version__,
                    str(torch.__version__),
                    plain,
                    files,
                    layout.records,
                    _base_record(base) if base is not None else None,
                )
            )
            with open_file(MANIFEST) as sink:
                sink.write(text)
    except refusals as error:
        reason = _reason(error, place, sum(piece.tensor.nbytes for piece in held))
        raise CheckpointWriteFailed(path=place.url, reason=reason, previous=previous) from error


class PartedCheckpoint:
    """A checkpoint to a local directory that all ranks see; each rank writes the parts that it holds.

    Rank 0 begins it before any rank writes, and ends it: the manifest, last, once every rank's list
    of parts is there. At any moment the directory holds the old or the new checkpoint, complete, as
    with `write_checkpoint`.
    """

    def __init__(self, url: str, *, rank: int, num_ranks: int, previous: str | None) -> None:
        self._place, self._rank, self._num_ranks, self._previous = (
            Place.at(url),
            rank,
            num_ranks,
            previous,
        )
        assert self._place.local is not None
        self._folder = shared_temporary(self._place.local)
        self._lock: int | None = None

    def begin(self) -> None:
        """Rank 0 alone."""
        try:
            self._lock = begin_together(self._place)
        except OSError as error:
            raise self._failed(error, 0) from error

    def write(self, pieces: list[Piece], progress: dict[str, Any], gives_up: threading.Event) -> None:
        """Write this rank's parts; on rank 0 also finish the checkpoint."""
        try:
            self._write_own(pieces)
            if self._rank == 0:
                self._end(progress, gives_up)
        except FileNotFoundError as error:
            if self._rank == 0:
                raise self._failed(error, 0) from error
            # Another rank has failed and reports why.
        except OSError as error:
            raise self._failed(error, sum(piece.tensor.nbytes for piece in pieces)) from error
        finally:
            if self._lock is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                os.close(self._lock)

    def _write_own(self, pieces: list[Piece]) -> None:
        layout = _lay_out(pieces, of_rank=f".rank-{self._rank}")
        files = {}
        try:
            for name, file in layout.files.items():
                with write_together(self._folder, name) as sink:
                    written = safetensors_file.write(sink, file.tensors, {"format": "pt", **file.aliases})
                files[name] = FileRecord(*written)
            failpoint("worker: part of a checkpoint written")
            with write_together(self._folder, f"{self._listed(self._rank)}.new") as sink:
                sink.write(msgspec.json.encode(_Parts(files, layout.records)))
            listed = self._folder / self._listed(self._rank)
            os.rename(f"{listed}.new", listed)
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)  # no rank waits for this rank's part
            raise

    def _end(self, progress: dict[str, Any], gives_up: threading.Event) -> None:
        assert self._lock is not None
        listed = [self._folder / self._listed(rank) for rank in range(self._num_ranks)]
        while not all(path.exists() for path in listed):
            if not self._folder.exists() or gives_up.wait(_LOOK_EVERY_S):
                raise FileNotFoundError(errno.ENOENT, "another worker could not write its part")
        files: dict[str, FileRecord] = {}
        records: list[PieceRecord] = []
        for path in listed:
            parts = msgspec.json.decode(path.read_bytes(), type=_Parts)
            files |= parts.files
            records += parts.pieces
            path.unlink()
        plain = to_plain(progress, "progress")
        with write_together(self._folder, MANIFEST) as sink:
            sink.write(
                encode_manifest(
                    Manifest(FORMAT, shoal.__version__, str(torch.__version__), plain, files, records)
                )
            )
        end_together(self._place, self._lock)

    def _listed(self, rank: int) -> str:
        return f"rank-{rank}.json"

    def _failed(self, error: OSError, num_bytes: int) -> CheckpointWriteFailed:
        reason = _reason(error, self._place, num_bytes)
        return CheckpointWriteFailed(path=self._place.url, reason=reason, previous=self._previous)


_A_FILE = "it is a file; Trainer(init_from=...) begins with the weights of one, and trainer.load takes a state_dict, too"


def _why_none(names: list[str]) -> str:
    steps = [name for name in names if name.startswith("step-")]
    if steps:
        return f"it holds checkpoints and is none itself; name one of them, the newest is {steps[-1]}"
    if "checkpoints" in names:
        return "it is the directory of a run; name one of those in its checkpoints directory"
    return f"it has no {MANIFEST}, so it was never finished" if names else "it does not exist"


def open_checkpoint(
    url: str | os.PathLike[str], *, verify: bool = True, verify_base: bool | None = None
) -> Checkpoint:
    """The checkpoint at `url`, once every file has the size and the hash that were written.

    `verify=False` reads no file but the manifest and checks only sizes: for a rank that reads what
    another has just verified. `verify_base` is the same for the checkpoints that this one builds
    on.
    """
    place = Place.at(url)
    if not place.has(MANIFEST):
        is_file = place.fs.isfile(place.path)
        raise NoCheckpoint(path=place.url, reason=_A_FILE if is_file else _why_none(place.names()))
    try:
        with place.open(MANIFEST) as source:
            text = source.read()
    except OSError as error:
        raise CheckpointDamaged(path=place.url, problem=f"{MANIFEST} cannot be read: {error}") from error
    described = decode_manifest(text, place.url)
    for name, record in described.files.items():
        problem = _problem(place, name, record, verify)
        if problem is not None:
            raise CheckpointDamaged(path=place.url, problem=problem)
    try:
        progress = from_plain(described.progress)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointDamaged(
            path=place.url, problem=f"the progress in {MANIFEST} cannot be understood ({error!r})"
        ) from None
    if not isinstance(progress, dict):
        raise CheckpointDamaged(path=place.url, problem=f"the progress in {MANIFEST} is no object")
    base = None
    if described.base is not None:
        base = _open_base(place, described.base, verify=verify if verify_base is None else verify_base)
    pieces = Pieces(place, described, base)
    pieces.check()
    return Checkpoint(place.url, progress, pieces)


def _open_base(place: Place, record: BaseRecord, *, verify: bool) -> Pieces:
    found = _base_place(place, record)
    if found is None:
        raise CheckpointDamaged(
            path=place.url,
            problem=f"it holds the rows that changed since {record.name}, and that is not beside it as it was then",
        )
    try:
        return open_checkpoint(found.url, verify=verify).pieces
    except (CheckpointDamaged, NoCheckpoint) as error:
        why = error.problem if isinstance(error, CheckpointDamaged) else error.reason
        problem = f"it holds the rows that changed since {record.name}, which is damaged: {why}"
        raise CheckpointDamaged(path=place.url, problem=problem) from None


def _base_place(place: Place, record: BaseRecord) -> Place | None:
    """The base, beside it; or one level up, if later checkpoints of an earlier run were set aside."""
    beside = _resolved(place).rpartition("/")[0]
    for folder in (beside, beside.rpartition("/")[0]):
        there = Place.at(f"{folder}/{record.name}") if folder else None
        if there is not None and there.has(MANIFEST) and _manifest_hash(there) == record.sha256:
            return there
    return None


def _resolved(place: Place) -> str:
    """Where it is: a path may be relative, or a link."""
    return place.url.rstrip("/") if place.local is None else str(place.local.resolve())


def _manifest_hash(place: Place) -> str:
    with place.open(MANIFEST) as source:
        return hashlib.sha256(source.read()).hexdigest()


def _base_record(base: str) -> BaseRecord:
    place = Place.at(base)
    return BaseRecord(_name(place), _manifest_hash(place))


def _bases(place: Place) -> Iterator[str]:
    """Where the checkpoints are that this one builds on, as far as they can be read."""
    try:
        with place.open(MANIFEST) as source:
            record = decode_manifest(source.read(), place.url).base
    except (OSError, CheckpointError):
        return
    # Only older ones: a damaged manifest cannot lead in a circle.
    if record is None or (step_of(record.name) or 0) >= (step_of(_name(place)) or 0):
        return
    if (found := _base_place(place, record)) is not None:
        yield _resolved(found)
        yield from _bases(found)


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


class Pieces(PartReader):
    """Whole tensors by piece name. Each look-up reads from the files into fresh memory."""

    def __init__(self, place: Place, described: Manifest, base: Pieces | None = None) -> None:
        self._place, self._base = place, base
        self._merged: dict[str, MergedKeys] = {}
        self._num_bytes = {name: record.bytes for name, record in described.files.items()}
        self._entries: dict[str, dict[str, safetensors_file.Entry]] = {}
        self._parts: dict[str, list[PieceRecord]] = {}
        for record in described.pieces:
            self._parts.setdefault(record.name, []).append(record)

    def __getitem__(self, name: str) -> Tensor:
        changed = self._parts[name][0].changed_keys
        if not changed:
            return self._own(name)
        if changed.startswith(CHANGED):
            shape, _ = self.describe(name)
            return self._updated_part(name, (0,) * len(shape), shape)
        keys = self._keys(changed)
        if name == changed:
            return torch.from_numpy(keys.keys)
        assert self._base is not None
        return keys.merge(self._base[name], self._own(name))

    def _own(self, name: str) -> Tensor:
        """The piece as stored in this checkpoint."""
        shape = tuple(self._parts[name][0].global_shape)
        return self._own_part(name, (0,) * len(shape), shape)

    def _keys(self, name: str) -> MergedKeys:
        if name not in self._merged:
            assert self._base is not None
            self._merged[name] = merged(
                self._base[name].numpy(), self._own(name).numpy(), self._own(GONE + name).numpy()
            )
        return self._merged[name]

    def part(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The part at `offset`, from all the files that have some of it."""
        changed = self._parts[name][0].changed_keys
        if not changed:
            return self._own_part(name, offset, shape)
        if changed.startswith(CHANGED):
            return self._updated_part(name, offset, shape)
        within = tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
        return self[name][within].clone()

    def _updated_part(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Part of a table whose rows are numbered from 0: that of the base, with the rows that changed."""
        assert self._base is not None
        rows, numbers = self._base.part(name, offset, shape), self._own(self._parts[name][0].changed_keys)
        numbers = numbers - offset[0]
        is_here = (numbers >= 0) & (numbers < shape[0])
        columns = tuple(slice(at, at + size) for at, size in zip(offset[1:], shape[1:], strict=True))
        rows[numbers[is_here]] = self._own(name)[is_here][(slice(None), *columns)]
        return rows

    def _own_part(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        parts, wanted = self._parts[name], _Box(tuple(offset), tuple(shape))
        if not math.prod(wanted.shape):
            return torch.empty(wanted.shape, dtype=safetensors_file.dtype_of(parts[0].dtype))
        boxes = [_Box(tuple(part.offset), tuple(part.shape)) for part in parts]
        for part, box in zip(parts, boxes, strict=True):
            if (common := box.common(wanted)) == wanted:
                return self._read(part, common.seen_from(box))
        result = torch.empty(wanted.shape, dtype=safetensors_file.dtype_of(parts[0].dtype))
        covered = torch.zeros(wanted.shape, dtype=torch.bool)
        for part, box in zip(parts, boxes, strict=True):
            common = box.common(wanted)
            if math.prod(common.shape):
                there = common.seen_from(wanted).slices
                result[there] = self._read(part, common.seen_from(box))
                covered[there] = True
        if not covered.all():
            raise CheckpointDamaged(
                path=self._place.url,
                problem=f"its parts of {name} leave {int((~covered).sum())} of {covered.numel()} numbers out",
            )
        return result

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the whole tensor, without reading it."""
        record = self._parts[name][0]
        shape = tuple(record.global_shape)
        if record.changed_keys.startswith(CHANGED):
            assert self._base is not None
            return self._base.describe(name)
        if record.changed_keys:
            shape = (len(self._keys(record.changed_keys).keys), *shape[1:])
        return shape, safetensors_file.dtype_of(record.dtype)

    def check(self) -> None:
        """Compare every record with the header of its file. CheckpointDamaged where they differ; no tensor is read."""
        for parts in self._parts.values():
            for record in parts:
                self._entry(record)
                if record.changed_keys and (problem := self._not_changes_of_base(record)):
                    raise CheckpointDamaged(path=self._place.url, problem=problem)

    def _not_changes_of_base(self, record: PieceRecord) -> str | None:
        """Reason why this cannot be rows that changed since the base."""
        keys = self._parts.get(record.changed_keys)
        is_numbered = record.changed_keys.startswith(CHANGED)
        if (
            self._base is None
            or keys is None
            or not (is_numbered or GONE + record.changed_keys in self._parts)
        ):
            return f"{record.name} has changed rows only, and nothing says of which"
        if (record.name not in self._base) or not record.shape or record.shape[0] != keys[0].shape[0]:
            return f"the changed rows of {record.name} are not rows of its base"
        shape, dtype = self._base._parts[record.name][0].shape, self._base._parts[record.name][0].dtype
        if shape[1:] != record.shape[1:] or dtype != record.dtype:
            return f"the changed rows of {record.name} are {record.dtype}{record.shape[1:]}, those of its base {dtype}{shape[1:]}"
        return None

    def _read(self, record: PieceRecord, within: _Box) -> Tensor:
        entry = self._entry(record)
        try:
            with self._place.open(record.file) as source:
                return safetensors_file.read_tensor(source, entry, within.offset, within.shape)
        except (OSError, ValueError) as error:
            raise self._damaged(record, error) from error

    def _entry(self, record: PieceRecord) -> safetensors_file.Entry:
        try:
            if record.file not in self._entries:
                with self._place.open(record.file) as source:
                    self._entries[record.file] = safetensors_file.read_header(
                        source, self._num_bytes[record.file]
                    )
            entry = self._entries[record.file].get(record.key)
            if entry is None or (list(entry.shape), entry.dtype) != (
                record.shape,
                safetensors_file.dtype_of(record.dtype),
            ):
                raise ValueError(f"'{record.key}' is not what {MANIFEST} says")
        except (OSError, ValueError) as error:
            raise self._damaged(record, error) from error
        return entry

    def _damaged(self, record: PieceRecord, error: Exception) -> CheckpointDamaged:
        return CheckpointDamaged(path=self._place.url, problem=f"{record.file} cannot be read: {error}")


@dataclass(frozen=True, slots=True)
class _Box:
    """A block of a tensor's numbers."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.offset, self.shape, strict=True))

    def common(self, other: _Box) -> _Box:
        begins = tuple(map(max, self.offset, other.offset))
        ends = [min(mine.stop, its.stop) for mine, its in zip(self.slices, other.slices, strict=True)]
        return _Box(begins, tuple(max(end - at, 0) for at, end in zip(begins, ends, strict=True)))

    def seen_from(self, around: _Box) -> _Box:
        return _Box(tuple(at - of for at, of in zip(self.offset, around.offset, strict=True)), self.shape)


@dataclass(frozen=True, slots=True)
class _File:
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    """Keys that share another key's tensor; kept in the file's metadata, where other readers of the format look."""


@dataclass(frozen=True, slots=True)
class _Layout:
    files: dict[str, _File]
    records: list[PieceRecord]


def _lay_out(pieces: list[Piece], of_rank: str = "") -> _Layout:
    """Assign each piece a file and a key. Tied weights, one memory under two names, are stored once."""
    layout = _Layout({}, [])
    stored: dict[Any, str] = {}
    for piece in pieces:
        tensor = piece.tensor
        word, _, key = piece.name.partition("/")
        name = f"{word}{of_rank}.safetensors"
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
                changed_keys=piece.changed_keys,
            )
        )
    return layout


def _problem(place: Place, name: str, record: FileRecord, verify: bool) -> str | None:
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
    return [place.url for place in _steps(directory) if place.has(MANIFEST)]


def newest_first(
    directory: str | os.PathLike[str],
    on_damaged: Callable[[CheckpointDamaged], None],
    *,
    verify_base: bool = True,
) -> Iterator[Checkpoint]:
    """Complete checkpoints, opened on demand; damaged ones are passed to `on_damaged`."""
    for place in reversed(_steps(directory)):
        try:
            found = open_checkpoint(place.url, verify_base=verify_base)
            if found.progress.get("step") != step_of(_name(place)):
                raise CheckpointDamaged(
                    path=place.url,
                    problem=f"{MANIFEST} is of step {found.progress.get('step')}, the directory of {step_of(_name(place))}",
                )
            yield found
        except CheckpointDamaged as damage:
            on_damaged(damage)
        except NoCheckpoint as error:
            on_damaged(CheckpointDamaged(path=place.url, problem=error.reason))


def newest_checkpoint(
    directory: str | os.PathLike[str],
    on_damaged: Callable[[CheckpointDamaged], None],
    *,
    verify_base: bool = True,
) -> Checkpoint | None:
    """The newest complete checkpoint; None if there is none."""
    return next(newest_first(directory, on_damaged, verify_base=verify_base), None)


def prune(directory: str | os.PathLike[str], keep_last: int, protect: Iterable[str] = ()) -> list[str]:
    """Remove all but the last `keep_last`, those in `protect` and their bases; return the removed ones.

    The newest complete one always stays: the one before is removed only once a newer one has been
    read back and verified.
    """
    if keep_last < 1:
        raise ConfigError(
            f"keep_last must be at least 1, got {keep_last}: a run without a checkpoint cannot go on."
        )
    kept = {os.fspath(path).rstrip("/").rpartition("/")[2] for path in protect}
    places = [place for place in _steps(directory)[:-keep_last] if _name(place) not in kept]
    if not places:
        return []
    newest = newest_checkpoint(directory, on_damaged=lambda damage: None, verify_base=False)
    if newest is None:
        return []  # nothing is complete, so nothing is spare
    names = {_name(place) for place in places} - {_name(Place.at(newest.path))}
    staying = [place for place in _steps(directory) if _name(place) not in names]
    staying += [place for aside in _set_aside(directory) for place in _steps(aside.url)]
    needed = {base for place in staying for base in _bases(place)}
    going = [place for place in places if _name(place) in names and _resolved(place) not in needed]
    for place in going:
        remove(place)
    return [place.url for place in going]


def spaced_by_hours(directory: str | os.PathLike[str], hours: float) -> list[str]:
    """Checkpoints of a directory that are at least this many hours apart, beginning with the oldest."""
    spaced: list[str] = []
    last = -math.inf
    for place in _steps(directory):
        written = place.fs.modified(place.file(MANIFEST)).timestamp() if place.has(MANIFEST) else -math.inf
        if written - last >= hours * 3600:
            spaced.append(place.url)
            last = written
    return spaced


_ASIDE = "before-"


def set_aside(directory: str | os.PathLike[str], *, after_step: int) -> str | None:
    """Move checkpoints of later steps into a folder `before-<n>` of their own; return it, None if there are none.

    A process that has just saved a step cannot have written a later one: those are of a run that
    began here earlier. Left in place, they would be the newest.
    """
    place = Place.at(directory)
    names = place.names()
    later = [name for name in names if (step := step_of(name)) is not None and step > after_step]
    if not later:
        return None
    aside = place.child(next(name for n in count(1) if (name := f"{_ASIDE}{n}") not in names))
    place.fs.makedirs(aside.path, exist_ok=True)
    for name in later:
        place.fs.mv(place.child(name).path, aside.child(name).path, recursive=True)
    return aside.url


def _set_aside(directory: str | os.PathLike[str]) -> list[Place]:
    place = Place.at(directory)
    return [place.child(name) for name in place.names() if name.startswith(_ASIDE)]


def _steps(directory: str | os.PathLike[str]) -> list[Place]:
    place = Place.at(directory)
    found = [(step, name) for name in place.names() if (step := step_of(name)) is not None]
    return [place.child(name) for _, name in sorted(found)]


def _name(place: Place) -> str:
    return place.url.rpartition("/")[2]


# ---- the manifest -----------------------------------------------------------------------------------


FORMAT = 1
FORMAT_WITH_BASE = 2  # of a checkpoint that holds changed rows of tables

_TAIL = re.compile(rb',\n"sha256": "([0-9a-f]{64})"\n}\n\Z')
_TAIL_BYTES = len(',\n"sha256": ""\n}\n') + 64
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")


Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file beside the manifest."""

    bytes: Size
    sha256: str


class PieceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """File and key of one tensor, or one part of one. Tied weights are two records of one key."""

    name: str
    file: str
    key: str
    dtype: str
    shape: list[Size]
    global_shape: list[Size]
    offset: list[Size]
    changed_keys: str = ""


class BaseRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint that an incremental one builds on: its directory's name, and the sha256 of its manifest."""

    name: str
    sha256: str


class _Parts(msgspec.Struct, frozen=True):
    """Files of a checkpoint that one rank wrote."""

    files: dict[str, FileRecord]
    pieces: list[PieceRecord]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The table of contents of a checkpoint."""

    format: int
    shoal: str
    torch: str
    progress: Any  # as runtime/serialization.py writes it
    files: dict[str, FileRecord]
    pieces: list[PieceRecord]
    base: BaseRecord | None = None


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json: a line per piece, the hash last."""
    fields = msgspec.to_builtins(manifest)
    listed = ",\n".join("  " + _json(piece) for piece in fields.pop("pieces"))
    lines = [f'"{key}": {_json(value)}' for key, value in fields.items()]
    lines.append(f'"pieces": [\n{listed}\n]')
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + f',\n"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def decode_manifest(text: bytes, path: str) -> Manifest:
    """The manifest that `encode` was given, or CheckpointDamaged. `path` is the checkpoint's, for the report."""
    tail = _TAIL.search(text, max(0, len(text) - _TAIL_BYTES))
    if tail is None:
        raise CheckpointDamaged(
            path=path, problem=f"{MANIFEST} is torn: after {len(text)} bytes it does not end as written"
        )
    found = hashlib.sha256(text[: tail.start()]).hexdigest()
    written = tail.group(1).decode()
    if found != written:
        raise CheckpointDamaged(
            path=path,
            problem=f"{MANIFEST} has changed since it was written: its sha256 is {found[:12]}..., not {written[:12]}...",
        )
    try:
        fields = json.loads(text)
        del fields["sha256"]
        if isinstance(number := fields.get("format"), int) and number > FORMAT_WITH_BASE:
            raise CheckpointError(
                f"the checkpoint {path} has format {number} (written by shoal {fields.get('shoal')}), and this version "
                f"reads format {FORMAT_WITH_BASE}. Nothing was changed; load it with the version that wrote it."
            )
        manifest = msgspec.convert(fields, Manifest)
        if manifest.format != (FORMAT if manifest.base is None else FORMAT_WITH_BASE):
            raise ValueError(f"its format is {manifest.format}")
        if manifest.base is not None and step_of(manifest.base.name) is None:
            raise ValueError(f"it builds on '{manifest.base.name}', which is no checkpoint's name")
        _check_pieces(manifest.pieces)
    except (RecursionError, ValueError) as error:  # JSON's and msgspec's are ValueErrors
        raise CheckpointDamaged(path=path, problem=f"{MANIFEST} cannot be understood: {error}") from None
    for name in [*manifest.files, *(piece.file for piece in manifest.pieces)]:
        if name not in manifest.files or not _FILE_NAME.fullmatch(name):
            raise CheckpointDamaged(
                path=path, problem=f"{MANIFEST} names a file '{name}' that is none of its own"
            )
    return manifest


def _check_pieces(records: Iterable[PieceRecord]) -> None:
    """Raise ValueError for a part outside of its tensor, and for parts that do not make a whole one.

    Before anything is allocated: a forged size would exhaust the memory.
    """
    parts: dict[str, list[PieceRecord]] = {}
    for record in records:
        parts.setdefault(record.name, []).append(record)
        safetensors_file.dtype_of(record.dtype)
        sizes = [record.shape, record.offset, record.global_shape]
        if len({len(size) for size in sizes}) != 1 or any(
            at + size > whole for size, at, whole in zip(*sizes, strict=True)
        ):
            raise ValueError(f"a part of {record.name} lies outside of it")
    for name, (first, *others) in parts.items():
        if any((each.dtype, each.global_shape) != (first.dtype, first.global_shape) for each in others):
            raise ValueError(f"the parts of {name} are of different tensors")
        num_there = sum(math.prod(each.shape) for each in (first, *others))
        if num_there < math.prod(first.global_shape):
            raise ValueError(
                f"its parts of {name} leave {math.prod(first.global_shape) - num_there} of "
                f"{math.prod(first.global_shape)} numbers out"
            )


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
