"""Available memory within the limits of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.runtime import memory as free_memory


def test_the_limit_of_a_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "job"
    group.mkdir()
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("400000\n")
    (group / "memory.stat").write_text("anon 300000\ninactive_file 50000\n")
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(free_memory, "_CGROUPS", tmp_path)
    read = Path.read_text

    def read_text(path: Path, *args: object, **kwargs: object) -> str:
        return "0::/job\n" if str(path) == "/proc/self/cgroup" else read(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert free_memory._cgroup_rooms() == [650_000]
    assert free_memory.available_bytes() == 650_000
