"""Sources: samples by index, one by one or as a batch; those of arrays, functions and torch's datasets.

An error of a user's function stays that error, with its traceback; a note names the stage, the
sample and the user's line.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from shoal.data.order import Indices, as_array
from shoal.data.slice import Slice
from shoal.data.tree import Tree, collate, map_leaves, map_tensors, to_tensor, to_tensors, uncollate
from shoal.errors import BadSample, ConfigError, DataError


class StreamPlan(Protocol):
    """The records of a stream by position: part of a checkpoint, for it grows while it is read."""

    def export_state(self, position: int) -> dict[str, Any]:
        """State of a reader at this position, fit for JSON."""

    def import_state(self, state: Mapping[str, Any]) -> None:
        """Go by an exported plan from now on; refuse where that cannot be."""


def import_plans(plans: Sequence[StreamPlan], states: Sequence[Mapping[str, Any]]) -> None:
    """Continue the streams of a dataset from their saved offsets."""
    if len(plans) != len(states):
        raise DataError(
            f"the position was saved for data of {len(states)} streams, and this has {len(plans)}. Nothing was read; give the same "
            "data, or begin anew."
        )
    for plan, state in zip(plans, states, strict=True):
        plan.import_state(state)


class Source(ABC):
    """A function from (index, epoch) to sample. Asked twice for one index in one epoch, it gives the same sample."""

    num_samples: int

    runs_user_code: bool
    """False if no user code runs: nothing can draw random numbers, and nothing has to be watched."""

    uses_epoch: bool = False
    """True where an index gives something else in another epoch: an augmentation."""

    reorders: bool = False
    """True where an index stands for another sample in another epoch: a shuffled dataset inside a zip."""

    num_processes: int = 0
    """Processes that read it (`map(fn, workers=4)`); 0: the one that asks."""

    timeout_s: float = 0.0
    """Time-out of one of them for a batch."""

    looks_ahead: bool = False
    """True where reading is slow and `will_need` helps: what is on disk."""

    @abstractmethod
    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """The samples at these indices, in their order. At least one index."""

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        """The same as one batch."""
        return collate(self.samples(indices, epoch))

    @abstractmethod
    def describe(self) -> list[dict[str, Any]]:
        """The source and what is done to its samples, fit for JSON."""

    def will_need(self, indices: Indices, epoch: int = 0) -> None:
        """Announce indices in the order of the next requests: a source on disk begins to read them."""
        return  # only a hint

    def share(self) -> None:
        """Prepare memory that processes forked from now on will share."""
        return  # nothing, for most

    def here(self) -> NDArray[np.bool_] | None:
        """Whether this host has each sample and others may not, by index; None if it makes no difference."""
        return None

    def stage(self) -> None:
        """Copy what will be read to this host, before anything is read."""
        return  # nothing to do where it is at hand

    def plans(self) -> list[StreamPlan]:
        """Plans of the streams it reads; most sources have none."""
        return []

    def names(self) -> list[str]:
        """Names of source and stages. Reads nothing."""
        return [str(stage.get("source") or stage.get("stage")) for stage in self.describe()]


class DerivedSource(Source):
    """Other sources with an operation on their samples. The number of samples is computed on demand."""

    name = ""
    """Name of the stage, as of the method that makes it."""

    def __init__(self, *inputs: Source) -> None:
        self._source, self._inputs = inputs[0], inputs
        self.runs_user_code = any(source.runs_user_code for source in inputs)
        self.uses_epoch = any(source.uses_epoch for source in inputs)
        self.reorders = any(source.reorders for source in inputs)
        self.num_processes = max(source.num_processes for source in inputs)
        self.timeout_s = max(source.timeout_s for source in inputs)

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # a property may stand for a plain attribute
        return self._source.num_samples

    @property
    def looks_ahead(self) -> bool:  # type: ignore[override]  # a property may stand for a plain attribute
        return any(source.looks_ahead for source in self._inputs)

    def will_need(self, indices: Indices, epoch: int = 0) -> None:
        """The same of all inputs: a stage that gives them other indices says which."""
        for source in self._inputs:
            source.will_need(indices, epoch)

    def share(self) -> None:
        for source in self._inputs:
            source.share()

    def here(self) -> NDArray[np.bool_] | None:
        """As its source, where that has the same samples at the same indices."""
        here = self._source.here()
        return here if here is not None and len(here) == self.num_samples else None

    def stage(self) -> None:
        for source in self._inputs:
            source.stage()

    def plans(self) -> list[StreamPlan]:
        return [plan for source in self._inputs for plan in source.plans()]

    def names(self) -> list[str]:
        return [*self._source.names(), *([self.name] if self.name else [])]


def name_of(fn: Any) -> str:
    """A function's name as its author knows it."""
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def call_user(stage: str, fn: Any, index: Any, epoch: int, *args: Any) -> Any:
    """`fn(*args)`; an error of the function names the sample it was called for."""
    try:
        return fn(*args)
    except Exception as error:
        blame(stage, fn, error, index, epoch)
        raise


