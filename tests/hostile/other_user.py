"""Another user of the same machine, for tests that run as root."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

UID = 65534

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


def run_as_other(action: Callable[[], object]) -> int:
    """Run `action` in a forked child as another user; its exit code: 0, or 1 where it raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(UID, UID, UID)
            os.setresuid(UID, UID, UID)
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
