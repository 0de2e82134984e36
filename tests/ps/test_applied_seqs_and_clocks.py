"""Applied seqs, clocks and the mailbox, against plain models."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.parallel.ps.relaxed import Naming
from shoal.ps.server.progress import AppliedSeqs, Clocks, some_slots
from shoal.ps.server.replication import decode, encode, from_bits, to_bits
from shoal.ps.server.steps import Mailbox, Result

slots = st.lists(st.integers(0, 255), min_size=1, max_size=5, unique=True)
pushes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), slots), max_size=20)


@given(pushes, st.integers(0, 4))
def test_marks_remember_the_last_seq_of_every_slot_and_stream(pushes, done_below) -> None:  # type: ignore[no-untyped-def]
    marks, model = AppliedSeqs(), dict[tuple[int, int], int]()
    for stream, seq, touched in pushes:
        marks.count(stream, seq, some_slots(touched))
        for slot in touched:
            model[slot, stream] = max(seq, model.get((slot, stream), 0))
    marks.forget_below(done_below)
    for stream in range(1, 5):
        for seq in range(1, 6):
            expected = [stream >= done_below and model.get((slot, stream), 0) < seq for slot in range(256)]
            assert marks.missing(stream, seq).tolist() == expected


@given(pushes, st.integers(0, 255))
def test_a_slot_takes_its_marks_along(pushes, slot) -> None:  # type: ignore[no-untyped-def]
    marks, other = AppliedSeqs(), AppliedSeqs()
    for stream, seq, touched in pushes:
        marks.count(stream, seq, some_slots(touched))
    other.count(9, 9, np.ones(256, np.bool_))
    other.set_slot(slot, marks.of_slot(slot))
    for stream in (1, 2, 3, 4, 9):
        for seq in range(1, 10):
            assert other.missing(stream, seq)[slot] == marks.missing(stream, seq)[slot]


@given(slots)
def test_slots_travel_as_bits(touched) -> None:  # type: ignore[no-untyped-def]
    assert np.flatnonzero(from_bits(to_bits(some_slots(touched)))).tolist() == sorted(touched)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 4)), max_size=30))
def test_a_clock_counts_every_batch_of_its_rank_once(ended) -> None:  # type: ignore[no-untyped-def]
    clocks = Clocks()
    clocks.expect(3)
    counted: dict[tuple[int, int], int] = {}
    expected = [0, 0, 0]
    for rank, stream, seq in ended:
        if seq > counted.get((rank, stream), 0):
            counted[rank, stream] = seq
            expected[rank] += 1
        clocks.finished(rank, stream, seq)
    assert [clocks.clock(rank) for rank in range(3)] == expected
    assert clocks.slowest() == min(expected)


def test_a_batch_that_the_lost_server_counted_is_not_counted_again() -> None:
    mine, theirs = Clocks(), Clocks()
    for clocks in (mine, theirs):
        clocks.expect(1)
        clocks.finished(0, 1, 1)
    theirs.finished(0, 1, 2)
    mine.heard(theirs.state(0))
    assert mine.clock(0) == 1
    mine.take_over()
    mine.finished(0, 1, 2)
    assert mine.clock(0) == 2


def test_who_was_absent_comes_back_with_the_slowest() -> None:
    clocks = Clocks()
    clocks.expect(2)
    clocks.left(1)
    for seq in (1, 2, 3):
        clocks.finished(0, 1, seq)
    assert clocks.slowest() == 3
    clocks.returned(1)
    assert (clocks.clock(1), clocks.slowest()) == (3, 3)


def test_the_log_is_kept_since_the_oldest_note_and_one_more() -> None:
    mailbox = Mailbox()
    for exchange in range(1, 6):
        notes = {rank: (exchange if rank else min(exchange, 3), b"note") for rank in range(2)}
        mailbox.finish(exchange, Result(True, b"sum"), notes, 2)
    assert sorted(mailbox.log) == [2, 3, 4, 5]
    assert mailbox.since(0) == (3, b"note", [3, 4, 5])
    assert mailbox.since(1) == (5, b"note", [5])


def test_a_board_is_the_same_after_a_copy() -> None:
    mailbox, other = Mailbox(), Mailbox()
    mailbox.finish(1, Result(False, b"all"), {0: (1, b"n0"), 1: (1, b"n1")}, 2)
    state, frames = mailbox.state()
    other.restore(state, list(frames))
    assert (other.log, other.notes) == (mailbox.log, mailbox.notes)


def test_records_are_what_they_were() -> None:
    from shoal.ps.server.replication import PostRecord

    record = PostRecord(3, [(0, 1)])
    assert decode(encode(record)) == record


def test_a_checkpoints_marks_tell_below_which_streams_all_are_over() -> None:
    marks = AppliedSeqs()
    marks.count(7 << 32 | 1, 2, some_slots([3]))
    marks.count(7 << 32 | 5, 1, some_slots([3]))
    assert marks.triples(some_slots([3])).tolist() == [[3, 7 << 32 | 1, 2], [3, 7 << 32 | 5, 1]]
    marks.forget_below(7 << 32 | 4)  # leases are numbered from 0, streams from 1: leases 0 to 2 are done
    triples = marks.triples(some_slots([3, 9]))
    assert triples.tolist() == [[3, 7 << 32 | 4, 0], [3, 7 << 32 | 5, 1]]
    naming = Naming(call=7, num_leases=9, samples_per_lease=8, first_epoch=0)
    naming.heard(triples)
    assert naming.done_below == 3
    Naming(call=8, num_leases=9, samples_per_lease=8, first_epoch=0).heard(triples)
