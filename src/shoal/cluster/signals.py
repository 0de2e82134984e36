"""Signals as something to wait for: Ctrl-C and its kin wake the supervisor's loop instead of breaking into it."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections import deque
from types import FrameType, TracebackType

LEAVE_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """Collects the signals that ask a job to leave, while it is entered.

    Only the main thread can take signals; elsewhere it stays empty. What is
    ignored stays ignored: `nohup` means it.
    """

    def __init__(self) -> None:
        self._received: deque[signal.Signals] = deque()
        self._before: dict[signal.Signals, object] = {}
        self._ours, self._theirs = socket.socketpair()
        for sock in (self._ours, self._theirs):
            sock.setblocking(False)

    def fileno(self) -> int:
        """For a selector: readable when `take` has something."""
        return self._ours.fileno()

    def take(self) -> list[signal.Signals]:
        """The signals since the last look, in order."""
        with contextlib.suppress(BlockingIOError):
            while self._ours.recv(4096):
                pass
        return [self._received.popleft() for _ in range(len(self._received))]

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            for signum in LEAVE_ON:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]  # what signal() gave back
        self._ours.close()
        self._theirs.close()

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(signum))
        with contextlib.suppress(BlockingIOError):
            self._theirs.send(b"!")
