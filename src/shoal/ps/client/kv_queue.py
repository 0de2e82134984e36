"""Requests under way, in the order in which they were made; what follows others waits for them here.

A server's mark is the last push that counted, so a push must never overtake
another: whenever one has to be sent again, all that are not acknowledged are,
in their order. Nothing runs by itself here; every call moves things on as far
as it can without waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shoal.errors import ArenaFull, LinkLost, PsError
from shoal.ps.client.kv_requests import Request
from shoal.ps.client.server_group import Group, ViewChanged

MAX_REQUESTS = 64
"""Under way at a time; one more waits for the oldest. Far fewer than a server keeps of a view that it does not know yet."""

MAX_BYTES = 1 << 30
"""The same for what they carry."""


class Line:
    """An operation of the group: all that is under way, up to the request that is waited for."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.sent_in = 0
        self._sent: deque[Request] = deque()
        self._held: deque[tuple[Request, list[Request]]] = deque()
        self._target: Request | None = None
        self._is_behind = False
        self.failed: list[Request] = []
        """Refused, and nobody has been told yet."""

    @property
    def all(self) -> list[Request]:
        """What is not acknowledged, in order."""
        return [*self._sent, *(request for request, _ in self._held)]

    def add(self, request: Request, after: Sequence[Request] = ()) -> None:
        """Send it now, or once those it follows are acknowledged."""
        self.advance()
        waits_for = [each for each in after if not each.is_done or each.error]
        if waits_for or self._held:
            request.keep()
            self._held.append((request, waits_for))
            self._release()
        else:
            self._begin(request)

    def advance(self) -> None:
        """Take the answers that are here, and send what waited for them."""
        try:
            while self._sent and self.sent_in == self._group.view and self._sent[0].poll():
                self._end(self._sent.popleft())
        except (LinkLost, ViewChanged):
            self.sent_in, self._is_behind = 0, True
        self._release()

    def finish(self, request: Request) -> None:
        """Wait until this one is acknowledged, or refused."""
        while any(held is request for held, _ in self._held):
            first, waits_for = self._held[0]
            for each in waits_for:
                self.finish(each)
            self._release()
            assert first.is_done or first in self._sent
        if request.is_done:
            return
        if self._is_behind:
            self._group.renew()
            self._is_behind = False
        self._target = request
        self._group.finish(self)

    # ---- as the group sees it -------------------------------------------------------------------

    def send(self, group: Group) -> None:
        """All that is not acknowledged, in order."""
        for request in self._sent:
            request.send(group)
        self._flush()

    def receive(self, group: Group) -> None:
        """Wait for one after the other."""
        assert self._target is not None
        while not self._target.is_done:
            self._sent[0].receive(group)
            self._end(self._sent.popleft())

    # ---- steps ----------------------------------------------------------------------------------

    def _release(self) -> None:
        while self._held and all(each.is_done for each in self._held[0][1]):
            request, waited_for = self._held.popleft()
            refused = next((each.error for each in waited_for if each.error), None)
            if refused is not None:
                why = f"a request to table '{request.table.name}' was not sent, because what it was to follow was refused"
                request.fail(PsError(f"{why}: {refused}"))
                self._end(request)
            else:
                self._begin(request)

    def _begin(self, request: Request) -> None:
        while self._sent and (
            len(self._sent) >= MAX_REQUESTS
            or request.num_bytes + sum(each.num_bytes for each in self._sent) > MAX_BYTES
        ):
            self.finish(self._sent[0])
        if not self._sent:
            self.sent_in, self._is_behind = self._group.view, False
        self._sent.append(request)
        try:
            if self.sent_in == self._group.view:
                request.send(self._group)
                self._flush()
        except (LinkLost, ViewChanged):
            self.sent_in, self._is_behind = 0, True
        except ArenaFull:  # it was not asked
            self._sent.pop()
            raise
        except BaseException:
            self.sent_in = 0  # who knows how much of it has left
            raise
        finally:
            request.keep()

    def _flush(self) -> None:
        """What was said leaves now: nobody may wait for it for long."""
        for server in self._group.servers:
            self._group.link(server).flush()

    def _end(self, request: Request) -> None:
        if request.error is not None:
            self.failed.append(request)
