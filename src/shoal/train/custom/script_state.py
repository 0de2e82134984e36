"""Script state at the beginning of a step: variables and position in the data, for a replacement worker.

Plain values, small tensors and containers of them are recorded from the frames that iterate the
data. The other ranks' notes give the common values; values that only this rank had are in a file of
its own that survives it. A loop that cannot be entered in the middle is reported at its first step:
there a death takes all workers back to the script's beginning (docs/adr/0016-loops-of-ones-own.md).
"""

from __future__ import annotations

import collections
import ctypes
import gc
import mmap
import os
import random
import sys
import types
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, GeneratorType
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from shoal.cluster.worker import session
from shoal.config import job as jobs
from shoal.errors import ClusterError
from shoal.recovery.replay_log import ReplayLog
from shoal.runtime.serialization import from_plain, to_plain
from shoal.train.custom import loop_shape
from shoal.train.custom.loop_shape import CannotEnter, RangeLoop, Shape, is_library

Noted: TypeAlias = Any
"""Scalars as they are; anything else as {"is": kind, "of": contents}."""

MAX_ITEMS = 64
"""Largest container copied at every step; of longer lists of scalars only appended items are recorded."""

MAX_NUMEL = 1024
"""Largest tensor or array copied at every step."""

_SCALARS = frozenset({int, float, str, bool, type(None)})
_KNOWN = (nn.Module, torch.optim.Optimizer, LRScheduler)
_CONSTANT = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    type,
    types.GeneratorType,
    torch.optim.Optimizer,
    LRScheduler,
)
_SKIPPED: Any = object()


