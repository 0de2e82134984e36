"""The block store: blocks by key over device memory, RAM and disk.

Bytes, files, threads and waiting; `tiering.py` decides what goes where. Slow
work happens outside the lock, so that a block in RAM is handed out while
another is written to disk. On disk a block is a file, whole or not there at
all, and checked when it is read; the directory goes with the store, or at the
latest with the process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shoal.data.cache import statistics
from shoal.data.cache.background import BackgroundJobs
from shoal.data.cache.eviction import Key
from shoal.data.cache.statistics import Stats, TierStats
from shoal.data.cache.tiering import (
    ActionFailed,
    ActionFinished,
    Changed,
    Discard,
    DropCopy,
    Enough,
    Event,
    Flush,
    Full,
    Limits,
    LoadBlock,
    Move,
    NotKept,
    Offer,
    Read,
    Release,
    Request,
    Settled,
    Slow,
    Store,
    Tier,
    Tiering,
    Wait,
    Want,
)
from shoal.data.tree import Tree, map_tensors
from shoal.errors import BlockDamaged, ConfigError, StoreFull
from shoal.runtime import scratch, serialization
from shoal.runtime.serialization import NotSerializable

Loader = Callable[[Any], Tree]
"""Gives the block of a key: from a file, a computation, another host."""


class BlockStore:
    """Blocks by key: trees of tensors and arrays, or bytes, as much of them in fast tiers as the limits allow.

    What `get` returns is the store's own and shared: read it. To change a
    block, `put` a new one, or `hold` it, write to it and `mark_dirty`.
    Changes reach a slower tier before a block leaves a faster one. Safe to
    use from several threads; a forked child has a store of its own that
    begins with the same content.

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
        device: torch.device | str | None = None,
    ) -> None:
        """The disk tier is a new folder of `directory`, or of the job's scratch directory; it goes with the store."""
        self.name = name
        self._contents = TierContents(directory, device)
        if self._contents.device is None:
            limits = Limits(ram_bytes=limits.ram_bytes, disk_bytes=limits.disk_bytes)
        self._limits, self._policy = limits, policy
        self._tiering = Tiering(limits, policy)
        self._stats = Stats({tier: TierStats(limit_bytes=limits.of(tier)) for tier in Tier})
        self._changed = threading.Condition(threading.Lock())
        self._ahead: list[tuple[Key, Loader | None, Tier]] = []
        self._background = BackgroundJobs("shoal-read-ahead")
        self._pid = os.getpid()
        statistics.watch(self)

    # ---- reading -----------------------------------------------------------------------------------

    def get(self, key: Key, load: Loader | None = None, *, tier: Tier | None = None) -> Tree:
        """The block, brought into the fastest tier, or into `tier`; loaded where no tier has it.

        KeyError where there is none and no `load`.
        """
        with self._entered():
            tree = self._bring(key, load, tier, is_held=False)
        self._go_on_reading_ahead()
        return tree

    @contextlib.contextmanager
    def hold(self, key: Key, load: Loader | None = None, *, tier: Tier | None = None) -> Iterator[Tree]:
        """The block, which stays where it is until the end of the `with`: the way to change one.

        with store.hold("weights") as block:
            block["rows"] += 1
            store.mark_dirty("weights")
        """
        with self._entered():
            tree = self._bring(key, load, tier, is_held=True)
        try:
            yield tree
        finally:
            with self._entered():
                self._tiering.let_go(key)
                self._changed.notify_all()

    def prefetch(self, keys: Iterable[Key], load: Loader | None = None, *, tier: Tier | None = None) -> None:
        """These blocks will be wanted soon, in this order: bring them in the background.

        At most half of the tier is filled ahead; as blocks are used, more
        follow. What was announced before and not read yet is forgotten. An
        error waits for whoever gets the block.
        """
        with self._entered():
            self._ahead = [(key, load, self._tier(tier)) for key in reversed(list(keys))]
        self._go_on_reading_ahead()

    def __contains__(self, key: Key) -> bool:
        with self._entered():
            block = self._tiering.blocks.get(key)
            return block is not None and bool(block.copies)

    def __len__(self) -> int:
        with self._entered():
            return sum(1 for block in self._tiering.blocks.values() if block.copies)

    # ---- writing -----------------------------------------------------------------------------------

    def put(self, key: Key, tree: Tree, *, can_load: bool = False, tier: Tier | None = None) -> None:
        """Keep this as the block's content. It is the store's from now on.

        With `can_load` it may be lost under pressure: somebody can make it
        again. StoreFull where no tier can take it; then the block is what it
        was before. ConfigError where the store has a disk and this could
        never be written there.
        """
        tier = self._tier(tier)
        self._check(tree)
        tree = self._contents.as_in(tier, tree)
        with self._entered():
            while can_load and isinstance(self._ask(Discard(key)), Wait):
                self._changed.wait()
            self._offer(key, tree, tier, is_new=not can_load)

    def mark_dirty(self, key: Key, *, tier: Tier | None = None) -> None:
        """The block that the caller holds was written to."""
        with self._entered():
            block = self._tiering.blocks.get(key)
            there = [] if block is None else [each for each in block.copies if each != Tier.DISK]
            if tier is not None:
                there = [each for each in there if each == tier]
            if block is None or not there or not block.num_holds:
                raise ConfigError(
                    f"mark_dirty({key!r}) says that the block was written to, but nobody holds it in memory: it may have "
                    "left with its old content. Change a block inside `with store.hold(key) as block:`."
                )
            self._report(Changed(key, min(there)))

    def flush(self) -> None:
        """Copy every change to the slowest tier. StoreFull where it cannot take one; nothing is lost then."""
        with self._entered():
            self._tiering.try_again()
            for key in list(self._tiering.blocks):
                while not isinstance(answer := self._ask(Flush(key)), Settled):
                    if isinstance(answer, (Full, OSError)):
                        raise self._full(key, answer if isinstance(answer, OSError) else None)
                    if isinstance(answer, Wait):
                        self._changed.wait()

    def release(self, key: Key) -> None:
        """Nobody needs the block at the moment: it leaves memory, or with policy="delayed" may leave it later."""
        with self._entered():
            while not isinstance(answer := self._ask(Release(key)), (Settled, Full)):
                if isinstance(answer, Wait):
                    self._changed.wait()

    def discard(self, key: Key) -> None:
        """Forget the block and its content, everywhere."""
        with self._entered():
            while isinstance(self._ask(Discard(key)), Wait):
                self._changed.wait()

    def close(self) -> None:
        """Forget everything and remove what is on disk. The store may be used again, and begins empty."""
        with self._entered():
            self._ahead = []
        self._background.finish()
        with self._entered():
            self._tiering = Tiering(self._limits, self._policy)
            self._contents.close()

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
            now.num_blocks = sum(1 for block in self._tiering.blocks.values() if block.copies)
            now.num_dirty = sum(1 for key in self._tiering.blocks if self._tiering.is_dirty(key))
            for tier, tier_figures in now.tiers.items():
                tier_figures.num_bytes = self._tiering.used[tier]
            return now

    def figures(self) -> dict[str, Any]:
        """The same, fit for JSON."""
        return {"kind": "blocks", "policy": self._policy, **self.stats.as_dict()}

    # ---- the doing, with the lock held -------------------------------------------------------------

    def _bring(self, key: Key, load: Loader | None, tier: Tier | None, *, is_held: bool) -> Tree:
        tier = self._tier(tier)
        self._count_request(key, tier)
        failure: OSError | None = None
        while True:
            outcome = self._next(Want(key, tier, must_stay=is_held))
            match outcome:
                case Settled():
                    if is_held:
                        self._tiering.hold(key)
                    version = self._tiering.blocks[key].copies[tier].version
                    return self._contents.read(key, tier, version, self._outside)
                case Wait():
                    self._changed.wait()
                case LoadBlock():
                    kept, tree = self._load(outcome, load, tier, must_stay=is_held)
                    if not is_held:
                        return tree
                    if not kept:
                        raise self._full(key, None)
                case Read() | Move():
                    try:
                        tree = self._carry_out(outcome)
                    except OSError as error:
                        failure = error
                        continue  # there is another way: the tiering knows by now that this one is closed
                    if isinstance(outcome, Read):
                        if is_held and failure is None and self._tiering.try_again():
                            continue  # somebody may have made room on the disk since
                        if is_held:
                            raise self._full(key, failure)
                        return self._contents.as_in(tier, tree)

    def _load(
        self, action: LoadBlock, load: Loader | None, tier: Tier, *, must_stay: bool = False
    ) -> tuple[bool, Tree]:
        try:
            if load is None:
                raise KeyError(action.key)
            with self._outside():
                tree = load(action.key)
                self._check(tree)
                tree = self._contents.as_in(tier, tree)
        except BaseException:
            self._report(ActionFailed(action))
            raise
        self._stats.num_loads += 1
        self._stats.bytes_loaded += serialization.num_bytes(tree)
        return self._offer(action.key, tree, tier, is_new=False, must_stay=must_stay), tree

    def _offer(self, key: Key, tree: Tree, tier: Tier, *, is_new: bool, must_stay: bool = False) -> bool:
        num_bytes, failure = serialization.num_bytes(tree), None
        while True:
            outcome = self._next(Offer(key, num_bytes, tier, is_new, must_stay))
            match outcome:
                case Wait():
                    self._changed.wait()
                case Settled():
                    return True  # somebody put it meanwhile
                case NotKept():
                    self._changed.notify_all()
                    return False
                case Full():
                    if failure is None and self._tiering.try_again():
                        continue  # somebody may have made room on the disk since
                    raise self._full(key, failure, num_bytes)
                case Store() | Move():
                    try:
                        self._carry_out(outcome, tree)
                    except OSError as error:
                        failure = error
                    else:
                        if isinstance(outcome, Store):
                            return True

    def _ask(self, request: Request) -> Any:
        """The next answer to a request, with one action carried out on the way; an OSError where that failed."""
        outcome = self._next(request)
        if isinstance(outcome, (LoadBlock, Store, Move, Read)):
            try:
                self._carry_out(outcome)
            except OSError as error:
                return error
        return outcome

    def _next(self, request: Request) -> Any:
        """The last of what must be done; drops before it are done."""
        last = None
        for last in self._tiering.handle(request):
            if isinstance(last, DropCopy):
                self._contents.drop(last.key, last.tier, last.version)
        return last

    def _carry_out(self, action: Slow, offered: Tree = None) -> Tree:
        """Do it and report; what was read or written. OSError where a tier did not take it."""
        try:
            match action:
                case Store(key, tier, version, num_bytes):
                    tree = self._contents.write(key, tier, version, offered, self._outside)
                    self._stats.tiers[tier].bytes_in += num_bytes
                case Move(key, source, tier, version, num_bytes):
                    tree = self._contents.read(key, source, version, self._outside)
                    tree = self._contents.write(key, tier, version, tree, self._outside)
                    self._stats.tiers[source].bytes_out += num_bytes
                    self._stats.tiers[tier].bytes_in += num_bytes
                case Read(key, source, _, version):
                    tree = self._contents.read(key, source, version, self._outside)
        except torch.OutOfMemoryError as error:
            self._report(ActionFailed(action))
            raise OSError(str(error)) from error
        except BlockDamaged as error:
            can_load = self._tiering.blocks[action.key].can_load
            self._report(ActionFailed(action, source_is_bad=True))
            if not can_load:
                raise
            raise OSError(str(error)) from error
        except BaseException:
            self._report(ActionFailed(action))
            raise
        self._report(ActionFinished(action))
        return tree

    def _report(self, event: Event) -> None:
        for drop in self._tiering.handle(event):
            if isinstance(drop, DropCopy):
                self._contents.drop(drop.key, drop.tier, drop.version)
        self._changed.notify_all()

    # ---- reading ahead -----------------------------------------------------------------------------

    def _go_on_reading_ahead(self) -> None:
        if self._ahead and self._background.is_idle:
            self._background(self._read_ahead)

    def _read_ahead(self) -> None:
        while True:
            with self._entered():
                if not self._ahead:
                    return
                key, load, tier = self._ahead[-1]
                outcome = self._next(Want(key, tier, ahead=True))
                if isinstance(outcome, (Enough, Wait)):
                    return  # the next `get` sends us again
                try:
                    if isinstance(outcome, LoadBlock):
                        self._load(outcome, load, tier)
                    elif isinstance(outcome, Move):
                        self._carry_out(outcome)
                except Exception:
                    # Whoever gets the block meets the same error, with somebody there to see it.
                    outcome = Settled()
                is_there = isinstance(outcome, (Settled, LoadBlock)) or (
                    isinstance(outcome, Move) and outcome.key == key
                )
                if is_there and self._ahead and self._ahead[-1][0] == key:
                    self._ahead.pop()

    def _count_request(self, key: Key, tier: Tier) -> None:
        block = self._tiering.blocks.get(key)
        if block is not None and block.is_ahead and tier in block.copies:
            self._stats.num_ahead += 1
        for each, counted in self._stats.tiers.items():
            if each < tier or self._limits.of(each) == 0:
                continue
            if block is not None and each in block.copies:
                counted.num_hits += 1
                return
            counted.num_misses += 1

    # ---- the rest ----------------------------------------------------------------------------------

    def _check(self, tree: Tree) -> None:
        """Refuse now what a disk would refuse in somebody else's call, when room is made for another block."""
        if self._limits.of(Tier.DISK) != 0:
            try:
                serialization.pack(tree)
            except NotSerializable as error:
                raise cannot_keep(error) from None

    def _tier(self, tier: Tier | None) -> Tier:
        return self._tiering.fastest if tier is None else tier

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        if self._pid != os.getpid():
            # A lock that another thread of the parent held stays held in a child for ever, and what it did is not done.
            self._changed, self._pid = threading.Condition(threading.Lock()), os.getpid()
            for block in list(self._tiering.blocks.values()):
                if block.busy is not None:
                    self._tiering.handle(ActionFailed(block.busy))
            self._tiering.try_again()
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

    def _full(self, key: Key, failure: OSError | None, num_bytes: int | None = None) -> StoreFull:
        used = {tier.name.lower(): self._tiering.used[tier] for tier in Tier if self._limits.of(tier) != 0}
        return StoreFull(
            store=self.name,
            key=repr(key),
            num_bytes=num_bytes,
            used=used,
            limits={tier.name.lower(): self._limits.of(tier) for tier in Tier if self._limits.of(tier) != 0},
            directory=None if self._contents.directory is None else str(self._contents.directory),
            reason=None if failure is None else failure.strerror or str(failure),
        )


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
            return map_tensors(lambda tensor: tensor.to(self.device), tree)
        if tier == Tier.RAM:
            return map_tensors(lambda tensor: tensor.cpu(), tree)
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


