"""Kernels as processes meet them: kept where nobody else can write, without threads, never compiled after a fork."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numba import types

from shoal.embedding.kernels import expand
from shoal.runtime.kernel_cache import Kernel, cache_directory, compile_all, is_compiled, vector

FORKED = """
import os, sys
import numpy as np
import shoal.ps.server.contents, shoal.ps.layout, shoal.embedding.lookup
from shoal.runtime import kernel_cache as compiled
def threads(): return len(os.listdir("/proc/self/task"))
before = threads()
num_kernels = compiled.warm()
assert num_kernels >= 20, num_kernels
assert threads() == before, "a kernel started a thread"
def refuse(*args, **kwargs): raise AssertionError("compiled after warm()")
for one in compiled._KERNELS:
    one.dispatcher._compiler.compile = refuse
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
from shoal.embedding.kernels import unique, expand, sum_back
from shoal.ps.layout import partition
from shoal.embedding.rules import RULES
from shoal.runtime.transport.messages.client_server import TableSpec
keys, inverse = unique(np.array([5, 3, 5]))
partition(keys, np.zeros(256, np.int16), 0)
for dtype in ("float32", "float64"):
    for num_rows in (None, 10):
        for rule in RULES:
            table = shoal.ps.server.contents.ServerTable(TableSpec(0, "t", 2, dtype, rule, {}, num_rows=num_rows))
            rows = np.ones((2, 2), dtype)
            frozen = np.frombuffer(rows.tobytes(), dtype).reshape(2, 2)
            frozen_keys = np.frombuffer(keys.tobytes(), np.int64)
            table.check_keys(frozen_keys)
            for given_keys, given in ((keys, rows), (frozen_keys, frozen), (keys, frozen)):
                table.apply(given_keys, given, 1.0)
                table.accumulate(given_keys, given)
            table.sum_of_squares(np.zeros(256))
            table.apply(*table.take_sum(), 0.5)
            table.pull(frozen_keys, rows)
            table.drop_slots(np.ones(256, bool))
            sum_back(frozen, np.array([1, 0], np.int32), rows)
os._exit(0)
"""


def test_a_process_forked_from_a_warm_one_never_compiles_and_has_no_new_thread() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]


def test_compiled_code_is_kept_where_only_its_user_can_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        directory = cache_directory()
        assert directory is not None
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        directory.chmod(0o777)
        assert cache_directory() == directory
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_where_nothing_can_be_kept_kernels_still_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_directory() is None
    monkeypatch.setattr("shoal.runtime.kernel_cache._DIRECTORY", None)

    def double(values: np.ndarray) -> float:
        return values[0] * 2

    made = Kernel(double, [(vector(types.float64),)])
    assert made(np.array([4.0])) == 8.0


def test_a_kernel_refuses_types_that_were_not_declared() -> None:
    rows, inverse = np.zeros((2, 3), np.float32), np.zeros(2, np.int32)
    with pytest.raises(TypeError, match="No matching definition"):
        expand(rows, inverse.astype(np.int64), rows)
    with pytest.raises(TypeError, match="No matching definition"):
        expand(rows, inverse, np.frombuffer(bytes(24), np.float32).reshape(2, 3))  # cannot be written


def test_a_kernel_may_be_called_first_by_several_threads_at_once() -> None:
    def doubled(values):  # type: ignore[no-untyped-def]  # numba's
        for i in range(len(values)):
            values[i] *= 2

    for _ in range(3):
        kernel = Kernel(
            doubled, [(vector(types.int64, written=True),), (vector(types.float64, written=True),)]
        )
        arrays = [np.ones(4) for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(kernel, arrays))
        assert [array.tolist() for array in arrays] == [[2.0] * 4] * 4


COLD = """
import importlib, sys
from shoal.cluster.launch import roles
for name in roles.PRELOAD:
    importlib.import_module(name)
import shoal.embedding, shoal.features, shoal.data, shoal.ps.layout
slow = ("numba", "llvmlite", "pyarrow", "google_crc32c", "plotly", "starlette", "uvicorn", "rich", "typer", "pandas", "torchmetrics")
loaded = [name for name in slow if name in sys.modules]
assert not loaded, loaded
import shoal.data.formats.text  # a format needs pyarrow, and its loops are declared without the compiler
loaded = [name for name in ("numba", "llvmlite", "google_crc32c") if name in sys.modules]
assert not loaded, loaded
"""


def test_importing_what_a_worker_needs_loads_no_compiler_and_no_format() -> None:
    done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]


def test_kernels_count_as_compiled_until_their_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.runtime.kernel_cache._DIRECTORY", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "shoal_kernels_of_a_test.py"
    text = """
from shoal.runtime.kernel_cache import inlined, kernel, types, vector
@inlined
def twice(value):
    return value * 2
@kernel((vector(types.int64),))
def doubled(values):
    return twice(values[0])
"""
    source.write_text(text)
    assert not is_compiled(source.stem)
    compile_all(source.stem)
    assert is_compiled(source.stem)
    assert sys.modules[source.stem].doubled(np.array([4])) == 8
    source.write_text(text + "# changed")
    assert not is_compiled(source.stem)
    monkeypatch.setattr("shoal.runtime.kernel_cache._DIRECTORY", None)
    assert not is_compiled(source.stem), "nothing is kept"