class Variables:
    """Records the variables of the script's frames, innermost first."""

    def __init__(self, trained: list[nn.Module], shape: Shape) -> None:
        self._trained, self._carried, self._targets = trained, shape.carried, shape.targets
        self._constants: dict[int, dict[str, Any]] = collections.defaultdict(dict)
        # Long ones: the list, and what was recorded of it.
        self._lists: dict[int, tuple[list[Any], list[Any]]] = {}
        self._seen: dict[tuple[int, str], tuple[int, Any]] = {}  # unrecorded values: identity and state

    @property
    def has_long(self) -> bool:
        return bool(self._lists)

    def note(self, frames: Sequence[FrameType]) -> list[dict[str, Noted]]:
        """The variables at present; CannotEnter if one that changes cannot be recorded."""
        noted = []
        for depth, frame in enumerate(frames):
            here = {}
            constants = self._constants[depth]
            for name, value in frame.f_locals.items():
                if constants.get(name, _SKIPPED) is value:
                    continue  # a module, a function, the optimizer: most objects of a script
                if depth == 0 and name in self._targets:
                    continue
                if type(value) in _SCALARS:
                    here[name] = value
                elif (
                    isinstance(value, _CONSTANT)
                    or name[:2] == "__"
                    or any(value is model for model in self._trained)
                ):
                    constants[name] = value
                elif (copied := self._copied(value)) is not _SKIPPED:
                    here[name] = copied
                elif _is_opaque(value):
                    constants[name] = value
                else:
                    self._refuse_changed(depth, name, value)
            noted.append(here)
        return noted

    def _copied(self, value: Any, depth: int = 0) -> Noted:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is not Tensor and (depth > 4 or isinstance(value, _KNOWN)):
            return _SKIPPED
        if isinstance(value, Tensor):
            if (
                value.requires_grad
                or value.numel() > MAX_NUMEL
                or value.layout is not torch.strided
                or value.is_meta
            ):
                return _SKIPPED
            return {"is": "tensor", "of": value.clone()}
        if isinstance(value, np.ndarray):
            if value.size > MAX_NUMEL or value.dtype.kind not in "biuf":
                return _SKIPPED
            return {"is": "array", "of": torch.from_numpy(value.copy())}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return {"is": "number", "of": value.item(), "dtype": value.dtype.str}
        if isinstance(value, (list, collections.deque)):
            if isinstance(value, list) and len(value) > MAX_ITEMS:
                return self._long_list(value)
            return self._all({"is": "list"}, value, depth)
        if kind is tuple or kind is set:
            return self._all({"is": kind.__name__}, value, depth)
        if isinstance(value, dict):
            if len(value) > MAX_ITEMS or not all(type(key) in _SCALARS for key in value):
                return _SKIPPED
            inner = self._all({"is": "dict"}, value.values(), depth)
            return inner if inner is _SKIPPED else inner | {"keys": list(value)}
        if isinstance(value, torch.Generator):
            return {"is": "generator", "of": value.get_state()}
        if _has_state(value):
            inner = self._copied(value.state_dict(), depth + 1)
            return inner if inner is _SKIPPED else {"is": "state", "of": inner}
        if is_of_script(value):
            there = {name: self._copied(item, depth + 1) for name, item in vars(value).items()}
            return {"is": "object", "of": {k: v for k, v in there.items() if v is not _SKIPPED}}
        return _SKIPPED

    def _all(self, noted: dict[str, Any], values: Any, depth: int) -> Noted:
        items = (
            [self._copied(value, depth + 1) for value in values] if len(values) <= MAX_ITEMS else [_SKIPPED]
        )
        return _SKIPPED if any(item is _SKIPPED for item in items) else noted | {"of": items}

    def _long_list(self, value: list[Any]) -> Noted:
        known, noted = self._lists.get(id(value), (value, []))
        count = len(noted)
        if known is not value or count > len(value) or (count and noted[-1] is not value[count - 1]):
            noted = []
        added = value[len(noted) :]
        if not all(type(item) in _SCALARS for item in added):
            return _SKIPPED
        noted.extend(added)
        if len(self._lists) > MAX_ITEMS:
            self._lists.clear()  # lists of finished epochs
        self._lists[id(value)] = value, noted
        return Long(noted, len(value))

    def _refuse_changed(self, depth: int, name: str, value: Any) -> None:
        standing = _standing(value)
        if standing is None:
            return
        which, before = self._seen.get((depth, name), (id(value), standing))
        self._seen[depth, name] = id(value), standing
        is_changed = which == id(value) and before != standing
        if is_changed or (which != id(value) and name in self._carried):
            raise CannotEnter(
                f"the variable `{name}` ({_described(value)}) changes from step to step, and is too large to be noted"
            )


class Long(NamedTuple):
    """A list that grows: its first `length` items."""

    noted: list[Any]
    length: int


def plain(noted: Noted) -> Noted:
    """A note with its long lists written out, for transfer."""
    if isinstance(noted, Long):
        return {"is": "list", "of": noted.noted[: noted.length]}
    if isinstance(noted, dict):
        return {key: plain(value) for key, value in noted.items()}
    return [plain(item) for item in noted] if isinstance(noted, list) else noted


def restore(frames: Sequence[FrameType], noted: Sequence[dict[str, Noted]]) -> None:
    """Write noted variables back into the frames; containers keep their identity."""
    for frame, names in zip(frames, noted, strict=True):
        there = frame.f_locals
        for name, value in names.items():
            there[name] = _restored(there.get(name), value)
        if frame.f_code.co_name != "<module>" and hasattr(ctypes.pythonapi, "PyFrame_LocalsToFast"):
            # From Python 3.13 on f_locals writes through.
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _restored(old: Any, noted: Noted) -> Any:
    if not isinstance(noted, dict):
        return noted
    contents = noted["of"]
    match noted["is"]:
        case "tensor":
            if (
                isinstance(old, Tensor)
                and old.shape == contents.shape
                and old.dtype == contents.dtype
                and not old.requires_grad
            ):
                return old.copy_(contents)
            return contents.clone().to(old.device if isinstance(old, Tensor) else "cpu")
        case "array":
            return contents.numpy().copy()
        case "number":
            return np.dtype(noted["dtype"]).type(contents)
        case "list":
            items = _items(old, contents)
            if isinstance(old, (list, collections.deque)):
                old.clear()
                old.extend(items)
                return old
            return items
        case "tuple":
            return tuple(_items(old, contents))
        case "set":
            return set(contents)
        case "dict":
            olds = [old.get(key) if isinstance(old, dict) else None for key in noted["keys"]]
            fresh = dict(zip(noted["keys"], map(_restored, olds, contents), strict=True))
            if not isinstance(old, dict):
                return fresh
            old.clear()
            old.update(fresh)
            return old
        case "generator":
            old.set_state(contents)
        case "state":
            old.load_state_dict(_restored(None, contents))
        case "object":
            for name, value in contents.items():
                vars(old)[name] = _restored(vars(old).get(name), value)
    return old


