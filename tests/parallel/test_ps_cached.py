"""Rows at the only worker of `ps`: what a load leaves for the servers, and that no two models write to them at a time."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.embedding.device_rows import DeviceRows
from shoal.parallel.protocol import PieceReader
from shoal.parallel.ps.cached import PsCached
from shoal.parallel.single import Single
from shoal.runtime.transport.messages.client_server import TableSpec


def strategy_of(session: Any, **fields: Any) -> PsCached:
    strategy = PsCached.__new__(PsCached)
    plain = {"_is_ahead": False, "_given": [], "_most_bytes": 1 << 20, "_writing": None, "_problem": None}
    for name, value in {**plain, "_session": session, **fields}.items():
        setattr(strategy, name, value)
    session.holders.append(strategy)
    return strategy


def session_of() -> Any:
    return SimpleNamespace(holders=[], updates=0, pending_anchor=lambda: None)


@pytest.mark.parametrize("most_bytes", [0, 1 << 20])
def test_a_load_comes_after_a_point_of_what_was_and_goes_with_the_next(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(Single, "load", lambda self, pieces: done.append("load"))
    monkeypatch.setattr(PsCached, "write_back", lambda self: done.append(("point", self._is_ahead)))
    fields = dict(
        taken=SimpleNamespace(name="rows.weight"),
        spec=TableSpec(0, "rows.weight", 2, "float32", "sgd", {"lr": 1.0}, num_rows=6),
        rows=DeviceRows(torch.zeros(6, 2), "sgd", {"lr": 1.0}),
        is_resident=True,
        drop_changes=lambda: None,
        read_from_servers=lambda: done.append("read"),
    )
    module: Any = type(
        "Module", (), {name: staticmethod(each) if callable(each) else each for name, each in fields.items()}
    )
    model = SimpleNamespace(write=lambda pieces, keeps_state, but: done.append(("write", len(but))))
    tables = SimpleNamespace(modules=[module], model=model, num_updates=3)
    strategy = strategy_of(session_of(), _tables=tables, _most_bytes=most_bytes)
    strategy.load(PieceReader({}, None))
    is_small = most_bytes > 0  # enough for a point to take all rows
    assert done == [("point", True), "load", ("write", is_small), *([] if is_small else ["read"])]
    assert module.rows.num_changes == (6 if is_small else 0)
    assert module.rows.is_changed.all() == is_small
    assert strategy._is_ahead


def test_a_model_waits_for_what_another_writes() -> None:
    session, gate = session_of(), threading.Event()

    def write() -> None:
        gate.wait(10.0)
        session.updates = 7

    other = strategy_of(session, _writing=threading.Thread(target=write))
    assert other._writing is not None
    other._writing.start()
    threading.Timer(0.1, gate.set).start()
    assert strategy_of(session).settle() == 7
