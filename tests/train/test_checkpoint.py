from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.errors import CheckpointDamaged, CheckpointMismatch, NoCheckpoint
from shoal.parallel.protocol import Piece
from shoal.train.checkpoint.checkpoint import check_fits, open_checkpoint, write_checkpoint


def whole(name: str, tensor: Tensor) -> Piece:
    return Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def pieces_of(model: nn.Module) -> Iterator[Piece]:
    return (whole(f"model/{key}", tensor) for key, tensor in model.state_dict().items())


@pytest.fixture(params=["local", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path)
    else:
        yield "memory://checkpoints"
        memory = fsspec.filesystem("memory")
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]


def test_tensors_of_every_kind_come_back_to_the_bit(directory: str) -> None:
    tensors = {
        "model/bf16": torch.randn(3, 5).bfloat16(),
        "model/double": torch.randn(2, dtype=torch.float64),
        "model/long": torch.tensor([2**62, -1]),
        "model/flags": torch.tensor([True, False, True]),
        "model/number": torch.tensor(math.pi),
        "model/none": torch.zeros(0, 3),
        "model/transposed": torch.randn(4, 6).t(),
        "optimizer/fc.weight/exp_avg": torch.randn(3),
        "optimizer/fc.weight/step": torch.tensor(7.0),
        "metrics/seen": torch.tensor([1, 2]),
    }
    write_checkpoint(f"{directory}/one", (whole(*item) for item in tensors.items()), progress={})
    read = open_checkpoint(f"{directory}/one").pieces
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_progress_comes_back_as_it_went_in(directory: str) -> None:
    progress = {
        "step": 500,
        "epoch": 1,
        "best": -math.inf,
        "groups": [{"betas": (0.9, 0.999), "lr": 1 / 3}],
        "none": None,
    }
    write_checkpoint(f"{directory}/one", [], progress=progress)
    assert open_checkpoint(f"{directory}/one").progress == progress


def test_anybody_can_open_the_weights_with_safetensors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    write_checkpoint(tmp_path / "click", pieces_of(model), progress={})
    assert sorted(path.name for path in (tmp_path / "click").iterdir()) == [
        "manifest.json",
        "model.safetensors",
    ]
    fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    fresh.load_state_dict(safetensors.torch.load_file(tmp_path / "click" / "model.safetensors"))
    assert torch.equal(fresh[0].weight, model[0].weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_stored_once_and_given_under_both_names(tmp_path: Path) -> None:
    model = Tied()
    write_checkpoint(tmp_path / "tied", pieces_of(model), progress={})
    stored = safetensors.torch.load_file(tmp_path / "tied" / "model.safetensors")
    assert list(stored) == ["embed.weight"]
    read = open_checkpoint(tmp_path / "tied").pieces
    assert torch.equal(read["model/embed.weight"], model.embed.weight)
    assert torch.equal(read["model/head.weight"], model.embed.weight)
    # safetensors' own load_model finds the other name in the metadata, as its save_model would have left it.
    fresh = Tied()
    assert safetensors.torch.load_model(fresh, tmp_path / "tied" / "model.safetensors") == (set(), [])
    assert torch.equal(fresh.head.weight, model.embed.weight)


def test_views_that_only_overlap_are_stored_apart(directory: str) -> None:
    base = torch.arange(10.0)
    views = {"model/low": base[:6], "model/high": base[4:], "model/square": base[:4].reshape(2, 2)}
    write_checkpoint(f"{directory}/one", (whole(*item) for item in views.items()), progress={})
    read = open_checkpoint(f"{directory}/one").pieces
    assert all(torch.equal(read[name], view) for name, view in views.items())


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 7), columns=st.integers(1, 5), data=st.data())
def test_parts_are_put_together_however_they_were_cut(rows: int, columns: int, data: st.DataObject) -> None:
    tensor = torch.randn(rows, columns)
    row = data.draw(st.integers(0, rows))
    column = data.draw(st.integers(0, columns))
    corners = [
        (0, 0, row, column),
        (0, column, row, columns),
        (row, 0, rows, column),
        (row, column, rows, columns),
    ]
    pieces = [
        Piece("model/w", tensor[top:bottom, left:right], (rows, columns), (top, left))
        for top, left, bottom, right in corners
        if bottom > top and right > left
    ]
    write_checkpoint("memory://parts/one", data.draw(st.permutations(pieces)), progress={})
    assert torch.equal(open_checkpoint("memory://parts/one").pieces["model/w"], tensor)