def blame(stage: str, fn: Any, error: Exception, index: Any, epoch: int, extra: str = "") -> None:
    """Note on an error of `fn` for which sample it was raised, and where."""
    where = f" at {place}" if (place := line_of(error, fn)) else ""
    error.add_note(
        f"raised by {stage}({name_of(fn)}) for the sample with index {index}, in epoch {epoch}{where}{extra}"
    )


def blame_batch(stage: str, fn: Any, error: Exception, part: Slice) -> None:
    """Note on an error of `fn` for which batch it was raised, and where."""
    where = f" at {place}" if (place := line_of(error, fn)) else ""
    first, last = part.start, part.start + part.num_global - 1
    mine = (
        f", for the {part.num_local} of them that are this worker's"
        if part.num_local < part.num_global
        else ""
    )
    error.add_note(
        f"raised by {stage}({name_of(fn)}) for the batch of samples {first} to {last} of epoch {part.epoch}{mine}{where}"
    )


def bad_sample(stage: str, fn: Any, error: Exception, index: Any) -> BadSample:
    """The sample that `fn` raised for, as one that may be skipped."""
    where = f", at {place}" if (place := line_of(error, fn)) else ""
    what = traceback.format_exception_only(error)[-1].strip()
    return BadSample(where=f"{stage}({name_of(fn)})", reason=f"it raised {what}{where}", index=int(index))


