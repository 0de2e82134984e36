"""Rows by number: what is written comes back, from RAM and from disk, in any order, in any process."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.cache import row_file as nameless
from shoal.data.cache import stats
from shoal.data.cache.row_file import Field, RowLayout
from shoal.data.cache.row_store import RowPrefetch, RowSpec, RowStore
from shoal.data.formats.table import Ragged
from shoal.errors import BlockDamaged, CacheFull
from waiting import wait_until

DTYPES = ["float32", "float64", "int64", "int32", "int16", "uint8", "bool", "complex128", "float16"]


def columns_of(
    fields: dict[str, tuple[str, tuple[int, ...]]], num_rows: int, seed: int = 0
) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {
        name: generator.integers(0, 100, (num_rows, *shape)).astype(dtype)
        for name, (dtype, shape) in fields.items()
    }


def spec_of(fields: dict[str, tuple[str, tuple[int, ...]]], **options: Any) -> RowSpec:
    made = {name: Field.of(np.dtype(dtype), shape) for name, (dtype, shape) in fields.items()}
    return RowSpec(fields=made, **{"lists": {}, "num_parts": 1, **options})


@settings(max_examples=60)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from([(), (), (3,), (2, 2)])), min_size=1, max_size=7
    ),
    num_rows=st.integers(1, 300),
)
def test_columns_come_back_from_rows(kinds: list[Any], num_rows: int) -> None:
    fields = {f"column {number}": kind for number, kind in enumerate(kinds)}
    columns = columns_of(fields, num_rows)
    layout = RowLayout({name: Field.of(np.dtype(dtype), shape) for name, (dtype, shape) in fields.items()})
    rows = np.concatenate([tile.copy() for tile in layout.pack(columns, num_rows)])
    back = layout.unpack(torch.from_numpy(rows).view(torch.int64))
    assert list(back) == list(fields)
    for name, column in columns.items():
        np.testing.assert_array_equal(back[name].numpy(), column)
        assert back[name].is_contiguous()
        assert back[name].numpy().dtype == column.dtype


@settings(max_examples=40)
@given(
    num_rows=st.integers(1, 200),
    ram_share=st.floats(0, 1),
    asked=st.lists(st.integers(0, 10**6), min_size=1, max_size=80),
    cuts=st.lists(st.integers(0, 199), max_size=4),
)
def test_rows_are_what_was_written_wherever_they_lie(
    num_rows: int, ram_share: float, asked: list[int], cuts: list[int]
) -> None:
    fields = {"a": ("int64", ()), "b": ("float32", (3,)), "c": ("uint8", ())}
    columns = columns_of(fields, num_rows)
    store = RowStore(spec_of(fields, num_rows=num_rows, num_ram_rows=int(num_rows * ram_share)), name="rows")
    bounds = sorted({0, num_rows, *(cut for cut in cuts if cut < num_rows)})
    for begin, end in itertools.pairwise(bounds):
        store.write(begin, end - begin, {name: column[begin:end] for name, column in columns.items()})
    rows = np.array([number % num_rows for number in asked])
    found = store.gather(rows)
    low, high = sorted((int(rows[0]), int(rows[-1]) + 1))
    span = store.gather(range(low, max(high, low + 1)))
    for name, column in columns.items():
        np.testing.assert_array_equal(found[name].numpy(), column[rows])
        np.testing.assert_array_equal(span[name].numpy(), column[low : max(high, low + 1)])


def test_single_rows_can_be_put(tmp_path: Path) -> None:
    fields = {"a": ("int64", ()), "b": ("float32", (2,))}
    store = RowStore(spec_of(fields, num_rows=100, num_ram_rows=50), name="rows", directory=tmp_path)
    columns = columns_of(fields, 40)
    numbers = np.random.default_rng(0).permutation(100)[:40]
    store.put(numbers, columns)
    found = store.gather(numbers[::-1].copy())
    np.testing.assert_array_equal(found["a"].numpy(), columns["a"][::-1])
    np.testing.assert_array_equal(found["b"].numpy(), columns["b"][::-1])


def test_what_is_given_out_may_be_written_to() -> None:
    fields = {"a": ("int64", ())}
    store = RowStore(spec_of(fields, num_rows=10, num_ram_rows=5), name="rows")
    store.write(0, 10, {"a": np.arange(10)})
    for rows in (range(10), np.arange(10)):
        store.gather(rows)["a"].fill_(7)
        assert store.gather(rows)["a"].tolist() == list(range(10))


@pytest.mark.parametrize("heap_ram_bytes", [0, 150, 1 << 40])
def test_lists_of_several_lengths(tmp_path: Path, heap_ram_bytes: int) -> None:
    texts = [f"{'ä' * (number % 7)}{number}".encode() for number in range(90)]
    numbers = [list(range(number % 5)) for number in range(90)]
    spec = RowSpec(
        fields={"id": Field(torch.int64)},
        lists={"text": np.dtype(np.uint8), "ids": np.dtype(np.int32)},
        num_rows=90,
        num_parts=3,
        num_ram_rows=45,
        heap_ram_bytes=heap_ram_bytes,
    )
    store = RowStore(spec, name="lists", directory=tmp_path)
    for begin in (60, 0, 30):
        chosen = range(begin, begin + 30)
        store.write(
            begin,
            30,
            {
                "id": np.asarray(chosen),
                "text": Ragged.of([np.frombuffer(texts[number], np.uint8) for number in chosen], np.uint8),
                "ids": Ragged.of([numbers[number] for number in chosen], np.int32),
            },
        )
    rows = np.random.default_rng(1).permutation(90)
    found = store.gather(rows)
    text, ids = found["text"], found["ids"]
    assert isinstance(text, Ragged)
    assert isinstance(ids, Ragged)
    for at, row in enumerate(rows.tolist()):
        assert text.values[text.offsets[at] : text.offsets[at + 1]].tobytes() == texts[row]
        assert ids.values[ids.offsets[at] : ids.offsets[at + 1]].tolist() == numbers[row]
    text.values[:] = 0  # a copy


def test_nothing_on_disk_has_a_name(tmp_path: Path) -> None:
    fields = {"a": ("int64", ())}
    store = RowStore(spec_of(fields, num_rows=10000, num_ram_rows=0), name="rows", directory=tmp_path)
    store.write(0, 10000, {"a": np.arange(10000)})
    assert list(tmp_path.iterdir()) == []
    assert store.disk_bytes() >= 80_000
    descriptors = len(os.listdir("/proc/self/fd"))
    del store
    assert len(os.listdir("/proc/self/fd")) < descriptors


def test_a_full_disk_is_one_paragraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RowStore(
        spec_of({"a": ("int64", ())}, num_rows=100, num_ram_rows=50),
        name="clicks.parquet",
        directory=tmp_path,
    )
    store.write(0, 50, {"a": np.arange(50)})

    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        CacheFull, match=r"the cache of clicks.parquet needs .* No space left on device"
    ) as caught:
        store.write(50, 50, {"a": np.arange(50, 100)})
    assert "Nothing was lost" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert store.gather(np.arange(50))["a"].tolist() == list(range(50))


def test_a_disk_that_cannot_be_read_is_one_paragraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of({"a": ("int64", ())}, num_rows=100, num_ram_rows=50)
    store = RowStore(spec, name="clicks.parquet", directory=tmp_path)
    store.write(0, 100, {"a": np.arange(100)})

    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(BlockDamaged, match=r"clicks.parquet in .*Input/output error"):
        store.gather(np.arange(100))


def test_a_forked_child_writes_what_its_parent_reads() -> None:
    fields = {"a": ("int64", ())}
    store = RowStore(spec_of(fields, num_rows=100, num_ram_rows=50, num_parts=2), name="rows")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with store.claimed(1) as is_ours:
                store.write(0, 100, {"a": np.arange(100) * 3})
                store.flags[1] = 1
                code = 0 if is_ours else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.flags.tolist() == [0, 1]
    assert store.gather(np.array([99, 0, 50]))["a"].tolist() == [297, 0, 150]


def test_a_part_is_claimed_by_one_process_and_free_when_that_dies() -> None:
    store = RowStore(spec_of({"a": ("int64", ())}, num_rows=4, num_ram_rows=4, num_parts=4), name="rows")
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with store.claimed(2):
                os.write(tell, b"x")
                os.close(tell)
                signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(told, 1) == b"x"
        with store.claimed(2) as is_ours:
            assert not is_ours
        with store.claimed(1) as is_ours, store.claimed(1) as is_ours_again:
            assert is_ours
            assert not is_ours_again
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(told)
        os.close(tell)
    with store.claimed(2) as is_ours:
        assert is_ours


def test_figures_say_where_rows_were() -> None:
    store = RowStore(
        spec_of({"a": ("int64", ())}, num_rows=100, num_ram_rows=25), name="figures", granted_bytes=1000
    )
    store.write(0, 100, {"a": np.arange(100)})
    store.gather(np.arange(100))
    store.gather(range(20, 30))
    [figures] = [each for each in stats() if each["name"] == "figures"]
    assert figures["ram"]["num_hits"] == 30
    assert figures["disk"]["num_hits"] == 80
    assert figures["ram"]["hit_rate"] == pytest.approx(30 / 110, abs=1e-3)
    assert figures["disk"]["bytes_out"] == 640


def test_the_memory_of_a_process_stays_flat_over_a_file_on_disk(tmp_path: Path) -> None:
    num_rows, row_words = 400_000, 64  # 205 MB
    fields = {"a": ("int64", (row_words,))}
    store = RowStore(spec_of(fields, num_rows=num_rows, num_ram_rows=0), name="large", directory=tmp_path)
    for begin in range(0, num_rows, 20_000):
        numbers = np.arange(begin, begin + 20_000)
        store.write(begin, 20_000, {"a": np.repeat(numbers[:, None], row_words, axis=1)})
    before = _resident_bytes()
    highest = before
    generator = np.random.default_rng(0)
    for _ in range(30):
        rows = generator.integers(0, num_rows, 2000)
        found = store.gather(rows)["a"]
        assert torch.equal(found[:, 0], torch.from_numpy(rows))
        assert torch.equal(found[:, -1], torch.from_numpy(rows))
        highest = max(highest, _resident_bytes())
    assert highest - before < 64 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- reading ahead ---------------------------------------------------------------------------------


class Counted:
    """Rows of which each is its own number; counts who asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def take(self, rows: Any) -> torch.Tensor:
        self.asked += rows.tolist()
        return torch.from_numpy(np.asarray(rows)).reshape(-1, 1).clone()


