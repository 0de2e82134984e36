"""BatchNorm's running statistics: local while a step runs, averaged when it is committed.

Each worker normalises with its own slice (as plain DDP does), but the running
mean and variance, which evaluation and checkpoints use, are the average over
the workers weighted by their samples: every rank holds the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.collectives.sync_batchnorm import SyncedBatchNorm


class RunningStatistics:
    """The running statistics of a model, as one flat vector."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[_BatchNorm] = []
        self._buffers: list[Tensor] = []
        self._counters: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, SyncedBatchNorm):
                continue  # every rank computes the same
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                assert module.running_var is not None
                self._modules.append(module)
                self._buffers += [module.running_mean, module.running_var]
                if module.num_batches_tracked is not None:
                    self._counters.append(module.num_batches_tracked)

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def flat(self) -> Tensor:
        """A copy of all of them, where they are."""
        here = device_of(self._model)
        return torch.cat(
            [
                # Another stage of a pipeline holds it, and tells.
                torch.zeros(buffer.numel(), dtype=torch.float64, device=here)
                if buffer.is_meta
                else buffer.detach().reshape(-1).to(torch.float64)
                for buffer in self._buffers
            ]
        )

    def write(self, flat: Tensor) -> None:
        """Put values in the order of `flat` back in place. A frozen layer keeps its own: an average would round them."""
        at = 0
        for number, buffer in enumerate(self._buffers):
            if self._modules[number // 2].training:
                buffer.copy_(flat[at : at + buffer.numel()].view(buffer.shape))
            at += buffer.numel()

    def keep(self) -> tuple[Tensor, list[Tensor]]:
        """Everything as it stands: taken before a forward that may turn out to be left out."""
        return self.flat(), self.counts()

    def take_back(self, kept: tuple[Tensor, list[Tensor]]) -> None:
        """As if there had been no forward since `keep`."""
        self.write(kept[0])
        self.write_counts(kept[1])

    def counts(self) -> list[Tensor]:
        """A copy of how many batches each layer has seen. Every worker counts alike, so these need no average."""
        return [counter.clone() for counter in self._counters]

    def write_counts(self, counts: list[Tensor]) -> None:
        """Set them back, for the next slice of the same batch."""
        for counter, count in zip(self._counters, counts, strict=True):
            counter.copy_(count)


def device_of(model: nn.Module) -> torch.device | None:
    """Where the part of a model is that this rank holds."""
    held = (*model.parameters(), *model.buffers())
    return next((tensor.device for tensor in held if not tensor.is_meta), None)
