"""Watchdog for device groups: abort NCCL when a peer is lost, so that a host blocked on the device is released.

Collectives within a model run on the device (NCCL). Where a rank died or left
one out, the host blocks on a later operation of the same device, for ever:
nothing there watches the group's connections. A thread does while a step runs,
and aborts the collectives; the step is broken then and its values are dropped.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

from shoal.recovery import device_group, rendezvous

LOOK_EVERY_S = 0.25

FREE_WITHIN_S = 20.0
"""A device that is stuck in another way than we know holds its process for no longer than this."""

EXIT_STUCK = 70


class DeviceWatch:
    """The watch over one device, from the first `over` on."""

    def __init__(
        self,
        device: torch.device,
        timeout_s: float,
        *,
        is_broken: Callable[[], bool] = rendezvous.is_broken,
        let_go: Callable[[], None] = device_group.let_go,
        is_busy: Callable[[], bool] | None = None,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        self._timeout_s, self._is_broken, self._let_go = timeout_s, is_broken, let_go
        self._is_busy = is_busy or (lambda: not torch.accelerator.current_stream(device).query())
        self._give_up = give_up or self._end_process
        self._lock = threading.Lock()
        self._depth = 0
        self._waits_since = 0.0
        self._thread: threading.Thread | None = None
        self.ended: str | None = None
        """Why it let go, once it did: what was computed since is worth nothing."""

    @contextlib.contextmanager
    def over(self) -> Iterator[None]:
        """While this lasts, somebody may wait for the device; RuntimeError where that was ended."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_on, name="device watch", daemon=True)
            self._thread.start()
        self._enter(+1)
        try:
            yield
        except Exception:
            if self.ended is None:
                raise
        finally:
            self._enter(-1)
        if self.ended is not None:
            # Whatever was made of the numbers that were left behind: this is why.
            raise RuntimeError(self.ended)

    def _enter(self, change: int) -> None:
        with self._lock:  # not while it is letting go: that ends the groups we may be about to leave
            if not self._depth:
                self._waits_since = time.monotonic()
            self._depth += change

    def _look_on(self) -> None:
        while self.ended is None:
            time.sleep(LOOK_EVERY_S)
            with self._lock:
                if self._depth:
                    self._look(time.monotonic())
        until = time.monotonic() + FREE_WITHIN_S
        while self._depth:
            if time.monotonic() > until:
                self._give_up()
            time.sleep(LOOK_EVERY_S)

    def _look(self, now: float) -> None:
        try:
            if self._is_broken():
                self.ended = "a connection of the group was closed"
            elif not self._is_busy():
                self._waits_since = now  # the host takes its time: it compiles, say, or writes a checkpoint
            elif now - self._waits_since > self._timeout_s:
                self.ended = f"the device is not done after {now - self._waits_since:.1f} s"
            if self.ended is not None:
                self._let_go()
        except Exception as error:
            # The driver's, or of a group that ends meanwhile; who waits must not wait for ever.
            self.ended = self.ended or f"the device cannot be asked: {error}"

    def _end_process(self) -> None:
        print(
            f"error: {self.ended}, and it did not let go of this worker within {FREE_WITHIN_S:g} s either. The step was not "
            "applied; this worker ends, and the job goes on from the newest snapshot.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_STUCK)
