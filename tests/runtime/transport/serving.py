"""A server of the simplest kind, in a thread: keeps what is pushed, answers as the test says."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.runtime.transport import tls, unix
from shoal.runtime.transport.messages.client_server import (
    Committed,
    Hello,
    Pulled,
    PullRows,
    PushRows,
    Welcome,
)
from shoal.runtime.transport.shared_server import Listener, ListenerConfig, Request

PUSH = PushRows(view=1, stream=0, seq=1, table=0)
PULL = PullRows(view=1, clock=0, table=0)
HELLO = Hello(name="worker-0", incarnation=0)


class Server:
    """Runs a listener. A push is kept and acknowledged; a pull gives the newest push back."""

    def __init__(
        self,
        path: Path,
        config: ListenerConfig | None = None,
        credentials: tls.Credentials | None = None,
        **more: Any,
    ) -> None:
        self.path = path
        self.heard: list[Request] = []
        self.gone: list[int] = []
        self.last: list[memoryview] = []
        self.answer: Callable[[Request], None] = self._answer
        self._selector = selectors.DefaultSelector()
        self._stop, self._wake = socket.socketpair()
        self._selector.register(self._stop, selectors.EVENT_READ)
        self.address = ""
        remote = None
        if credentials is not None:
            remote = (tls.listen("127.0.0.1"), credentials)
            self.address = tls.join_address(credentials.scheme, *remote[0].getsockname()[:2])
        self.listener = Listener(
            unix.listen(path),
            self._selector,
            hear=self._hear,
            gone=self.gone.append,
            config=config,
            remote=remote,
            **more,
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._wake.send(b"x")
        self._thread.join()
        self.listener.close()
        self._selector.close()
        self._stop.close()
        self._wake.close()

    def _run(self) -> None:
        while True:
            for key, mask in self._selector.select(0.05):
                if key.fileobj is self._stop:
                    return
                self.listener.attend(key, mask)
            self.listener.tick()

    def _hear(self, request: Request) -> None:
        self.answer(request)

    def _answer(self, request: Request) -> None:
        match request.message:
            case Hello(name):
                self.listener.reply(request.peer, request.ticket, Welcome(name, 0, 1))
            case PushRows():
                self.last = request.frames
                self.listener.reply(request.peer, request.ticket, Committed(seq=1, updates=1, slowest=1))
            case PullRows() if request.into:
                for into, frame in zip(request.into, self.last, strict=True):
                    into[:] = frame
                self.listener.reply(request.peer, request.ticket, Pulled(updates=1, slowest=1))
            case PullRows():
                self.listener.reply(
                    request.peer, request.ticket, Pulled(updates=1, slowest=1), [bytes(f) for f in self.last]
                )


@contextmanager
def serving(
    folder: Path,
    config: ListenerConfig | None = None,
    credentials: tls.Credentials | None = None,
    **more: Any,
) -> Iterator[Server]:
    server = Server(folder / "s", config, credentials, **more)
    try:
        yield server
    finally:
        server.close()
