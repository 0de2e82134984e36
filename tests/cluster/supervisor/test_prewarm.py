"""First calls are made before anything is forked: none of them may wake an accelerator's driver, which starts threads."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch

from shoal.cluster.launch import threads
from shoal.cluster.supervisor import prewarm as first_calls


def test_where_torch_is_built_for_an_accelerator_nobody_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: object, **settings: object) -> NoReturn:
        raise AssertionError("this would start the driver")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("current_accelerator", "is_available", "device_count"):
        monkeypatch.setattr(torch.accelerator, name, asked)
    for name in ("is_available", "device_count", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, asked)
    first_calls.make()
    threads.choose_vector_code()
    with pytest.raises(AssertionError, match="start the driver"):  # an optimizer does
        torch.optim.Adam([torch.zeros(1, requires_grad=True)]).step()
