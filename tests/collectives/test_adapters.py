"""Sums of tensors that are elsewhere, made in host memory; here "elsewhere" is only said."""

from __future__ import annotations

from typing import Any

import torch
from lockstep import with_ranks

from shoal.collectives.adapters import HostStaged


def test_far_tensors_are_summed_and_gathered_as_if_they_were_near() -> None:
    def run(native: Any) -> tuple[torch.Tensor, list[torch.Tensor], bool]:
        # One rank computes on a device and the others do not, as in a job of different kinds.
        staged = HostStaged(native, is_far=lambda tensor: native.rank == 1)
        tensor = torch.arange(5.0) * (native.rank + 1)
        work = staged.start_all_reduce(tensor)
        untouched = torch.equal(tensor, torch.arange(5.0) * (native.rank + 1))
        staged.finish(work, "a sum")
        return tensor, staged.all_gather(torch.tensor([native.rank])), untouched

    results = with_ranks(3, run)
    for total, gathered, _ in results:
        assert torch.equal(total, torch.arange(5.0) * 6)
        assert torch.cat(gathered).tolist() == [0, 1, 2]
    assert results[1][2]  # what is summed is the copy: the device's own is written when the sum is whole
