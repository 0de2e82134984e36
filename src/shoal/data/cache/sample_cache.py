"""`Dataset.cache`: samples are made once and kept, in RAM as far as they fit, else on disk.

Samples are made on demand. Samples of one shape are rows of numbers, batched in one go; others
(text, ragged lists) are serialized each. The first epoch's sample is kept, so that a resumed run,
with an empty cache, sees the same.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shoal.config import job as jobs
from shoal.data.cache import CacheConfig, cache_plan, row_file
from shoal.data.cache.cache_plan import piece_bytes, place, say_where
from shoal.data.cache.row_file import Field, RowLayout
from shoal.data.cache.row_store import UNLIMITED, RowPrefetch, RowSpec, RowStore
from shoal.data.formats.table import Ragged
from shoal.data.order import Indices, integers
from shoal.data.randomness import PrivateGenerators
from shoal.data.slice import Weighted
from shoal.data.sources.source import DerivedSource, Source
from shoal.data.tree import Tree, collate, to_tensor
from shoal.errors import ConfigError
from shoal.runtime import scratch, serialization
from shoal.runtime.serialization import NotSerializable


def cached(
    source: Source,
    where: str = "auto",
    ram_bytes: int | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> Cached:
    folder = None if directory is None else os.fspath(directory)
    return Cached(source, CacheConfig(where=where, ram_bytes=ram_bytes, directory=folder))  # type: ignore[arg-type]  # checked there


class Cached(DerivedSource):
    """Another source whose samples are kept."""

    name = "cache"

    def __init__(self, source: Source, config: CacheConfig) -> None:
        super().__init__(source)
        # The functions before it are watched here, and only when they run.
        self.runs_user_code = False
        self._config = config
        self._store: SampleStore | None = None
        self._lock = threading.Lock()
        self._generators = PrivateGenerators(0)

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        numbers = integers(indices)
        return self._filled(numbers).samples(numbers)

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        numbers = integers(indices)
        return self._filled(numbers).batch(numbers)

    @property
    def looks_ahead(self) -> bool:  # type: ignore[override]  # a property may stand for a plain attribute
        return (self._store is not None and self._store.looks_ahead) or self._source.looks_ahead

    def will_need(self, indices: Indices, epoch: int = 0) -> None:
        """Read cached samples ahead from the cache, the others from the source."""
        numbers, store = integers(indices), self._opened()
        missing = store.flags[numbers] == MISSING
        if not missing.any():
            store.will_need(numbers)
        elif self._source.looks_ahead:
            self._source.will_need(numbers[missing], 0)

    def share(self) -> None:
        """Processes that are forked from now on fill one cache together."""
        super().share()
        self._opened()

    def describe(self) -> list[dict[str, Any]]:
        return self._source.describe()

    def _opened(self) -> SampleStore:
        with self._lock:
            if self._store is None:
                name = " > ".join(self._source.names())
                self._store = SampleStore(self.num_samples, self._config, name=name)
            return self._store

    def _filled(self, numbers: NDArray[np.int64]) -> SampleStore:
        store = self._opened()
        missing = np.unique(numbers[store.flags[numbers] == MISSING])
        if len(missing):
            store.keep(missing, self._made(missing))
        return store

    def _made(self, numbers: NDArray[np.int64]) -> list[Any]:
        if not self._source.runs_user_code:
            return self._source.samples(numbers, 0)
        with self._generators as generators:
            generators.reseed(0)
            samples = self._source.samples(numbers, 0)
            if generators.were_used():
                raise ConfigError(
                    "cache keeps a sample for all epochs, but a stage before it draws from the random generators of torch, "
                    "numpy or Python: what is kept would depend on when it was first read, and a resumed run would see "
                    "something else. Nothing was kept; call cache before that stage, and make it an augment."
                )
        return samples


MISSING, REGULAR, ODD = 0, 1, 2


class _Plan(msgspec.Struct, frozen=True):
    """Layout of the cache, decided for all processes by the first that had a sample."""

    template: Template | None
    num_ram_rows: int


class SampleStore:
    """Places for `num_samples` samples."""

    def __init__(self, num_samples: int, config: CacheConfig, *, name: str) -> None:
        self._num_samples, self._config, self._name = num_samples, config, name
        self._directory = (
            None if config.where == "ram" else config.directory or str(scratch.directory("rows"))
        )
        budget = cache_plan.for_caches(num_sharers=jobs.current().num_sharers)
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
        self._plan_file = row_file.in_memory("shoal-template", 0)
        self._owned = [self._plan_file, *self._regular_files]
        self._finalizer = weakref.finalize(self, row_file.close_all, self._owned)
        self._plan: _Plan | None = None
        self._regular: RowStore | None = None
        self._ahead: RowPrefetch | None = None
        self._lock = threading.Lock()
        self.flags = self._odd.flags
        """MISSING, REGULAR or ODD, by index."""

    def keep(self, numbers: NDArray[np.int64], samples: list[Any]) -> None:
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
                numbers[~fits], {"sample": Ragged(np.frombuffer(b"".join(pieces), np.uint8), offsets)}
            )
            self.flags[numbers[~fits]] = ODD

    def batch(self, numbers: NDArray[np.int64]) -> Tree:
        plan = self._known_plan()
        if plan is None or plan.template is None or not (self.flags[numbers] == REGULAR).all():
            return collate(self.samples(numbers))
        return plan.template.batch(self._columns(numbers))

    def samples(self, numbers: NDArray[np.int64]) -> list[Any]:
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
        return self._config.where != "ram" and (self._regular is None or not self._regular.is_all_in_ram)

    def will_need(self, numbers: NDArray[np.int64]) -> None:
        """Prefetch samples on disk; only if all are cached, since prefetched ones are not read again."""
        if self._known_plan() is None or self._ahead is None or not (self.flags[numbers] == REGULAR).all():
            return
        self._ahead.announce(numbers)

    # ---- layout of regular samples -----------------------------------------------------------------

    def _plan_of(self, template: Template | None) -> _Plan:
        plan = self._known_plan()
        if plan is not None:
            return plan
        with self._odd.claimed(self._num_samples, waits=True):
            if not self._odd.note:
                plan = self._decide(template)
                content = msgspec.msgpack.encode(plan)
                row_file.write_at(self._plan_file, 0, content)
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
            num_sharers=jobs.current().num_sharers,
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
        del self._owned[1:]  # the store owns them from now on
        if not store.is_all_in_ram:
            self._ahead = RowPrefetch(
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
        assert isinstance(kept, Ragged)
        return [_decoded(kept.row(row)) for row in range(kept.num_rows)]


def _encoded(sample: Any) -> bytes:
    try:
        return serialization.dumps(
            sample, lambda each: ("weighted", tuple(each)) if isinstance(each, Weighted) else None
        )
    except NotSerializable as error:
        raise ConfigError(
            f"{error.what} cannot be kept in a cache, which holds tensors, arrays of numbers or text, strings, bytes and plain "
            "numbers, in dicts by name, tuples and lists: so nothing it reads back could run as code. Nothing was kept; give one "
            "of those."
        ) from None


def _decoded(piece: NDArray[np.uint8]) -> Any:
    return serialization.loads(piece.data, lambda tag, parts: Weighted(*parts))


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Template(msgspec.Struct, frozen=True):
    """One node: a dict, tuple, list or weighted sample with parts, or a leaf with a type and a shape."""

    kind: str
    names: tuple[str, ...] = ()
    parts: tuple[Template, ...] = ()
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, sample: Any) -> Template | None:
        """The template that a sample fits; None where it holds anything but numbers."""
        if isinstance(sample, dict):
            if not all(isinstance(name, str) for name in sample):
                return None
            return cls._of_parts("dict", tuple(sample.values()), tuple(sample))
        if isinstance(sample, Weighted):
            return cls._of_parts("weighted", sample)
        if type(sample) in (tuple, list):
            return cls._of_parts(type(sample).__name__, tuple(sample))
        if isinstance(sample, torch.Tensor):
            if sample.layout is not torch.strided or sample.device.type != "cpu" or not sample.numel():
                return None
            return cls("tensor", dtype=str(sample.dtype), shape=tuple(sample.shape))
        if isinstance(sample, (np.ndarray, np.generic)):
            tensor = to_tensor(np.asarray(sample))
            kind = "array" if isinstance(sample, np.ndarray) else "scalar"
            if tensor is None or not tensor.numel():
                return None
            return cls(kind, dtype=str(tensor.dtype), shape=tuple(tensor.shape))
        dtype = _NUMBERS.get(type(sample))
        if dtype is None or (type(sample) is int and not -(1 << 63) <= sample < 1 << 63):
            return None
        return cls("number", dtype=str(dtype))

    @classmethod
    def _of_parts(cls, kind: str, parts: tuple[Any, ...], names: tuple[str, ...] = ()) -> Template | None:
        made = [cls.of(part) for part in parts]
        if not made or any(part is None for part in made):
            return None
        return cls(kind, names, tuple(part for part in made if part is not None))

    def fields(self) -> dict[str, Field]:
        return {
            str(number): Field(_DTYPES[leaf.dtype], leaf.shape) for number, leaf in enumerate(self._leaves())
        }

    def columns(self, samples: list[Any]) -> dict[str, np.ndarray[Any, Any]]:
        """The leaves of samples that fit, side by side."""
        rows = [list(self._values(sample)) for sample in samples]
        columns = {}
        for number, leaf in enumerate(self._leaves()):
            values = [row[number] for row in rows]
            if leaf.kind == "tensor":
                stacked = torch.stack([value.detach() for value in values])
                # numpy lacks some types, such as bfloat16; their bytes are stored.
                columns[str(number)] = _raw(stacked)
            else:
                columns[str(number)] = np.stack([np.asarray(value) for value in values])
                if leaf.kind == "number":
                    columns[str(number)] = columns[str(number)].astype(_numpy(leaf.dtype))
        return columns

    def batch(self, columns: dict[str, Any]) -> Tree:
        """The samples as one batch, as `collate` makes it."""
        return self._built([columns[str(number)] for number in range(len(columns))], as_batch=True)

    def samples(self, columns: dict[str, Any], num_samples: int) -> list[Any]:
        """The samples one by one, each leaf of the type it had."""
        listed = [_as_it_was(leaf, columns[str(number)]) for number, leaf in enumerate(self._leaves())]
        return [self._built([column[row] for column in listed], as_batch=False) for row in range(num_samples)]

    def _leaves(self) -> list[Template]:
        if not self.parts:
            return [self]
        return [leaf for part in self.parts for leaf in part._leaves()]

    def _values(self, sample: Any) -> list[Any]:
        if not self.parts:
            return [sample]
        inside = sample.values() if self.kind == "dict" else sample
        return [value for part, each in zip(self.parts, inside, strict=True) for value in part._values(each)]

    def _built(self, values: list[Any], *, as_batch: bool) -> Any:
        if not self.parts:
            return values.pop(0)
        parts = [part._built(values, as_batch=as_batch) for part in self.parts]
        if self.kind == "dict":
            return dict(zip(self.names, parts, strict=True))
        if self.kind == "weighted":
            return Weighted(*parts)
        return parts if self.kind == "list" and not as_batch else tuple(parts)


def _as_it_was(leaf: Template, column: torch.Tensor) -> Any:
    match leaf.kind:
        case "tensor":
            return column.unbind(0)
        case "number":
            return column.tolist()
    return column.numpy()


def _raw(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    try:
        return tensor.contiguous().numpy()
    except TypeError:
        return tensor.contiguous().view({1: torch.uint8, 2: torch.int16}[tensor.itemsize]).numpy()


def _numpy(dtype: str) -> Any:
    return torch.empty(0, dtype=_DTYPES[dtype]).numpy().dtype
