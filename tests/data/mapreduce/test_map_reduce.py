"""map_reduce gives what a dict gives, at any number of partitions, buffers and processes."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

import shoal
from shoal.data.mapreduce import tasks
from shoal.data.mapreduce.tasks import Claims, Indexed
from shoal.errors import ConfigError, DataError, MapReduceFailed, MapReduceStalled
from shoal.runtime import events


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Lines:
    """Some lines of text, as a foreign dataset."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> str:
        return self.lines[index]


def words(line: str) -> Any:
    return ((word, 1) for word in line.split())


def add(key: Any, values: Any) -> Any:
    return sum(values)


TEXT = ["the quick brown fox", "jumps over the lazy dog", "", "the end"] * 200
COUNTS = Counter(word for line in TEXT for word in line.split())


def test_words_are_counted() -> None:
    counts = shoal.Dataset.from_torch(Lines(TEXT)).map_reduce(words, add, add, 3)
    assert dict(counts) == COUNTS
    assert list(counts) == sorted(COUNTS)
    assert list(counts.items()) == sorted(COUNTS.items())
    assert len(counts) == len(COUNTS)
    assert counts["the"] == 600
    assert counts.get("cat") is None
    assert "dog" in counts
    assert counts.all_gather() == COUNTS


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(-3, 3) | st.text(max_size=2), st.integers()), min_size=1, max_size=400),
    st.integers(1, 5),
    st.sampled_from([1, 500, 5000, 1 << 26]),
    st.booleans(),
)  # fmt: skip
def test_any_data_in_any_partitions_with_any_buffer_gives_what_a_dict_gives(
    pairs: list[tuple[Any, int]], partitions: int, buffer_bytes: int, combines: bool
) -> None:
    expected = defaultdict(list)
    for key, value in pairs:
        expected[key].append(value)
    data = shoal.Dataset.from_torch(pairs)
    found = data.map_reduce(
        lambda pair: [pair],
        add if combines else None,
        lambda key, values: (key, sum(values)),
        partitions,
        buffer_bytes=buffer_bytes,
    )
    assert dict(found) == {key: (key, sum(values)) for key, values in expected.items()}


def test_without_functions_to_combine_a_result_is_the_list_of_values_in_the_order_of_the_data() -> None:
    data = shoal.Dataset.from_torch(list(range(3000))).shuffle(seed=3)
    found = data.map_reduce(lambda number: [(number % 7, number)], buffer_bytes=2000)
    assert dict(found) == {rest: list(range(rest, 3000, 7)) for rest in range(7)}


def test_batches_are_mapped_as_arrays() -> None:
    ids = np.random.default_rng(0).integers(0, 50, 5000)

    def frequencies(batch: dict[str, torch.Tensor]) -> Any:
        found, counts = np.unique(batch["id"].numpy(), return_counts=True)
        assert len(batch["id"]) <= 512
        return zip(found.tolist(), counts.tolist(), strict=True)

    found = shoal.Dataset.from_arrays({"id": ids}).map_reduce(frequencies, add, batched=512)
    assert dict(found) == Counter(ids.tolist())


def test_a_key_whose_result_is_none_is_left_out() -> None:
    data = shoal.Dataset.from_torch(Lines(TEXT))
    found = data.map_reduce(words, add, lambda word, counts: total if (total := sum(counts)) > 200 else None)
    assert dict(found) == {"the": 600}


def test_values_may_be_arrays_and_dicts() -> None:
    data = shoal.Dataset.from_arrays(torch.arange(1000.0).reshape(500, 2))
    found = data.map_reduce(
        lambda row: [(int(row[0]) % 2, {"sum": row.numpy(), "n": 1})],
        lambda key, found: {
            "sum": np.sum([one["sum"] for one in found], 0),
            "n": sum(one["n"] for one in found),
        },
        buffer_bytes=3000,
    )
    assert found[0]["n"] == 500
    assert found[0]["sum"].tolist() == [sum(range(0, 1000, 2)), sum(range(1, 1000, 2))]


def test_part_of_a_split_is_counted_alone() -> None:
    first, second = shoal.Dataset.from_torch(list(range(1000))).split(0.3, 0.7, seed=1)
    count = [len(part.map_reduce(lambda number: [(number, 1)], add)) for part in (first, second)]
    assert count == [300, 700]


def test_nothing_gives_nothing() -> None:
    found = shoal.Dataset.from_torch([]).map_reduce(words, add)
    assert dict(found) == {}


