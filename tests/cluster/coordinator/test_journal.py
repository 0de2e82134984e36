from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster.coordinator.journal import APPLICATION_ID, FILE_NAME, VERSION, Journal, begin_launch
from shoal.cluster.coordinator.journal_entries import Entry, Granted, JournalState, StoreChanged
from shoal.errors import JournalFailed, RunDirectoryError
from shoal.runtime.transport.messages.supervisor import Reaped, Saved
from shoal.runtime.transport.messages.worker_coordinator import (
    Join,
    StoreCount,
    StoreDone,
    StoreRefused,
    StoreValues,
    ViewFormed,
)

ENTRIES: list[Entry] = [
    Join(0, 0, 11, 2),
    Join(1, 0, 12, 2),
    Granted(1, ("fit", "epochs=2 ü")),
    ViewFormed(1, -1, -1, 0, [0, 0]),
    StoreChanged({"view-1/a": b"\0\xff", "gone": b"x"}, {5: (1, StoreCount(-3))}),
    Saved(0, "runs/x/step-3", 3),
    Reaped(1, 0, -9),
    Join(1, 1, 13, 2),
    StoreChanged({"gone": None}, {5: (2, StoreValues([b"v"])), 6: (1, StoreRefused("no"))}),
    ViewFormed(2, 0, 7, 1, [0, 1]),
    Granted(2, None),
]


def remembered(entries: list[Entry]) -> JournalState:
    memory = JournalState()
    for entry in entries:
        memory.apply(entry)
    return memory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE_NAME


def begun(path: Path) -> Journal:
    return Journal(path, launch=begin_launch(path, num_workers=2))


def test_what_was_written_is_remembered_by_the_next_coordinator(path: Path) -> None:
    journal = begun(path)
    for entry in ENTRIES:
        journal.write([entry])
    assert journal.load() == remembered(ENTRIES)
    journal.close()
    again = Journal(path, launch=1)
    assert again.load() == remembered(ENTRIES)
    again.close()


def test_a_new_launch_begins_with_an_empty_memory_and_the_history_stays(path: Path) -> None:
    journal = begun(path)
    journal.write(ENTRIES)
    journal.close()
    journal = begun(path)
    assert (journal.launch, journal.load()) == (2, JournalState())
    journal.close()
    with sqlite3.connect(path) as db:
        facts = db.execute("SELECT launch, count(*) FROM facts GROUP BY launch").fetchall()
    db.close()
    assert facts == [(1, sum(not isinstance(entry, StoreChanged) for entry in ENTRIES))]


def test_entries_are_written_together_or_not_at_all(path: Path) -> None:
    journal = begun(path)
    journal.write(ENTRIES[:2])
    journal._db.execute("PRAGMA max_page_count = 1")  # as a full disk
    with pytest.raises(JournalFailed, match="the disk is full"):
        journal.write([ENTRIES[2], StoreChanged({"big": bytes(1 << 20)}, {})])
    assert journal.load() == remembered(ENTRIES[:2])
    journal.close()


WRITER = """
import os, sys
from pathlib import Path
from shoal.cluster.coordinator.journal import Journal
from shoal.cluster.coordinator.journal_entries import Granted

journal = Journal(Path(sys.argv[1]), launch=1)
for number in range(1, 10**6):
    journal.write([Granted(number, ("fit", "x" * 50))])
    os.write(1, b"%d\\n" % number)
"""


@pytest.mark.parametrize("after", [1, 17, 300])
def test_a_coordinator_killed_while_it_writes_loses_nothing_it_has_promised(path: Path, after: int) -> None:
    begin_launch(path, num_workers=2)
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(path)], stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    for _ in range(after):
        writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    promised = writer.stdout.read().splitlines()
    writer.wait()
    writer.stdout.close()
    last = int(promised[-1]) if promised else after
    journal = Journal(path, launch=1)
    assert len(journal.load().calls) in (last, last + 1)  # one may have been written and not yet promised
    journal.write([Granted(1, None)])
    journal.close()


def test_two_coordinators_cannot_share_a_journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cluster.coordinator.journal.BUSY_TIMEOUT_S", 0.05)
    journal = begun(path)
    journal.write(ENTRIES)
    with pytest.raises(JournalFailed, match="locked"):
        Journal(path, launch=1)
    journal.close()


