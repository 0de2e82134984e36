"""Compilation and on-disk cache of numba kernels.

A kernel releases the GIL, never starts a thread (processes are forked after
kernels were loaded), keeps IEEE arithmetic (the same bits everywhere), and is
kept on disk, in a directory of the user's own, because what numba keeps there
is code. The types it is compiled for are declared with it and there are no
others: so a process whose parent called `warm()` never compiles.

What is shared by kernels of several files is here and only here; numba looks
at a kernel's own file to see whether what it kept is still good, so this
file's text is part of the directory's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# numba describes itself to type checkers in part; what it makes of a function is not what it says.
_config: Any = numba.config
_njit: Any = numba.njit
_intrinsic: Any = intrinsic

FLOATS: tuple[Any, ...] = (types.float32, types.float64)
INT: Any = types.int64


def vector(dtype: Any, *, written: bool = False) -> Any:
    """The type of a contiguous array; what is only read may be memory that cannot be written."""
    return types.Array(dtype, 1, "C", readonly=not written)


def matrix(dtype: Any, *, written: bool = False) -> Any:
    """The type of contiguous rows."""
    return types.Array(dtype, 2, "C", readonly=not written)


# ---- where compiled code is kept --------------------------------------------------------------------


def cache_directory() -> Path | None:
    """A directory only this user can enter, made where it is missing; None where there can be none.

    Then kernels are compiled anew in every process that is not forked from a warm one.
    """
    if os.environ.get("NUMBA_CACHE_DIR"):
        return Path(os.environ["NUMBA_CACHE_DIR"])
    text = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    directory = Path(home) / "shoal" / f"kernels-{sys.version_info[0]}.{sys.version_info[1]}-{text}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        if found.st_uid != os.geteuid():
            return None
        if stat.S_IMODE(found.st_mode) != 0o700:
            directory.chmod(0o700)
    except OSError:
        return None
    return directory if os.access(directory, os.W_OK) else None


@contextlib.contextmanager
def _kept_in(directory: Path | None) -> Iterator[None]:
    # numba asks for the directory once, when a function is decorated; the user's own functions keep theirs.
    before = _config.CACHE_DIR
    _config.CACHE_DIR = str(directory or before)
    try:
        yield
    finally:
        _config.CACHE_DIR = before


_DIRECTORY = cache_directory()
_preparing = threading.Lock()


class Kernel(Generic[Parameters, Result]):
    """A compiled loop. Compiled, or loaded, for all of its types at its first call or by `warm()`."""

    def __init__(self, function: Callable[Parameters, Result], signatures: Sequence[tuple[Any, ...]]) -> None:
        with _kept_in(_DIRECTORY):
            # numpy's way to divide: a check for zero that could raise keeps loops from running over several numbers
            # at once, and a server that gets a setting of 0 has to say NaN as torch does, not to die.
            self.dispatcher = _njit(nogil=True, error_model="numpy", cache=_DIRECTORY is not None)(function)
        self._signatures, self._is_ready = signatures, False
        self.__doc__ = function.__doc__

    def prepare(self) -> None:
        """Compile or load; after that no call ever compiles. Several threads may ask at once."""
        with _preparing:
            if not self._is_ready:
                for signature in self._signatures:
                    self.dispatcher.compile(signature)
                # Closed, it converts what may be written to what is only read instead of compiling another version.
                self.dispatcher.disable_compile()
                self._is_ready = True

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Run it."""
        if not self._is_ready:
            self.prepare()
        return cast(Result, self.dispatcher(*args))


_KERNELS: list[Kernel[Any, Any]] = []


def kernel(
    *signatures: tuple[Any, ...],
) -> Callable[[Callable[Parameters, Result]], Kernel[Parameters, Result]]:
    """Make a function a kernel for these types of arguments."""

    def made(function: Callable[Parameters, Result]) -> Kernel[Parameters, Result]:
        _KERNELS.append(Kernel(function, signatures))
        return cast(Kernel[Parameters, Result], _KERNELS[-1])

    return made


def floating_kernel(
    types_of: Callable[[Any], tuple[Any, ...]],
) -> Callable[[Callable[Parameters, Result]], Kernel[Parameters, Result]]:
    """Make a function a kernel for float32 and float64; `types_of(dtype)` are its arguments' types."""
    return kernel(*(types_of(dtype) for dtype in FLOATS))


def inlined(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A part of kernels, compiled into each."""
    return cast("Callable[Parameters, Result]", _njit(error_model="numpy")(function))


def warm() -> int:
    """Load every kernel declared so far, compiling what was never compiled on this machine; how many there are."""
    for one in _KERNELS:
        one.prepare()
    return len(_KERNELS)


# ---- parts of several kernels -----------------------------------------------------------------------


@inlined
def mixed(word: Any) -> Any:
    """64 bits well mixed: the end of splitmix64. `word` is a np.uint64."""
    word ^= word >> np.uint64(30)
    word *= np.uint64(0xBF58476D1CE4E5B9)
    word ^= word >> np.uint64(27)
    word *= np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@_intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address; never faults, whatever the address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from llvmlite import ir  # type: ignore[import-untyped]  # it has no types

        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(function, [pointer, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


_AHEAD = 12  # rows; enough to hide a trip to memory, few enough to be still there when needed


@inlined
def ask_ahead(rows: Any, i: int, table: Any) -> None:
    """Have the cache lines of a row that comes soon under way."""
    if i + _AHEAD < len(rows):
        row_bytes = table.shape[1] * table.itemsize
        start = table.ctypes.data + np.int64(rows[i + _AHEAD]) * row_bytes
        for line in range(0, row_bytes, 64):
            prefetch(start + line)


@inlined
def ask_for(array: Any, i: Any) -> None:
    """Have the cache line of an element of a vector under way."""
    prefetch(array.ctypes.data + np.int64(i) * array.itemsize)
