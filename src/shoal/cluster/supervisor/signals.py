"""Signals as something to wait for: Ctrl-C and its kin wake the supervisor's loop instead of breaking into it."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from types import TracebackType

LEAVE_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """Collects the signals that ask a job to leave, while it is entered.

    Only the main thread can take signals; elsewhere it stays empty. What is
    ignored stays ignored: `nohup` means it.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, object] = {}
        self._fd_before = -1
        self._ours, self._theirs = socket.socketpair()
        for sock in (self._ours, self._theirs):
            sock.setblocking(False)

    def fileno(self) -> int:
        """For a selector: readable when `take` has something."""
        return self._ours.fileno()

    def take(self) -> list[signal.Signals]:
        """The signals since the last look, in order."""
        received = b""
        with contextlib.suppress(BlockingIOError):
            received = self._ours.recv(4096)
        return [signal.Signals(number) for number in received if number in LEAVE_ON]

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            # The interpreter writes the signal's number there from whichever thread the kernel chose; a handler
            # alone would run only once the main thread wakes up by itself.
            self._fd_before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
            for signum in LEAVE_ON:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, lambda signum, frame: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            for signum, handler in self._before.items():
                signal.signal(signum, handler)  # type: ignore[arg-type]  # what signal() gave back
            signal.set_wakeup_fd(self._fd_before)
        self._ours.close()
        self._theirs.close()
