from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.cache import BlockStore, Limits, Tier, stats
from shoal.data.cache.block_store import POLICIES, BlockFiles, LeastFrequentlyUsed
from shoal.errors import BlockDamaged, ConfigError, StoreFull
from waiting import wait_until

KIB = 1024


def block(number: int, num_bytes: int = KIB) -> dict[str, Any]:
    return {"rows": torch.full((num_bytes // 8,), number, dtype=torch.int64)}


def number_of(tree: Any) -> int:
    [number] = set(tree["rows"].tolist())
    return int(number)


def store_of(tmp_path: Path, ram_bytes: int, **options: Any) -> BlockStore:
    disk_bytes = options.pop("disk_bytes", None)
    return BlockStore(Limits(ram_bytes=ram_bytes, disk_bytes=disk_bytes), directory=tmp_path, **options)


def files_in(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def test_what_does_not_fit_in_ram_lies_on_disk_and_comes_back_the_same(tmp_path: Path) -> None:
    with store_of(tmp_path, 3 * KIB) as store:
        tree = {
            "f": torch.arange(4.0).reshape(2, 2),
            "h": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            "empty": torch.empty(0, 3, dtype=torch.int32),
            "bool": torch.tensor([True, False]),
            "number": torch.tensor(7),
            "array": np.arange(6, dtype=np.int16).reshape(3, 2),
            "text": np.array(["ä", "bcd"]),
            "scalar": np.float32(0.25),
            "deep": ({"x": [1, 2.5, None, True, "é", b"raw", 2**40]}, b"z" * 1000),
        }
        store.put("a", tree)
        for number in range(8):
            store.put(number, block(number))
        assert store.stats.tiers[Tier.RAM].num_bytes <= 3 * KIB
        assert len(files_in(tmp_path)) >= 6
        back = store.get("a")
        assert back["deep"] == tree["deep"]
        assert back["scalar"] == np.float32(0.25)
        assert isinstance(back["scalar"], np.float32)
        for name in ("f", "h", "empty", "bool", "number"):
            assert back[name].dtype == tree[name].dtype
            assert torch.equal(back[name], tree[name])
        for name in ("array", "text"):
            np.testing.assert_array_equal(back[name], tree[name])
        assert [number_of(store.get(number)) for number in range(8)] == list(range(8))
    assert files_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_bytes_are_blocks_too(tmp_path: Path) -> None:
    with store_of(tmp_path, KIB) as store:
        for number in range(5):
            store.put(number, bytes([number]) * 900)
        assert [store.get(number) for number in range(5)] == [bytes([number]) * 900 for number in range(5)]


def test_what_could_run_as_code_is_refused(tmp_path: Path) -> None:
    with store_of(tmp_path, 10) as store, pytest.raises(ConfigError, match="a set cannot be kept"):
        store.put("a", {"x": {1, 2}})


def test_what_no_disk_can_take_is_refused_when_it_comes_and_not_when_room_is_made(tmp_path: Path) -> None:
    with store_of(tmp_path, 64 * KIB) as store:  # all of it would fit in RAM
        for bad in (object(), {"x": [object()]}, np.array([object()]), {1, 2}, {"x": range(3)}):
            with pytest.raises(ConfigError, match="cannot be kept"):
                store.put("a", bad)
            with pytest.raises(ConfigError, match="cannot be kept"):
                store.get("a", lambda key, bad=bad: bad)
            assert "a" not in store
        store.put("a", {"x": [b"y" * 100, (1, "z", None)], "t": torch.zeros(3, 4).t()})
        assert "a" in store
    with store_of(tmp_path, 64 * KIB, disk_bytes=0) as store:
        store.put("a", {1, 2})
        assert store.get("a") == {1, 2}


def test_a_full_store_says_what_would_help(tmp_path: Path) -> None:
    with (
        store_of(tmp_path, KIB, disk_bytes=0) as store,
        pytest.raises(
            StoreFull, match=r"Raise ram_bytes, give the store a disk \(disk_bytes\), or let go of"
        ),
    ):
        store.put("a", block(1, 4 * KIB))
    with (
        store_of(tmp_path, KIB, disk_bytes=KIB) as store,
        pytest.raises(StoreFull, match=r"Raise ram_bytes or disk_bytes, or let go of") as full,
    ):
        store.put("a", block(1, 4 * KIB))
    assert "Free space" not in str(full.value)


def test_a_block_is_loaded_once_and_counted(tmp_path: Path) -> None:
    loaded: list[int] = []

    def load(key: int) -> Any:
        loaded.append(key)
        return block(key)

    with store_of(tmp_path, 2 * KIB + 500, name="counted") as store:
        for key in (0, 1, 0, 2, 0, 1):
            assert number_of(store.get(key, load)) == key
        assert loaded == [0, 1, 2]
        ram, disk = store.stats.tiers[Tier.RAM], store.stats.tiers[Tier.DISK]
        assert (ram.num_hits, ram.num_misses) == (2, 4)
        assert (disk.num_hits, disk.num_misses) == (1, 3)
        assert disk.bytes_in >= KIB
        assert disk.bytes_out >= KIB
        [figures] = [each for each in stats() if each["name"] == "counted"]
        assert figures["ram"]["hit_rate"] == pytest.approx(1 / 3, abs=1e-3)
        assert figures["num_loads"] == 3


def test_a_key_that_nobody_knows_is_a_key_error(tmp_path: Path) -> None:
    with store_of(tmp_path, KIB) as store:
        with pytest.raises(KeyError):
            store.get("nothing")
        assert "nothing" not in store
        assert store.get("nothing", lambda key: b"x") == b"x"


def test_an_error_of_the_loader_is_the_callers_and_the_next_one_tries_again(tmp_path: Path) -> None:
    def fail(key: Any) -> Any:
        raise ZeroDivisionError

    with store_of(tmp_path, KIB) as store:
        with pytest.raises(ZeroDivisionError):
            store.get("a", fail)
        assert store.get("a", lambda key: b"x") == b"x"


def test_changes_survive_every_way_through_the_tiers(tmp_path: Path) -> None:
    with store_of(tmp_path, 2 * KIB + 500) as store:
        for number in range(6):
            store.put(number, block(0))
        for _ in range(3):
            for number in range(6):
                with store.hold(number) as tree:
                    tree["rows"] += number
                    store.mark_dirty(number)
        assert store.stats.num_dirty > 0
        store.flush()
        assert store.stats.num_dirty == 0
        assert [number_of(store.get(number)) for number in range(6)] == [3 * number for number in range(6)]


def test_writing_to_what_nobody_holds_is_refused(tmp_path: Path) -> None:
    with store_of(tmp_path, KIB) as store:
        store.put("a", block(1, 256))
        with pytest.raises(ConfigError, match="nobody holds it"):
            store.mark_dirty("a")


def test_released_blocks_leave_memory_and_are_still_there(tmp_path: Path) -> None:
    with store_of(tmp_path, 4 * KIB) as store:
        store.put("a", block(1))
        store.release("a")
        assert store.stats.tiers[Tier.RAM].num_bytes == 0
        assert number_of(store.get("a")) == 1
        store.discard("a")
        assert "a" not in store
        assert files_in(tmp_path) == []


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on only short writes, of the store's own notes, still fit."""
    write = os.write

    def full(fd: int, data: Any) -> int:
        if len(data) > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)


def test_a_full_disk_is_one_paragraph_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(tmp_path, 2 * KIB + 500, name="full") as store:
        store.put("a", block(1))
        store.put("b", block(2))
        fill_the_disk(monkeypatch)
        with pytest.raises(StoreFull, match="No space left on device") as caught:
            store.put("c", block(3))
        assert "'full'" in str(caught.value)
        assert "Nothing was lost" in str(caught.value)
        assert "\n" not in str(caught.value)
        with pytest.raises(StoreFull):
            store.put("a", block(4, 3 * KIB))
        with pytest.raises(StoreFull):
            store.flush()
        assert number_of(store.get("a")) == 1
        assert number_of(store.get("b")) == 2
        # What can be loaded is handed out all the same.
        assert number_of(store.get("d", lambda key: block(9))) == 9
        assert [file for file in files_in(tmp_path) if file.suffix == ".partial"] == []
        monkeypatch.undo()
        store.flush()
        store.put("c", block(3))
        assert [number_of(store.get(key)) for key in "abc"] == [1, 2, 3]


def test_a_disk_that_was_full_takes_blocks_again_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(tmp_path, KIB + 500) as store:
        store.put("a", block(1))
        fill_the_disk(monkeypatch)
        for _ in range(2):  # and says each time what is wrong with the disk
            with pytest.raises(StoreFull, match="No space left on device"):
                store.put("b", block(2))
        monkeypatch.undo()
        store.put("b", block(2))
        with store.hold("a") as held:
            assert number_of(held) == 1
        assert [number_of(store.get(key)) for key in "ab"] == [1, 2]


def test_a_damaged_file_is_loaded_again_or_said_to_be_damaged(tmp_path: Path) -> None:
    with store_of(tmp_path, KIB + 500) as store:
        store.get("a", lambda key: block(1))
        store.get("b", lambda key: block(2))  # a is on disk now
        [file] = files_in(tmp_path)
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        assert number_of(store.get("a", lambda key: block(7))) == 7
        store.put("c", block(3))
        store.put("d", block(4))
        store.release("c")
        store.release("d")
        for file in files_in(tmp_path):
            file.write_bytes(file.read_bytes()[:50])
        with pytest.raises(BlockDamaged, match="cut off"):
            store.get("c")


@pytest.mark.parametrize("damage", [b"", b"shoalblk", b"x" * 500])
def test_what_is_no_block_is_damaged(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "x").write_bytes(damage)
    with pytest.raises(BlockDamaged):
        BlockFiles().read(tmp_path / "x")
    with pytest.raises(BlockDamaged, match="cannot be read"):
        BlockFiles().read(tmp_path / "nothing")


def test_reading_ahead_brings_blocks_before_they_are_asked_for(tmp_path: Path) -> None:
    with store_of(tmp_path, 9 * KIB) as store:
        for number in range(16):
            store.put(number, block(number))
        store.prefetch(range(4))
        wait_until(lambda: store._background.is_idle)
        before = store.stats.tiers[Tier.RAM].num_misses
        for number in range(4):
            assert number_of(store.get(number)) == number
        assert store.stats.tiers[Tier.RAM].num_misses == before
        assert store.stats.num_ahead > 0


def test_reading_ahead_goes_on_as_blocks_are_used(tmp_path: Path) -> None:
    loaded: list[int] = []

    def load(key: int) -> Any:
        loaded.append(key)
        return block(key)

    with store_of(tmp_path, 4 * KIB + 500, disk_bytes=0) as store:
        store.prefetch(range(20), load)
        wait_until(lambda: store._background.is_idle)
        assert 1 <= len(loaded) <= 3
        for number in range(20):
            assert number_of(store.get(number, load)) == number
            wait_until(lambda: store._background.is_idle)
        assert loaded == list(range(20)), "each once, and in order"


def test_an_error_while_reading_ahead_waits_for_whoever_gets_the_block(tmp_path: Path) -> None:
    def load(key: int) -> Any:
        if key == 1:
            raise ZeroDivisionError
        return block(key)

    with store_of(tmp_path, 8 * KIB) as store:
        store.prefetch([0, 1, 2], load)
        wait_until(lambda: store._background.is_idle)
        assert number_of(store.get(2, load)) == 2
        with pytest.raises(ZeroDivisionError):
            store.get(1, load)


@pytest.mark.parametrize("policy", POLICIES)
def test_many_threads_see_the_last_content_of_every_block(tmp_path: Path, policy: str) -> None:
    num_threads, wrong = 4, []
    with store_of(tmp_path, 6 * KIB, policy=policy) as store:

        def work(mine: int) -> None:
            # Each thread writes keys of its own and reads those that are loaded, which all share.
            latest: dict[int, int] = {}
            generator = np.random.default_rng(mine)
            for step in range(120):
                key = mine * 100 + int(generator.integers(0, 4))
                shared = int(generator.integers(1000, 1006))
                if step % 3 == 0:
                    store.put(key, block(step))
                    latest[key] = step
                elif step % 3 == 1 and key in latest:
                    with store.hold(key) as tree:
                        tree["rows"] += 1
                        store.mark_dirty(key)
                    latest[key] += 1
                elif key in latest and number_of(store.get(key)) != latest[key]:
                    wrong.append((mine, key, step))
                if number_of(store.get(shared, block)) != shared:
                    wrong.append((mine, shared, step))
                if step % 10 == 0:
                    store.release(shared)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert store.stats.tiers[Tier.RAM].num_bytes <= 6 * KIB


def test_a_forked_child_has_its_own_store_and_leaves_the_parents_files(tmp_path: Path) -> None:
    with store_of(tmp_path, KIB + 500) as store:
        for number in range(4):
            store.put(number, block(number))
        before = files_in(tmp_path)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                fine = [number_of(store.get(number)) for number in range(4)] == [0, 1, 2, 3]
                store.put(0, block(99))
                for number in range(4):
                    store.get(number)
                fine = fine and number_of(store.get(0)) == 99
                store.close()
                code = 0 if fine else 2
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert set(before) <= set(files_in(tmp_path))
        assert [number_of(store.get(number)) for number in range(4)] == [0, 1, 2, 3]


def test_a_held_block_stays_in_ram(tmp_path: Path) -> None:
    with store_of(tmp_path, 2 * KIB + 500) as store:
        store.put("held", block(1))
        with store.hold("held") as tree:
            for number in range(4):
                store.put(number, block(number))
            assert store.get("held") is tree
            with store.hold(3), pytest.raises(StoreFull), store.hold(0):
                pass


def test_a_block_written_to_while_it_is_copied_stays_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(tmp_path, 4 * KIB) as store:
        store.put("a", block(1))
        write = BlockFiles.write

        def write_slowly(files: BlockFiles, path: Path, tree: Any) -> None:
            write(files, path, tree)
            tree["rows"] += 1
            store.mark_dirty("a")

        with store.hold("a"):
            monkeypatch.setattr(BlockFiles, "write", write_slowly)
            store.flush()
            monkeypatch.undo()
        assert store.stats.num_dirty == 1
        store.release("a")
        assert number_of(store.get("a")) == 2


def test_lfu_forgets_how_hot_a_block_was_long_ago() -> None:
    policy = LeastFrequentlyUsed()
    for _ in range(50):
        policy.used("once hot")
    policy.used("cold")
    assert list(policy.coldest_first()) == ["cold", "once hot"]
    for _ in range(300):
        policy.used("hot now")
        policy.used("cold")
    assert next(policy.coldest_first()) == "once hot"


@pytest.mark.parametrize("bad", [{"ram_bytes": -1}, {"ram_bytes": 0, "disk_bytes": -1}])
def test_limits_refuse_what_cannot_be_meant(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be 0 or more"):
        Limits(**bad)
    with pytest.raises(ConfigError, match="there is no policy 'mru'"):
        BlockStore(Limits(ram_bytes=0), policy="mru")


@settings(max_examples=40)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["get", "put", "change", "release", "flush"]),
            st.integers(0, 5),
            st.integers(1, 60),
        ),
        max_size=40,
    ),
    policy=st.sampled_from(list(POLICIES)),
    ram=st.integers(100, 900),
    disk=st.sampled_from([None, 2000]),
)
def test_every_get_gives_the_last_put(steps: list[Any], policy: str, ram: int, disk: int | None) -> None:
    contents: dict[int, tuple[int, int]] = {}
    with BlockStore(Limits(ram_bytes=ram, disk_bytes=disk), policy=policy) as store:
        for serial, (what, key, size) in enumerate(steps):
            try:
                if what == "put":
                    store.put(key, block(serial, 8 * size))
                    contents[key] = serial, size
                elif what == "release":
                    store.release(key)
                elif what == "flush":
                    store.flush()
                elif key in contents and what == "change":
                    with store.hold(key) as tree:
                        tree["rows"].fill_(serial)
                        store.mark_dirty(key)
                        contents[key] = serial, contents[key][1]
                elif key in contents:
                    tree = store.get(key)
                    assert (number_of(tree), len(tree["rows"])) == contents[key]
            except StoreFull:
                pass
            assert store.stats.tiers[Tier.RAM].num_bytes <= ram
        for key, (serial, _) in contents.items():
            assert number_of(store.get(key)) == serial
