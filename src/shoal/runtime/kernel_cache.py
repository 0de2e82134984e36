"""Compilation and on-disk cache of numba kernels.

A kernel releases the GIL, never starts a thread (processes are forked after kernels were loaded),
keeps IEEE arithmetic (the same bits everywhere), and is cached on disk, in a directory of the
user's own, because the cache is code. Its argument types are declared with it and there are no
others: so a process whose parent called `warm()` never compiles.

Declaring a kernel does not import numba, which takes a second: `types` here are names of numba's,
and `inlined` functions become numba's own when the first kernel of their file is prepared.

Code shared by kernels of several files is here and only here; numba checks only a kernel's own file
for changes, so this file's text is part of the directory's name.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, cast

import numpy as np

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _Types:
    """Types of numba by name: `types.int64` is "int64" until a kernel is compiled for it."""

    def __getattr__(self, name: str) -> str:
        return name


types: Any = _Types()
FLOATS: tuple[Any, ...] = (types.float32, types.float64)
INT: Any = types.int64


def vector(dtype: Any, *, written: bool = False) -> Any:
    """The type of a contiguous array; what is only read may be memory that cannot be written."""
    return (dtype, 1, written)


def matrix(dtype: Any, *, written: bool = False) -> Any:
    """The type of contiguous rows."""
    return (dtype, 2, written)


def _resolved(kind: Any) -> Any:
    """numba's own type."""
    import numba

    if isinstance(kind, tuple):
        dtype, num_dims, written = kind
        return numba.types.Array(_resolved(dtype), num_dims, "C", readonly=not written)
    return getattr(numba.types, kind) if isinstance(kind, str) else kind


# ---- cache directory --------------------------------------------------------------------------------


def cache_directory() -> Path | None:
    """A directory only this user can enter, created if missing; None if impossible.

    Then kernels are compiled in every process that is not forked from a warm one.
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
    import numba

    # numba reads the directory once, when a function is decorated; the user's own functions keep theirs.
    config: Any = numba.config  # type checkers are told of it in part
    before = config.CACHE_DIR
    config.CACHE_DIR = str(directory or before)
    try:
        yield
    finally:
        config.CACHE_DIR = before


_DIRECTORY = cache_directory()
_preparing = threading.RLock()


class Inlined:
    """A part of kernels, made numba's own when the first of them is prepared."""

    def __init__(self, function: Any, make: str = "njit") -> None:
        self._function, self._make, self._made = function, make, None
        self.__doc__ = function.__doc__

    @property
    def made(self) -> Any:
        if self._made is None:
            import numba
            from numba.extending import intrinsic

            bind(self._function)
            make: Any = numba.njit(error_model="numpy") if self._make == "njit" else intrinsic
            self._made = make(self._function)
        return self._made

    def __call__(self, *args: Any) -> Any:
        """Run it, from Python."""
        return self.made(*args)


def bind(function: Any) -> None:
    """Replace the parts that a function of this file names by numba's own: numba looks them up when it compiles."""
    names = function.__globals__
    for name in function.__code__.co_names:
        if isinstance(part := names.get(name), Inlined):
            names[name] = part.made


class Kernel(Generic[Parameters, Result]):
    """A compiled loop. Compiled, or loaded, for all of its types at its first call or by `warm()`."""

    def __init__(self, function: Callable[Parameters, Result], signatures: Sequence[tuple[Any, ...]]) -> None:
        self._function, self._signatures, self._is_ready = function, signatures, False
        self.dispatcher: Any = None
        self.__doc__ = function.__doc__

    def prepare(self) -> None:
        """Compile or load; after that no call ever compiles. Several threads may ask at once."""
        with _preparing:
            if not self._is_ready:
                import numba

                bind(self._function)
                with _kept_in(_DIRECTORY):
                    # numpy's division: a check for zero that could raise prevents vectorization, and a
                    # server that gets a setting of 0 has to return NaN as torch does, not crash.
                    make: Any = numba.njit(nogil=True, error_model="numpy", cache=_DIRECTORY is not None)
                    self.dispatcher = make(self._function)
                for signature in self._signatures:
                    self.dispatcher.compile(tuple(_resolved(kind) for kind in signature))
                # Closed, it converts writable arguments to read-only ones instead of compiling another
                # version.
                self.dispatcher.disable_compile()
                self._is_ready = True

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
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
    return cast("Callable[Parameters, Result]", Inlined(function))


def intrinsic(function: Callable[..., Any]) -> Any:
    """A part of kernels that writes its own machine code, as numba.extending.intrinsic."""
    return Inlined(function, "intrinsic")


# ---- compiled modules --------------------------------------------------------------------------------


def _mark(module: str) -> Path | None:
    """File that marks all kernels of a module as compiled, keyed like numba's own index."""
    found = importlib.util.find_spec(module)
    if _DIRECTORY is None or found is None or found.origin is None:
        return None
    source = os.stat(found.origin)
    facts = [found.origin, source.st_mtime_ns, source.st_size, *_compiled_for()]
    return _DIRECTORY / f"ready-{hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()}"


@functools.cache
def _compiled_for() -> tuple[str, str]:
    """numba's version and the processor."""
    with contextlib.suppress(OSError):
        facts = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        processor = "".join(line for line in facts if line.startswith(("model name", "flags", "Features")))
        return version("numba"), processor
    return version("numba"), platform.processor()


def is_compiled(module: str) -> bool:
    """True where the kernels of a module are on this machine's disk: using them takes numba's import and no compilation."""
    mark = _mark(module)
    return mark is not None and mark.exists()


def compile_all(module: str) -> None:
    """Compile the kernels of a module, or load them, and note that they are there."""
    mark, here = _mark(module), vars(importlib.import_module(module)).values()
    for one in here:
        if isinstance(one, Kernel):
            one.prepare()
    if mark is not None:
        with contextlib.suppress(OSError):
            mark.touch(mode=0o600)


COMPILED_WITHIN_S = 600.0
"""A compilation that takes longer was killed with its job."""


def compile_in_background(module: str) -> bool:
    """Start a process that compiles a module's kernels for the next start.

    False if nothing can be cached, or another has just begun.
    """
    mark = _mark(module)
    if mark is None:
        return False
    begun = mark.with_suffix(".begun")
    try:
        if begun.exists() and time.time() - begun.stat().st_mtime < COMPILED_WITHIN_S:
            return False
        begun.touch(mode=0o600)
    except OSError:
        return False
    code = (
        f"import os; os.nice(19); from shoal.runtime.kernel_cache import compile_all; compile_all({module!r})"
    )
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **quiet)  # type: ignore[call-overload]
    return True


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


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address; never faults, whatever the address."""
    from numba import types

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
    """Prefetch the cache lines of a row that comes soon."""
    if i + _AHEAD < len(rows):
        row_bytes = table.shape[1] * table.itemsize
        start = table.ctypes.data + np.int64(rows[i + _AHEAD]) * row_bytes
        for line in range(0, row_bytes, 64):
            prefetch(start + line)


@inlined
def ask_for(array: Any, i: Any) -> None:
    """Prefetch the cache line of an element of a vector."""
    prefetch(array.ctypes.data + np.int64(i) * array.itemsize)
