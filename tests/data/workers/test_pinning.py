"""Batches on their way to a GPU: pinned once, in the thread that reads ahead, and on a CPU not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from shoal.data import Batches
from shoal.data.randomness import ReadAhead
from shoal.data.workers import prefetch as pinning

GPU = torch.device("cuda", 0)


def batches_of() -> Batches:
    return shoal.Dataset.from_arrays(({"x": torch.arange(12)}, torch.zeros(12))).batch(4)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], bool]]:
    """What was pinned, and whether a thread that reads ahead did it. There is no GPU here to pin anything for."""
    seen: list[tuple[list[int], bool]] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        seen.append((tensor.tolist(), isinstance(threading.current_thread(), ReadAhead)))
        return tensor

    monkeypatch.setattr(pinning, "_pin", pin)
    return seen


def read(batches: Batches) -> list[Any]:
    parts = batches.slices(epoch=0, start=0, rank=0, num_workers=1)
    return [part.batch[0]["x"].tolist() for part in parts]


WHOLE = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_on_a_cpu_nothing_is_pinned(pinned: list[Any]) -> None:
    batches = batches_of()
    assert batches.for_device(torch.device("cpu")) is batches
    assert read(batches) == WHOLE
    assert pinned == []


@pytest.mark.parametrize(
    ("stages", "in_thread"),
    [
        (lambda batches: batches, False),
        (lambda batches: batches.prefetch(2), True),
        (lambda batches: batches.prefetch(2).map(lambda batch: batch), False),  # makes tensors of its own
    ],
)
def test_every_tensor_is_pinned_once_where_there_is_time_for_it(
    pinned: list[Any], stages: Callable[[Batches], Batches], in_thread: bool
) -> None:
    batches = stages(batches_of())
    assert read(batches.for_device(GPU)) == WHOLE
    assert [values for values, _ in pinned][::2] == WHOLE
    assert len(pinned) == 6
    # The first batch is read by whoever asks: the thread starts after it.
    assert {by_thread for _, by_thread in pinned[2:]} == {in_thread}


def test_pinned_batches_are_the_same_data_and_the_others_stay_as_they_are(pinned: list[Any]) -> None:
    batches = batches_of().prefetch(1)
    assert batches.for_device(GPU).describe() == batches.describe()
    assert read(batches) == WHOLE
    assert pinned == []


def test_what_cannot_be_pinned_stays_as_it_is() -> None:
    batch = {"names": ["a"], "sparse": torch.eye(2).to_sparse(), "meta": torch.zeros(2, device="meta")}
    kept = pinning.pin(batch)
    assert kept["names"] == ["a"]
    assert kept["sparse"] is batch["sparse"]
    assert kept["meta"] is batch["meta"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("workers", [0, 2])
def test_on_a_gpu_batches_are_pinned_and_arrive_whole(workers: int) -> None:
    torch.zeros(1, device=GPU)  # processes are forked from one that uses the GPU already
    data = shoal.Dataset.from_arrays(torch.arange(4000.0).reshape(40, 100))
    batches = data.map(lambda row: row + 1, workers=workers).batch(8).prefetch(2).for_device(GPU)
    found = []
    for part in batches.slices(epoch=0, start=0, rank=0, num_workers=1):
        assert part.batch.is_pinned()
        found.append(part.batch.to(GPU, non_blocking=True))
    assert torch.equal(torch.cat(found).cpu(), torch.arange(4000.0).reshape(40, 100) + 1)