def test_parts_that_leave_a_hole_are_damage(directory: str) -> None:
    write_checkpoint(f"{directory}/one", [Piece("model/w", torch.ones(2), (5,), (3,))], progress={})
    with pytest.raises(CheckpointDamaged, match="parts of model/w leave 3 of 5 numbers out"):
        open_checkpoint(f"{directory}/one").pieces["model/w"]


def test_a_piece_is_read_when_asked_for(directory: str) -> None:
    write_checkpoint(f"{directory}/one", [whole("model/w", torch.ones(5))], progress={})
    pieces = open_checkpoint(f"{directory}/one").pieces
    assert pieces.describe("model/w") == ((5,), torch.float32)
    assert pieces["model/w"].data_ptr() != pieces["model/w"].data_ptr()
    with pytest.raises(KeyError):
        pieces["model/v"]


def test_writing_again_replaces_the_old_one(directory: str) -> None:
    write_checkpoint(
        f"{directory}/one",
        [whole("model/w", torch.zeros(5)), whole("optimizer/w/m", torch.ones(1))],
        progress={"n": 1},
    )
    write_checkpoint(f"{directory}/one", [whole("model/w", torch.ones(5))], progress={"n": 2})
    checkpoint = open_checkpoint(f"{directory}/one")
    assert checkpoint.progress == {"n": 2}
    assert torch.equal(checkpoint.pieces["model/w"], torch.ones(5))


def test_two_pieces_of_one_name_are_a_mistake_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two pieces are called model/w"):
        write_checkpoint(
            tmp_path / "one", [whole("model/w", torch.zeros(1)), whole("model/w", torch.ones(1))], progress={}
        )
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_is_no_checkpoint(directory: str) -> None:
    with pytest.raises(NoCheckpoint, match="it does not exist"):
        open_checkpoint(f"{directory}/nothing")


def test_without_a_manifest_there_is_no_checkpoint(directory: str) -> None:
    write_checkpoint(f"{directory}/one", [whole("model/w", torch.ones(5))], progress={})
    fs, path = fsspec.core.url_to_fs(f"{directory}/one/manifest.json")
    fs.rm(path)
    with pytest.raises(NoCheckpoint, match=r"no manifest\.json, so it was never finished"):
        open_checkpoint(f"{directory}/one")


def test_a_directory_of_checkpoints_is_told_from_one(directory: str) -> None:
    write_checkpoint(
        f"{directory}/run/checkpoints/step-000000005", [whole("model/w", torch.ones(5))], progress={}
    )
    with pytest.raises(NoCheckpoint, match="the newest is step-000000005"):
        open_checkpoint(f"{directory}/run/checkpoints")
    with pytest.raises(NoCheckpoint, match="it is the directory of a run"):
        open_checkpoint(f"{directory}/run")


def raw(directory: str, name: str) -> bytes:
    with fsspec.open(f"{directory}/one/{name}", "rb") as file:
        return bytes(file.read())


def overwrite(directory: str, name: str, content: bytes) -> None:
    with fsspec.open(f"{directory}/one/{name}", "wb") as file:
        file.write(content)


FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), data=st.data(), how=st.sampled_from(["torn", "flipped", "longer"]))
def test_damage_anywhere_is_found_and_named(tmp_path: Path, name: str, data: st.DataObject, how: str) -> None:
    directory = str(tmp_path)
    write_checkpoint(
        f"{directory}/one",
        [whole("model/w", torch.rand(50)), whole("optimizer/w/m", torch.rand(9))],
        progress={"step": 1},
    )
    content = bytearray(raw(directory, name))
    position = data.draw(st.integers(0, len(content) - 1))
    if how == "torn":
        content = content[:position]
    elif how == "longer":
        content[position:position] = b"\0"
    else:
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    overwrite(directory, name, bytes(content))
    with pytest.raises(CheckpointDamaged, match=name.replace(".", r"\.")) as caught:
        open_checkpoint(f"{directory}/one")
    assert caught.value.path == f"{directory}/one"


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_file_is_named(directory: str, name: str) -> None:
    write_checkpoint(
        f"{directory}/one",
        [whole("model/w", torch.rand(5)), whole("optimizer/w/m", torch.rand(9))],
        progress={},
    )
    fs, path = fsspec.core.url_to_fs(f"{directory}/one/{name}")
    fs.rm(path)
    with pytest.raises(CheckpointDamaged, match=f"{name} is missing"):
        open_checkpoint(f"{directory}/one")