def test_the_journal_of_an_earlier_launch_is_refused(path: Path) -> None:
    begin_launch(path, num_workers=2)
    begin_launch(path, num_workers=2)
    with pytest.raises(JournalFailed, match="launch 2 of this run, and this is launch 1"):
        Journal(path, launch=1)


def test_a_journal_that_was_never_begun_is_refused(path: Path) -> None:
    with pytest.raises(JournalFailed, match="launch 0 of this run"):
        Journal(path, launch=1)


# ---- what is no journal of ours -------------------------------------------------------------------


def whole(path: Path) -> bytes:
    """The file of a run with some history, all of it in the main file."""
    journal = begun(path)
    for number in range(1, 300):
        journal.write([Granted(number, ("fit", "x" * 100))])
    journal.close()
    assert not path.with_name(f"{FILE_NAME}-wal").exists()
    return path.read_bytes()


def damaged(path: Path) -> None:
    content = bytearray(whole(path))
    content[4096 * 3 : 4096 * 4] = os.urandom(4096)
    path.write_bytes(content)


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE recipes (name TEXT)")
    db.close()


def newer(path: Path) -> None:
    whole(path)
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()


def older(path: Path) -> None:
    whole(path)
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {VERSION - 1}")
    db.close()


UNUSABLE = {
    "text": (lambda path: path.write_text("my notes\n" * 1000), "damaged, or no database"),
    "one page missing": (lambda path: path.write_bytes(whole(path)[: -2 * 4096]), "damaged"),
    "half a page": (lambda path: path.write_bytes(whole(path)[:2000]), "damaged"),
    "a damaged page": (damaged, "damaged"),
    "another program's": (foreign, "not a journal of shoal's"),
    "a newer version": (newer, "written by a newer shoal"),
    "an older version": (older, "written by an older shoal"),
    "a folder": (lambda path: path.mkdir(), "unable to open"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_file_that_is_no_journal_of_this_version_is_refused_with_the_cure_and_not_touched(
    path: Path, kind: str
) -> None:
    make, reason = UNUSABLE[kind]
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(RunDirectoryError, match=reason) as refused:
        begin_launch(path, num_workers=2)
    assert "Nothing was started" in str(refused.value)
    assert "move it away and go on with `shoal resume`" in str(refused.value)
    with pytest.raises(JournalFailed, match=reason):
        Journal(path, launch=1)
    assert before is None or path.read_bytes() == before


def test_an_empty_file_is_a_new_journal(path: Path) -> None:
    path.touch()
    assert begin_launch(path, num_workers=2) == 1


def test_a_journal_says_whose_it_is_and_of_which_version(path: Path) -> None:
    begin_launch(path, num_workers=2)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert db.execute("PRAGMA user_version").fetchone() == (VERSION,)
    db.close()


def test_a_fact_that_cannot_be_read_is_refused(path: Path) -> None:
    begun(path).close()
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO facts VALUES (1, 1, 0, 'join', '{\"type\": \"join\"}')")
    db.close()
    journal = Journal(path, launch=1)
    with pytest.raises(JournalFailed, match="rank"):
        journal.load()
    journal.close()


# ---- any entries ----------------------------------------------------------------------------------

numbers = st.integers(0, 5)
entries = st.one_of(
    st.builds(Join, numbers, numbers, numbers, numbers),
    st.builds(Reaped, numbers, numbers, st.integers(-64, 255)),
    st.builds(ViewFormed, numbers, st.integers(-1, 5), st.integers(-1, 5), numbers, st.lists(numbers)),
    st.builds(Granted, st.integers(1, 5), st.none() | st.tuples(st.text(), st.text())),
    st.builds(Saved, numbers, st.text(), numbers),
    st.builds(
        StoreChanged,
        st.dictionaries(st.text(max_size=5), st.none() | st.binary(max_size=9), max_size=4),
        st.dictionaries(st.integers(1, 2**62), st.tuples(numbers, st.just(StoreDone())), max_size=2),
    ),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(entries, max_size=4), max_size=6))
def test_what_is_read_back_is_the_sum_of_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Entry]]
) -> None:
    path = tmp_path_factory.mktemp("journal") / FILE_NAME
    journal = begun(path)
    for batch in batches:
        journal.write(batch)
    journal.close()
    again = Journal(path, launch=1)
    assert again.load() == remembered([entry for batch in batches for entry in batch])
    again.close()
