"""Checkpoints that hold the rows of a table that changed: whole tensors for whoever reads, and a base that stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import CheckpointDamaged, ConfigError
from shoal.parallel.protocol import Piece
from shoal.train.callbacks.monitored import ModelCheckpoint
from shoal.train.checkpoint.changes import merged
from shoal.train.checkpoint.checkpoint import (
    list_checkpoints,
    newest_checkpoint,
    open_checkpoint,
    prune,
    set_aside,
    step_path,
    write_checkpoint,
)
from shoal.train.checkpoint.saving import TABLE_BYTES, Increments

KEYS, ROWS, SUM = "model/t.keys", "model/t.rows", "optimizer/t.rows/sum"


def piece(name: str, tensor: torch.Tensor, changed: str = "") -> Piece:
    return Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), changed)


def save(
    home: Path, step: int, rows: dict[int, float], *, base: int | None = None, gone: tuple[int, ...] = ()
) -> str:
    """A checkpoint of a table with these rows, or of these changes since that of another step."""
    keys = torch.tensor(sorted(rows), dtype=torch.int64)
    values = torch.tensor([[rows[int(key)]] * 3 for key in keys]).reshape(-1, 3)
    changed = KEYS if base is not None else ""
    pieces = [piece(KEYS, keys, changed), piece(ROWS, values, changed), piece(SUM, values * 2, changed)]
    pieces.append(piece("model/w", torch.tensor([float(step)])))
    if base is not None:
        pieces.append(piece(f"gone/{KEYS}", torch.tensor(sorted(gone), dtype=torch.int64)))
    path = step_path(home, step)
    write_checkpoint(
        path, pieces, progress={"step": step}, base=step_path(home, base) if base is not None else None
    )
    return path


def rows_of(path: str) -> dict[int, float]:
    pieces = open_checkpoint(path).pieces
    assert pieces.describe(ROWS) == (tuple(pieces[ROWS].shape), torch.float32)
    assert torch.equal(pieces[SUM], pieces[ROWS] * 2)
    assert torch.equal(pieces.part(ROWS, (0, 1), (len(pieces[KEYS]), 1)), pieces[ROWS][:, 1:2])
    return dict(zip(pieces[KEYS].tolist(), pieces[ROWS][:, 0].tolist(), strict=True))


@settings(max_examples=60, deadline=None)
@given(
    base=st.dictionaries(st.integers(-9, 9), st.integers(0, 9)),
    changed=st.dictionaries(st.integers(-9, 9), st.integers(10, 19)),
    gone=st.sets(st.integers(-9, 9)),
)
def test_changes_over_a_base_are_an_updated_dict(base: Any, changed: Any, gone: Any) -> None:
    gone -= changed.keys()
    arrays = [np.array(sorted(each), np.int64) for each in (base, changed, gone)]
    found = merged(*arrays)
    expected = {**{key: value for key, value in base.items() if key not in gone}, **changed}
    assert found.keys.tolist() == sorted(expected)
    columns = [
        torch.tensor([each[key] for key in sorted(each)], dtype=torch.int64) for each in (base, changed)
    ]
    assert found.merge(*columns).tolist() == [expected[key] for key in sorted(expected)]


def test_a_chain_reads_as_one_table_and_keeps_its_base(tmp_path: Path) -> None:
    save(tmp_path, 1, {-3: 1.0, 5: 1.0, 9: 1.0})
    save(tmp_path, 2, {5: 2.0, 7: 2.0}, base=1)
    newest = save(tmp_path, 3, {-3: 3.0}, base=2, gone=(5, 9))
    assert rows_of(newest) == {-3: 3.0, 7: 2.0}
    assert prune(tmp_path, keep_last=1) == []  # both are needed
    save(tmp_path, 4, {1: 4.0})
    save(tmp_path, 5, {1: 5.0}, base=4)
    assert {Path(path).name[-1] for path in prune(tmp_path, keep_last=2)} == {"1", "2", "3"}
    assert [rows_of(path) for path in list_checkpoints(tmp_path)] == [{1: 4.0}, {1: 5.0}]


def test_numbered_rows_are_those_of_the_base_with_the_changed_ones(tmp_path: Path) -> None:
    name, changed = "model/table", "changed/table"
    table = torch.arange(20.0).reshape(5, 4)
    write_checkpoint(step_path(tmp_path, 1), [piece(name, table)], progress={"step": 1})
    for step, numbers in ((2, [0, 3]), (3, []), (4, [3, 4])):
        rows = torch.full((len(numbers), 4), float(100 * step))
        table[numbers] = rows
        pieces = [piece(changed, torch.tensor(numbers, dtype=torch.int64)), piece(name, rows, changed)]
        path = step_path(tmp_path, step)
        write_checkpoint(path, pieces, progress={"step": step}, base=step_path(tmp_path, step - 1))
        found = open_checkpoint(path).pieces
        assert torch.equal(found[name], table)
        assert found.describe(name) == ((5, 4), torch.float32)
        for offset, shape in (((0, 1), (5, 2)), ((2, 0), (2, 4)), ((3, 2), (1, 1)), ((1, 0), (0, 4))):
            rows = table[offset[0] : offset[0] + shape[0], offset[1] : offset[1] + shape[1]]
            assert torch.equal(found.part(name, offset, shape), rows)
    pieces = [piece(changed, torch.tensor([1])), piece(name, torch.ones(1, 3), changed)]
    write_checkpoint(step_path(tmp_path, 5), pieces, progress={"step": 5}, base=step_path(tmp_path, 4))
    with pytest.raises(CheckpointDamaged, match=r"are F32\[3\], those of its base F32\[4\]"):
        open_checkpoint(step_path(tmp_path, 5))


def test_what_is_set_aside_finds_the_base_that_stayed(tmp_path: Path) -> None:
    save(tmp_path, 1, {1: 1.0})
    save(tmp_path, 8, {2: 8.0}, base=1)
    save(tmp_path, 4, {1: 4.0})
    aside = set_aside(tmp_path, after_step=4)
    assert aside is not None
    assert rows_of(step_path(aside, 8)) == {1: 1.0, 2: 8.0}
    save(tmp_path, 5, {1: 5.0})
    assert [Path(path).name[-1] for path in prune(tmp_path, keep_last=1)] == ["4"]  # 1 is needed there
    assert rows_of(step_path(aside, 8)) == {1: 1.0, 2: 8.0}


def test_what_is_set_aside_keeps_none_of_the_same_name(tmp_path: Path) -> None:
    """Rank 0 was replaced and saves again what it had saved."""
    save(tmp_path, 1, {1: 1.0})
    save(tmp_path, 2, {2: 2.0}, base=1)
    save(tmp_path, 3, {3: 3.0}, base=2)
    set_aside(tmp_path, after_step=1)
    save(tmp_path, 1, {1: 1.5})
    save(tmp_path, 2, {2: 2.5}, base=1)
    save(tmp_path, 4, {4: 4.0})
    assert {Path(path).name[-1] for path in prune(tmp_path, keep_last=1)} == {"1", "2"}


def test_a_base_is_found_from_a_relative_path_and_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "checkpoints"
    save(home, 1, {1: 1.0})
    newest = save(home, 2, {2: 2.0}, base=1)
    (tmp_path / "latest").symlink_to(newest)
    monkeypatch.chdir(home)
    for path in (Path(newest).name, f"{Path(newest).name}/", "../latest"):
        assert rows_of(path) == {1: 1.0, 2: 2.0}


def test_the_next_checkpoint_builds_on_one_of_an_earlier_step_alone(tmp_path: Path) -> None:
    """Two callbacks may save the same step, and a fit may go back: the base would be replaced by what needs it."""
    home, increments = str(tmp_path), Increments()

    def begin_and_write(step: int) -> str | None:
        increment = increments.begin(home, step, full_every=10)
        assert increment.changes is not None
        increment.changes.num_table_bytes = TABLE_BYTES
        increments.written(increment, save(tmp_path, step, {1: 1.0}))
        return increment.base

    bases = [begin_and_write(step) for step in (10, 20, 20, 30, 15, 16)]
    assert bases == [None, step_path(home, 10), None, step_path(home, 20), None, step_path(home, 15)]


def test_a_chain_too_long_to_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 100, got 101"):
        ModelCheckpoint(full_every=101)


@pytest.mark.parametrize("harm", ["missing", "damaged", "another"])
def test_a_base_that_is_not_as_it_was_is_named_and_an_older_whole_one_is_used(
    tmp_path: Path, harm: str
) -> None:
    save(tmp_path, 1, {1: 1.0})
    base = Path(save(tmp_path, 2, {1: 2.0}))
    newest = save(tmp_path, 3, {1: 3.0}, base=2)
    if harm == "missing":
        base.rename(tmp_path / "elsewhere")
    elif harm == "damaged":
        file = base / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    else:
        save(tmp_path, 2, {1: 7.0})
    with pytest.raises(CheckpointDamaged, match="since step-000000002"):
        open_checkpoint(newest)
    told: list[CheckpointDamaged] = []
    found = newest_checkpoint(tmp_path, told.append)
    assert found is not None
    assert found.progress["step"] == (2 if harm == "another" else 1)
    assert told
    assert "step-000000003" in str(told[0])
