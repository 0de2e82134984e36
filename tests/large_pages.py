"""Large pages for the memory of another process: forking it then copies a tenth of the page table.

Putting 300 MiB into them takes a second of CPU, so a job's own warm parent, which forks a few times, is better off without;
that of the tests forks thousands of times.
"""

from __future__ import annotations

import ctypes
import os

_PROCESS_MADVISE = 440  # the system call's number, on every processor
_MADV_COLLAPSE = 25  # since Linux 6.1
_LARGE_PAGE_BYTES = 2 << 20


class _Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def use_large_pages(pid: int) -> None:
    """Collapse the private memory of a process into large pages, as far as the kernel can and lets us."""
    libc = ctypes.CDLL(None)
    process = os.pidfd_open(pid)
    try:
        with open(f"/proc/{pid}/maps") as maps:
            for fields in map(str.split, maps.readlines()):
                begin, end = (int(address, 16) for address in fields[0].split("-"))
                is_own = fields[1] == "rw-p" and (len(fields) == 5 or fields[5] == "[heap]")
                if is_own and end - begin >= _LARGE_PAGE_BYTES:
                    place = _Range(begin, end - begin)
                    libc.syscall(_PROCESS_MADVISE, process, ctypes.byref(place), 1, _MADV_COLLAPSE, 0)
    finally:
        os.close(process)
