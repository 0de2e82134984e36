"""The scale of fp16 is a function of the steps' results."""

from __future__ import annotations

import torch
from torch import nn

from shoal.parallel.loss import loss_rule
from shoal.parallel.loss_scale import GROWS_AFTER, LARGEST, LossScale
from shoal.parallel.protocol import TrainJob


def test_the_scale_halves_at_an_overflow_and_doubles_after_many_steps_without_one() -> None:
    scale = LossScale(8.0)
    scale.after(applied=False)
    assert scale == LossScale(4.0, 0)
    for _ in range(GROWS_AFTER - 1):
        scale.after(applied=True)
    assert scale == LossScale(4.0, GROWS_AFTER - 1)
    scale.after(applied=True)
    assert scale == LossScale(8.0, 0)


def test_the_scale_stays_a_power_of_two_between_its_bounds() -> None:
    low, high = LossScale(1.0), LossScale(LARGEST, GROWS_AFTER - 1)
    low.after(applied=False)
    high.after(applied=True)
    assert (low.value, low.can_fall) == (1.0, False)
    assert high == LossScale(LARGEST, 0)


def test_a_loss_in_fp16_is_scaled_past_what_fp16_holds() -> None:
    job = TrainJob(
        model=nn.Linear(1, 1), loss=loss_rule("model"), build_optimizer=None, loss_scale=LossScale()
    )
    assert job.scaled(torch.tensor(100.0, dtype=torch.float16)) == 100.0 * 65536.0
