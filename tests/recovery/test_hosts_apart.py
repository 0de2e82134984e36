"""Groups that the same processes of several hosts cannot form: the cause is named, and not tried without a limit."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import GroupNotFormed, HostsApart, PeerLost
from shoal.recovery import elastic_group, group_sockets, rendezvous
from shoal.recovery.elastic_group import MAX_APART, MAX_UNFORMED, ElasticGroup
from shoal.recovery.rendezvous import MAX_STRANGERS, NotConnected
from shoal.runtime.transport.messages.worker_coordinator import ViewFormed

APART = NotConnected(rank=1, view=1, silent={2: "10.0.0.3"}, reason="Connect timeout\n at gloo/pair.cc")
BROKEN = PeerLost(rank=1, operation="forming the group", reason="a connection was closed\n at gloo/pair.cc")


class Views:
    """Views that never form, as rank 1 sees them; `incarnations` of each."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        incarnations: list[list[int]],
        error: PeerLost = APART,
    ) -> None:
        self.num_entered = 0
        self._incarnations, self._error = incarnations, error
        job = SimpleNamespace(rank=1, rank_hosts=(0, 1, 2))
        monkeypatch.setattr(elastic_group.session, "enter_view", self._enter)
        monkeypatch.setattr(elastic_group, "form_group", self._form)
        monkeypatch.setattr(elastic_group.jobs, "current", lambda: job)

    def _enter(self, **_: Any) -> ViewFormed:
        self.num_entered += 1
        processes = self._incarnations[self.num_entered - 1]
        return ViewFormed(view=self.num_entered, donor=-1, finished=-1, call=0, incarnations=processes)

    def _form(self, job: Any, view: int) -> None:
        raise self._error


def test_a_group_that_cannot_be_formed_is_given_up_with_the_names_of_ranks_that_are_not_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    views = Views(monkeypatch, [[0, 0, 0]] * MAX_APART)
    with pytest.raises(
        HostsApart,
        match=r"rank 1 did not reach rank 2 \(10\.0\.0\.3\) in 6 attempts .*\(the last error: Connect timeout\)",
    ):
        ElasticGroup().regroup()
    assert views.num_entered == MAX_APART
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        "note: rank 1 does not reach rank 2 (10.0.0.3) (Connect timeout); the group is formed again (1 of 6 times)"
    )
    assert len(told) == MAX_APART - 1


def test_a_group_that_cannot_be_formed_for_another_reason_is_given_up_with_the_last_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert MAX_UNFORMED > MAX_STRANGERS + 1  # the error of strangers comes first
    views = Views(monkeypatch, [[0, 0, 0]] * MAX_UNFORMED, BROKEN)
    with pytest.raises(
        GroupNotFormed, match=r"in 12 attempts.*\. The last error: a connection was closed\. "
    ):
        ElasticGroup().regroup()
    assert views.num_entered == MAX_UNFORMED
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        "note: rank 1 could not form the group (a connection was closed); the group is formed again (2 of 12 times)"
    )
    assert len(told) == MAX_UNFORMED - 2


def test_a_process_that_was_replaced_begins_the_count_anew_and_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    views = Views(monkeypatch, [[0, 0, 0]] * (MAX_APART - 1) + [[0, 0, 1]] * MAX_APART)
    with pytest.raises(HostsApart):
        ElasticGroup().regroup()
    assert views.num_entered == 2 * MAX_APART - 1
    assert len(capsys.readouterr().err.splitlines()) == 2 * (MAX_APART - 1) - 1


def test_a_refused_connection_and_a_silent_host_are_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.2", 0)) as answers,
        socket.create_server(("127.0.0.3", 0)) as refuses,
        socket.create_server(("127.0.0.4", 0)) as is_silent,
    ):
        probed = [("127.0.0.1", 9), *(each.getsockname() for each in (answers, refuses, refuses, is_silent))]
        refuses.close()
        group_sockets.drop_packets({is_silent.fileno(): probed[4]})
        monkeypatch.setattr(rendezvous, "_probed", probed)
        job: Any = SimpleNamespace(bind_address="127.0.0.1", host_address="192.0.2.1")
        assert rendezvous._silent_ranks(job) == {2: "127.0.0.3", 3: "127.0.0.3", 4: "127.0.0.4"}
