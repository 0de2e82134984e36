"""`ring` exchange over shoal's own connections, for `--tls`: both ends have a certificate of the job.

Each rank connects to the next one and accepts the previous one; sums, broadcasts and gathers go
around this ring, and a recovering rank fetches its state by a connection to its donor. The scheme
is that of `schemes/ring.py`, so the bits are too. Gloo's group beside it carries the addresses of
the listeners, and its connections show when a peer is lost; no training data goes through it.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import struct
import threading
import time
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.collectives.reducer import LOOK_AROUND_EVERY, Native, Threaded
from shoal.collectives.schemes import ring
from shoal.config.job import Job
from shoal.errors import PeerLost, WireError
from shoal.runtime.transport import tls
from shoal.runtime.transport.tls import Credentials, PlainStream, TlsStream

CONNECT_TIMEOUT_S = 20.0
"""Time for both neighbours of a rank to connect: milliseconds, unless one dies just then."""

MAX_STRANGERS = 64
"""Connections that have not identified themselves. One more, and the oldest is closed."""

SEND_BYTES = 1 << 20

_HELLO = struct.Struct("<QQQ")  # number of the ring, rank that speaks, rank that is meant
_ADDRESS_BYTES = 128
_NOTHING = memoryview(b"")

_num_rings = 0
"""Number of the newest ring of this process; that of the next one is larger than any rank's."""


class _Seat(NamedTuple):
    """Address and incarnation of a rank."""

    address: str
    incarnation: int


