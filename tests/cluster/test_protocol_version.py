"""A job whose processes were started from different files is told, not left to misunderstand itself."""

from __future__ import annotations

import socket

import pytest

from shoal.cluster.launch import protocol_version as dialect
from shoal.cluster.supervisor import forkserver_messages as warm_messages
from shoal.cluster.supervisor.forkserver_client import WarmParent
from shoal.cluster.supervisor.forkserver_messages import Ready
from shoal.errors import ClusterError
from shoal.runtime.transport.messages import MESSAGES
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.supervisor import Finished


class Finished2(Finished, frozen=True, tag="finished2"):
    new_field: int = 0


def test_one_field_more_in_one_message_is_another_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = dialect.dialect()
    assert dialect.dialect() == ours
    Finished2.__name__ = Finished.__name__
    others: list[type[Message]] = [Finished2 if kind is Finished else kind for kind in MESSAGES]
    monkeypatch.setattr(dialect, "MESSAGES", others)
    assert dialect.dialect() != ours


def test_a_warm_parent_with_other_files_than_ours_is_refused_before_anything_is_started() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    warm = WarmParent.__new__(WarmParent)  # without its process: what it says is all that counts here
    warm._sock, warm._ready = ours, None
    with ours, theirs:
        warm_messages.send(theirs, Ready(1.0, dialect.dialect() ^ 1))
        with pytest.raises(ClusterError, match=r"were replaced while the job started.*start the job again"):
            warm._receive()
        assert not warm.is_ready
        warm_messages.send(theirs, Ready(1.0, dialect.dialect()))
        warm._receive()
        assert warm.is_ready
