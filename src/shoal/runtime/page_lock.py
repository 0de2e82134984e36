"""Page-locked memory: mappings that a device copies from and to by DMA, at several times the speed.

Locking backs all of a mapping with memory at once. If it is refused (a limit on locked memory,
another kind of device) copies are slower and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable


def lock(memory: memoryview) -> Callable[[], None]:
    """Lock a writable mapping for CUDA; what is returned unlocks it, and must be called before it is unmapped."""
    import torch

    if not torch.cuda.is_available():
        return _nothing
    at = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(at, memory.nbytes, 0)):
        return _nothing
    return lambda: runtime.cudaHostUnregister(at)


def _nothing() -> None:
    pass
