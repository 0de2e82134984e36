"""Digests of a server's slots: equal on two holders of the same rows, chunks, applied seqs and mailbox."""

from __future__ import annotations

import hashlib

import msgspec

from shoal.ps.server.state import ServerState


def slot_digests(state: ServerState) -> list[bytes | None]:
    """By slot; None where it is not held."""
    return [_digest(state, slot) if held else None for slot, held in enumerate(state.contents.held.tolist())]


def _digest(state: ServerState, slot: int) -> bytes:
    record, frames = state.write_slot(slot)
    marks = [mark for mark in record.marks if mark[1]]
    said = (record.version, record.steps, marks, record.tables, record.chunks, record.mailbox)
    hashed = hashlib.blake2b(msgspec.msgpack.encode(said))
    for frame in frames:
        hashed.update(len(frame).to_bytes(8, "little"))
        hashed.update(frame)
    return hashed.digest()
