"""Errors of data name the user's line that opened it, whenever they come."""

from __future__ import annotations

import gzip
import inspect
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shoal.data import Dataset
from shoal.errors import BadSample, DataError, FileDamaged, FileLost, NoFiles, TooManySkipped


def here(lines_up: int = 1) -> str:
    """As errors say it: this file, and the line so many above the caller's."""
    frame = inspect.stack()[1]
    return f"The data is opened at {__file__}, line {frame.lineno - lines_up}: "


def told(kind: type[DataError], read: Any) -> str:
    with pytest.raises(kind) as raised:
        for _ in read:
            pass
    assert "\n" not in str(raised.value)
    assert raised.value.opened_at is not None
    return str(raised.value)


def test_a_file_that_disappears_and_one_that_is_damaged(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pq.write_table(pa.table({"x": list(range(1000))}), tmp_path / f"{name}.parquet")
    lost = Dataset.from_parquet(tmp_path / "a.parquet").shuffle(seed=0).batch(10)
    opened = here()
    (tmp_path / "a.parquet").unlink()
    assert f"{opened}lost = Dataset.from_parquet(" in told(FileLost, lost)
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileDamaged) as raised:
        Dataset.from_parquet(tmp_path / "b.parquet")
    assert here() in str(raised.value)
    with pytest.raises(NoFiles) as raised_again:
        Dataset.from_parquet(tmp_path / "c.parquet")
    assert here() in str(raised_again.value)


def test_bad_samples_of_tables_and_streams_and_too_many_of_them(tmp_path: Path) -> None:
    text = "x,y\n1,2\n3,4,5\n6,7\n"
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    table = Dataset.from_csv(tmp_path / "a.csv").map(lambda sample: sample).batch(3)
    assert here() in told(BadSample, table)
    stream = Dataset.from_csv(tmp_path / "a.csv.gz").batch(3)
    assert here() in told(BadSample, stream)
    skipping = Dataset.from_csv(tmp_path / "a.csv", on_error="skip", max_skips=0).batch(3)
    assert here() in (message := told(TooManySkipped, skipping))
    assert message.startswith("1 bad sample was left out, and max_skips=0 allows no more")
    assert message.count("The data is opened at") == 1


def test_what_a_function_of_batches_raises_names_the_batch() -> None:
    def fails(batch: Any) -> Any:
        if batch.max() >= 7:
            raise ValueError("seven")
        return batch

    batches = Dataset.from_arrays(torch.arange(10)).batch(3).map(fails)
    with pytest.raises(ValueError, match="seven") as raised:
        list(batches)
    [note] = raised.value.__notes__
    assert note.startswith("raised by batch().map(")
    assert f"for the batch of samples 6 to 8 of epoch 0 at {__file__}, line " in note