def _items(old: Any, contents: list[Noted]) -> list[Any]:
    olds = (
        list(old)
        if isinstance(old, (list, tuple, collections.deque)) and len(old) == len(contents)
        else [None] * len(contents)
    )
    return list(map(_restored, olds, contents))


def note_generators() -> dict[str, Noted]:
    """The global generators of Python and numpy; torch's are seeded for every batch."""
    version, words, gauss = random.getstate()
    kind, keys, at, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": {"is": "tensor", "of": torch.tensor(words)},
        "gauss": gauss,
        "version": version,
        "numpy": {"is": "tensor", "of": torch.from_numpy(np.asarray(keys, np.int64))},
        "more": [kind, at, has_gauss, cached],
    }


def restore_generators(noted: dict[str, Noted]) -> None:
    random.setstate((noted["version"], tuple(noted["python"]["of"].tolist()), noted["gauss"]))
    kind, at, has_gauss, cached = noted["more"]
    np.random.set_state((kind, noted["numpy"]["of"].numpy().astype(np.uint32), at, has_gauss, cached))


def is_of_script(value: Any) -> bool:
    """Whether an object's class is the script's own, or a bag of names."""
    if isinstance(value, (types.SimpleNamespace,)):
        return True
    module = type(value).__module__
    if module == "__main__":
        return hasattr(value, "__dict__")
    home = sys.modules.get(module)
    return hasattr(value, "__dict__") and home is not None and not is_library(getattr(home, "__file__", None))


def _has_state(value: Any) -> bool:
    return callable(getattr(type(value), "state_dict", None)) and callable(
        getattr(type(value), "load_state_dict", None)
    )


def _is_opaque(value: Any) -> bool:
    """Whether an object is neither recorded nor watched, now or later: shoal's data, a logger, a file."""
    return not isinstance(value, (Tensor, tuple, np.ndarray, np.generic)) and not (
        _has_state(value) or _standing(value) is not None
    )


def _standing(value: Any) -> Any:
    """Value that changes with the object, if that is cheap to tell; None if not."""
    if isinstance(value, Tensor):
        return None if value.requires_grad else (value._version, tuple(value.shape))
    if isinstance(value, nn.Module):
        return sum(tensor._version for tensor in (*value.parameters(), *value.buffers()))
    if isinstance(value, (list, dict, set, collections.deque)):
        return len(value)
    return None


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.numel():,} elements"
    return f"a {type(value).__name__}" + (f" of {len(value):,}" if hasattr(value, "__len__") else "")


# ---- state that survives this process -----------------------------------------------------------


