"""Arguments that cannot be meant are refused at the call, in one paragraph that names them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shoal.data import Dataset, Feature, copies, write_tfrecord
from shoal.errors import ShoalError

NAN = float("nan")
TABLES = ("csv", "jsonl", "parquet", "tfrecord", "sql")

# What every table takes, and wrong values of it; then what only some take.
OF_TABLES: dict[str, list[Any]] = {
    "label": [3, "", [], [3], NAN],
    "cache": [3, "rum", 0],
    "on_error": ["skp", None, 3],
    "max_skips": [3, 0, -1, NAN, "3", 1.5],
}
SKIPPED: dict[str, list[Any]] = {"max_skips": [-1, NAN, "3", 1.5, True]}
OF_FILES: dict[str, list[Any]] = {"location": ["here", None, 3], "spread": ["x", None]}
OF_COLUMNS: dict[str, list[Any]] = {
    "columns": ["x", [], 3, [3], [""], [None], NAN],
    "fill": [3, [], "x", {"x": None}, {"x": "a"}, {3: 1}, {"z": 1}],
}
OF_SCHEMA: dict[str, list[Any]] = {"schema": [3, ["x"], "x", {"x": None}, {"x": 3}, {"x": ""}, {3: "int64"}]}
OF_CSV: dict[str, list[Any]] = {
    "delimiter": ["", 3, ",,", "\n"],
    "quote": [3, ""],
    "header": [3, "yes"],
    "names": ["xys", [], 3, [1, 2, 3], ["a"], ["a", "", "b"]],
}
OF_PARQUET: dict[str, list[Any]] = {
    "where": [
        *(3, "x > 3", [], [()], {}, [("x", ">")], [("x", "~", 3)], [("z", ">", 3)], [("x", ">", "a")]),
        *([("x", ">", None)], [(3, ">", 3)], [("x", "in", 3)], [("x", "in", [])], [("x", "in", [None])]),
    ]
}
OF_SQL: dict[str, list[Any]] = {
    "key": [3, "", "z"],
    "partitions": [0, "3", NAN, 1.5],
    "timeout_s": [-1, 0, "x", NAN, None],
}
WRONG_PATHS: list[Any] = [None, "", 3, [], [None], [""], b"a.csv", NAN, {}, ["a.csv", 3]]
WRONG_FUNCTIONS: list[Any] = [3, None, "", [], NAN]
WRONG_NUMBERS: list[Any] = [-1, NAN, "3", 1.5, True, []]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small table in each format."""
    path = tmp_path_factory.mktemp("tables")
    (path / "a.csv").write_text("x,y,s\n1,0,a\n2,1,b\n")
    (path / "a.jsonl").write_text('{"x": 1, "y": 0, "s": "a"}\n{"x": 2, "y": 1, "s": "b"}\n')
    pq.write_table(pa.table({"x": [1, 2], "y": [0, 1], "s": ["a", "b"]}), path / "a.parquet")
    write_tfrecord(path / "a.tfrecord", [{"x": 1.0, "y": 0}, {"x": 2.0, "y": 1}])
    connection = sqlite3.connect(path / "a.db")
    connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, x REAL, y INTEGER)")
    connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [(1, 1.0, 0), (2, 2.0, 1)])
    connection.commit()
    connection.close()
    return path


@pytest.fixture(params=["arrays", "stream"])
def data(request: pytest.FixtureRequest) -> Dataset:
    """Ten samples, by index or one after the other."""
    if request.param == "arrays":
        return ten()
    return Dataset.from_generator(lambda: iter([(torch.tensor(1.0), torch.tensor(0))] * 10))


def ten() -> Dataset:
    return Dataset.from_arrays((torch.arange(10.0), torch.arange(10)))


