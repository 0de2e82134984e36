"""The bytes themselves: what lies in each tier of a store, and how it gets there.

Decides nothing. Whoever calls holds the store's lock; `outside` is a context
in which it is let go of, for what takes long.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from shoal.data.cache import block_format
from shoal.data.cache.block_files import BlockFiles
from shoal.data.cache.block_format import Tree
from shoal.data.cache.policies import Key
from shoal.data.cache.tier import Tier

Outside = Callable[[], AbstractContextManager[None]]


class TierContents:
    """Trees on the device and in RAM, and files. Of a block there may be two versions on disk for a moment."""

    def __init__(self, directory: str | os.PathLike[str] | None, device: torch.device | str | None) -> None:
        self.device = torch.device(device) if device is not None else _accelerator()
        self._files = BlockFiles(directory)
        self._num_files = 0
        self._in_memory: dict[Tier, dict[Key, Tree]] = {Tier.DEVICE: {}, Tier.RAM: {}}
        self._on_disk: dict[tuple[Key, int], Path] = {}

    def read(self, key: Key, tier: Tier, version: int, outside: Outside) -> Tree:
        """A block as it lies in a tier; BlockDamaged where its file is."""
        if tier != Tier.DISK:
            return self._in_memory[tier][key]
        path = self._on_disk[key, version]
        with outside():
            return self._files.read(path)

    def write(self, key: Key, tier: Tier, version: int, tree: Tree, outside: Outside) -> Tree:
        """Put a block into a tier, and give it back as it lies there; OSError where the tier does not take it."""
        if tier == Tier.DISK:
            self._num_files += 1
            number = self._num_files
            with outside():
                path = self._files.write(number, tree)
            self._on_disk[key, version] = path
            return tree
        with outside():
            tree = self.as_in(tier, tree)
        self._in_memory[tier][key] = tree
        return tree

    def drop(self, key: Key, tier: Tier, version: int) -> None:
        """Forget a copy."""
        if tier == Tier.DISK:
            self._files.remove(self._on_disk.pop((key, version)))
        else:
            del self._in_memory[tier][key]

    def as_in(self, tier: Tier, tree: Tree) -> Tree:
        """The tree with its tensors where the tier has them. To disk they go as they are."""
        if tier == Tier.DEVICE:
            return block_format.map_tensors(lambda tensor: tensor.to(self.device), tree)
        if tier == Tier.RAM:
            return block_format.map_tensors(lambda tensor: tensor.cpu(), tree)
        return tree

    @property
    def directory(self) -> Path | None:
        """Of the files; None before the first."""
        return self._files.directory

    def close(self) -> None:
        """Forget everything, and remove the files."""
        self._in_memory = {Tier.DEVICE: {}, Tier.RAM: {}}
        self._on_disk = {}
        self._files.close()


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
