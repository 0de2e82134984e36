"""Recurrent layers under fsdp on a GPU: torch's own kernels, since cuDNN's saw old weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.parallel.fsdp import without_cudnn


def test_a_layer_is_computed_without_cudnn_and_the_rest_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", True)
    layer, seen = nn.LSTM(3, 4), []
    expected = layer(torch.ones(2, 1, 3))[0]
    layer.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
    inner = layer.forward
    layer.forward = lambda *args: (seen.append(torch.backends.cudnn.enabled), inner(*args))[1]  # type: ignore[func-returns-value, method-assign]
    without_cudnn(layer)
    torch.testing.assert_close(layer(torch.ones(2, 1, 3))[0], expected)
    assert seen == [False, True]
