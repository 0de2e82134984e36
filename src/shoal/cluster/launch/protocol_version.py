"""What the processes of a job can say to each other, as one number: two that differ in it come from different files.

The supervisor and its warm parent import shoal one after the other. Where its
files are replaced in between, each works by itself, and what one of them says
is dropped by the other as no message of its own.
"""

from __future__ import annotations

import zlib

from shoal.cluster.coordinator.process import CoordinatorSpec
from shoal.cluster.launch.server_spec import ServerSpec
from shoal.cluster.worker.process import WorkerSpec
from shoal.config.job import Job
from shoal.runtime.transport.messages import MESSAGES

_SPECS: tuple[type, ...] = (WorkerSpec, CoordinatorSpec, ServerSpec, Job)


def dialect() -> int:
    """The same where every message, and every spec that a child is started with, has the same fields."""
    fields = [
        (each.__name__, getattr(each, "__annotations__", {}))
        for kind in (*MESSAGES, *_SPECS)
        for each in kind.__mro__
    ]
    return zlib.crc32(repr(fields).encode())
