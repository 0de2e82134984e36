from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from shoal.errors import CheckpointDamaged, ConfigError
from shoal.parallel.protocol import Piece
from shoal.train.checkpoint.checkpoint import (
    list_checkpoints,
    newest_checkpoint,
    prune,
    step_path,
    write_checkpoint,
)


@pytest.fixture(params=["local", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "checkpoints")
    else:
        yield "memory://many/checkpoints"
        fsspec.filesystem("memory").rm("/many", recursive=True)


def write(directory: str, *steps: int) -> None:
    for step in steps:
        piece = Piece("model/w", torch.full((4,), float(step)), (4,), (0,))
        write_checkpoint(step_path(directory, step), [piece], progress={"step": step})


def damage(directory: str, step: int) -> None:
    with fsspec.open(f"{step_path(directory, step)}/model.safetensors", "rb") as file:
        content = bytearray(file.read())
    content[-1] ^= 1
    with fsspec.open(f"{step_path(directory, step)}/model.safetensors", "wb") as file:
        file.write(bytes(content))


def steps(directory: str) -> list[int]:
    return [int(path.rpartition("-")[2]) for path in list_checkpoints(directory)]


def nobody(damaged: CheckpointDamaged) -> None:
    raise AssertionError(damaged)


def test_they_are_listed_by_step_and_nothing_else_is(directory: str) -> None:
    write(directory, 1000, 20, 1_000_000_000, 300)
    fs, path = fsspec.core.url_to_fs(directory)
    fs.makedirs(f"{path}/best")
    fs.makedirs(f"{path}/step-000000005")  # without a manifest it is none
    assert steps(directory) == [20, 300, 1000, 1_000_000_000]


def test_a_directory_that_is_not_there_has_none(directory: str) -> None:
    assert list_checkpoints(directory) == []
    assert newest_checkpoint(directory, nobody) is None
    write(directory, 1)  # so that there is something to remove


def test_the_newest_is_by_step_not_by_time(directory: str) -> None:
    write(directory, 300, 100)
    newest = newest_checkpoint(directory, nobody)
    assert newest is not None
    assert newest.path == step_path(directory, 300)
    assert newest.progress == {"step": 300}


def test_a_damaged_one_is_reported_and_the_one_before_is_used(directory: str) -> None:
    write(directory, 100, 200, 300)
    damage(directory, 300)
    fs, path = fsspec.core.url_to_fs(step_path(directory, 200))
    fs.rm(f"{path}/manifest.json")
    told: list[CheckpointDamaged] = []
    newest = newest_checkpoint(directory, told.append)
    assert newest is not None
    assert newest.progress == {"step": 100}
    assert [(error.path, error.problem.split()[0]) for error in told] == [
        (step_path(directory, 300), "model.safetensors"),
        (step_path(directory, 200), "it"),
    ]


def test_nothing_is_used_when_all_are_damaged(directory: str) -> None:
    write(directory, 100)
    damage(directory, 100)
    told: list[CheckpointDamaged] = []
    assert newest_checkpoint(directory, told.append) is None
    assert len(told) == 1


def test_the_last_few_are_kept(directory: str) -> None:
    write(directory, 1, 2, 3, 4, 5)
    assert prune(directory, keep_last=2) == [step_path(directory, step) for step in (1, 2, 3)]
    assert steps(directory) == [4, 5]
    assert prune(directory, keep_last=2) == []


def test_the_best_is_kept_beside_them(directory: str) -> None:
    write(directory, 1, 2, 3, 4, 5)
    prune(directory, keep_last=1, protect={step_path(directory, 2)})
    assert steps(directory) == [2, 5]


def test_the_newest_whole_one_is_kept_when_newer_ones_are_damaged(directory: str) -> None:
    write(directory, 1, 2, 3, 4)
    damage(directory, 3)
    damage(directory, 4)
    prune(directory, keep_last=1)
    assert steps(directory) == [2, 4]


def test_nothing_goes_when_nothing_is_whole(directory: str) -> None:
    write(directory, 1, 2, 3)
    for step in (1, 2, 3):
        damage(directory, step)
    assert prune(directory, keep_last=1) == []
    assert steps(directory) == [1, 2, 3]


def test_what_a_writer_elsewhere_left_unfinished_goes_with_the_old_ones(directory: str) -> None:
    write(directory, 1, 2, 3)
    fs, path = fsspec.core.url_to_fs(step_path(directory, 1))
    fs.rm(f"{path}/manifest.json")
    assert prune(directory, keep_last=2) == [step_path(directory, 1)]
    assert not fs.exists(path)


def test_keeping_none_is_refused(directory: str) -> None:
    write(directory, 1)
    with pytest.raises(ConfigError, match="keep_last must be at least 1, got 0"):
        prune(directory, keep_last=0)


def test_pruning_leaves_no_half_removed_directory(tmp_path: Path) -> None:
    write(str(tmp_path), 1, 2)
    prune(tmp_path, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000002"]
