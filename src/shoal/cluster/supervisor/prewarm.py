"""First calls whose cost the warm parent pays once, instead of every process forked from it.

numba and torch fill tables of Python objects when a compiled loop or an optimizer is used for the
first time. In a child this copies pages shared with its parent: 14 MiB of a server's own memory for
the first loop, 3 MiB for the first step of an optimizer, and the time for both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.runtime.kernel_cache import kernel, types, vector


@kernel((vector(types.int64),))
def _length(numbers: Any) -> int:
    return len(numbers)


def make() -> None:
    """Make the first calls. Only with compiled loops: this imports numba."""
    import torch

    _length(np.zeros(1, np.int64))
    if any(getattr(torch.version, kind, None) for kind in ("cuda", "hip", "xpu")):
        # Built for an accelerator: an optimizer's first step asks whether there is one, and the driver's
        # answer starts a thread. After that, no fork is possible and no child could use the device.
        return
    for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam):
        one = torch.zeros(1)
        one.grad = torch.ones(1)
        make_optimizer: Any = kind
        make_optimizer([one], lr=0.1).step()