class TlsP2P:
    """A rank's connections in the ring. `swap` goes from the rank before to the next one, and nowhere else."""

    def __init__(self, job: Job, group: Native, credentials: Credentials) -> None:
        self.rank, self.num_ranks = group.rank, group.num_workers
        self._group, self._credentials = group, credentials
        self._listener = tls.listen(job.bind_address)
        self._out: TlsStream | PlainStream | None = None
        self._in: TlsStream | PlainStream | None = None
        self._pairs: dict[int, TlsStream | PlainStream] = {}  # beside the ring, by rank
        self._number = 0  # of this ring; the same on all ranks
        # A donor gives its state to one rank after the other.
        self._pair_timeout_s = job.liveness.step_timeout_s
        try:
            self._seats = self._gather_seats(job)
            self._connect_ring()
        except BaseException:
            self.close()
            raise

    def swap(self, to: int, outgoing: Tensor, source: int, incoming: Tensor) -> None:
        assert (to - self.rank) % self.num_ranks == 1 == (self.rank - source) % self.num_ranks
        assert self._out is not None
        assert self._in is not None
        self._move(self._out, _bytes(outgoing), self._in, _bytes(incoming), f"receiving from rank {source}")

    def pass_on(self, tensor: Tensor) -> None:
        """Send what rank 0 has around the ring, to the last rank."""
        nothing = torch.empty(0, dtype=torch.uint8)
        before, after = (self.rank - 1) % self.num_ranks, (self.rank + 1) % self.num_ranks
        if self.rank:
            self.swap(after, nothing, before, tensor)
        if after:
            self.swap(after, tensor, before, nothing)

    def send_to(self, rank: int, tensor: Tensor) -> None:
        """Send to a rank that is in `receive_from`, by a connection for this alone."""
        if rank not in self._pairs:
            self._pairs[rank] = self._accept(rank, self._pair_timeout_s)
        self._move(self._pairs[rank], _bytes(tensor), None, _NOTHING, f"sending to rank {rank}")

    def receive_from(self, rank: int, tensor: Tensor) -> None:
        if rank not in self._pairs:
            self._pairs[rank] = self._connect(rank, self._pair_timeout_s)
        self._move(None, _NOTHING, self._pairs[rank], _bytes(tensor), f"receiving from rank {rank}")

    def _connect(self, rank: int, timeout_s: float) -> TlsStream | PlainStream:
        """A connection to a rank that is in `_accept`, or will be."""
        seat = self._seats[rank]
        try:
            stream = self._credentials.connect(seat.address, expect=f"worker-{rank}", timeout_s=timeout_s)
            stream.sendall(_HELLO.pack(self._number, self.rank, rank))
        except (OSError, WireError) as error:
            raise self._lost(f"connecting to rank {rank}", str(error)) from None
        if isinstance(stream, TlsStream) and stream.identity.incarnation != seat.incarnation:
            stream.close()
            raise self._lost(f"connecting to rank {rank}", "another incarnation of it answers")
        stream.setblocking(False)
        return stream

    def shut(self) -> None:
        """End all connections; a thread that waits in one gets PeerLost."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()

    @property
    def _sockets(self) -> list[socket.socket]:
        made = [self._out, self._in, *self._pairs.values(), self._listener]
        return [sock for sock in made if sock is not None]

    # ---- connecting -----------------------------------------------------------------------------

    def _gather_seats(self, job: Job) -> list[_Seat]:
        global _num_rings
        address = tls.join_address(
            self._credentials.scheme, job.host_address, self._listener.getsockname()[1]
        )
        said = f"{_num_rings + 1} {job.incarnation} {address}".encode().ljust(_ADDRESS_BYTES, b"\0")
        gathered = self._group.all_gather(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        words = [each.numpy().tobytes().rstrip(b"\0").decode("ascii", "replace").split() for each in gathered]
        # A replacement has opened fewer than the others.
        self._number = _num_rings = max(int(number) for number, _, _ in words)
        return [_Seat(where, int(incarnation)) for _, incarnation, where in words]

    def _connect_ring(self) -> None:
        """Connect to the next rank while the one before is accepted: all do both at once."""
        accepted: list[TlsStream | PlainStream] = []
        problems: list[PeerLost] = []

        def accept() -> None:
            try:
                accepted.append(self._accept((self.rank - 1) % self.num_ranks, CONNECT_TIMEOUT_S))
            except PeerLost as error:
                problems.append(error)

        accepting = threading.Thread(target=accept, name="shoal-ring", daemon=True)
        accepting.start()
        try:
            self._out = self._connect((self.rank + 1) % self.num_ranks, CONNECT_TIMEOUT_S)
        finally:
            accepting.join()
            self._in = accepted[0] if accepted else None
        if problems:
            raise problems[0]

    def _accept(self, rank: int, timeout_s: float) -> TlsStream | PlainStream:
        """The connection of that rank; other connections are ignored."""
        waiting: dict[TlsStream | PlainStream, bytearray] = {}
        deadline = time.monotonic() + timeout_s
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)

            def drop(stream: TlsStream | PlainStream) -> None:
                selector.unregister(stream)
                del waiting[stream]
                stream.close()

            try:
                while True:
                    ready = selector.select(LOOK_AROUND_EVERY.total_seconds())
                    if time.monotonic() > deadline or self._group.is_broken():
                        raise self._lost(f"waiting for rank {rank}", "it did not connect")
                    for key, _ in ready:
                        if key.fileobj is self._listener:
                            with contextlib.suppress(OSError):
                                stream = self._credentials.accept(self._listener)
                                waiting[stream] = bytearray()
                                selector.register(stream, selectors.EVENT_READ)
                            if len(waiting) > MAX_STRANGERS:
                                drop(next(iter(waiting)))
                            continue
                        stream = key.fileobj  # type: ignore[assignment]
                        if stream not in waiting:
                            continue  # dropped in this turn, for a newer one
                        try:
                            if self._hear_hello(stream, waiting[stream], rank):
                                del waiting[stream]
                                return stream
                        except (OSError, WireError):
                            drop(stream)
            finally:
                for stream in waiting:
                    stream.close()

    def _hear_hello(self, stream: TlsStream | PlainStream, heard: bytearray, rank: int) -> bool:
        """True once the rank has named its peer; WireError where it is another one."""
        try:
            while len(heard) < _HELLO.size:
                data = stream.recv(_HELLO.size - len(heard))
                if not data:
                    raise WireError("it hung up")
                heard += data
        except BlockingIOError:
            return False
        is_rank = stream.identity == (f"worker-{rank}", self._seats[rank].incarnation)
        if not is_rank or _HELLO.unpack(heard) != (self._number, rank, self.rank):
            raise WireError("it is not the rank that was waited for")
        return True

    # ---- moving ---------------------------------------------------------------------------------

    def _move(
        self,
        out: TlsStream | PlainStream | None,
        outgoing: memoryview,
        source: TlsStream | PlainStream | None,
        incoming: memoryview,
        operation: str,
    ) -> None:
        """Send and receive at once, until both are done."""
        sent = received = 0
        while sent < len(outgoing) or received < len(incoming):
            poller = select.poll()
            did = 0
            try:
                if out is not None and sent < len(outgoing):
                    with contextlib.suppress(BlockingIOError):
                        did = out.sendmsg([outgoing[sent : sent + SEND_BYTES]])
                        sent += did
                    poller.register(out, select.POLLOUT)
                if source is not None and received < len(incoming):
                    with contextlib.suppress(BlockingIOError):
                        count = source.recv_into(incoming[received:])
                        if not count:
                            raise ConnectionResetError("the connection was closed")
                        did, received = did + count, received + count
                    poller.register(source, select.POLLIN)
            except OSError as error:
                raise self._lost(operation, str(error)) from None
            is_done = sent == len(outgoing) and received == len(incoming)
            is_idle = not did and not is_done
            if (
                is_idle
                and not poller.poll(LOOK_AROUND_EVERY.total_seconds() * 1000)
                and self._group.is_broken()
            ):
                raise self._lost(operation, "a connection of the group was closed")

    def _lost(self, operation: str, reason: str) -> PeerLost:
        return PeerLost(rank=self.rank, operation=operation, reason=reason)


class TlsRing(Threaded):
    """Reducer whose every operation goes over `TlsP2P`, in one thread, in the order of starting."""

    scatters_rows = False  # torch's all-to-all is not encrypted

    def __init__(self, job: Job, group: Native, credentials: Credentials) -> None:
        self._p2p = TlsP2P(job, group, credentials)
        super().__init__(group, lambda flat: ring.all_reduce(self._p2p, flat))

    def broadcast(self, tensor: Tensor) -> None:
        flat = tensor.detach().contiguous().reshape(-1)
        self.finish(
            self.start(lambda: self._p2p.pass_on(flat), tensor.detach(), flat), "a broadcast from rank 0"
        )

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty(tensor.numel(), dtype=tensor.dtype) for _ in range(self.num_workers)]
        parts[self.rank].copy_(tensor.detach().reshape(-1))
        self.finish(self.start(lambda: ring.all_gather(self._p2p, parts, own=self.rank)), "an all-gather")
        return [part.reshape(tensor.shape) for part in parts]

    def send_to(self, rank: int, tensor: Tensor) -> None:
        self._p2p.send_to(rank, tensor)

    def receive_from(self, rank: int, tensor: Tensor) -> None:
        self._p2p.receive_from(rank, tensor)

    def close(self) -> None:
        """End the thread and its connections; a peer that waits for this rank notices."""
        self._p2p.shut()
        super().close()
        self._thread.join()
        self._p2p.close()


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor that is in one piece."""
    return tensor.view(torch.uint8).numpy().data if tensor.numel() else _NOTHING
