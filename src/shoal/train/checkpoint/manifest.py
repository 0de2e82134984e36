"""manifest.json: the table of contents of a checkpoint, with its own hash.

Its last line is the hash of every byte before it, so that nothing of a
manifest can change unseen, white space included. A directory without a valid
one is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import msgspec

from shoal.errors import CheckpointDamaged, CheckpointError

NAME = "manifest.json"
FORMAT = 1

_TAIL = re.compile(rb',\n"sha256": "([0-9a-f]{64})"\n}\n\Z')
_TAIL_BYTES = len(',\n"sha256": ""\n}\n') + 64
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file beside the manifest."""

    bytes: int
    sha256: str


class PieceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """File and key of one tensor, or one part of one. Tied weights are two records of one key."""

    name: str
    file: str
    key: str
    dtype: str
    shape: list[int]
    global_shape: list[int]
    offset: list[int]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table of contents of a checkpoint."""

    format: int
    shoal: str
    torch: str
    progress: Any  # as runtime/serialization.py writes it
    files: dict[str, FileRecord]
    pieces: list[PieceRecord]


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json: a line per piece, the hash last."""
    fields = msgspec.to_builtins(manifest)
    lines = []
    for key, value in fields.items():
        if key == "pieces":
            listed = ",\n".join("  " + _json(piece) for piece in value)
            lines.append(f'"pieces": [\n{listed}\n]')
        else:
            lines.append(f'"{key}": {_json(value)}')
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + f',\n"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def decode(text: bytes, path: str) -> Manifest:
    """The manifest that `encode` was given, or CheckpointDamaged. `path` is the checkpoint's, for the report."""
    tail = _TAIL.search(text, max(0, len(text) - _TAIL_BYTES))
    if tail is None:
        raise CheckpointDamaged(
            path=path, problem=f"{NAME} is torn: after {len(text)} bytes it does not end as written"
        )
    found = hashlib.sha256(text[: tail.start()]).hexdigest()
    written = tail.group(1).decode()
    if found != written:
        raise CheckpointDamaged(
            path=path,
            problem=f"{NAME} has changed since it was written: its sha256 is {found[:12]}..., not {written[:12]}...",
        )
    fields = json.loads(text)
    del fields["sha256"]
    if fields["format"] != FORMAT:
        raise CheckpointError(
            f"the checkpoint {path} has format {fields['format']} (written by shoal {fields['shoal']}), and this version "
            f"reads format {FORMAT}. Nothing was changed; load it with the version that wrote it."
        )
    try:
        manifest = msgspec.convert(fields, Manifest)
    except msgspec.ValidationError as error:
        raise CheckpointDamaged(path=path, problem=f"{NAME} cannot be understood: {error}") from None
    for name in [*manifest.files, *(piece.file for piece in manifest.pieces)]:
        if name not in manifest.files or not _FILE_NAME.fullmatch(name):
            raise CheckpointDamaged(
                path=path, problem=f"{NAME} names a file '{name}' that is none of its own"
            )
    return manifest


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
