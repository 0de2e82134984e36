"""Identity of a dataset and functions, as a hash: equal only if they give the same results.

Data in memory counts by content, tables by their identity, functions by their code and everything
it refers to. If something cannot be inspected (a foreign dataset, an open connection, an object of
an incomparable class) there is no identity: then nothing is reused, which is slow and never wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import sys
import sysconfig
import types
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.data.order import Order, Shuffled
from shoal.data.sources.source import Source
from shoal.data.stream import Stream

_LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})
_OURS = os.path.realpath(Path(__file__).parents[2])
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, type(Ellipsis)})

_MEMORIES = {"_chosen"}  # a filter's own results, which follow from its definition


class _Unknown(Exception):
    """Internal: something that cannot be compared. Never leaves this file."""


def identity_of(source: Source | Stream, order: Order | None, *others: Any) -> str | None:
    """Key of an aggregate over a dataset and its other dependencies; None if it cannot be determined."""
    while isinstance(order, Shuffled):  # the same samples
        order = order.parent
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    try:
        return _hashed("aggregate", python, _Walk().of((source, order, *others)))
    except _Unknown:
        return None


def _hashed(*parts: str | bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


class _Walk:
    """One walk over an object and all that it refers to."""

    def __init__(self) -> None:
        self._seen: dict[int, str] = {}
        self._alive: list[Any] = []  # keeps ids unique meanwhile

    def of(self, thing: Any) -> str:
        if type(thing) in _PLAIN:
            return _hashed("plain", type(thing).__qualname__, repr(thing))
        if id(thing) in self._seen:
            return self._seen[id(thing)]
        self._seen[id(thing)] = _hashed("seen", str(len(self._seen)))  # whatever refers back to it
        self._alive.append(thing)
        found = self._seen[id(thing)] = self._identify(thing)
        return found

    def _identify(self, thing: Any) -> str:
        kind = type(thing)
        if kind in (tuple, list) or (isinstance(thing, tuple) and hasattr(thing, "_fields")):
            return _hashed("list", self.of(kind), *map(self.of, thing))
        if kind in (set, frozenset):
            return _hashed("set", *sorted(map(self.of, thing)))
        if kind in (dict, Counter, OrderedDict, types.MappingProxyType):
            return _hashed("dict", *(self.of(part) for pair in thing.items() for part in pair))
        if kind is re.Pattern:
            return _hashed("pattern", self.of(thing.pattern), str(thing.flags))
        if isinstance(thing, torch.Tensor):
            return self._array(_bytes_of(thing), str(thing.dtype), tuple(thing.shape))
        if isinstance(thing, (np.ndarray, np.generic)):
            array = np.asarray(thing)
            if array.dtype.hasobject:
                return _hashed("objects", str(array.shape), *map(self.of, array.reshape(-1).tolist()))
            return self._array(
                np.ascontiguousarray(array).reshape(-1).view(np.uint8), str(array.dtype), array.shape
            )
        if isinstance(thing, (np.dtype, torch.dtype, range, Path)):
            return _hashed(type(thing).__qualname__, str(thing))
        if isinstance(thing, types.ModuleType):
            return self._module(thing)
        if isinstance(thing, np.ufunc):
            return self._ufunc(thing)
        if isinstance(thing, types.CodeType):
            return self._code(thing, {})
        if isinstance(thing, (types.FunctionType, types.MethodDescriptorType, type)):
            return self._named(thing)
        if isinstance(thing, types.BuiltinFunctionType):
            owner: Any = thing.__self__
            is_free = owner is None or isinstance(owner, types.ModuleType)
            return self._named(thing) if is_free else _hashed("method", str(thing.__name__), self.of(owner))
        if isinstance(thing, types.MethodType):
            return _hashed("method", self.of(thing.__func__), self.of(thing.__self__))
        if isinstance(thing, functools.partial):
            return _hashed("partial", self.of(thing.func), self.of(thing.args), self.of(thing.keywords))
        return self._instance(thing)

    def _array(self, raw: Any, dtype: str, shape: tuple[int, ...]) -> str:
        return _hashed("array", dtype, str(shape), hashlib.blake2b(raw, digest_size=16).digest())

    def _ufunc(self, ufunc: Any) -> str:
        name: str = ufunc.__name__
        if vars(np).get(name) is not ufunc:  # made of a function that it does not show
            raise _Unknown
        return _hashed("ufunc", name, np.__version__)

    def _module(self, module: types.ModuleType) -> str:
        """A library by its version, shoal by its file; the present content of a user's module is unknown."""
        file = os.path.realpath(getattr(module, "__file__", None) or "")
        if not getattr(module, "__file__", None) or _is_below(file, _LIBRARIES):
            return _hashed("library", module.__name__, str(getattr(module, "__version__", "")))
        if _is_below(file, (_OURS,)):
            return _hashed("shoal", module.__name__, _file_hash(file))
        raise _Unknown

    def _named(self, thing: Any) -> str:
        """A function or class, and what a function carries with it."""
        found = self._code_of(thing)
        if not isinstance(thing, types.FunctionType):
            return found
        closure = [cell.cell_contents for cell in thing.__closure__ or ()]
        carried = [thing.__defaults__, thing.__kwdefaults__, closure, vars(thing)]
        return _hashed("function", found, *map(self.of, carried))

    def _code_of(self, thing: Any) -> str:
        """Identity of a function: a library's by name and version, shoal's by its file, the user's by its code."""
        module = sys.modules.get(thing.__module__ or "builtins")
        name = f"{thing.__module__}.{thing.__qualname__}"
        file = os.path.realpath(getattr(module, "__file__", None) or "")
        is_library = not getattr(module, "__file__", None) or _is_below(file, _LIBRARIES)
        if module is not None and is_library and module.__name__ != "__main__":
            top = sys.modules.get(module.__name__.partition(".")[0])
            return _hashed("library", name, str(getattr(top, "__version__", "")))
        if _is_below(file, (_OURS,)):
            return _hashed("shoal", name, _file_hash(file))
        if isinstance(thing, types.FunctionType):
            return self._code(thing.__code__, thing.__globals__)
        if isinstance(thing, type):
            members = {
                key: _unwrapped(member) for key, member in vars(thing).items() if not _is_made(key, member)
            }
            parts = [self.of(member) for _, member in sorted(members.items())]
            return _hashed("class", name, *map(self.of, thing.__bases__), *sorted(members), *parts)
        raise _Unknown

    def _code(self, code: types.CodeType, scope: dict[str, Any]) -> str:
        constants = [
            self._code(constant, scope) if isinstance(constant, types.CodeType) else self.of(constant)
            for constant in code.co_consts
        ]
        # Names of attributes are among them; a global of the same name only makes the key finer.
        used = [(name, self.of(scope[name])) for name in code.co_names if name in scope]
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return _hashed(
            "code", code.co_code, repr(names), *constants, *(part for pair in used for part in pair)
        )

    def _instance(self, thing: Any) -> str:
        kind = type(thing)
        if kind.__module__.startswith("shoal."):
            identity = getattr(thing, "identity", None)
            if isinstance(identity, str):  # a table knows best
                return _hashed("identity", f"{kind.__module__}.{kind.__qualname__}", identity)
            if hasattr(thing, "__dict__"):
                return _hashed("stage", self._named(kind), self.of(_attributes(thing)))
        if dataclasses.is_dataclass(thing) and kind.__dataclass_params__.frozen:
            fields = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
            return _hashed("dataclass", self.of(kind), self.of(fields))
        raise _Unknown


