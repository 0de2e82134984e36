"""Samples by index, kept once they have been made.

Those that fit the template of the first one are rows of numbers, of which a
batch is made in one go; all others (text, lists of several lengths) are kept
as bytes each. Processes forked after `share` keep and find them together.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.config import job as jobs
from shoal.data.cache import CacheConfig, available, block_format
from shoal.data.cache import anon_file as nameless
from shoal.data.cache.cache_plan import piece_bytes, place, say_where
from shoal.data.cache.row_layout import RowLayout
from shoal.data.cache.row_prefetch import RowsAhead
from shoal.data.cache.row_store import UNLIMITED, Lists, RowSpec, RowStore
from shoal.data.cache.sample_template import Template
from shoal.data.collate import collate
from shoal.data.tree import Tree
from shoal.data.weights import Weighted
from shoal.runtime import scratch

MISSING, REGULAR, ODD = 0, 1, 2
_WEIGHTED = "\0weighted"


class _Plan(msgspec.Struct, frozen=True):
    """What the first process that had a sample decided for all of them."""

    template: Template | None
    num_ram_rows: int


class SampleStore:
    """Places for `num_samples` samples."""

    def __init__(self, num_samples: int, config: CacheConfig, *, name: str) -> None:
        self._num_samples, self._config, self._name = num_samples, config, name
        self._directory = (
            None if config.where == "ram" else config.directory or str(scratch.directory("rows"))
        )
        budget = available.for_caches(num_sharers=jobs.current().num_workers)
        self._budget = budget if config.ram_bytes is None else config.ram_bytes
        heap = {"ram": UNLIMITED, "disk": 0, "auto": self._budget}[config.where]
        if config.where == "ram" and config.ram_bytes is not None:
            heap = config.ram_bytes
        spec = RowSpec(
            fields={},
            lists={"sample": np.dtype(np.uint8)},
            num_rows=num_samples,
            num_parts=num_samples,
            num_ram_rows=num_samples,
            heap_ram_bytes=heap,
        )
        self._odd = RowStore(
            spec,
            name=f"{name} (odd samples)",
            directory=self._directory,
            files=RowStore.reserve(self._directory),
        )
        self._regular_files = RowStore.reserve(self._directory)
        self._plan_file = nameless.in_memory("shoal-template", 0)
        self._owned = [self._plan_file, *self._regular_files]
        self._finalizer = weakref.finalize(self, nameless.close_all, self._owned)
        self._plan: _Plan | None = None
        self._regular: RowStore | None = None
        self._ahead: RowsAhead | None = None
        self._lock = threading.Lock()
        self.flags = self._odd.flags
        """MISSING, REGULAR or ODD, by index."""

    def keep(self, numbers: NDArray[np.int64], samples: list[Any]) -> None:
        """Put samples into their places."""
        templates = [Template.of(sample) for sample in samples]
        plan = self._plan_of(templates[0])
        fits = np.array([plan.template is not None and each == plan.template for each in templates])
        if fits.any():
            assert plan.template is not None
            assert self._regular is not None
            chosen = [sample for sample, fit in zip(samples, fits, strict=True) if fit]
            self._regular.put(numbers[fits], plan.template.columns(chosen))
            self.flags[numbers[fits]] = REGULAR
        if not fits.all():
            pieces = [_encoded(sample) for sample, fit in zip(samples, fits, strict=True) if not fit]
            offsets = np.cumsum([0, *(len(piece) for piece in pieces)])
            self._odd.put(
                numbers[~fits], {"sample": Lists(np.frombuffer(b"".join(pieces), np.uint8), offsets)}
            )
            self.flags[numbers[~fits]] = ODD

    def batch(self, numbers: NDArray[np.int64]) -> Tree:
        """Samples that are there, as one batch."""
        plan = self._known_plan()
        if plan is None or plan.template is None or not (self.flags[numbers] == REGULAR).all():
            return collate(self.samples(numbers))
        return plan.template.batch(self._columns(numbers))

    def samples(self, numbers: NDArray[np.int64]) -> list[Any]:
        """Samples that are there, one by one."""
        plan, found = self._known_plan(), [None] * len(numbers)
        are_odd = self.flags[numbers] == ODD
        for rows, made in (
            (np.flatnonzero(~are_odd), self._regular_samples(plan, numbers[~are_odd])),
            (np.flatnonzero(are_odd), self._odd_samples(numbers[are_odd])),
        ):
            for row, sample in zip(rows.tolist(), made, strict=True):
                found[row] = sample
        return found

    @property
    def looks_ahead(self) -> bool:
        """Whether some of it may be on disk."""
        return self._config.where != "ram" and (self._regular is None or not self._regular.is_all_in_ram)

    def will_need(self, numbers: NDArray[np.int64]) -> None:
        """Read them ahead, where they are on disk; only if all are there, for what is read ahead is not read again."""
        if self._known_plan() is None or self._ahead is None or not (self.flags[numbers] == REGULAR).all():
            return
        self._ahead.announce(numbers)

    # ---- how regular samples lie -------------------------------------------------------------------

    def _plan_of(self, template: Template | None) -> _Plan:
        """What was decided; by us, if nobody has yet."""
        plan = self._known_plan()
        if plan is not None:
            return plan
        with self._odd.claimed(self._num_samples, waits=True):
            if not self._odd.note:
                plan = self._decide(template)
                content = msgspec.msgpack.encode(plan)
                nameless.write_at(self._plan_file, 0, content)
                self._odd.note = len(content)
        plan = self._known_plan()
        assert plan is not None
        return plan

    def _decide(self, template: Template | None) -> _Plan:
        if template is None:
            return _Plan(None, 0)
        row_bytes = RowLayout(template.fields()).row_bytes
        placed = place(
            self._num_samples,
            row_bytes,
            self._config,
            budget_bytes=self._budget,
            num_sharers=jobs.current().num_workers,
        )
        say_where(self._name, placed, self._directory)
        return _Plan(template, placed.num_ram_rows)

    def _known_plan(self) -> _Plan | None:
        if self._plan is None and self._odd.note:
            with self._lock:
                content = os.pread(self._plan_file, self._odd.note, 0)
                plan = msgspec.msgpack.decode(content, type=_Plan)
                if plan.template is not None and self._regular is None:
                    self._open(plan.template, plan.num_ram_rows)
                self._plan = plan
        return self._plan

    def _open(self, template: Template, num_ram_rows: int) -> None:
        spec = RowSpec(
            fields=template.fields(),
            lists={},
            num_rows=self._num_samples,
            num_parts=0,
            num_ram_rows=num_ram_rows,
        )
        store = RowStore(
            spec,
            name=self._name,
            directory=self._directory,
            files=self._regular_files,
            granted_bytes=num_ram_rows * RowLayout(template.fields()).row_bytes,
        )
        del self._owned[1:]  # they are the store's from now on
        if not store.is_all_in_ram:
            self._ahead = RowsAhead(
                store.take, row_bytes=store.row_bytes, piece_bytes=piece_bytes(self._budget)
            )
        self._regular = store

    # ---- reading -----------------------------------------------------------------------------------

    def _columns(self, numbers: NDArray[np.int64]) -> dict[str, Any]:
        assert self._regular is not None
        taken = None
        if self._ahead is not None:
            taken = self._ahead.take(numbers)
            if taken is not None:
                self._regular.count_ahead(len(numbers))
        return self._regular.gather(numbers) if taken is None else self._regular.unpack(taken)

    def _regular_samples(self, plan: _Plan | None, numbers: NDArray[np.int64]) -> list[Any]:
        if not len(numbers):
            return []
        assert plan is not None
        assert plan.template is not None
        return plan.template.samples(self._columns(numbers), len(numbers))

    def _odd_samples(self, numbers: NDArray[np.int64]) -> list[Any]:
        if not len(numbers):
            return []
        kept = self._odd.gather(numbers)["sample"]
        assert isinstance(kept, Lists)
        pieces = [
            kept.values[begin:end] for begin, end in zip(kept.offsets[:-1], kept.offsets[1:], strict=True)
        ]
        return [_decoded(piece) for piece in pieces]


def _encoded(sample: Any) -> bytes:
    header, body = block_format.joined({_WEIGHTED: tuple(sample)} if isinstance(sample, Weighted) else sample)
    return len(header).to_bytes(8, "little") + header + bytes(block_format.padding(8 + len(header))) + body


def _decoded(piece: NDArray[np.uint8]) -> Any:
    # A buffer of its own: where arrays begin is a multiple of 64 only from its beginning on.
    content = memoryview(bytearray(piece.tobytes()))
    begin = 8 + int.from_bytes(content[:8], "little")
    tree = block_format.decode(content[8:begin], content[begin + block_format.padding(begin) :])
    if isinstance(tree, dict) and list(tree) == [_WEIGHTED]:
        return Weighted(*tree[_WEIGHTED])
    return tree