def test_a_stream_is_read_by_one_task() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(1000))

    data = shoal.Dataset.from_torch(Endless())
    assert dict(data.map_reduce(lambda number: [(number % 3, 1)], add)) == {0: 334, 1: 333, 2: 333}
    batched = data.map_reduce(lambda batch: [("sum", int(batch.sum()))], add, batched=64)
    assert dict(batched) == {"sum": 499500}


def test_random_draws_of_a_stage_are_those_of_the_first_epoch() -> None:
    data = shoal.Dataset.from_torch(list(range(300))).map(
        lambda number: (number, int(torch.randint(1000, ())))
    )
    found = data.map_reduce(lambda sample: [sample])
    assert {key: value for key, [value] in found.items()} == dict(data)


def test_samples_that_may_be_skipped_are_left_out_and_written_down() -> None:
    def strict(number: int) -> int:
        if number % 100 == 7:
            raise ValueError("seven")
        return number

    events.emitted.clear()
    data = shoal.Dataset.from_torch(list(range(1000))).map(strict, on_error="skip")
    for batched in (False, 64):
        found = data.map_reduce(
            lambda some: [("sum", int(np.sum(np.asarray(some))))], add, batched=batched, key=f"{batched}"
        )
        assert dict(found) == {"sum": sum(range(1000)) - sum(range(7, 1000, 100))}
    assert sum(kind == "sample skipped" for kind, _ in events.emitted) == 20


def test_a_filtered_and_repeated_dataset_is_mapped_as_it_is() -> None:
    data = shoal.Dataset.from_torch(list(range(100))).filter(lambda number: number % 3 == 0).repeat(2)
    found = data.map_reduce(lambda number: [(number, 1)], add)
    assert dict(found) == dict.fromkeys(range(0, 100, 3), 2)


# ---- several processes ------------------------------------------------------------------------------


def test_any_number_of_processes_gives_the_same_to_the_bit() -> None:
    data = shoal.Dataset.from_torch(np.random.default_rng(0).normal(size=3000).tolist())
    results = [
        dict(
            data.map_reduce(lambda x: [(int(x > 0), x), ("all", x)], add, workers=workers, buffer_bytes=5000)
        )
        for workers in (1, 2, 4)
    ]
    assert results[0] == results[1] == results[2]
    assert set(results[0]) == {0, 1, "all"}


def test_a_process_that_is_killed_loses_only_its_task(tmp_path: Path) -> None:
    happened = tmp_path / "killed"

    def dangerous(number: int) -> Any:
        if number == 700 and not happened.exists():
            happened.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with open(tmp_path / "seen", "ab") as seen:
            os.write(seen.fileno(), b"%d\n" % number)
        return [(number % 5, number)]

    found = shoal.Dataset.from_torch(list(range(2000))).map_reduce(dangerous, add, workers=2)
    assert dict(found) == {rest: sum(range(rest, 2000, 5)) for rest in range(5)}
    seen = Counter(int(line) for line in (tmp_path / "seen").read_text().split())
    assert set(seen) == set(range(2000))
    again = {number for number, times in seen.items() if times > 1}
    assert again == set(range(min(again), 700)), "only the killed task's beginning was run twice"
    assert len(again) < 2000 // 8


def test_a_task_that_kills_every_process_is_not_begun_for_ever() -> None:
    def deadly(number: int) -> Any:
        if number == 300:
            os.kill(os.getpid(), signal.SIGKILL)
        return [(0, number)]

    with pytest.raises(
        DataError, match=r"the task 'map-00001' of map_reduce \(samples 250 to 499\) was begun 3 times"
    ):
        shoal.Dataset.from_torch(list(range(1000))).map_reduce(deadly, add, workers=2)


