"""Evaluation of an nn.TransformerEncoder gives for padding what torch's fast path does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shoal.parallel.tensor_parallel import attention


@pytest.fixture(autouse=True)
def _short_cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "_is_disabled", False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("lengths", [(4, 2), (0, 3)])
def test_padding_is_zero_in_evaluation_and_only_there(lengths: tuple[int, int]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    models = [nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8)) for _ in range(2)]
    for model in models:
        nn.init.normal_(model.norm.bias)  # type: ignore[union-attr, arg-type]
    x = torch.randn(2, 4, 8)
    # Where padding lies before what counts, torch does not take the short cut.
    padding = torch.tensor([[False] * 4, [True, False, False, False]])
    if all(lengths):
        padding = torch.arange(4) >= torch.tensor(lengths)[:, None]
    expected = []
    for model in models:
        trained = model.train()(x, src_key_padding_mask=padding)
        with torch.no_grad():
            expected.append((trained, model.eval()(x, src_key_padding_mask=padding)))
    for model, (trained, evaluated) in zip(models, expected, strict=True):  # the second one after the first
        attention.disable_encoder_fast_path(model)
        torch.testing.assert_close(model.train()(x, src_key_padding_mask=padding), trained)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x, src_key_padding_mask=padding), evaluated)
    assert not torch.backends.mha.get_fastpath_enabled()


def test_whoever_does_not_take_the_short_cut_is_left_alone() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 1)
    attention.disable_encoder_fast_path(model)
    assert not model.layers[0]._forward_hooks
