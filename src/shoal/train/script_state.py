"""Variables of a script at the beginning of a step, for a worker that replaces another.

Plain values, small tensors and containers of them are noted from the frames
that iterate the data. The other ranks' notes say what is common to all; what
only this rank had is in a file of its own that outlives it.
"""

from __future__ import annotations

import collections
import ctypes
import mmap
import os
import random
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from shoal.train.loop_shape import CannotEnter, is_library

Noted: TypeAlias = Any
"""Scalars as they are; anything else as {"is": kind, "of": contents}."""

MAX_ITEMS = 64
"""Of a container that is copied at every step; longer lists of scalars are noted by what was appended."""

MAX_NUMEL = 1024
"""Of a tensor or array that is copied at every step."""

_SCALARS = frozenset({int, float, str, bool, type(None)})
_KNOWN = (nn.Module, torch.optim.Optimizer, LRScheduler)
_CONSTANT = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    type,
    types.GeneratorType,
)
_SKIPPED: Any = object()


class Variables:
    """Notes the variables of the script's frames, innermost first."""

    def __init__(self, trained: Callable[[], list[nn.Module]], carried: frozenset[str]) -> None:
        self._trained, self._carried = trained, carried
        self._constants: dict[int, dict[str, Any]] = collections.defaultdict(dict)
        self._lists: dict[
            int, tuple[list[Any], list[Any]]
        ] = {}  # long ones: the list, and what was noted of it
        self._seen: dict[
            tuple[int, str], tuple[int, Any]
        ] = {}  # what is not noted: which it is, and how it stands

    def note(self, frames: Sequence[FrameType]) -> list[dict[str, Noted]]:
        """The variables as they are; CannotEnter where one that changes cannot be noted."""
        noted = []
        for depth, frame in enumerate(frames):
            here = {}
            constants = self._constants[depth]
            for name, value in frame.f_locals.items():
                if type(value) in _SCALARS:
                    here[name] = value
                elif constants.get(name) is value:
                    continue  # a module, a function, the optimizer: most of what a script has
                elif (
                    isinstance(value, (*_CONSTANT, torch.optim.Optimizer, LRScheduler))
                    or name[:2] == "__"
                    or any(value is model for model in self._trained())
                ):
                    constants[name] = value
                else:
                    copied = self._copied(value)
                    if copied is not _SKIPPED:
                        here[name] = copied
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
            self._lists.clear()  # lists of epochs that are over
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
    """A note with its long lists written out, to be handed over."""
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
    """Draw on as noted."""
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


def _standing(value: Any) -> Any:
    """Something that changes when the value does, where that can be told cheaply; None where it cannot."""
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


# ---- what outlives this process -----------------------------------------------------------------


class OwnFile:
    """This rank's newest note, in memory that outlives the process: written in turn to two places, each with a checksum."""

    _SLOT = 1 << 16

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, 2 * self._SLOT)
        self._memory = mmap.mmap(descriptor, 2 * self._SLOT)
        os.close(descriptor)
        self._turn = 0

    def write(self, at: int, noted: Sequence[dict[str, Noted]]) -> None:
        """The variables before exchange `at`; what is too long for a slot is left to the other ranks."""
        try:
            raw = _ENCODER.encode([at, [_without_long(names) for names in noted]])
        except (TypeError, OverflowError):  # a number of more than 64 bits, or a dtype that numpy has not
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
        """What is there is of a life that nobody goes on with."""
        self._memory[:8] = self._memory[self._SLOT : self._SLOT + 8] = bytes(8)

    def read(self) -> tuple[int, list[dict[str, Noted]]] | None:
        """The newest note that is whole."""
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
    """The variables of a replacement that begins before exchange `at`, and those of its own that lack the last step.

    `own` is what its predecessor noted, `others` what another rank has noted
    at that place and, as `before`, a step earlier: a variable that was equal
    there is common to all, and the other rank's newer value is its own.
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
