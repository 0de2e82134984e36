"""Weights in flight from servers of other hosts: forward begins before the last of them has arrived.

They are requested in the order of the model's parameters, a wave of chunks at a time, and servers
answer in that order: weights of the first layers arrive first. Every use of a weight (by a layer, a
loss, a callback) waits until it has arrived. Two mechanisms detect uses: a mode that sees every
call of torch's functions, and a hook before the forward of every module, whose own weights a
compiled extension may read without a torch call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

WAVE_BYTES = 1 << 20
"""Size of a wave: a message costs less than the time that these bytes take on a network."""

_TENSOR: Any = Tensor  # as a class: its attributes are descriptors there
_NO_VALUES = frozenset(
    getter.__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "grad", "grad_fn", "requires_grad", "is_leaf", "names",
        "is_sparse", "is_quantized", "is_meta", "is_cuda", "is_cpu", "is_nested", "itemsize", "nbytes",
        "_version",
    )
    if (getter := getattr(Tensor, name, None)) is not None
) | {_TENSOR.grad.__set__, Tensor.size, Tensor.numel, Tensor.dim, Tensor.is_contiguous, Tensor.is_floating_point}  # fmt: skip
"""Calls that read a tensor's metadata and not its values."""


def can_follow(model: nn.Module) -> bool:
    """Whether every use of a weight can be detected: compiled code and scripts call no torch function."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    # Something is compiled, if only a function of the script.
    if compiler is not None and compiler.cached_backends:
        return False
    return not any(
        isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
        or type(module).__name__ == "OptimizedModule"  # of torch.compile; its own file is slow to import
        for module in model.modules()
    )


def cut_into_waves(sizes: Sequence[int]) -> list[range]:
    """Consecutive chunks of the given sizes, together WAVE_BYTES or a little more."""
    waves, begin, num_bytes = [], 0, 0
    for number, size in enumerate(sizes):
        num_bytes += size
        if num_bytes >= WAVE_BYTES or number == len(sizes) - 1:
            waves.append(range(begin, number + 1))
            begin, num_bytes = number + 1, 0
    return waves


class ArrivingWeights(TorchFunctionMode):
    """Waves that have not been waited for. None is left outside the context `watched`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_watched = False
        self._waves: list[Callable[[], None]] = []
        self._next = 0
        self._last_wave: dict[int | None, int] = {}  # by the storage of a parameter

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which weights may arrive later; at its end all have arrived."""
        hook = register_module_forward_pre_hook(self._before_forward)
        try:
            with self:
                self.is_watched = True
                yield
        finally:
            self.is_watched = False
            hook.remove()
            # However the steps ended: the model afterwards has weights of one step.
            self.settle()

    def follow(
        self, waves: Sequence[Callable[[], None]], parameters: Sequence[Iterable[nn.Parameter]]
    ) -> None:
        """Call each of `waves` before the first use of one of its parameters, and after the waves before it."""
        # Read before anything is pending: this is a use of the parameters too.
        last_wave = {
            _storage(parameter): number for number, of_wave in enumerate(parameters) for parameter in of_wave
        }
        self._waves, self._next, self._last_wave = list(waves), 0, last_wave
        if not self.is_watched:
            self.settle()

    def settle(self) -> None:
        self._wait_up_to(len(self._waves) - 1)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._next < len(self._waves) and func not in _NO_VALUES:
            self._wait_for((*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._next < len(self._waves):
            self._wait_for(module._parameters.values())

    def _wait_for(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                storage = _storage(value)
                last = len(self._waves) - 1 if storage is None else self._last_wave.get(storage, -1)
                self._wait_up_to(last)
            elif isinstance(value, (list, tuple)):
                self._wait_for(value)
            elif isinstance(value, dict):
                self._wait_for(value.values())

    def _wait_up_to(self, number: int) -> None:
        while self._next <= number and self._next < len(self._waves):
            wave = self._waves[self._next]
            # Counted first: it makes torch calls itself.
            self._next += 1
            wave()


def _storage(tensor: Tensor) -> int | None:
    """Storage of a tensor; None if it cannot be read: a sparse tensor, or a wrapper such as torch.func's."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None