_MAGIC = b"shoalblk"
_PREAMBLE = struct.Struct(
    "<8sQQII"
)  # magic, header bytes, body bytes, checksum of the header and of the body


class BlockFiles:
    """Blocks in a directory of their own, by number.

    A forked child reads what its parent wrote, and writes and removes only
    what is its own.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """In a new folder of `directory`, or of the job's scratch directory."""
        self._parent = directory
        self._made: tuple[int, Path] | None = None
        self._finalizer: weakref.finalize[..., BlockFiles] | None = None

    def write(self, number: int, tree: Tree) -> Path:
        """Write a block; OSError where the disk does not take it, and then nothing is left of it."""
        header, arrays = serialization.pack_bytes(tree)
        checksum, num_bytes = 0, 0
        for array in arrays:
            gap = bytes(serialization.padding(len(array)))
            checksum = zlib.crc32(gap, zlib.crc32(array, checksum))
            num_bytes += len(array) + len(gap)
        preamble = _PREAMBLE.pack(_MAGIC, len(header), num_bytes, zlib.crc32(header), checksum)
        path = self._directory() / f"{number}.block"
        partial = path.with_suffix(".partial")
        try:
            with open(partial, "wb", buffering=0) as file:
                begin = _PREAMBLE.size + len(header)
                _write_all(file.fileno(), preamble + header + bytes(serialization.padding(begin)))
                for array in arrays:
                    _write_all(file.fileno(), array)
                    _write_all(file.fileno(), bytes(serialization.padding(len(array))))
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        return path

    def read(self, path: Path) -> Tree:
        """The block of a file; BlockDamaged where it is not what was written."""
        try:
            with open(path, "rb", buffering=0) as file:
                content = bytearray(os.fstat(file.fileno()).st_size)
                length = file.readinto(content) or 0
                while 0 < length < len(content):
                    more = file.readinto(memoryview(content)[length:]) or 0
                    length = length + more if more else -1
        except OSError as error:
            raise BlockDamaged(path=str(path), problem=f"it cannot be read ({error.strerror})") from None
        if len(content) < _PREAMBLE.size or length != len(content):
            raise BlockDamaged(path=str(path), problem=f"it has only {len(content)} bytes")
        magic, header_bytes, body_bytes, header_sum, body_sum = _PREAMBLE.unpack_from(content)
        begin = _PREAMBLE.size + header_bytes
        begin += serialization.padding(begin)
        if magic != _MAGIC or begin + body_bytes != len(content):
            raise BlockDamaged(path=str(path), problem="it is no block, or was cut off")
        view = memoryview(content)
        header = view[_PREAMBLE.size : _PREAMBLE.size + header_bytes]
        body = view[begin:]
        if zlib.crc32(header) != header_sum or zlib.crc32(body) != body_sum:
            raise BlockDamaged(path=str(path), problem="its checksum is wrong")
        return serialization.unpack_bytes(header, body)

    def remove(self, path: Path) -> None:
        """Take a file away, if this process wrote it."""
        if self._made is not None and self._made[0] == os.getpid() and path.parent == self._made[1]:
            path.unlink(missing_ok=True)

    @property
    def directory(self) -> Path | None:
        """Where the files are; None before the first."""
        return None if self._made is None else self._made[1]

    def close(self) -> None:
        """Take everything away."""
        if self._made is not None:
            _remove(*self._made)
        if self._finalizer is not None:
            self._finalizer.detach()
        self._made = self._finalizer = None

    def _directory(self) -> Path:
        if self._made is None or self._made[0] != os.getpid():
            parent = scratch.directory("blocks") if self._parent is None else Path(self._parent)
            parent.mkdir(parents=True, exist_ok=True)
            path = parent / f"store-{os.getpid()}-{id(self):x}-{os.urandom(4).hex()}"
            path.mkdir(mode=0o700)
            self._made = os.getpid(), path
            self._finalizer = weakref.finalize(self, _remove, *self._made)  # also runs at exit
        return self._made[1]


def _remove(pid: int, path: Path) -> None:
    # A forked child inherits the finalizer, not the directory.
    if pid == os.getpid():
        shutil.rmtree(path, ignore_errors=True)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def cannot_keep(error: NotSerializable) -> ConfigError:
    return ConfigError(
        f"{error.what} cannot be kept in a store or cache, which holds tensors, arrays of numbers or text, strings, bytes and "
        "plain numbers, in dicts by name, tuples and lists: so nothing it reads back could run as code. Nothing was "
        "kept; give one of those."
    )
