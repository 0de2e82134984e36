"""The block store: blocks by key over RAM and disk, within limits in bytes.

Loading, reading and writing happen outside the lock, so that a block in RAM is
handed out while another is written to disk. On disk a block is a file, whole or
not there at all, and checked when it is read; the directory goes with the
store, or at the latest with the process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from shoal.data.cache import cache_plan
from shoal.data.cache.background import BackgroundJobs
from shoal.data.tree import Tree
from shoal.errors import BlockDamaged, ConfigError, StoreFull
from shoal.runtime import scratch, serialization
from shoal.runtime.serialization import NotSerializable

Key = Hashable
Loader = Callable[[Any], Tree]
"""Gives the block of a key: from a file, a computation, another host."""


class Tier(IntEnum):
    """Where a block lies; from fast to slow."""

    RAM = 0
    DISK = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many bytes of blocks each tier holds at most."""

    ram_bytes: int
    """Of RAM. What is handed out stays the caller's and is not counted."""

    disk_bytes: int | None = None
    """Of disk: 0 for none, None for as much as the disk takes."""

    def __post_init__(self) -> None:
        if self.ram_bytes < 0:
            raise ConfigError(f"ram_bytes must be 0 or more, got {self.ram_bytes}")
        if self.disk_bytes is not None and self.disk_bytes < 0:
            raise ConfigError(f"disk_bytes must be 0 or more, or None for no limit, got {self.disk_bytes}")

    def of(self, tier: Tier) -> int | None:
        return self.ram_bytes if tier == Tier.RAM else self.disk_bytes


# ---- eviction ------------------------------------------------------------------------------------------


class Policy(Protocol):
    """The order of eviction in one tier. Sees keys come, being used and go; moves nothing."""

    def used(self, key: Key) -> None:
        """The block came into the tier, or was asked for while there."""

    def left(self, key: Key) -> None:
        """The block is not in the tier any more."""

    def coldest_first(self) -> Iterator[Key]:
        """The tier's blocks, those to be evicted first in front."""


