"""In a plain process the collectives give back what they were given, and refuse what they always refuse."""

from __future__ import annotations

import pytest
import torch

import shoal
from shoal.errors import ConfigError


def test_alone_they_are_identities() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    for op in ("sum", "mean", "max", "min"):
        assert torch.equal(shoal.collectives.all_reduce(x, op), x)
        assert torch.equal(shoal.collectives.reduce_scatter(x, op), x)
    assert [part.tolist() for part in shoal.collectives.all_gather(x)] == [x.tolist()]
    assert torch.equal(shoal.collectives.broadcast(x), x)
    shoal.collectives.barrier(timeout_s=1.0)


def test_what_makes_no_sense_is_refused() -> None:
    for wrong in (
        lambda: shoal.collectives.all_reduce(3.0),  # type: ignore[arg-type]
        lambda: shoal.collectives.all_reduce(torch.ones(2), "median"),
        lambda: shoal.collectives.all_reduce(torch.ones(2, dtype=torch.int64), "mean"),
        lambda: shoal.collectives.reduce_scatter(torch.tensor(1.0)),
        lambda: shoal.collectives.broadcast(torch.ones(2), root=1),
    ):
        with pytest.raises(ConfigError):
            wrong()
