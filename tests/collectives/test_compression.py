"""Fewer bytes: what is lost is bounded, and what is kept for later is not lost at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import with_ranks
from torch import Tensor, nn

from shoal.collectives.compression import Gradient, compressor, int8
from shoal.collectives.gradients import GradientExchange
from shoal.config.choices import COMPRESSORS, GradientSize
from shoal.errors import ConfigError
from shoal.parallel.protocol import PieceReader
from shoal.parallel.state import load_residuals, residual_pieces

LAYOUT = [Gradient(0, (12, 10)), Gradient(120, (7,)), Gradient(127, (5, 4, 2))]
LENGTH = 167
NAMES = ["bf16", "fp16", "int8", "topk:ratio=0.2", "powersgd:rank=2"]


def test_no_compressor_is_left_out() -> None:
    assert {name.partition(":")[0] for name in NAMES} == set(COMPRESSORS) - {"none"}


@pytest.mark.parametrize("name", NAMES)
def test_the_registry_knows_whether_a_compressor_keeps_state(name: str) -> None:
    [(_, each)] = run(name, 1, 1)
    assert COMPRESSORS.parse(name)[0].keeps_state == bool(each.state())


@pytest.mark.parametrize("name", NAMES)
def test_two_workers_send_the_bytes_that_the_planner_counts(name: str) -> None:
    choice, settings = COMPRESSORS.parse(name)
    traffic = run(name, 2, 1)[0][1].traffic
    # Of the layout: its two matrices, and its vector as a third of one column.
    matrices = [(120, 12, 10), (40, 5, 8), (7, 7, 0)]
    counted = choice.sum_bytes(GradientSize(traffic.raw_bytes, 2, matrices), settings)
    assert traffic.sent_bytes == pytest.approx(counted, rel=0.05)


def part(rank: int, step: int) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(100 * step + rank))


def run(name: str, num_workers: int, num_steps: int, *, break_at: int | None = None) -> list[Any]:
    """Every rank's sums of all steps, its compressor and its rank."""

    def work(group: Any) -> Any:
        each = compressor(name)
        assert each is not None
        sums = []
        for step in range(num_steps):
            if step == break_at:  # the exchange is run once, breaks, and is run again
                each.finish(each.start(0, part(group.rank, step), LAYOUT, group), group, "a sum")
                each.abandon()
            flat = part(group.rank, step)
            each.finish(each.start(0, flat, LAYOUT, group), group, "a sum")
            each.commit()
            sums.append(flat)
        return sums, each

    return with_ranks(num_workers, work)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_all_ranks_get_the_same_and_nearly_the_sum(name: str, num_workers: int) -> None:
    results = run(name, num_workers, 3)
    for sums, each in results:
        assert all(torch.equal(mine, first) for mine, first in zip(sums, results[0][0], strict=True))
        assert each.traffic.sent_bytes < each.traffic.raw_bytes
    exact = sum((part(rank, 0) for rank in range(num_workers)), torch.zeros(LENGTH))
    error = (results[0][0][0] - exact).norm() / exact.norm()
    assert error < {"bf16": 0.02, "fp16": 0.005, "int8": 0.02}.get(name, 0.95)


@pytest.mark.parametrize("name", ["topk:ratio=0.2", "powersgd:rank=2"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_what_is_left_out_comes_later(name: str, num_workers: int) -> None:
    num_steps = 5
    results = run(name, num_workers, num_steps)
    given_in = sum(
        (part(rank, step) for rank in range(num_workers) for step in range(num_steps)), torch.zeros(LENGTH)
    )
    came_out = sum(results[0][0], torch.zeros(LENGTH))
    still_there = sum((each.state()["0"] for _, each in results), torch.zeros(LENGTH))
    assert torch.allclose(came_out + still_there, given_in, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_an_exchange_that_breaks_and_is_run_again_leaves_no_trace(name: str) -> None:
    undisturbed, broken = run(name, 3, 4), run(name, 3, 4, break_at=2)
    for (sums, _), (again, _) in zip(undisturbed, broken, strict=True):
        assert all(torch.equal(mine, other) for mine, other in zip(sums, again, strict=True))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3000) | st.just(2 * int8.CHUNK + 5), st.floats(1e-6, 1e6), st.integers(0, 1000))
def test_int8_is_off_by_half_a_step_at_most(length: int, scale: float, seed: int) -> None:
    flat = torch.randn(length, generator=torch.Generator().manual_seed(seed)) * scale
    back = torch.empty_like(flat)
    int8.unpack(int8.pack(flat), back)
    for begin in range(0, length, int8.BLOCK):
        block = slice(begin, begin + int8.BLOCK)
        step = flat[block].abs().max() / 127
        assert (back[block] - flat[block]).abs().max() <= step * 0.501


def test_int8_does_not_hide_what_is_not_finite() -> None:
    flat = torch.ones(10)
    flat[3] = float("nan")
    back = torch.empty_like(flat)
    int8.unpack(int8.pack(flat), back)
    assert not torch.isfinite(back).all()


@pytest.mark.parametrize("num_after", [2, 3, 5])
def test_residuals_in_a_checkpoint_are_not_lost_at_another_number_of_ranks(num_after: int) -> None:
    results = run("topk:ratio=0.2", 3, 2)
    states = [each.state()["0"] for _, each in results]
    saved = {piece.name: piece.tensor for piece in residual_pieces(results[0][1], lambda mine: states)}
    after = []
    for rank in range(num_after):
        each = compressor("topk:ratio=0.2")
        assert each is not None
        load_residuals(each, PieceReader(saved, None), rank, num_after)
        after.append(each.state()["0"])
    assert torch.allclose(sum(after, torch.zeros(LENGTH)), sum(states, torch.zeros(LENGTH)), atol=1e-5)
    if num_after == 3:
        assert all(torch.equal(mine, other) for mine, other in zip(after, states, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_model_go_through_it(name: str) -> None:
    def work(group: Any) -> list[Tensor | None]:
        model = nn.Linear(20, 30)
        unused = nn.Parameter(torch.ones(3))
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.zero_()
        named = [*model.named_parameters(), ("unused", unused)]
        exchange = GradientExchange(named, sparse=frozenset(), compressor=compressor(name))
        exchange.arm(group)
        model(torch.full((2, 20), float(group.rank + 1))).sum().backward()
        exchange.finish()
        exchange.close()
        return [model.weight.grad, model.bias.grad, unused.grad]

    for weight, bias, unused in with_ranks(3, work):
        assert unused is None
        assert weight is not None
        assert bias is not None
        if not name.startswith("topk"):
            assert torch.allclose(weight, torch.full((30, 20), 12.0), rtol=0.02)
            assert torch.allclose(bias, torch.full((30,), 6.0), rtol=0.02)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("topc", "Did you mean 'topk'"),
        ("topk:ratio=7", "'ratio=7' is no setting of the compression topk.*ratio from 1e-06 to 1"),
        ("bf16:x=1", "its settings: none"),
        ("powersgd:rank=2.5", "no setting"),
    ],
)
def test_what_means_nothing_is_refused(said: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        COMPRESSORS.parse(said)
