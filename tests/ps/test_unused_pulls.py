"""Memory of a pull that nobody waited for."""

from __future__ import annotations

import pytest
from kv_world import Link, World

from shoal.ps.client import server_group as groups
from shoal.ps.client.server_group import Group
from shoal.ps.client.step import DensePull
from shoal.runtime.transport.messages.client_server import ChunkSpec, DeclareDense, DeclareMode, DensePart


def test_it_is_given_back_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "Link", Link)
    Link.world = world = World(0)
    group = Group(
        name="worker-0", incarnation=0, ways_in=["0", "1", "2"], ask_view=world.ask_view, timeout_s=9.0
    )
    group.declare(DeclareMode(1, "async"))
    chunks = [ChunkSpec(slot, slot, "float32", [DensePart(f"w{slot}", [4], 0, 0)]) for slot in range(3)]
    group.declare(DeclareDense(chunks, "SGD", [{"lr": 0.5}]))
    first, second = (DensePull([(slot, slot, 16) for slot in range(3)], clock=0) for _ in range(2))
    group.start(first)
    group.run(second)
    second.take_along(first)
    second.release()
    links = [link for _, link in group._links.values()]
    assert len(links) == 3
    assert not any(link.in_use for link in links)  # type: ignore[attr-defined]
