"""Memory of a step by a dry run: what one of many ranks would hold, counted in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.data.batches import Batches
from shoal.parallel.loss import loss_rule
from shoal.parallel.protocol import TrainJob
from shoal.train.dry_run import DryRuns

ONE = [(1, 1)]
WIDTH, LAYERS, BATCH = 512, 6, 64
WEIGHTS = LAYERS * 4 * (WIDTH * WIDTH + WIDTH)


def batches() -> Batches:
    data = (torch.randn(4 * BATCH, WIDTH), torch.randn(4 * BATCH, WIDTH))
    return shoal.Dataset.from_arrays(data).batch(BATCH)


def job_of(model: nn.Module, **more: object) -> TrainJob:
    return TrainJob(model=model, loss=loss_rule(nn.MSELoss()), build_optimizer=None, **more)  # type: ignore[arg-type]


def deep() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def test_one_of_64_ranks_holds_a_64th_of_the_weights_and_its_part_of_a_batch() -> None:
    model = deep()
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    wanted = [(1, 1), (64, 1), (64, 64)]
    alone, sliced, sharded = DryRuns(model, wanted).run(job_of(model), batches(), optimizer)
    assert alone["parameter_bytes"] == alone["gradient_bytes"] == WEIGHTS
    assert alone["optimizer_bytes"] == pytest.approx(2 * WEIGHTS, rel=0.01)
    # Weights and gradients; the inputs of layers are freed while gradients come.
    assert alone["peak_bytes"] > 2 * WEIGHTS
    assert alone["peak_bytes"] > WEIGHTS + LAYERS * 4 * BATCH * WIDTH
    assert 2 * WEIGHTS < sliced["peak_bytes"] < alone["peak_bytes"]
    assert sharded["parameter_bytes"] == pytest.approx(WEIGHTS / 64, rel=0.01)
    assert sharded["optimizer_bytes"] == alone["optimizer_bytes"] // 64
    # A layer or two are gathered at a time, never the model.
    assert sharded["peak_bytes"] < 0.7 * sliced["peak_bytes"]
    assert not torch.distributed.is_initialized()


def test_activations_that_run_again_are_not_held() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)) for _ in range(8)))
    data = shoal.Dataset.from_arrays((torch.randn(512, 8), torch.randn(512, 8))).batch(512)
    [kept] = DryRuns(model, ONE).run(job_of(model), data, None)
    [again] = DryRuns(model, ONE).run(job_of(model, checkpoint_activations=True), data, None)
    assert again["peak_bytes"] < 0.5 * kept["peak_bytes"]


def test_a_model_that_decides_by_its_values_says_so() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum().item() > 0 else x * self.layer.bias

    model = Deciding()
    [told] = DryRuns(model, ONE).run(job_of(model), batches(), None)
    assert "DataDependent" in told["error"]