def refused(call: Callable[[], Any], what: object) -> str:
    """The message, if it is a refusal of ours in one paragraph."""
    try:
        made = call()
    except ShoalError as error:
        message = str(error)
        assert "\n" not in message, message
        assert 20 < len(message) < 900, message
        return message
    except Exception as error:
        pytest.fail(f"{what}: {type(error).__name__}: {error}")
    pytest.fail(f"{what} is taken: {made!r}")


def opener(kind: str, folder: Path) -> Callable[..., Dataset]:
    if kind == "sql":
        return lambda **options: Dataset.from_sql("t", folder / "a.db", **options)
    if kind == "tfrecord":
        schema = {"x": "float32", "y": "int64"}
        return lambda **options: Dataset.from_tfrecord(folder / "a.tfrecord", schema, **options)
    make = getattr(Dataset, f"from_{kind}")
    return lambda **options: make(folder / f"a.{kind}", **options)


@pytest.mark.parametrize("kind", TABLES)
def test_options_of_tables(kind: str, folder: Path) -> None:
    options = dict(OF_TABLES)
    options |= OF_FILES if kind != "sql" else OF_SQL
    options |= OF_COLUMNS if kind != "tfrecord" else {}
    options |= OF_SCHEMA if kind in ("csv", "jsonl", "sql") else {}
    options |= {"csv": OF_CSV, "parquet": OF_PARQUET}.get(kind, {})
    make = opener(kind, folder)
    for name, values in options.items():
        for value in values:
            refused(lambda name=name, value=value: make(**{name: value}), (kind, name, value))  # type: ignore[misc]
    for name, values in SKIPPED.items():
        for value in values:
            call = lambda name=name, value=value: make(on_error="skip", **{name: value})  # noqa: E731
            assert name in refused(call, (kind, name, value))


@pytest.mark.parametrize("where", WRONG_PATHS, ids=repr)
def test_paths(where: Any) -> None:
    for make in (Dataset.from_csv, Dataset.from_jsonl, Dataset.from_parquet, copies):
        refused(lambda make=make: make(where), (make, where))  # type: ignore[misc]
    refused(lambda: Dataset.from_tfrecord(where, {"x": "int64"}), where)


def test_schemas_of_records_and_places_of_databases(folder: Path) -> None:
    wrong: list[Any] = [None, 3, {}, [], "x", {"x": None}, {"x": 3}, {"x": ""}, {3: "int64"}]
    wrong += [{"x": feature} for feature in (Feature(None), Feature("float32", (0,)), Feature("str", (2, 2)))]
    wrong += [{"x": Feature("str", None, default=[3])}, {"x": Feature("str", (2,), default=["a"])}]
    for schema in wrong:
        refused(lambda schema=schema: Dataset.from_tfrecord(folder / "a.tfrecord", schema), schema)  # type: ignore[misc]
    places: list[Any] = [None, "", 3, folder / "no.db", "mysql://x/y", [], ":memory:"]
    for place in places:
        refused(lambda place=place: Dataset.from_sql("t", place), place)  # type: ignore[misc]
    for query in [None, "", 3, [], "no_such_table", "SELECT", ";"]:
        refused(lambda query=query: Dataset.from_sql(query, folder / "a.db"), query)  # type: ignore[misc]


def test_sources_of_other_kinds() -> None:
    ragged = (torch.arange(3), torch.arange(4))
    for arrays in [
        None,
        3,
        "x",
        [],
        {},
        (),
        ragged,
        torch.tensor(3),
        (None,),
        {"x": None},
        NAN,
        {"x": "abc"},
    ]:
        refused(lambda arrays=arrays: Dataset.from_arrays(arrays), arrays)  # type: ignore[misc]
    for fn in WRONG_FUNCTIONS:
        refused(lambda fn=fn: Dataset.from_function(fn, 3), fn)  # type: ignore[misc]
        refused(lambda fn=fn: Dataset.from_generator(fn), fn)  # type: ignore[misc]
    for number in [-1, None, NAN, "3", 1.5]:
        refused(lambda number=number: Dataset.from_function(len, number), number)  # type: ignore[misc]
    for options in [{"num_samples": 0}, {"num_samples": NAN}, {"seed": None}, {"seed": "a"}]:
        refused(lambda options=options: Dataset.from_generator(list, **options), options)  # type: ignore[misc]
    for dataset in [None, 3, "", NAN, {}]:
        refused(lambda dataset=dataset: Dataset.from_torch(dataset), dataset)  # type: ignore[misc]


