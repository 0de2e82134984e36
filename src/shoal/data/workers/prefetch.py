"""Reading ahead of the consumer in a thread, and pinning of batches for a GPU.

The copy into page-locked memory is the only one: it is made in the thread that
reads ahead where there is one, and torch keeps the memory for the next batch.
On a CPU nothing is pinned.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from shoal.data.randomness import DrawsWatch, ReadAhead
from shoal.data.slice import Slice
from shoal.data.tree import Tree, map_tensors
from shoal.errors import ConfigError

T = TypeVar("T")


def prefetched(items: Iterator[T], num_ahead: int) -> Iterator[T]:
    """The same items in the same order, up to `num_ahead` of them read before they are asked for.

    The first item is read by the consumer itself: if foreign code draws random
    numbers for it, a thread would share the global generators with the
    training step, and that is refused. The thread starts then and is gone when
    the iterator is exhausted, closed or dropped. An exception of `items` is
    raised where the item it prevented would have been.
    """
    with DrawsWatch() as watch:
        try:
            first = next(items)
        except StopIteration:
            return
    if watch.drew:
        raise ConfigError(
            "prefetch reads ahead in a thread, and the stages before it draw from the global random generators of torch, "
            "numpy or Python, which the training step uses at the same time: neither could be repeated. Nothing was "
            "trained; take prefetch out, or let processes draw: map(fn, workers=2), behind which prefetch is fine, or a "
            "DataLoader of num_workers=2."
        )
    shelf = _Shelf(num_ahead)
    thread = ReadAhead(target=_fill, args=(shelf, items), name="shoal-prefetch", daemon=True)
    del items  # the thread's alone, so that it is also closed there
    thread.start()
    try:
        yield first
        del first
        while True:
            kind, value = shelf.take()
            if kind == "end":
                return
            if kind == "error":
                try:
                    raise value
                finally:
                    del value  # an exception kept here would keep every frame it passed alive
            yield value
    finally:
        shelf.close()
        thread.join()


class _Shelf:
    """A bounded queue that its consumer can close under a waiting producer."""

    def __init__(self, num_places: int) -> None:
        self._entries: deque[tuple[str, Any]] = deque()
        self._num_places = num_places
        self._closed = False
        self._changed = threading.Condition()

    def wait_for_place(self) -> bool:
        """True once there is a place; False when nothing will be taken any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._entries) < self._num_places)
            return not self._closed

    def put(self, kind: str, value: Any) -> None:
        with self._changed:
            if not self._closed:
                self._entries.append((kind, value))
                self._changed.notify_all()

    def take(self) -> tuple[str, Any]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._entries))
            self._changed.notify_all()
            return self._entries.popleft()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._entries.clear()
            self._changed.notify_all()


def _fill(shelf: _Shelf, items: Iterator[Any]) -> None:
    try:
        while shelf.wait_for_place():
            shelf.put("item", next(items))
    except StopIteration:
        shelf.put("end", None)
    except BaseException as error:
        shelf.put("error", error)
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()


def wants_pinning(device: torch.device) -> bool:
    """Whether batches on their way to `device` are better page-locked."""
    return device.type not in ("cpu", "mps")  # memory that device and CPU share needs no copy


def pinned(slices: Iterator[Slice]) -> Iterator[Slice]:
    for part in slices:
        yield replace(part, batch=pin(part.batch))


def pin(batch: Tree) -> Tree:
    """The batch with its tensors in page-locked memory; those that are there, or on a device, stay."""
    return map_tensors(_pin, batch)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()
