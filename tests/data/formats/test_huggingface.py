"""Data sets of Hugging Face's `datasets`, as tables, row by row and as streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.dataset import Dataset
from shoal.data.formats.huggingface import RowsByDatasets, open_huggingface
from shoal.data.formats.table_source import TableSource
from shoal.errors import BadSample, ConfigError, NoSuchColumn

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _without_a_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress bars keep a thread that looks after them."""
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)


def made(num_rows: int = 10) -> Any:
    rows = {
        "x": [number / 2 for number in range(num_rows)],
        "s": [f"s{number}" for number in range(num_rows)],
        "l": [[number] * (number % 3) for number in range(num_rows)],
        "y": [number % 2 for number in range(num_rows)],
    }
    kinds = {
        "x": datasets.Value("float32"),
        "s": datasets.Value("string"),
        "l": datasets.Sequence(datasets.Value("int32")),
        "y": datasets.ClassLabel(names=["no", "yes"]),
    }
    return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))


def test_columns_are_read_as_a_table() -> None:
    data = Dataset.from_huggingface(made(), label="y")
    [(inputs, label)] = list(data.batch(10))
    assert inputs["x"].dtype == torch.float32
    assert inputs["s"].tolist()[:2] == ["s0", "s1"]
    assert inputs["l"].tolist()[:3] == [[-1, -1], [1, -1], [2, 2]]
    assert label.tolist() == [number % 2 for number in range(10)]


def test_shuffled_selected_and_concatenated_data_sets() -> None:
    source = datasets.concatenate_datasets([made(5), made(7)]).select([11, 0, 6, 2])
    data = Dataset.from_huggingface(source, columns=["s"])
    assert [sample["s"] for sample in data] == ["s6", "s0", "s1", "s2"]
    assert sorted(batch["s"].item() for batch in data.shuffle(seed=1).batch(1)) == ["s0", "s1", "s2", "s6"]


def test_a_format_changes_nothing_for_a_table() -> None:
    source = open_huggingface(made().with_format("numpy"))
    assert isinstance(source, TableSource)
    assert source.samples([3])[0]["s"] == "s3"


def test_missing_values_are_named_or_filled() -> None:
    source = datasets.Dataset.from_dict({"x": [1, None, 3]})
    with pytest.raises(BadSample, match=r"the data set, row 2, column 'x': the value is missing"):
        list(Dataset.from_huggingface(source))
    assert [int(sample["x"]) for sample in Dataset.from_huggingface(source, fill={"x": 0})] == [1, 0, 3]
    batches = Dataset.from_huggingface(source, on_error="skip", max_skips=1).batch(3)
    assert [batch["x"].tolist() for batch in batches] == [[1, 3]]


def test_a_split_is_chosen_by_name() -> None:
    both = datasets.DatasetDict(train=made(4), test=made(2))
    assert len(Dataset.from_huggingface(both, split="test")) == 2
    assert len(Dataset.from_huggingface(datasets.DatasetDict(train=made(4)))) == 4
    with pytest.raises(
        ConfigError, match="has the splits 'train', 'test', and none was chosen: say split='train'"
    ):
        Dataset.from_huggingface(both)
    with pytest.raises(ConfigError, match="has the splits 'train', 'test', and there is no 'valid'"):
        Dataset.from_huggingface(both, split="valid")
    with pytest.raises(ConfigError, match="split='test' chooses from a DatasetDict"):
        Dataset.from_huggingface(made(), split="test")


def test_what_is_no_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"but got a str. To load one by name, use datasets.load_dataset"):
        Dataset.from_huggingface("imdb")
    with pytest.raises(
        NoSuchColumn, match=r"the data set has no column 'z', which columns= asks for. It has x, s, l, y\."
    ):
        Dataset.from_huggingface(made(), columns=["z"])


def test_nested_columns_are_read_row_by_row() -> None:
    kinds = {"m": datasets.Array2D((2, 2), "float32"), "y": datasets.Value("int64")}
    rows = {"m": [np.full((2, 2), number) for number in range(3)], "y": [0, 1, 2]}
    source = open_huggingface(datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)), label="y")
    assert isinstance(source, RowsByDatasets)
    inputs, label = source.batch([2, 1])
    assert (inputs["m"].tolist(), label.tolist()) == ([[[2, 2], [2, 2]], [[1, 1], [1, 1]]], [2, 1])
    assert "is of type" in source.describe()[0]["by_row_because"]


def test_a_transform_is_run() -> None:
    def double(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {**batch, "x": [2 * value for value in batch["x"]]}

    data = Dataset.from_huggingface(made().with_transform(double), columns=["x"])
    assert [float(batch["x"]) for batch in data.batch(1)] == [float(number) for number in range(10)]


def test_an_iterable_data_set_is_a_stream() -> None:
    data = Dataset.from_huggingface(made().to_iterable_dataset(), label="y", columns=["x", "s"])
    batches = data.batch(4)
    read = [(inputs["x"].tolist(), list(inputs["s"]), label.tolist()) for inputs, label in batches]
    assert read[0] == ([0.0, 0.5, 1.0, 1.5], ["s0", "s1", "s2", "s3"], [0, 1, 0, 1])
    assert [len(part[0]) for part in read] == [4, 4, 2]
    with pytest.raises(TypeError, match="a stream has no length"):
        len(data)
    with pytest.raises(NoSuchColumn, match="which label= asks for"):
        Dataset.from_huggingface(made().to_iterable_dataset(), label="z")


def test_the_shuffle_buffer_of_a_stream_is_another_each_epoch_and_the_same_again() -> None:
    stream = made(50).to_iterable_dataset().shuffle(seed=3, buffer_size=20)
    batches = Dataset.from_huggingface(stream, columns=["x"]).batch(50)
    epochs = [
        [part.batch["x"].tolist() for part in batches.slices(epoch=epoch, start=0, rank=0, num_workers=1)]
        for epoch in (0, 1, 0)
    ]
    assert epochs[0] == epochs[2] != epochs[1]