def line_of(error: BaseException, fn: Any) -> str | None:
    """The line of the user's own that raised: the last one in the function's file, else the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own_file = getattr(getattr(fn, "__code__", None), "co_filename", None)
    frame = next((frame for frame in reversed(frames) if frame.filename == own_file), None)
    if frame is None:
        frame = frames[-1] if len(frames) > 1 else None  # the first is the call itself, in shoal
    if frame is None:
        return None
    code = f": {frame.line}" if frame.line else ""
    return f"{frame.filename}, line {frame.lineno}{code}"


def check_rows(
    tree: Tree, num_rows: int, given: str, wanted: str, *, of: Any = (torch.Tensor, np.ndarray)
) -> Tree:
    """The tree, or a DataError where a part of it has not one row for each sample."""

    def check(path: str, leaf: Any) -> Any:
        if isinstance(leaf, of) and leaf.ndim and len(leaf) == num_rows:
            return leaf
        got = f"shape {tuple(leaf.shape)}" if isinstance(leaf, of) else f"a {type(leaf).__name__}"
        where = f" at {path}" if path else ""
        raise DataError(f"{given} and gave {got}{where}. It must return tensors or arrays with {wanted}.")

    return map_leaves(check, tree)


class ArraySource(Source):
    """Rows of tensors of equal length.

    A batch is always a copy, of a range as of a gather: a caller that writes into
    one must not change the dataset.
    """

    runs_user_code = False

    def __init__(self, tree: Tree) -> None:
        columns: dict[str, torch.Tensor] = {}

        def adopt(path: str, leaf: Any) -> torch.Tensor:
            columns[path] = column = _column(path, leaf)
            return column

        self._tree = map_leaves(adopt, tree)
        lengths = {path: len(column) for path, column in columns.items()}
        if not lengths:
            raise ConfigError("from_arrays was given no array: pass a tensor, or a dict or tuple of tensors.")
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{path} has {length}" for path, length in lengths.items())
            raise ConfigError(
                f"from_arrays needs one length for all arrays, the number of samples, but {listed}. Cut them to the "
                "same first dimension."
            )
        self.num_samples = next(iter(lengths.values()))
        self._columns = [
            {"at": path, "dtype": str(column.dtype).removeprefix("torch."), "shape": list(column.shape[1:])}
            for path, column in columns.items()
        ]

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        return uncollate(self.batch(indices, epoch), len(indices))

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        """The rows, copied: a range in one piece, anything else by `index_select` (4 times as fast as `x[indices]`)."""
        if isinstance(indices, range):
            begin, length = indices.start, len(indices)
            return map_tensors(lambda column: column.narrow(0, begin, length).clone(), self._tree)
        rows = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        return map_tensors(lambda column: column.index_select(0, rows.to(column.device)), self._tree)

    def describe(self) -> list[dict[str, Any]]:
        return [{"source": "arrays", "num_samples": self.num_samples, "columns": self._columns}]


def _column(path: str, leaf: Any) -> torch.Tensor:
    where = f" at {path}" if path else ""
    tensor = to_tensor(leaf)
    if tensor is None:
        what = f"an array of {leaf.dtype}" if isinstance(leaf, np.ndarray) else f"a {type(leaf).__name__}"
        raise ConfigError(
            f"from_arrays takes tensors and numeric arrays, in any nesting of dicts and tuples, but got {what}{where}. "
            "Make it a tensor first, for instance with torch.tensor(...)."
        )
    if tensor.dim() == 0 or tensor.layout is not torch.strided:
        what = "a single number" if tensor.dim() == 0 else f"a {tensor.layout} tensor"
        raise ConfigError(
            f"from_arrays needs the samples along the first dimension, but got {what}{where}. "
            "Give a dense tensor with one row per sample."
        )
    return tensor.contiguous()


class FunctionSource(Source):
    """A vectorised function of the index: an array of indices in, a batch out."""

    runs_user_code = True

    def __init__(self, fn: Callable[[NDArray[np.int64]], Tree], num_samples: int) -> None:
        self._fn, self.num_samples = fn, num_samples

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        return uncollate(self.batch(indices, epoch), len(indices))

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        """The function's batch, arrays as tensors, checked to have one row per index."""
        wanted = np.asarray(indices, dtype=np.int64) if isinstance(indices, list) else as_array(indices)
        return check_rows(
            to_tensors(self._fn(wanted)),
            len(wanted),
            f"the function '{name_of(self._fn)}' was asked for {len(wanted)} samples",
            "one row per index it is given",
            of=torch.Tensor,
        )

    def describe(self) -> list[dict[str, Any]]:
        return [{"source": "function", "fn": name_of(self._fn), "num_samples": self.num_samples}]


def torch_source(dataset: Any) -> Source:
    """The source a map-style dataset stands for; torch's own TensorDataset is read as the arrays it is."""
    if type(dataset) is TensorDataset and all(tensor.layout is torch.strided for tensor in dataset.tensors):
        return ArraySource(tuple(dataset.tensors))
    return TorchSource(dataset)


class TorchSource(Source):
    """A foreign dataset, asked the way torch's DataLoader would ask it."""

    runs_user_code = True

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        try:
            self.num_samples = len(dataset)
        except (TypeError, NotImplementedError):
            raise ConfigError(
                f"the dataset {type(dataset).__name__} has no length, so its samples cannot be shuffled or shared out. "
                "Give it a __len__, or make it an IterableDataset, which is read as a stream."
            ) from None

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """The dataset's items; many at once where it offers `__getitems__`."""
        # Plain ints: a dataset that looks its index up in a dict or a list must not get numpy's.
        wanted = indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
        if getattr(self._dataset, "__getitems__", None):
            samples: list[Any] = self._dataset.__getitems__(wanted)
            return samples
        items = []
        for index in wanted:
            try:
                items.append(self._dataset[index])
            except Exception as error:
                error.add_note(f"raised by {type(self._dataset).__name__} for the sample with index {index}")
                raise
        return items

    def describe(self) -> list[dict[str, Any]]:
        return [
            {"source": "torch", "dataset": type(self._dataset).__qualname__, "num_samples": self.num_samples}
        ]
