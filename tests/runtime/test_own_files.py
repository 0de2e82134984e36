from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from shoal.runtime import own_files


def test_a_small_file_takes_no_more_memory_than_it_has(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    tracemalloc.start()
    try:
        assert own_files.read(path, max_bytes=64 << 20) == b"x" * 100
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_file_past_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert own_files.read(path, max_bytes=100)
    with pytest.raises(OSError, match="more than 99 bytes"):
        own_files.read(path, max_bytes=99)