def test_stages_of_samples(data: Dataset) -> None:
    for fn in WRONG_FUNCTIONS:
        for stage in (data.map, data.filter, data.augment):
            assert "takes a function of" in refused(lambda stage=stage, fn=fn: stage(fn), (stage, fn))  # type: ignore[misc]
        if fn is not None and fn != 3:
            refused(lambda fn=fn: data.with_weights(fn), fn)  # type: ignore[misc]
    of_map: dict[str, list[Any]] = {
        "workers": [-1, NAN, None, "2"],
        "timeout_s": [0, -1, NAN, None, "x"],
        "on_error": ["x", None],
        "max_skips": [3, -1, NAN],
        "batched": [3, None, "yes"],
    }
    for name, values in of_map.items():
        for value in values:
            call = lambda name=name, value=value: data.map(len, **{name: value})  # noqa: E731
            assert name in refused(call, (name, value))
    refused(lambda: data.filter(len, batched=3), "batched=3")  # type: ignore[arg-type]
    for seed in [None, NAN, "x", 1.5]:
        refused(lambda seed=seed: data.augment(len, seed), seed)  # type: ignore[misc]
        refused(lambda seed=seed: data.shuffle(seed), seed)  # type: ignore[misc]
    for buffer in [0, NAN, "x"]:
        refused(lambda buffer=buffer: data.shuffle(buffer=buffer), buffer)  # type: ignore[misc]
    for number in WRONG_NUMBERS:
        for stage in (data.take, data.skip, data.repeat, data.batch):
            refused(lambda stage=stage, number=number: stage(number), (stage, number))  # type: ignore[misc]
    for options in [{"per_worker": 3}, {"per_worker": None}, {"drop_last": "no"}]:
        refused(lambda options=options: data.batch(3, **options), options)  # type: ignore[misc]


def test_stages_that_choose() -> None:
    data, weights = ten(), [[], [1, 2], [0] * 10, [-1] * 10, [NAN] * 10, ["a"] * 10, 3, NAN, ""]
    for wrong in [*weights, torch.ones(10, 2)]:
        refused(lambda wrong=wrong: data.sample(weights=wrong), wrong)  # type: ignore[misc]
        refused(lambda wrong=wrong: data.with_weights(wrong), wrong)  # type: ignore[misc]
    for options in [{"replacement": 3}, {"replacement": None}, {"seed": None}, {"num_samples": 0}]:
        refused(lambda options=options: data.sample(**options), options)  # type: ignore[misc]
    parts: list[tuple[Any, ...]] = [(), (-0.5, 0.5), (NAN,), (0.8, 0.3), ("a",), (None,), (11,), (0.5, 3)]
    for part in [*parts, ([0.5, 0.5],), (True,), (float("inf"),), (-3,)]:
        refused(lambda part=part: data.split(*part), part)  # type: ignore[misc]
    by: list[dict[str, Any]] = [{"seed": NAN}, {"stratify": 3}, {"stratify": []}, {"group": ""}]
    for options in [*by, {"time": [NAN] * 10}, {"group": [1], "time": [2]}]:
        refused(lambda options=options: data.split(0.5, 0.5, **options), options)  # type: ignore[misc]
    for k in [None, 1, 0, -2, 11, NAN, "3", 2.5]:
        refused(lambda k=k: data.folds(k), k)  # type: ignore[misc]


