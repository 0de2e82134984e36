"""What stores and caches cannot keep, or not give back.

Part of the tree of `core/errors.py`, under DataError.
"""

from __future__ import annotations

from shoal.core.errors import DataError


class StoreFull(DataError):
    """A block for which no tier of a store has room."""

    def __init__(
        self,
        *,
        store: str,
        key: str,
        num_bytes: int | None,
        used: dict[str, int],
        limits: dict[str, int | None],
        directory: str | None = None,
        reason: str | None = None,
    ) -> None:
        """`used` and `limits` are in bytes, by tier; `reason` is what the disk said."""
        self.store, self.key, self.num_bytes, self.used, self.limits = store, key, num_bytes, used, limits
        self.directory, self.reason = directory, reason
        what = f"block {key}" if num_bytes is None else f"block {key} of {num_bytes:,} bytes"
        tiers = ", ".join(
            f"{used[tier]:,} bytes in {tier}{'' if limits[tier] is None else f' of {limits[tier]:,}'}"
            for tier in used
        )
        disk = "" if reason is None else f" The disk ({directory}) says: {reason}."
        super().__init__(
            f"the store '{store}' has no place for {what}: it holds {tiers or 'nothing'}, and what is there is in use or "
            f"could not be loaded again.{disk} Nothing was lost: every block is as it was before this one. {self._cure()}"
        )

    def _cure(self) -> str:
        if self.reason is not None:
            return "Free space on the disk, or give another directory."
        limited = " or ".join(f"{tier}_bytes" for tier, limit in self.limits.items() if limit is not None)
        raised = f"Raise {limited}" if limited else "Make the blocks smaller"
        disk = "" if "disk" in self.limits else ", give the store a disk (disk_bytes)"
        return f"{raised}{disk}, or let go of blocks that are held and discard those that nobody needs."


class BlockDamaged(DataError):
    """A file of a store's disk tier that is not what was written."""

    def __init__(self, *, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(
            f"the file {path}, in which a store kept a block, is damaged: {problem}. Nothing of it was used; blocks that "
            "can be loaded again are. Check the disk, and go on from the last checkpoint."
        )


class CacheFull(DataError):
    """A cache whose disk is full."""

    def __init__(
        self, *, what: str, directory: str, needed_bytes: int, free_bytes: int | None, reason: str
    ) -> None:
        self.what, self.directory, self.needed_bytes, self.free_bytes = (
            what,
            directory,
            needed_bytes,
            free_bytes,
        )
        self.reason = reason
        free = "" if free_bytes is None else f", where {free_bytes:,} are free"
        super().__init__(
            f"the cache of {what} needs {needed_bytes:,} bytes more in {directory}{free}: {reason}. Nothing was lost: the "
            "data itself was only read, and checkpoints are whole. Free space there, name another directory, or read "
            "without a cache."
        )
