"""A job whose processes were started from different files is told, not left to misunderstand itself."""

from __future__ import annotations

import pytest

from shoal.cluster.launch import roles
from shoal.cluster.supervisor.warm_parent import check_same_files
from shoal.errors import ClusterError
from shoal.runtime.forkserver.messages import ServerReady
from shoal.runtime.transport.messages import MESSAGES
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.supervisor import Finished


class Finished2(Finished, frozen=True, tag="finished2"):
    new_field: int = 0


def test_one_field_more_in_one_message_is_another_protocol_version(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = roles.protocol_version()
    assert roles.protocol_version() == ours
    Finished2.__name__ = Finished.__name__
    others: list[type[Message]] = [Finished2 if kind is Finished else kind for kind in MESSAGES]
    monkeypatch.setattr(roles, "MESSAGES", others)
    assert roles.protocol_version() != ours


def test_a_warm_parent_with_other_files_than_ours_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ClusterError, match=r"were replaced while the job started.*start the job again"):
        check_same_files(ServerReady(1.0, roles.protocol_version() ^ 1))
    check_same_files(ServerReady(1.0, roles.protocol_version()))
