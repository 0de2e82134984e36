"""Samples that are kept are the samples that were made: each once, whatever they are, wherever they lie."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import Dataset
from shoal.data.cache.sample_cache import Template, cached
from shoal.data.sources.source import Source
from shoal.data.tree import collate
from shoal.errors import CacheFull, ConfigError
from shoal.runtime import events


class Made(Source):
    """Samples made by a function, which counts how often."""

    runs_user_code = True

    def __init__(self, make: Any, num_samples: int) -> None:
        self._make, self.num_samples = make, num_samples
        self.num_made: Counter[int] = Counter()
        self._lock = threading.Lock()

    def samples(self, indices: Any, epoch: int = 0) -> list[Any]:
        with self._lock:
            self.num_made.update(int(index) for index in indices)
        return [self._make(int(index)) for index in indices]

    def describe(self) -> list[dict[str, Any]]:
        return [{"source": "made", "num_samples": self.num_samples}]


def regular(index: int) -> Any:
    return (
        {
            "x": torch.full((3,), float(index)),
            "id": torch.tensor(index),
            "half": torch.tensor([index / 2]).bfloat16(),
        },
        [index, index / 3, index % 2 == 0],
        np.arange(4, dtype=np.int16) + index,
        np.float32(index),
    )


def odd(index: int) -> Any:
    return {
        "text": f"ä{index}" * (index % 5),
        "ids": torch.arange(index % 7),
        "raw": b"x" * index,
        "none": None,
    }


def mixed(index: int) -> Any:
    return regular(index) if index % 3 else odd(index)


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {},
    "ram": {"where": "ram"},
    "disk": {"where": "disk"},
    "small": {"ram_bytes": 700},
    "nothing": {"ram_bytes": 0},
}


@pytest.mark.parametrize("make", [regular, odd, mixed], ids=["regular", "odd", "mixed"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_samples_are_what_was_made_and_made_once(make: Any, kind: str, tmp_path: Path) -> None:
    source = Made(make, 60)
    kept = cached(source, directory=None if kind == "ram" else tmp_path, **SETTINGS[kind])
    generator = np.random.default_rng(0)
    for _ in range(12):
        indices = generator.integers(0, 60, 17)
        for index, sample in zip(indices.tolist(), kept.samples(indices), strict=True):
            assert same(sample, make(index)), index
    assert set(source.num_made.values()) == {1}
    assert kept.num_samples == 60
    assert list(tmp_path.iterdir()) == [], "what is on disk has no name"


@pytest.mark.parametrize("kind", SETTINGS)
def test_batches_are_what_collating_the_samples_gives(kind: str) -> None:
    kept = cached(Made(regular, 60), **SETTINGS[kind])
    for indices in (np.array([3, 9, 3, 59]), range(10, 20), [5], np.arange(60)):
        expected = collate([regular(int(index)) for index in indices])
        for _ in range(2):
            assert same(kept.batch(indices), expected)


def test_a_batch_with_samples_of_several_kinds() -> None:
    kept = cached(Made(lambda index: {"ids": torch.arange(index % 4 + 1)}, 20))
    expected = collate([{"ids": torch.arange(index % 4 + 1)} for index in range(20)])
    assert same(kept.batch(range(20)), expected), "lists of several lengths are padded as without a cache"
    assert same(kept.batch(np.array([0, 4, 8])), collate([{"ids": torch.arange(1)}] * 3))


def test_what_is_given_out_may_be_written_to() -> None:
    for make in (regular, odd):
        kept = cached(Made(make, 8))
        name = "x" if make is regular else "ids"
        first = kept.samples([5])[0]
        (first[0] if make is regular else first)[name].fill_(-1)
        again = kept.samples([5])[0]
        assert (again[0] if make is regular else again)[name].tolist() != [-1] * 3


def test_nothing_is_made_before_it_is_asked_for() -> None:
    source = Made(regular, 1000)
    data = Dataset(cached(source)).shuffle(seed=0).batch(10)
    assert source.num_made == Counter()
    next(iter(data))
    assert sum(source.num_made.values()) == 10


@pytest.mark.parametrize("ram_bytes", [0, 2000, None])
def test_a_dataset_over_its_limit_gives_the_same_batches(ram_bytes: int | None, tmp_path: Path) -> None:
    def make(index: int) -> Any:
        return {"x": torch.full((50,), float(index)), "id": index}, index % 2

    plain = Dataset(Made(make, 300)).shuffle(seed=1).batch(32)
    limited = (
        Dataset(Made(make, 300)).cache(ram_bytes=ram_bytes, directory=tmp_path).shuffle(seed=1).batch(32)
    )
    for _ in range(3):
        for left, right in zip(plain, limited, strict=True):
            assert same(left, right)


def test_memory_stays_flat_over_four_times_the_limit(tmp_path: Path) -> None:
    limit, width = 16 << 20, 512
    num_samples = 4 * limit // (4 * width)

    def make(indices: Any) -> Any:
        return {"x": torch.from_numpy(indices).float()[:, None].repeat(1, width)}

    data = Dataset.from_function(make, num_samples).cache(ram_bytes=limit, directory=tmp_path)
    batches = data.shuffle(seed=0).batch(256)
    next(iter(batches))
    before, growth = _resident_bytes(), []
    for _ in range(3):
        highest = before
        for batch in batches:
            assert torch.equal(batch["x"][:, 0], batch["x"][:, -1])
            highest = max(highest, _resident_bytes())
        growth.append(highest - before)
    assert max(growth) < 2.5 * limit, f"{growth} bytes over a limit of {limit}"
    assert growth[2] - growth[1] < limit // 4


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_on_disk_is_read_ahead(tmp_path: Path) -> None:
    data = Dataset(Made(lambda index: {"id": index}, 20_000)).cache("disk", directory=tmp_path)
    kept = data._source
    batches = data.shuffle(seed=0).batch(256)
    for _ in range(3):
        assert sorted(torch.cat([batch["id"] for batch in batches]).tolist()) == list(range(20_000))
    figures = kept._store._regular.figures()  # type: ignore[union-attr]  # a Cached
    assert figures["disk"]["num_ahead"] >= 40_000, "all of the second and third epoch"


def test_stages_before_it_run_once_and_stages_after_it_always() -> None:
    calls: Counter[str] = Counter()

    def slow(sample: Any) -> Any:
        calls["slow"] += 1
        return sample + 1

    def quick(sample: Any) -> Any:
        calls["quick"] += 1
        return sample * 2

    batches = Dataset.from_arrays(torch.arange(40)).map(slow).cache().map(quick).shuffle(seed=0).batch(8)
    for _ in range(3):
        assert sorted(torch.cat(list(batches)).tolist()) == [2 * (number + 1) for number in range(40)]
    assert calls == {"slow": 40, "quick": 120}


def test_weights_are_kept_with_their_samples() -> None:
    data = Dataset.from_arrays((torch.arange(20.0), torch.arange(20))).with_weights(
        lambda sample: 2.0 + sample[1]
    )
    plain, kept = list(data.batch(7)), list(data.cache().batch(7))
    assert all(same(left, right) for left, right in zip(plain, kept, strict=True))


def test_what_draws_random_numbers_is_refused() -> None:
    data = Dataset.from_arrays(torch.zeros(10)).map(lambda sample: sample + torch.rand(())).cache()
    with pytest.raises(ConfigError, match="call cache before that stage"):
        next(iter(data.batch(5)))
    with pytest.raises(ConfigError, match="Call cache before that stage"):
        Dataset.from_arrays(torch.zeros(10)).augment(lambda sample, generator: sample).cache()


def test_what_could_run_as_code_is_refused() -> None:
    with pytest.raises(ConfigError, match="a set cannot be kept"):
        cached(Made(lambda index: {index}, 5)).samples([1])


def test_an_error_of_a_stage_is_the_users_and_what_was_fine_is_kept() -> None:
    def fragile(sample: torch.Tensor) -> Any:
        return 1 / (int(sample) - 7)

    data = Dataset.from_arrays(torch.arange(10)).map(fragile).cache()
    assert data[3] == pytest.approx(-1 / 4)
    with pytest.raises(ZeroDivisionError):
        list(data.batch(10))
    assert data[3] == pytest.approx(-1 / 4)


def test_bad_samples_are_skipped_each_time_and_never_kept() -> None:
    def fragile(sample: torch.Tensor) -> Any:
        return 1 / (int(sample) - 7)

    data = Dataset.from_arrays(torch.arange(20)).map(fragile, on_error="skip", max_skips=10).cache()
    batches = data.batch(20)
    for _ in range(2):
        [batch] = batches
        assert len(batch) == 19


def test_a_disk_that_is_full_is_said_in_a_paragraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = cached(Made(regular, 100), where="disk", directory=tmp_path)
    kept.samples(range(10))

    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CacheFull, match="No space left on device"):
        kept.samples(range(5, 15))
    monkeypatch.undo()
    assert same(kept.samples(range(5, 15)), [regular(index) for index in range(5, 15)])


def test_where_it_lies_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events.emitted.clear()
    kept = cached(Made(regular, 100), ram_bytes=1000, directory=tmp_path)
    kept.samples(range(10))
    kept.samples(range(100))
    [(kind, facts)] = events.emitted
    assert kind == "cache placed"
    assert facts["ram_bytes"] <= 1000 < facts["disk_bytes"]
    assert "because it is" in capsys.readouterr().err


def test_settings_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ConfigError, match="'tape'"):
        cached(Made(regular, 5), where="tape")
    with pytest.raises(ConfigError, match=r"cache='ram' would need"):
        cached(Made(regular, 1000), where="ram", ram_bytes=100).samples([0])


def test_many_threads_fill_one_cache() -> None:
    source = Made(mixed, 300)
    kept = cached(source)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(10):
            indices = np.random.default_rng(seed).integers(0, 300, 40)
            if not same(kept.samples(indices), [mixed(int(index)) for index in indices]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_forked_readers_fill_one_cache() -> None:
    source = Made(mixed, 60)
    kept = cached(source, ram_bytes=3000)
    kept.share()
    pids = []
    for number in range(3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                mine = range(number * 20, number * 20 + 20)
                code = 0 if same(kept.samples(mine), [mixed(index) for index in mine]) else 2
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    assert same(kept.samples(range(60)), [mixed(index) for index in range(60)])
    assert source.num_made == Counter(), "the children have made all of them"


def test_processes_that_read_share_a_cache_over_epochs(tmp_path: Path) -> None:
    log = tmp_path / "calls"

    def slow(sample: torch.Tensor) -> Any:
        with open(log, "a") as file:
            file.write("x")
        return sample + 1

    batches = Dataset.from_arrays(torch.arange(40)).map(slow, workers=2).cache().shuffle(seed=0).batch(8)
    for _ in range(3):
        assert sorted(torch.cat(list(batches)).tolist()) == list(range(1, 41))
    assert len(log.read_text()) == 40


def test_a_cache_leaves_no_descriptors_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        kept = cached(Made(mixed, 30))
        kept.samples(range(30))
        unused = cached(Made(mixed, 30))
        unused.share()
        del kept, unused
    assert len(os.listdir("/proc/self/fd")) == before


LEAVES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3).map(torch.tensor),
    st.lists(st.integers(0, 255), min_size=1, max_size=3).map(lambda values: np.array(values, np.uint8)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=6,
)


@given(sample=TREES, num_samples=st.integers(1, 3))
@settings(max_examples=60)
def test_any_tree_of_numbers_survives(sample: Any, num_samples: int) -> None:
    template = Template.of(sample)
    assert template is not None
    kept = cached(Made(lambda index: sample, num_samples))
    assert same(kept.samples(range(num_samples)), [sample] * num_samples)
    assert same(kept.batch(range(num_samples)), collate([sample] * num_samples))