class LeastRecentlyUsed:
    """What was not used for longest goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def used(self, key: Key) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def left(self, key: Key) -> None:
        self._order.pop(key, None)

    def coldest_first(self) -> Iterator[Key]:
        return iter(self._order)


class LeastFrequentlyUsed:
    """What was used least often since it came goes first; of equals, what was not used for longest.

    Counts are halved now and then, so that a block that was hot long ago is
    not kept for ever.
    """

    def __init__(self) -> None:
        self._counts: dict[Key, int] = {}
        self._buckets: dict[int, OrderedDict[Key, None]] = {}
        self._num_uses = 0

    def used(self, key: Key) -> None:
        count = self._counts.get(key, 0)
        self.left(key)
        self._put(key, count + 1)
        self._num_uses += 1
        if self._num_uses > 16 * len(self._counts) + 64:
            cold_to_hot = list(self.coldest_first())
            counts, self._buckets, self._num_uses = self._counts, {}, 0
            for each in cold_to_hot:
                self._put(each, counts[each] // 2)

    def left(self, key: Key) -> None:
        count = self._counts.pop(key, None)
        if count is not None:
            del self._buckets[count][key]
            if not self._buckets[count]:
                del self._buckets[count]

    def coldest_first(self) -> Iterator[Key]:
        for count in sorted(self._buckets):
            yield from self._buckets[count]

    def _put(self, key: Key, count: int) -> None:
        self._counts[key] = count
        self._buckets.setdefault(count, OrderedDict())[key] = None


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed}
"""The names that `BlockStore(policy=)` takes."""


# ---- the store -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class TierStats:
    """Of one tier since the store was made."""

    num_bytes: int = 0
    """There now."""

    limit_bytes: int | None = None
    num_hits: int = 0
    """Requests that were answered from here, without waiting for a slower place."""

    num_misses: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    """Copied to another tier; what is dropped because it is elsewhere too costs nothing and is not counted."""


@dataclass(slots=True)
class Stats:
    """Of one store."""

    tiers: dict[Tier, TierStats]
    num_blocks: int = 0
    num_dirty: int = 0
    """Blocks that neither the disk has nor anybody could load again."""

    num_loads: int = 0
    bytes_loaded: int = 0
    num_ahead: int = 0
    """Requests for blocks that were there because they had been read ahead."""


@dataclass(slots=True)
class _Block:
    in_ram: bool = False
    tree: Tree = None
    path: Path | None = None
    """On disk, where that has the newest content."""

    num_bytes: int = 0
    version: int = 0
    can_load: bool = True
    """Somebody can make it again, so that it may be dropped."""

    num_holds: int = 0
    is_busy: bool = False
    """A thread loads, reads, writes or replaces it; others wait, but for reading what is in RAM."""

    is_ahead: bool = False
    """Was read ahead, and nobody asked for it yet."""


class BlockStore:
    """Blocks by key: trees of tensors and arrays, or bytes, as much of them in RAM as the limits allow.

    What `get` returns is the store's own and shared: read it. To change a
    block, `put` a new one, or `hold` it, write to it and `mark_dirty`.
    Changes reach the disk before a block leaves RAM. Safe to use from several
    threads; a forked child has a store of its own that begins with the same
    content.

        store = BlockStore(Limits(ram_bytes=1 << 30), policy="lru")
        block = store.get("rows-7", load=lambda key: read_rows(7))
    """

    def __init__(
        self,
        limits: Limits,
        *,
        policy: str = "lru",
        directory: str | os.PathLike[str] | None = None,
        name: str = "blocks",
    ) -> None:
        """Files lie in a new folder of `directory`, or of the job's scratch directory, which goes with the store."""
        if policy not in POLICIES:
            raise ConfigError(f"there is no policy '{policy}' for memory; there are: {', '.join(POLICIES)}")
        self.name, self.granted_bytes = name, 0
        self._limits = limits
        self._policy, self._files = policy, BlockFiles(directory)
        self._stats = Stats({tier: TierStats(limit_bytes=limits.of(tier)) for tier in Tier})
        self._changed, self._pid = threading.Condition(threading.Lock()), os.getpid()
        self._ahead: list[tuple[Key, Loader | None]] = []
        self._background = BackgroundJobs("shoal-read-ahead")
        self._failure: OSError | None = None
        self._empty()
        cache_plan.register(self)

    def _empty(self) -> None:
        self._blocks: dict[Key, _Block] = {}
        self._used = dict.fromkeys(Tier, 0)  # bytes, with those being written to disk
        self._policies = {tier: POLICIES[self._policy]() for tier in Tier}
        self._num_evicting = 0

    # ---- reading -----------------------------------------------------------------------------------

    def get(self, key: Key, load: Loader | None = None) -> Tree:
        """The block, brought into RAM where it fits; loaded where the store lacks it. KeyError where nothing has it."""
        with self._entered():
            tree = self._bring(key, load)
        self._go_on_reading_ahead()
        return tree

    @contextlib.contextmanager
    def hold(self, key: Key, load: Loader | None = None) -> Iterator[Tree]:
        """The block, which stays in RAM until the end of the `with`: the way to change one.

        with store.hold("weights") as block:
            block["rows"] += 1
            store.mark_dirty("weights")
        """
        with self._entered():
            tree = self._bring(key, load, is_held=True)
        try:
            yield tree
        finally:
            with self._entered():
                if key in self._blocks:
                    self._blocks[key].num_holds -= 1
                self._changed.notify_all()

    def prefetch(self, keys: Iterable[Key], load: Loader | None = None) -> None:
        """These blocks will be wanted soon, in this order: bring them in the background.

        At most half of the RAM is filled ahead; as blocks are used, more
        follow. What was announced before and not read yet is forgotten. An
        error waits for whoever gets the block.
        """
        with self._entered():
            self._ahead = [(key, load) for key in reversed(list(keys))]
        self._go_on_reading_ahead()

    def __contains__(self, key: Key) -> bool:
        with self._entered():
            block = self._blocks.get(key)
            return block is not None and _is_there(block)

    def __len__(self) -> int:
        with self._entered():
            return sum(map(_is_there, self._blocks.values()))

    # ---- writing -----------------------------------------------------------------------------------

    def put(self, key: Key, tree: Tree, *, can_load: bool = False) -> None:
        """Keep this as the block's content. It is the store's from now on.

        With `can_load` it may be lost under pressure: somebody can make it
        again. StoreFull where there is no room for it; then the block is what
        it was before. ConfigError where the store has a disk and this could
        never be written there.
        """
        self._check(tree)
        num_bytes = serialization.num_bytes(tree)
        with self._entered(), self._claimed(key) as block:
            self._failure = None
            replaced = block.num_bytes if block.in_ram else 0
            if num_bytes <= self._limits.ram_bytes and self._make_room(num_bytes - replaced):
                self._drop(key, block)
                self._keep_in_ram(key, block, tree, num_bytes)
            elif (path := self._written(tree, num_bytes)) is not None:
                self._drop(key, block)
                block.path, block.num_bytes = path, num_bytes
                self._policies[Tier.DISK].used(key)
            elif can_load:
                self._drop(key, block)
            else:
                raise self._full(key, num_bytes)
            block.version += 1
            block.can_load, block.is_ahead = can_load, False

    def mark_dirty(self, key: Key) -> None:
        """The block that the caller holds was written to."""
        with self._entered():
            block = self._blocks.get(key)
            if block is None or not block.in_ram or not block.num_holds:
                raise ConfigError(
                    f"mark_dirty({key!r}) says that the block was written to, but nobody holds it in memory: it may have "
                    "left with its old content. Change a block inside `with store.hold(key) as block:`."
                )
            self._drop_file(key, block)
            block.version += 1
            block.can_load = False

    def flush(self) -> None:
        """Copy every change to disk. StoreFull where it cannot take one; nothing is lost then."""
        with self._entered():
            self._failure = None
            for key in list(self._blocks):
                with self._claimed(key) as block:
                    if self._is_dirty(block) and not self._write_out(key, block, is_flush=True):
                        raise self._full(key, block.num_bytes)

    def release(self, key: Key) -> None:
        """Nobody needs the block at the moment: it leaves RAM, if the disk takes it or it can be loaded again."""
        with self._entered(), self._claimed(key) as block:
            block.is_ahead, self._failure = False, None
            if block.in_ram and not block.num_holds:
                self._evict(key, block)

    def discard(self, key: Key) -> None:
        """Forget the block and its content, everywhere."""
        with self._entered(), self._claimed(key) as block:
            self._drop(key, block)

    def close(self) -> None:
        """Forget everything and remove what is on disk. The store may be used again, and begins empty."""
        with self._entered():
            self._ahead = []
        self._background.finish()
        with self._entered():
            self._empty()
            self._files.close()

    def __enter__(self) -> BlockStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- figures -----------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Hit rates and bytes moved, as of now."""
        with self._entered():
            now = self._stats
            now.num_blocks = sum(map(_is_there, self._blocks.values()))
            now.num_dirty = sum(map(self._is_dirty, self._blocks.values()))
            for tier, tier_figures in now.tiers.items():
                tier_figures.num_bytes = self._used[tier]
            return now

    def filled_bytes(self) -> int:
        """Nothing was promised to it."""
        return 0

    def figures(self) -> dict[str, Any]:
        listed = asdict(self.stats)
        for tier, tier_figures in listed.pop("tiers").items():
            rate = cache_plan.hit_rate(tier_figures["num_hits"], tier_figures["num_misses"])
            listed[tier.name.lower()] = {**tier_figures, "hit_rate": rate}
        return {"kind": "blocks", "policy": self._policy, **listed}

    # ---- with the lock held ------------------------------------------------------------------------

    def _bring(self, key: Key, load: Loader | None, *, is_held: bool = False, is_ahead: bool = False) -> Tree:
        block = self._blocks.get(key)
        if not is_ahead:
            self._count_request(block)
        if block is not None and block.in_ram and not is_held:  # readable, also while it is written out
            self._policies[Tier.RAM].used(key)
            block.is_ahead = False
            return block.tree
        with self._claimed(key) as block:
            if not block.in_ram:
                self._failure = None
                tree, source = self._read(key, block, load)
                num_bytes = serialization.num_bytes(tree) if source is None else block.num_bytes
                if num_bytes > self._limits.ram_bytes or not self._make_room(num_bytes):
                    if is_held:
                        raise self._full(key, num_bytes)
                    if source is None and (path := self._written(tree, num_bytes)) is not None:
                        block.path, block.num_bytes = path, num_bytes
                        self._policies[Tier.DISK].used(key)
                    return tree
                if source is not None:
                    source.bytes_out += num_bytes
                self._keep_in_ram(key, block, tree, num_bytes)
            self._policies[Tier.RAM].used(key)
            block.is_ahead = is_ahead
            block.num_holds += is_held
            return block.tree

    def _read(self, key: Key, block: _Block, load: Loader | None) -> tuple[Tree, TierStats | None]:
        if block.path is not None:
            try:
                with self._outside():
                    tree = self._files.read(block.path)
                self._policies[Tier.DISK].used(key)
                return tree, self._stats.tiers[Tier.DISK]
            except BlockDamaged:
                self._drop_file(key, block)
                if not block.can_load:
                    raise
        if load is None:
            raise KeyError(key)
        with self._outside():
            tree = load(key)
            self._check(tree)
        self._stats.num_loads += 1
        self._stats.bytes_loaded += serialization.num_bytes(tree)
        block.can_load = True
        return tree, None

    @contextlib.contextmanager
    def _claimed(self, key: Key) -> Iterator[_Block]:
        """The block, made where it is missing, for this thread alone to move; gone afterwards if it has no content."""
        while (block := self._blocks.get(key)) is not None and block.is_busy:
            self._changed.wait()
        if block is None:
            block = self._blocks[key] = _Block()
        block.is_busy = True
        try:
            yield block
        finally:
            block.is_busy = False
            if not _is_there(block) and self._blocks.get(key) is block:
                del self._blocks[key]
            self._changed.notify_all()

    def _make_room(self, num_bytes: int) -> bool:
        """Evict cold blocks until so many bytes more fit into RAM; False where that cannot be."""
        stuck: set[Key] = set()
        while self._used[Tier.RAM] + num_bytes > self._limits.ram_bytes:
            victim = self._coldest(stuck)
            if victim is not None:
                with self._claimed(victim) as block:
                    if not self._evict(victim, block):
                        stuck.add(victim)
            elif self._num_evicting:  # by other threads, who wait for nobody meanwhile
                self._changed.wait()
            else:
                return False
        return True

    def _coldest(self, stuck: set[Key]) -> Key | None:
        """The block to leave RAM next; what will be wanted soon goes last, however long it has been there."""
        ahead = None
        for key in self._policies[Tier.RAM].coldest_first():
            block = self._blocks[key]
            if key in stuck or block.is_busy or block.num_holds:
                continue
            if not block.is_ahead:
                return key
            ahead = key if ahead is None else ahead
        return ahead

    def _evict(self, key: Key, block: _Block) -> bool:
        """Let a claimed block leave RAM; False where that would lose its content."""
        if block.path is None:
            self._num_evicting += 1
            try:
                is_written = self._failure is None and self._write_out(key, block)
            finally:
                self._num_evicting -= 1
            if not is_written and not block.can_load:
                return False
        self._drop_from_ram(key, block)
        return True

    def _write_out(self, key: Key, block: _Block, *, is_flush: bool = False) -> bool:
        """Write a claimed block from RAM to disk; False where the disk does not take it."""
        version = block.version
        path = self._written(block.tree, block.num_bytes, is_flush=is_flush)
        if path is None:
            return False
        if block.version != version:  # written to by whoever holds it: it is dirty again
            self._files.remove(path)
            self._used[Tier.DISK] -= block.num_bytes
            return True
        block.path = path
        self._policies[Tier.DISK].used(key)
        self._stats.tiers[Tier.RAM].bytes_out += block.num_bytes
        return True

    def _written(self, tree: Tree, num_bytes: int, *, is_flush: bool = False) -> Path | None:
        """A new file with this content, its bytes counted; None where the limit or the disk does not allow it."""
        limit = self._limits.disk_bytes
        if limit is not None:
            for key in list(self._policies[Tier.DISK].coldest_first()):
                if self._used[Tier.DISK] + num_bytes <= limit:
                    break
                block = self._blocks[key]
                if not block.is_busy and (block.can_load or (block.in_ram and not is_flush)):
                    self._drop_file(key, block)
                    if not _is_there(block):
                        del self._blocks[key]
            if self._used[Tier.DISK] + num_bytes > limit:
                return None
        self._used[Tier.DISK] += num_bytes
        try:
            path = self._files.new_path()
            with self._outside():
                self._files.write(path, tree)
        except BaseException as error:
            self._used[Tier.DISK] -= num_bytes
            if not isinstance(error, OSError):
                raise
            self._failure = error
            return None
        self._stats.tiers[Tier.DISK].bytes_in += num_bytes
        return path

    def _keep_in_ram(self, key: Key, block: _Block, tree: Tree, num_bytes: int) -> None:
        block.in_ram, block.tree, block.num_bytes = True, tree, num_bytes
        self._used[Tier.RAM] += num_bytes
        self._policies[Tier.RAM].used(key)
        self._stats.tiers[Tier.RAM].bytes_in += num_bytes

    def _drop(self, key: Key, block: _Block) -> None:
        self._drop_file(key, block)
        self._drop_from_ram(key, block)

    def _drop_from_ram(self, key: Key, block: _Block) -> None:
        if block.in_ram:
            block.in_ram, block.tree = False, None
            self._used[Tier.RAM] -= block.num_bytes
            self._policies[Tier.RAM].left(key)

    def _drop_file(self, key: Key, block: _Block) -> None:
        if block.path is not None:
            self._files.remove(block.path)
            block.path = None
            self._used[Tier.DISK] -= block.num_bytes
            self._policies[Tier.DISK].left(key)

    # ---- reading ahead -----------------------------------------------------------------------------

    def _go_on_reading_ahead(self) -> None:
        if self._ahead and self._background.is_idle:
            self._background(self._read_ahead)

    def _read_ahead(self) -> None:
        while True:
            with self._entered():
                if not self._ahead:
                    return
                key, load = self._ahead[-1]
                block = self._blocks.get(key)
                if block is None or not block.in_ram:
                    there = sum(each.num_bytes for each in self._blocks.values() if each.is_ahead)
                    size = 1 if block is None else block.num_bytes
                    if (block is not None and block.is_busy) or there + size > self._limits.ram_bytes // 2:
                        return  # the next `get` sends us again
                    with contextlib.suppress(Exception):  # whoever gets the block meets the same error
                        self._bring(key, load, is_ahead=True)
                if self._ahead and self._ahead[-1][0] == key:
                    self._ahead.pop()

    def _count_request(self, block: _Block | None) -> None:
        ram, disk = self._stats.tiers.values()
        if block is not None and block.in_ram:
            ram.num_hits += 1
            self._stats.num_ahead += block.is_ahead
            return
        ram.num_misses += 1
        if self._limits.disk_bytes != 0:
            is_hit = block is not None and block.path is not None
            disk.num_hits += is_hit
            disk.num_misses += not is_hit

    # ---- the rest ----------------------------------------------------------------------------------

    def _is_dirty(self, block: _Block) -> bool:
        return block.in_ram and block.path is None and not block.can_load and self._limits.disk_bytes != 0

    def _check(self, tree: Tree) -> None:
        """Refuse now what a disk would refuse in somebody else's call, when room is made for another block."""
        if self._limits.disk_bytes != 0:
            try:
                serialization.pack(tree)
            except NotSerializable as error:
                raise cannot_keep(error) from None

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        if self._pid != os.getpid():
            # A lock that another thread of the parent held stays held in a child for ever, and what it did is not done.
            self._changed, self._pid = threading.Condition(threading.Lock()), os.getpid()
            self._num_evicting = 0
            self._blocks = {key: block for key, block in self._blocks.items() if _is_there(block)}
            for block in self._blocks.values():
                block.is_busy = False
        with self._changed:
            yield

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        """Without the lock, for as long as it takes."""
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()

    def _full(self, key: Key, num_bytes: int) -> StoreFull:
        limits = {tier: self._limits.of(tier) for tier in Tier if self._limits.of(tier) != 0}
        directory, failure = self._files.directory, self._failure
        return StoreFull(
            store=self.name,
            key=repr(key),
            num_bytes=num_bytes,
            used={tier.name.lower(): self._used[tier] for tier in limits},
            limits={tier.name.lower(): limit for tier, limit in limits.items()},
            directory=None if directory is None else str(directory),
            reason=None if failure is None else failure.strerror or str(failure),
        )