def taken(ahead: RowPrefetch, rows: Any) -> list[int] | None:
    found = ahead.take(np.asarray(rows))
    return None if found is None else found[:, 0].tolist()


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    windows=st.integers(1, 5),
    piece=st.integers(1, 64),
    seed=st.integers(0, 100),
)
@settings(max_examples=40)
def test_announced_rows_come_in_the_order_of_the_announcement(
    sizes: list[int], windows: int, piece: int, seed: int
) -> None:
    rows = np.random.default_rng(seed).permutation(sum(sizes))
    source = Counted()
    ahead = RowPrefetch(source.take, row_bytes=8, piece_bytes=8 * piece)
    for window in np.array_split(rows, windows):
        ahead.announce(window)
    at = 0
    for size in sizes:
        assert taken(ahead, rows[at : at + size]) == rows[at : at + size].tolist()
        at += size
    assert source.asked == rows.tolist(), "each was read once"


def test_what_was_not_announced_is_the_callers_to_read() -> None:
    source = Counted()
    ahead = RowPrefetch(source.take, row_bytes=8, piece_bytes=80)
    assert taken(ahead, [1, 2]) is None
    ahead.announce(np.arange(100))
    assert taken(ahead, [5, 7]) is None
    assert taken(ahead, range(30, 45)) == list(range(30, 45)), "what nobody came for is forgotten"
    assert taken(ahead, range(3)) is None
    assert taken(ahead, range(90, 110)) is None, "announced only in part"


def test_only_a_few_pieces_are_in_memory() -> None:
    source = Counted()
    ahead = RowPrefetch(source.take, row_bytes=8, piece_bytes=80)
    ahead.announce(np.arange(1000))
    wait_until(lambda: ahead._background.is_idle)
    assert len(source.asked) == 30


def test_an_error_while_reading_ahead_is_met_by_whoever_reads() -> None:
    def fail(rows: Any) -> torch.Tensor:
        raise OSError

    ahead = RowPrefetch(fail, row_bytes=8, piece_bytes=80)
    ahead.announce(np.arange(20))
    assert taken(ahead, range(5)) is None


def test_a_file_of_another_process_is_opened_only_if_it_is_still_the_same() -> None:
    fd = nameless.in_memory("x", 10)
    inode = os.fstat(fd).st_ino
    opened = nameless.open_of(os.getpid(), fd, inode)
    assert opened is not None
    assert nameless.open_of(os.getpid(), fd, inode + 1) is None
    os.close(fd)
    assert nameless.open_of(os.getpid(), fd, inode) is None
    os.close(opened)
