"""Results of finished calls in the run directory, for workers that are started after them.

Under a parameter server no worker may hold what a replacement would need, so
rank 0 writes each result down once; the others hold them in memory and write
nothing. Plain values and tensors, no pickle.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from shoal.recovery import state_transfer


class KeptResults(MutableMapping[str, Any]):
    """Results by name: those of this process, then those on disk."""

    def __init__(self, directory: Path, *, writes: bool) -> None:
        self._directory, self._writes = directory, writes
        self._own: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key in self._own:
            return self._own[key]
        try:
            name, value = state_transfer.from_bytes(self._path(key).read_bytes())
        except FileNotFoundError:
            raise KeyError(key) from None
        if name != key:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        self._own[key] = value
        if self._writes:
            path = self._path(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_bytes(state_transfer.to_bytes((key, value)))
            draft.rename(path)

    def __delitem__(self, key: str) -> None:
        del self._own[key]
        if self._writes:
            self._path(key).unlink(missing_ok=True)

    def __contains__(self, key: object) -> bool:
        return key in self._own or (isinstance(key, str) and self._path(key).exists())

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def _path(self, key: str) -> Path:
        return self._directory / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.bin"
