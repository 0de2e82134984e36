"""Updates by sparse gradients: the bits that torch leaves, and torch itself for whatever is not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.embedding import fused_updates

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.3}),
    (torch.optim.Adagrad, {"lr": 0.02, "lr_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-6}),
]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_updates, "_is_compiled", lambda: True)


def trained(make: Any, settings: dict[str, Any], start: Tensor, *, fused: bool) -> tuple[Tensor, Any, int]:
    """Weights and optimizer state after some updates, and how many of them torch made."""
    generator = torch.Generator().manual_seed(1)
    table, rest = nn.Parameter(start.clone()), nn.Parameter(torch.ones(3))
    optimizer = make([table, rest], **settings)
    by_torch = 0
    for _ in range(4):
        ids = torch.randint(0, len(start), (1, 200), generator=generator)
        values = torch.randn(200, start.shape[1], generator=generator, dtype=start.dtype)
        table.grad = torch.sparse_coo_tensor(ids, values, start.shape, check_invariants=False).coalesce()
        rest.grad = torch.ones(3)
        if fused:
            fused_updates.update(optimizer)
        by_torch += table.grad is not None
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            optimizer.step()
    return table.detach(), optimizer.state_dict()["state"], by_torch


@pytest.mark.parametrize(("make", "settings"), OPTIMIZERS)
@pytest.mark.parametrize(("dim", "dtype"), [(1, torch.float32), (19, torch.float32), (16, torch.float64)])
def test_the_bits_are_those_of_torch(
    make: Any, settings: dict[str, Any], dim: int, dtype: torch.dtype
) -> None:
    start = torch.randn(90, dim, generator=torch.Generator().manual_seed(0), dtype=dtype)
    ours, our_state, by_torch = trained(make, settings, start, fused=True)
    theirs, their_state, _ = trained(make, settings, start, fused=False)
    assert by_torch == 0
    assert torch.equal(ours, theirs)
    for number, state in their_state.items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(our_state[number][name]), torch.as_tensor(value)), name


def test_what_is_not_known_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(torch.optim.SGD):
        pass

    start = torch.zeros(5, 2)
    for make, settings in ((Own, {"lr": 0.1}), (torch.optim.SGD, {"lr": torch.tensor(0.1)})):
        assert trained(make, settings, start, fused=True)[2] == 4
    hook = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert trained(torch.optim.SGD, {"lr": 0.1}, start, fused=True)[2] == 4
    finally:
        hook.remove()
    # A processor whose sums round otherwise.
    monkeypatch.setattr(fused_updates, "_equals_torch", lambda *_: False)
    fused_updates._Sgd.is_exact.cache_clear()
    assert trained(torch.optim.SGD, {"lr": 0.1}, start, fused=True)[2] == 4
    fused_updates._Sgd.is_exact.cache_clear()