class OwnFile:
    """This rank's newest note, in memory that outlives the process: written alternately to two slots,
    each with a checksum.
    """

    _SLOT = 1 << 16

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, 2 * self._SLOT)
        self._memory = mmap.mmap(descriptor, 2 * self._SLOT)
        os.close(descriptor)
        self._turn = 0

    def write(self, at: int, noted: Sequence[dict[str, Noted]], *, has_long: bool = True) -> None:
        """Write the variables before exchange `at`; a note too long for a slot is left to the other ranks."""
        try:
            raw = _ENCODER.encode([at, [_without_long(names) for names in noted] if has_long else noted])
        except (TypeError, OverflowError):  # an integer of more than 64 bits, or a dtype unknown to numpy
            raw = bytes(self._SLOT)
        if len(raw) + 8 > self._SLOT:
            raw = _ENCODER.encode([at, [{} for _ in noted]])
        begin = self._turn * self._SLOT
        self._turn = 1 - self._turn
        self._memory[begin : begin + 8] = bytes(8)
        self._memory[begin + 8 : begin + 8 + len(raw)] = raw
        self._memory[begin : begin + 8] = len(raw).to_bytes(4, "little") + zlib.crc32(raw).to_bytes(
            4, "little"
        )

    def clear(self) -> None:
        """Discard the content: it belongs to an earlier launch."""
        self._memory[:8] = self._memory[self._SLOT : self._SLOT + 8] = bytes(8)

    def read(self) -> tuple[int, list[dict[str, Noted]]] | None:
        """Newest intact note."""
        return max(self._slots(), key=lambda slot: slot[0], default=None)

    def _slots(self) -> Iterator[tuple[int, list[dict[str, Noted]]]]:
        for begin in (0, self._SLOT):
            length = int.from_bytes(self._memory[begin : begin + 4], "little")
            raw = self._memory[begin + 8 : begin + 8 + length]
            if length and zlib.crc32(raw) == int.from_bytes(self._memory[begin + 4 : begin + 8], "little"):
                at, noted = msgspec.msgpack.decode(raw)
                yield at, [_from_msgpack(names) for names in noted]


def merged(
    own: tuple[int, list[dict[str, Noted]]] | None,
    at: int,
    others: Sequence[dict[str, Noted]],
    before: tuple[int, Sequence[dict[str, Noted]]] | None,
) -> tuple[list[dict[str, Noted]], list[str]]:
    """Variables of a replacement that begins before exchange `at`, and those of its own that lack the last step.

    `own` is its predecessor's note, `others` another rank's note at that position and, as `before`,
    a step earlier: a variable that was equal there is common to all, so the other rank's newer
    value is valid.
    """
    result = [dict(names) for names in others]
    if own is None or len(own[1]) != len(others):
        return result, sorted({name for names in others for name in names})
    if own[0] == at:
        for names, mine in zip(result, own[1], strict=True):
            names |= mine
        return result, []
    behind = []
    for depth, mine in enumerate(own[1]):
        known = (
            before[1][depth]
            if before is not None and before[0] == own[0] and len(before[1]) == len(others)
            else {}
        )
        for name, value in mine.items():
            if name not in known or not _equal(known[name], value):
                if name in others[depth] and _equal(others[depth][name], value):
                    continue
                result[depth][name] = value
                behind.append(name)
    return result, behind


def _equal(left: Noted, right: Noted) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return (
            isinstance(left, Tensor)
            and isinstance(right, Tensor)
            and left.shape == right.shape
            and torch.equal(left, right)
        )
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right) or (left != left and right != right)


def _without_long(names: dict[str, Noted]) -> dict[str, Noted]:
    return {name: value for name, value in names.items() if type(value) in _SCALARS or not _has_long(value)}


def _has_long(noted: Noted) -> bool:
    if isinstance(noted, dict):
        return any(map(_has_long, noted.values()))
    return isinstance(noted, Long) or (isinstance(noted, list) and any(map(_has_long, noted)))


def _to_msgpack(value: Any) -> Any:
    if isinstance(value, Tensor):
        array = value.detach().cpu().numpy()
        return {"~": array.dtype.str, "shape": list(array.shape), "raw": array.tobytes()}
    raise NotImplementedError


def _from_msgpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_msgpack(item) for item in value]
    if isinstance(value, dict):
        if "~" in value:
            return torch.from_numpy(np.frombuffer(value["raw"], value["~"]).reshape(value["shape"]).copy())
        return {key: _from_msgpack(item) for key, item in value.items()}
    return value


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_msgpack)


# ---- replay anchors of a custom loop ----------------------------------------------------------------