def test_sizes_are_looked_at_even_where_hashes_are_not(directory: str) -> None:
    write_checkpoint(f"{directory}/one", [whole("model/w", torch.ones(5))], progress={})
    content = raw(directory, "model.safetensors")
    overwrite(directory, "model.safetensors", content[:-4] + b"\0\0\0\0")
    assert open_checkpoint(f"{directory}/one", verify=False).pieces["model/w"][-1] == 0
    overwrite(directory, "model.safetensors", content[:-1])
    with pytest.raises(CheckpointDamaged, match=f"has {len(content) - 1} bytes, {len(content)} were written"):
        open_checkpoint(f"{directory}/one", verify=False)


def test_damage_after_it_was_opened_is_still_damage(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", [whole("model/w", torch.ones(5))], progress={})
    pieces = open_checkpoint(tmp_path / "one").pieces
    file = tmp_path / "one" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointDamaged, match="ends 8 bytes before a tensor does"):
        pieces["model/w"]


def expected(model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in model.state_dict().items()}


def test_the_same_model_fits(directory: str) -> None:
    write_checkpoint(
        f"{directory}/one", [*pieces_of(Tied()), whole("optimizer/x/m", torch.ones(1))], progress={}
    )
    check_fits(expected(Tied()), open_checkpoint(f"{directory}/one").pieces, "one")


def test_another_model_is_told_by_keys_and_shapes(directory: str) -> None:
    write_checkpoint(f"{directory}/one", pieces_of(nn.Linear(3, 2)), progress={})
    pieces = open_checkpoint(f"{directory}/one").pieces
    other = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(CheckpointMismatch) as caught:
        check_fits(expected(other), pieces, "one")
    assert caught.value.missing == ["0.weight", "0.bias"]
    assert caught.value.unexpected == ["bias", "weight"]

    with pytest.raises(
        CheckpointMismatch,
        match=r"weight is float32\[2, 3\] in the checkpoint and float32\[2, 4\] in the model",
    ):
        check_fits(expected(nn.Linear(4, 2)), pieces, "one")
    with pytest.raises(
        CheckpointMismatch, match=r"float32\[2\] in the checkpoint and float64\[2\] in the model"
    ):
        check_fits(expected(nn.Linear(3, 2).double()), pieces, "one")


def test_a_plain_mapping_of_tensors_can_be_checked_too() -> None:
    tensors: dict[str, Any] = {f"model/{key}": tensor for key, tensor in nn.Linear(3, 2).state_dict().items()}
    check_fits(expected(nn.Linear(3, 2)), tensors, "memory")


def test_nothing_is_written_when_the_pieces_cannot_be_given(tmp_path: Path) -> None:
    def failing() -> Iterator[Piece]:
        yield whole("model/w", torch.ones(1))
        raise RuntimeError("a rank went away")

    with pytest.raises(RuntimeError, match="a rank went away"):
        write_checkpoint(tmp_path / "deep" / "one", failing(), progress={})
    assert list(tmp_path.iterdir()) == []


def test_a_wide_file_is_not_copied_in_memory() -> None:
    # The writer hands out views of the tensor itself.
    tensor = torch.zeros(3 << 20)
    seen: list[int] = []

    class Sink(io.RawIOBase):
        def write(self, data: Any) -> int:
            if not isinstance(data, bytes):
                seen.append(torch.frombuffer(data, dtype=torch.uint8).data_ptr())
            return len(data)

    from shoal.train.checkpoint import safetensors_file

    safetensors_file.write(Sink(), {"w": tensor})
    assert seen == [tensor.data_ptr() + at for at in range(0, tensor.nbytes, 4 << 20)]
