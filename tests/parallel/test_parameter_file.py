"""Parameters in a file while a model is built: the bits of a model built in memory, and nobody's tensor parted from it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.parallel import parameter_file
from shoal.parallel.parameter_file import ParameterFile


class Tied(nn.Module):
    """Tied weights, a buffer, BatchNorm, a parameter of its own, and a second initialisation of them all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.randn(6) * 0.1)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.rand(6))
        self.apply(self._again)
        nn.init.orthogonal_(self.head.weight)
        self.embedding.weight.data[3].mul_(0.5)

    def _again(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data.normal_(std=0.02)


def assigned() -> nn.Module:
    """Weights that take the place of registered ones."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    model.load_state_dict({name: torch.rand_like(t) for name, t in model.state_dict().items()}, assign=True)
    model[0].weight.data = torch.rand(4, 5)
    return model


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_file, "LEAST_BYTES", 1)
    monkeypatch.setattr(parameter_file, "RESIDENT_BYTES", 0)
    monkeypatch.setattr(parameter_file, "CHUNK_BYTES", 1 << 14)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ParameterFile]:
    with ParameterFile(tmp_path).open() as opened:
        yield opened


def built(factory: Callable[[], nn.Module], file: ParameterFile) -> nn.Module:
    torch.manual_seed(7)
    with file.building():
        model = factory()
    file.move_rest(model)
    return model


@pytest.mark.parametrize(
    "factory", [Tied, assigned, lambda: nn.LSTM(3, 4), lambda: nn.TransformerDecoderLayer(8, 2, 16)]
)
def test_model_has_the_bits_of_one_built_in_memory(
    factory: Callable[[], nn.Module], file: ParameterFile
) -> None:
    torch.manual_seed(7)
    plain, after = factory(), torch.rand(2)
    model = built(factory, file)
    assert torch.equal(torch.rand(2), after)
    assert all(file.holds(parameter) for parameter in model.parameters())
    file.settle(model)
    assert not any(file.holds(parameter) for parameter in model.parameters())
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(t, plain.state_dict()[name]) for name, t in model.state_dict().items())
    assert len(list(model.parameters())) == len(list(plain.parameters()))


def test_parameter_that_a_tensor_of_the_script_shares_stays_with_it(
    file: ParameterFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = torch.zeros(4, 4)

    def factory() -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(shared)
        return layer

    model = built(factory, file)
    shared.fill_(3.0)
    assert model.weight.sum() == 48.0
    assert [file.holds(model.weight), file.holds(model.bias)] == [False, True]
    assert "whole in every worker's memory" in (file.kept_in_memory() or "")


def test_full_disk_leaves_the_model_in_memory_and_says_so(
    file: ParameterFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    model = built(Tied, file)
    assert not any(file.holds(parameter) for parameter in model.parameters())
    assert "No space left on device" in (file.kept_in_memory() or "")


def test_file_is_gone_with_the_last_parameter_in_it(tmp_path: Path) -> None:
    with ParameterFile(tmp_path).open() as file:
        model = built(Tied, file)
        mapped = Path("/proc/self/maps").read_text().count(str(tmp_path))
        file.settle(model)
    assert mapped
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert not list(tmp_path.iterdir())