@dataclass(slots=True)
class DataPlace:
    """A place in the data from which a step's first batch is taken."""

    data: int
    """Number of the data."""

    epoch: int
    next_index: int = 0
    index: int = 0
    """Batches taken in this epoch before it."""

    stretch: dict[str, Any] | None = None
    """Each worker's share of the epoch so far."""

    epochs: dict[int, int] = field(default_factory=dict)
    """How often the script has begun to iterate each data, by its number."""

    progress: dict[str, Any] = field(default_factory=dict)
    """Steps counted so far, and the last line of metrics.jsonl."""


@dataclass(slots=True)
class Recovery:
    """Script state recorded for a replacement, and how the replacement restores it."""

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    set_up_at: list[tuple[CodeType, int]] = field(default_factory=list)
    _is_given_up: bool = False
    _shapes: dict[tuple[tuple[CodeType, int], ...], tuple[Shape, Variables]] = field(default_factory=dict)
    _asking: set[int] = field(default_factory=set)  # data that a `while` iterates
    _now: tuple[int, list[dict[str, Noted]]] | None = None
    _own: OwnFile | None = None
    _schedulers: dict[int, list[Any]] = field(default_factory=dict)

    def set_up(self) -> None:
        """The script calls `shoal.setup`."""
        self.set_up_at += loop_shape.set_up_here()

    # ---- noting ---------------------------------------------------------------------------------

    def note(self, replay_log: ReplayLog | None, place: DataPlace) -> None:
        """Record the state before a step's first batch is taken."""
        if replay_log is None:
            return
        if self._is_given_up:
            replay_log.anchor(dict)
            return
        frames = loop_shape.script_frames()
        try:
            shape, variables = self._shape(frames, place.data)
            noted = variables.note(frames)
        except CannotEnter as reason:
            self.give_up(replay_log, str(reason))
            return
        noted.append(note_generators() if shape.draws else {})
        before, self._now = self._now, (replay_log.num_finished, noted)
        if self._own is None:
            self._own = OwnFile(_own_path())
            if not replay_log.was_given_state:
                self._own.clear()
        self._own.write(replay_log.num_finished, noted, has_long=variables.has_long)
        groups = [[_settings(group) for group in optimizer.param_groups] for optimizer in self.optimizers]
        schedules = [[each.state_dict() for each in self.schedulers_of(opt)] for opt in self.optimizers]
        replay_log.anchor(
            lambda: {
                "data": place.data,
                "epoch": place.epoch,
                "next_index": place.next_index,
                "index": place.index,
                "stretch": place.stretch,
                "epochs": [list(pair) for pair in place.epochs.items()],
                "progress": place.progress,
                "groups": groups,
                "schedules": [[to_plain(state, "a scheduler") for state in states] for states in schedules],
                "rank": jobs.rank(),
                "ranges": [list(loop) for loop in shape.ranges],
                "variables": plain(noted),
                "before": [before[0], plain(before[1])] if before is not None else None,
            }
        )

    def stop_noting(self) -> None:
        self._is_given_up = True

    def give_up(self, replay_log: ReplayLog | None, why: str) -> None:
        """From here on a dead worker cannot be replaced alone; reported once."""
        if replay_log is None or self._is_given_up:
            return
        self._is_given_up = True
        replay_log.drop_results(
            f"note: {why}: a worker that dies takes all of them back to the beginning of the script, or to the newest checkpoint "
            "where it calls shoal.resume. A loop over shoal's data "
            "itself, inside `while` or `for NAME in range(...)`, with one optimizer step after one or more batches, goes on "
            "with that worker replaced"
        )

    def _shape(self, frames: Sequence[Any], data: int) -> tuple[Shape, Variables]:
        key = tuple((frame.f_code, frame.f_lineno) for frame in frames)
        if key not in self._shapes:
            if self._asking - {data}:
                raise CannotEnter("a `while` goes through other data than this before it")
            _refuse_wrappers()
            shape = loop_shape.shape_of(frames, self.set_up_at)
            if shape.asks:
                self._asking.add(data)
            self._shapes[key] = shape, Variables(self.models, shape)
        return self._shapes[key]

    # ---- in a replacement -----------------------------------------------------------------------

    def start_of(self, start: DataPlace, replay_log: ReplayLog | None) -> DataPlace | None:
        """`start` itself; in a replaced worker the others' position, or None if they are past this data."""
        waiting = replay_log.pending_anchor() if replay_log is not None else None
        if replay_log is None or waiting is None or "data" not in waiting:
            return start
        if start.data != waiting["data"]:
            return None
        at = replay_log.anchored_at
        replay_log.take_anchor()
        for optimizer, groups, states in zip(
            self.optimizers, waiting["groups"], waiting["schedules"], strict=True
        ):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(saved)
            for scheduler, state in zip(self.schedulers_of(optimizer), states, strict=True):
                scheduler.load_state_dict(from_plain(state))
        self._enter(replay_log, at, waiting)
        epochs = {int(number): count for number, count in waiting["epochs"]}
        return DataPlace(
            start.data,
            waiting["epoch"],
            waiting["next_index"],
            waiting["index"],
            waiting["stretch"],
            epochs,
            waiting["progress"],
        )

    def _enter(self, replay_log: ReplayLog, at: int, waiting: dict[str, Any]) -> None:
        frames = loop_shape.script_frames()
        noted = waiting["variables"]
        if len(noted) != len(frames) + 1:
            raise ClusterError(
                f"a replaced worker took its first batch {len(frames)} calls deep in the script, and the others {len(noted) - 1}. "
                "Weights and what was saved are safe; start the job again, and take batches at one place."
            )
        behind: list[str] = []
        if waiting["rank"] != jobs.rank():
            self._own = OwnFile(_own_path())
            before = tuple(waiting["before"]) if waiting["before"] is not None else None
            noted, behind = merged(self._own.read(), at, noted, before)
        restore(frames, noted[:-1])
        if noted[-1]:
            restore_generators(noted[-1])
        loop_shape.enter(frames, [RangeLoop(*loop) for loop in waiting["ranges"]])
        if behind:
            session.say_when_live(
                f"note: worker {jobs.rank()} was replaced: what its script alone had added to {_names(behind)} in the step in "
                "which it died is missing there. Weights, and variables that all workers have alike, are exact"
            )
        elif replay_log.next_is_known:
            session.say_when_live(
                f"note: worker {jobs.rank()} was replaced, and runs a step again that is committed: what its script adds up of "
                "the model's outputs in it is of the weights after that step. Weights are exact"
            )

    def schedulers_of(self, optimizer: torch.optim.Optimizer, *, look: bool = False) -> list[Any]:
        """Schedulers that the script built on the optimizer. They refer to it, but it does not refer to them."""
        if look or id(optimizer) not in self._schedulers:
            self._schedulers[id(optimizer)] = [
                thing
                for thing in gc.get_objects()
                # Not isinstance: it asks the object itself, and deprecated ones answer with a warning.
                if issubclass(type(thing), LRScheduler) and thing.optimizer is optimizer
            ]
        return self._schedulers[id(optimizer)]


def _refuse_wrappers() -> None:
    """Refuse an iterator in C around ours: it has a position of its own, and no frame."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__iter__":
        frame = frame.f_back  # type: ignore[assignment]
    for generator in gc.get_referrers(frame) if frame is not None else ():
        for holder in gc.get_referrers(generator):
            kind = type(holder)
            is_c = issubclass(kind, Iterator) and kind.__module__ in ("builtins", "itertools")
            if is_c and kind not in (enumerate, GeneratorType):
                raise CannotEnter(f"the place of a {kind.__name__} around shoal's data cannot be handed over")


def _own_path() -> Any:
    job = jobs.current()
    return job.run_dir / "loop" / f"worker-{job.rank}"


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
