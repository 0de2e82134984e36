"""File systems by URL: what is refused, and files that only read and seek. HDFS itself is in tests/engines."""

from __future__ import annotations

import importlib.util
import io
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.runtime.file_systems import open_file_system, open_to_read

HAS_HDFS = importlib.util.find_spec("hdfs_native") is not None


@pytest.mark.skipif(HAS_HDFS, reason="hdfs-native is installed")
def test_hdfs_without_its_client_is_refused_in_one_line_with_the_way_to_install_it() -> None:
    with pytest.raises(
        ConfigError, match=r"hdfs://nobody:9/a cannot be opened: .*pip install 'hdfs-native"
    ) as raised:
        open_file_system("hdfs://nobody:9/a")
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(not HAS_HDFS, reason="hdfs-native comes with `make test-engines`")
def test_a_namenode_that_does_not_answer_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"nobody answers at 127\.0\.0\.1:1 "):
        open_file_system("hdfs://127.0.0.1:1/a")


class Bare(io.RawIOBase):
    """As the files of hdfs-native: it reads and seeks, a call of its server each, and cannot read into a buffer."""

    def __init__(self, content: bytes) -> None:
        self._content, self.num_reads = io.BytesIO(content), 0

    def read(self, size: int = -1) -> bytes:
        self.num_reads += 1
        return self._content.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._content.seek(offset, whence)

    def tell(self) -> int:
        return self._content.tell()


def test_files_that_only_read_are_read_through_a_buffer() -> None:
    bare = Bare(b"".join(b"%d\n" % n for n in range(1000)))
    system: Any = SimpleNamespace(open=lambda path, mode: bare)
    file = open_to_read(system, "a")
    assert [int(line) for line in file] == list(range(1000))
    assert bare.num_reads <= 3
    buffer = bytearray(4)
    file.seek(-4, io.SEEK_END)
    assert file.readinto(buffer) == 4  # type: ignore[attr-defined]
    assert buffer == b"999\n"
