"""Hosts that reach the head and not each other: named, and not tried without a limit."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import HostsApart
from shoal.recovery import elastic_group, rendezvous
from shoal.recovery.elastic_group import MAX_UNFORMED, ElasticGroup
from shoal.recovery.rendezvous import NotConnected
from shoal.runtime.transport.messages.worker_coordinator import ViewFormed


class Views:
    """Views that never form, as rank 1 sees them; `incarnations` of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, incarnations: list[list[int]]) -> None:
        self.num_entered = 0
        self._incarnations = incarnations
        monkeypatch.setattr(elastic_group.session, "enter_view", self._enter)
        monkeypatch.setattr(elastic_group, "form_group", self._form)
        monkeypatch.setattr(elastic_group.jobs, "current", lambda: SimpleNamespace(rank=1))

    def _enter(self, **_: Any) -> ViewFormed:
        self.num_entered += 1
        processes = self._incarnations[self.num_entered - 1]
        return ViewFormed(view=self.num_entered, donor=-1, finished=-1, call=0, incarnations=processes)

    def _form(self, job: Any, view: int) -> None:
        raise NotConnected(rank=1, view=view, silent={2: "10.0.0.3"}, reason="Connect timeout")


def test_a_group_that_cannot_be_formed_is_given_up_with_the_names_of_silent_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    views = Views(monkeypatch, [[0, 0, 0]] * MAX_UNFORMED)
    with pytest.raises(HostsApart, match=r"rank 1 got no answer from rank 2 \(10\.0\.0\.3\) in 6 attempts"):
        ElasticGroup().regroup()
    assert views.num_entered == MAX_UNFORMED
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        "note: rank 1 gets no answer from rank 2 (10.0.0.3); the group is formed again (1 of 6 times)"
    )
    assert len(told) == MAX_UNFORMED - 1


def test_a_process_that_was_replaced_begins_the_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    views = Views(monkeypatch, [[0, 0, 0]] * (MAX_UNFORMED - 1) + [[0, 0, 1]] * MAX_UNFORMED)
    with pytest.raises(HostsApart):
        ElasticGroup().regroup()
    assert views.num_entered == 2 * MAX_UNFORMED - 1


def test_a_refused_connection_is_an_answer_and_a_silent_host_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"10.0.0.1": ConnectionRefusedError, "10.0.0.3": TimeoutError, "10.0.0.4": OSError}

    def connect(address: tuple[str, int], timeout_s: float) -> None:
        raise answers[address[0]]

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(
        rendezvous, "_host_addresses", ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.3", "10.0.0.4"]
    )
    job: Any = SimpleNamespace(host_address="10.0.0.2")
    assert rendezvous._silent_ranks(job) == {2: "10.0.0.3", 3: "10.0.0.3", 4: "10.0.0.4"}
