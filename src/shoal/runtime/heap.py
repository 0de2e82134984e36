"""What glibc keeps of memory that was freed: nothing of large blocks, where a model is cut to save memory.

glibc serves blocks of up to 32 MB from its heap once one of that size was
freed, and a heap has holes. FSDP gathers and lets go of its units in every
step: measured with 30 M parameters, Adam and 2 workers, a process held 990 MB
by the third step, and 260 MB with large blocks straight from the system.
"""

from __future__ import annotations

import ctypes
import os

LARGE_BYTES = 4 << 20
"""Blocks from here on go back to the system as soon as they are freed. Smaller ones are not worth the page faults."""

KEPT_BYTES = 8 * LARGE_BYTES
"""What may lie idle at the end of the heap. Once told of large blocks, glibc would else give back all but 128 KB of it at every
chance, and take it again: measured, a third of the time of Adam's update."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def return_large_blocks() -> None:
    """From now on; and what lies idle at present. Nothing where the C library is another, or the user has set it."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or any(name in os.environ for name in _SETTINGS):
        return
    libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    libc.malloc_trim(0)
