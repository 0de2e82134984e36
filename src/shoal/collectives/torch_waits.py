"""Waits of torch's own collectives as spans: gathers of fsdp, sums of tp, sends of pp.

Torch runs them within forward and backward, where the loop records compute. Every wait of a host
for one of them goes through `Work.wait`, or through `wait_tensor` if DTensor started it; both are
wrapped once a process. Device work in parallel to the host is not visible here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import _functional_collectives

from shoal.runtime import recorder


@functools.cache
def record() -> None:
    """Count waits as exchange from now on."""
    wait = Work.wait
    wait_tensor: Callable[[Tensor], Tensor] = _functional_collectives.wait_tensor

    @functools.wraps(wait)
    def recorded_wait(self: Work, *args: Any, **settings: Any) -> Any:
        with recorder.EXCHANGE:
            return wait(self, *args, **settings)

    @functools.wraps(wait_tensor)
    def recorded_wait_tensor(tensor: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return wait_tensor(tensor)
        with recorder.EXCHANGE:
            return wait_tensor(tensor)

    Work.wait = recorded_wait  # type: ignore[method-assign]
    _functional_collectives.wait_tensor = recorded_wait_tensor