def _attributes(thing: Any) -> dict[str, Any]:
    """Attributes that define a stage; caches of its own are left out."""
    found = dict(vars(thing)) if hasattr(thing, "__dict__") else {}
    table = found.get("table")
    if isinstance(getattr(table, "identity", None), str):
        keep = ("table", "_label", "_labels", "on_error", "max_skips")
        return {name: found[name] for name in keep if name in found}
    return {name: found[name] for name in sorted(found.keys() - _MEMORIES)}


def _is_made(name: str, member: Any) -> bool:
    """Whether Python or `dataclass` made a member of a class out of the others."""
    if name in (
        "__dict__",
        "__weakref__",
        "__doc__",
        "__slots__",
        "__annotations__",
        "__match_args__",
        "__firstlineno__",
    ):
        return True
    made_of_text = isinstance(member, types.FunctionType) and member.__code__.co_filename == "<string>"
    return name.startswith("__dataclass_") or made_of_text or isinstance(member, types.MemberDescriptorType)


def _unwrapped(member: Any) -> Any:
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    if isinstance(member, property):
        return [member.fget, member.fset]
    return member


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise _Unknown
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8).numpy()


def _is_below(file: str, folders: tuple[str, ...]) -> bool:
    return any(file.startswith(f"{folder}{os.sep}") for folder in folders)


@functools.cache
def _file_hash(file: str) -> bytes:
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).digest()