def test_several_datasets_caches_and_iterators(tmp_path: Path) -> None:
    data = ten()
    (tmp_path / "file").touch()
    for sides in [(), (3,), (data, None), ([data, data],)]:
        refused(lambda sides=sides: Dataset.zip(*sides), sides)  # type: ignore[misc]
    for sides in [([],), (None,), (3,), ([3],), (data,), ([data], 0), ([data], NAN)]:
        refused(lambda sides=sides: Dataset.interleave(*sides), sides)  # type: ignore[misc]
    of_cache: dict[str, list[Any]] = {
        "where": ["rum", None, 3],
        "ram_bytes": [-1, NAN, "1GB", 1.5],
        "directory": [3, "", tmp_path / "file"],
    }
    for name, values in of_cache.items():
        for value in values:
            refused(lambda name=name, value=value: data.cache(**{name: value}), (name, value))  # type: ignore[misc]
    for position in [3, "", "x", {}, {"epoch": -1}, [], NAN]:
        refused(lambda position=position: data.iterator(position), position)  # type: ignore[misc]
        refused(lambda position=position: data.batch(2).iterator(position), position)  # type: ignore[misc]
    for at in [[], 3, str(tmp_path), [3], [None], [tmp_path / "file"]]:
        refused(lambda at=at: copies(tmp_path, 2, at=at), at)  # type: ignore[misc]
    for number in [0, NAN, "2", None]:
        refused(lambda number=number: copies(tmp_path, number), number)  # type: ignore[misc]


def test_stages_of_batches() -> None:
    batches = ten().batch(2)
    for fn in WRONG_FUNCTIONS:
        assert "takes a function of a batch" in refused(lambda fn=fn: batches.map(fn), fn)  # type: ignore[misc]
    for number in [0, *WRONG_NUMBERS, None]:
        refused(lambda number=number: batches.prefetch(number), number)  # type: ignore[misc]
    shards: list[dict[str, Any]] = [{"how": None}, {"how": 3}, {"how": ""}, {"how": "balanced"}]
    shards += [{"how": "balanced", "cost": cost} for cost in (3, [], NAN)]
    shards += [{"how": "weighted", "weights": each} for each in ([], [0, 0], [-1, 1], [NAN], "x", 3, ["a"])]
    shards += [{"how": "dynamic", "drain_slower_than": each} for each in (0, NAN, "x")]
    shards += [{"how": "dynamic", "probe_every_s": each} for each in (0, NAN, None, "x")]
    shards += [{"how": "dynamic", "backup": 3}, {"how": "equal", "cost": "length"}]
    for options in shards:
        refused(lambda options=options: batches.shard(**options), options)  # type: ignore[misc]


def test_map_reduce_and_the_writer(tmp_path: Path) -> None:
    data = ten()
    of_reduce: dict[str, list[Any]] = {
        "map": WRONG_FUNCTIONS,
        "combine": [3],
        "reduce": [3],
        "partitions": [0, NAN, "3"],
        "batched": [-1, "x", NAN],
        "key": [3],
        "workers": [0, -1, NAN],
        "buffer_bytes": [0, NAN, "x"],
        "timeout_s": [0, NAN, "x"],
        "directory": [3, ""],
    }
    for name, values in of_reduce.items():
        for value in values:
            options = {"map": len, name: value}
            refused(lambda options=options: data.map_reduce(**options), (name, value))  # type: ignore[misc]
    path = tmp_path / "a.tfrecord"
    for wrong in [None, "", 3]:
        refused(lambda wrong=wrong: write_tfrecord(wrong, []), wrong)  # type: ignore[misc]
    for rows in [None, 3, [3], [{"x": None}], [{3: 1}], [np.zeros(3)]]:
        refused(lambda rows=rows: write_tfrecord(path, rows), rows)  # type: ignore[misc]
    for label in [3, "y"]:
        refused(lambda label=label: write_tfrecord(path, [{"x": 1}], label=label), label)  # type: ignore[misc]
    assert not list(tmp_path.iterdir())