def _is_there(block: _Block) -> bool:
    return block.in_ram or block.path is not None


_PREAMBLE = struct.Struct("<8sQQ")  # magic, bytes that follow, their checksum
_MAGIC = b"shoalblk"


class BlockFiles:
    """Blocks in a directory of their own.

    A forked child reads what its parent wrote, and writes and removes only
    what is its own.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self._parent = directory
        self._made: tuple[int, Path] | None = None
        self._finalizer: weakref.finalize[..., BlockFiles] | None = None
        self._num_files = 0

    def write(self, path: Path, tree: Tree) -> None:
        """Write a block to a new path; OSError where the disk does not take it, and then nothing is left of it."""
        content = memoryview(serialization.dumps(tree))
        preamble = _PREAMBLE.pack(_MAGIC, len(content), zlib.crc32(content))
        partial = path.with_suffix(".partial")
        try:
            with open(partial, "wb", buffering=0) as file:
                os.write(file.fileno(), preamble)
                while content:
                    content = content[os.write(file.fileno(), content) :]
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise

    def read(self, path: Path) -> Tree:
        """The block of a file; BlockDamaged where it is not what was written."""
        try:
            content = memoryview(path.read_bytes())
        except OSError as error:
            raise BlockDamaged(path=str(path), problem=f"it cannot be read ({error.strerror})") from None
        if len(content) < _PREAMBLE.size:
            raise BlockDamaged(path=str(path), problem=f"it has only {len(content)} bytes")
        magic, num_bytes, checksum = _PREAMBLE.unpack_from(content)
        content = content[_PREAMBLE.size :]
        if magic != _MAGIC or num_bytes != len(content):
            raise BlockDamaged(path=str(path), problem="it is no block, or was cut off")
        if zlib.crc32(content) != checksum:
            raise BlockDamaged(path=str(path), problem="its checksum is wrong")
        return serialization.loads(content)

    def remove(self, path: Path) -> None:
        """Take a file away, if this process wrote it."""
        if self._made is not None and self._made == (os.getpid(), path.parent):
            path.unlink(missing_ok=True)

    @property
    def directory(self) -> Path | None:
        return None if self._made is None else self._made[1]

    def close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._made = self._finalizer = None

    def new_path(self) -> Path:
        """Of a file not written yet. Not for two threads at once."""
        if self._made is None or self._made[0] != os.getpid():
            parent = scratch.directory("blocks") if self._parent is None else Path(self._parent)
            parent.mkdir(parents=True, exist_ok=True)
            path = parent / f"store-{os.getpid()}-{id(self):x}-{os.urandom(4).hex()}"
            path.mkdir(mode=0o700)
            self._made = os.getpid(), path
            self._finalizer = weakref.finalize(self, _remove, *self._made)  # also runs at exit
        self._num_files += 1
        return self._made[1] / f"{self._num_files}.block"


def _remove(pid: int, path: Path) -> None:
    # A forked child inherits the finalizer, not the directory.
    if pid == os.getpid():
        shutil.rmtree(path, ignore_errors=True)


def cannot_keep(error: NotSerializable) -> ConfigError:
    return ConfigError(
        f"{error.what} cannot be kept in a store or cache, which holds tensors, arrays of numbers or text, strings, bytes and "
        "plain numbers, in dicts by name, tuples and lists: so nothing it reads back could run as code. Nothing was "
        "kept; give one of those."
    )