def test_what_the_map_function_raises_in_a_process_comes_with_its_traceback() -> None:
    def wrong(number: int) -> Any:
        return [(0, 1 // (number - 333))]

    with pytest.raises(MapReduceFailed) as caught:
        shoal.Dataset.from_torch(list(range(1000))).map_reduce(wrong, add, workers=2)
    assert "ZeroDivisionError" in str(caught.value)
    assert "return [(0, 1 // (number - 333))]" in str(caught.value)
    assert "for the sample with index 333" in str(caught.value)
    assert "processes.py" not in str(caught.value)


# ---- what goes wrong --------------------------------------------------------------------------------


def test_what_the_map_function_raises_is_raised_with_the_index() -> None:
    def wrong(line: str) -> Any:
        return [(line[0], 1)]

    with pytest.raises(IndexError) as caught:
        shoal.Dataset.from_torch(Lines(TEXT)).map_reduce(wrong, add)
    assert any("wrong) for the sample with index 2" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("role", ["combine", "reduce"])
def test_what_combine_and_reduce_raise_says_the_key(role: str) -> None:
    def wrong(word: str, values: Any) -> Any:
        if word == "fox":
            raise ValueError("no foxes")
        return sum(values)

    with pytest.raises(ValueError, match="no foxes") as caught:
        shoal.Dataset.from_torch(Lines(TEXT)).map_reduce(words, **{"combine": add, role: wrong})
    assert any("for the key 'fox'" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "gave a int: it must yield"),
        (["ab"], "yielded a str where a pair"),
        ([(1, 2, 3)], "yielded a tuple where a pair"),
        ([([], 1)], "a list: keys are"),
        ([(1, {2})], "a value with a set in it"),
    ],
)
def test_what_is_no_pair_is_refused(given: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        shoal.Dataset.from_torch([1]).map_reduce(lambda sample: given)


def test_a_function_that_fails_for_the_systems_sake_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_RETRY_AFTER_S", (0.0, 0.0))
    failures = [OSError("away"), OSError("still away")]

    def flaky(number: int) -> Any:
        if number == 3 and failures:
            raise failures.pop()
        return [(0, number)]

    events.emitted.clear()
    assert dict(shoal.Dataset.from_torch(list(range(10))).map_reduce(flaky, add)) == {0: 45}
    assert [facts["task"] for kind, facts in events.emitted if "run again" in kind] == ["map-00000"] * 2


def test_a_task_that_somebody_holds_for_too_long_is_said_with_its_holder(tmp_path: Path) -> None:
    data = shoal.Dataset.from_torch(list(range(1000)))
    claims = Claims(tmp_path / "agg" / "claims", run="x")
    child = os.fork()
    if child == 0:
        claims.take("map-00002")
        (tmp_path / "held").touch()
        signal.pause()
        os._exit(0)
    try:
        while not (tmp_path / "held").exists():
            pass
        plan = tasks.AggregatePlan(
            map=lambda n: [(0, n)],
            combine=add,
            reduce=add,
            num_partitions=1,
            buffer_bytes=1 << 20,
            num_map_tasks=4,
        )
        mine = tasks.Tasks(
            plan, Indexed(*data._random_access("x"), None), tmp_path / "agg", run="x", timeout_s=0.2
        )
        with pytest.raises(
            MapReduceStalled, match=rf"'map-00002' is held by process {child}\. Finished tasks are kept"
        ):
            mine.finish()
        assert mine.left() == ["map-00002"]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    mine.finish()  # the kernel has let go of the dead process's lock
    assert mine.is_complete


@pytest.mark.parametrize("moment", range(1, 9))
def test_a_finished_map_task_is_not_run_again_while_another_process_completes_the_result(
    tmp_path: Path, moment: int
) -> None:
    data = shoal.Dataset.from_torch(list(range(1000)))
    mapped: Counter[int] = Counter()

    def look(number: int) -> list[tuple[int, int]]:
        mapped[number] += 1
        return [(0, number)]

    plan = tasks.AggregatePlan(
        map=look, combine=add, reduce=add, num_partitions=1, buffer_bytes=1 << 20, num_map_tasks=3
    )

    def make(kind: type[tasks.Tasks]) -> tasks.Tasks:
        return kind(plan, Indexed(*data._random_access("x"), None), tmp_path / "agg", run="x", timeout_s=5.0)

    other = make(tasks.Tasks)
    looks = 0

    class Overtaken(tasks.Tasks):
        """The other process runs the map tasks after two looks at the directory, and the rest at `moment`."""

        def _missing(self, names: list[str]) -> list[str]:
            nonlocal looks
            found = super()._missing(names)
            looks += 1
            if looks == 2:
                other._run_all(other.map_names, other._map)
            if looks == moment:
                other.finish()
            return found

    mine = make(Overtaken)
    mine.finish()
    assert mine.is_complete
    assert mapped == dict.fromkeys(range(1000), 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"map": 3}, r"map_reduce\(map=\) takes a function"),
        ({"combine": "sum"}, r"map_reduce\(combine=\) takes a function, got a str"),
        ({"partitions": 0}, r"map_reduce\(partitions=\)"),
        ({"workers": 0}, r"map_reduce\(workers=\)"),
        ({"batched": 0}, r"map_reduce\(batched=\)"),
        ({"key": 7}, r"map_reduce\(key=\)"),
        ({"timeout_s": 0}, r"map_reduce\(timeout_s=\)"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shoal.Dataset.from_torch([1]).map_reduce(**{"map": words, **options})
