"""`shoal map-reduce`: real programs over real files, by Hadoop Streaming's contract."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal import system
from shoal.data.mapreduce import streaming
from shoal.data.mapreduce.streaming import StreamingConfig, map_reduce_lines
from shoal.engines.tasks import run_tasks
from shoal.errors import ConfigError, DataError
from waiting import wait_until

WORDS = "tr -s ' ' '\\n'"
COUNT = "uniq -c"


def result(folder: Path) -> list[list[str]]:
    return [path.read_text().splitlines() for path in sorted(folder.glob("part-*"))]


def counts(folder: Path) -> dict[str, int]:
    lines = [line.split(maxsplit=1) for part in result(folder) for line in part]
    assert len({word for _, word in lines}) == len(lines), "a key in two places"
    return {word: int(number) for number, word in lines}


@pytest.mark.parametrize("num_reducers", [1, 3])
def test_words_are_counted_as_in_one_process(tmp_path: Path, num_reducers: int) -> None:
    texts = ["a b a\nc", "b c c\n\n", "a d"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "3.txt.gz").write_bytes(gzip.compress(b"d d\na\n"))
    config = StreamingConfig(mapper=WORDS, reducer=COUNT, num_reducers=num_reducers)
    assert map_reduce_lines(config, [str(tmp_path / "*.txt*")], str(tmp_path / "out"), workers=3) == 4
    found = counts(tmp_path / "out")
    found.pop("", None)
    assert found == Counter("abacbccaddda")
    assert (tmp_path / "out" / "_SUCCESS").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=12), max_size=20
    ),
    split_bytes=st.integers(1, 40),
    ends=st.booleans(),
)
def test_every_line_is_in_one_split(tmp_path: Path, lines: list[str], split_bytes: int, ends: bool) -> None:
    file = tmp_path / "lines"
    file.write_bytes("\n".join(lines).encode() + (b"\n" if ends and lines else b""))
    splits = list(streaming._splits([str(file)], split_bytes))
    found = b"".join(line for split in splits for line in streaming._lines(split))
    expected = file.read_bytes()
    assert found == (expected if not expected or expected.endswith(b"\n") else expected + b"\n")


def test_lines_of_a_key_come_in_the_order_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("".join(f"{key}\t{number}\n" for number in range(500) for key in "ba"))
    config = StreamingConfig(mapper="cat", reducer="cat", split_bytes=300)
    assert map_reduce_lines(config, [str(tmp_path / "in")], str(tmp_path / "out"), workers=4) > 5
    [lines] = result(tmp_path / "out")
    assert lines == [f"{key}\t{number}" for key in "ab" for number in range(500)]


def test_a_failed_task_alone_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("".join(f"{number}\n" for number in range(100)))
    program = tmp_path / "fails_once.sh"
    program.write_text(
        f"#!/bin/sh\necho x >> {tmp_path}/runs-$mapreduce_task_partition\n[ -e {tmp_path}/failed ] && exec cat\n"
        f'[ "$mapreduce_task_partition" = 2 ] && touch {tmp_path}/failed && exit 7\nexec cat\n'
    )
    program.chmod(0o755)
    config = StreamingConfig(mapper=str(program), reducer="sort -n", split_bytes=60)
    num_maps = map_reduce_lines(config, [str(tmp_path / "in")], str(tmp_path / "out"))
    assert result(tmp_path / "out") == [[str(number) for number in range(100)]]
    runs = [len((tmp_path / f"runs-{number}").read_text().split()) for number in range(num_maps)]
    assert runs == [2 if number == 2 else 1 for number in range(num_maps)]


@pytest.mark.parametrize(
    ("mapper", "words"),
    [
        ("sh -c 'cat >/dev/null; echo no such city >&2; exit 3'", "exit code 3; last it said: no such city"),
        (
            "sh -c 'cat >/dev/null; echo good; printf \"\\377\\376\\n\"'",
            "line 2 of what it printed is not UTF-8 text",
        ),
    ],
)
def test_a_mapper_that_fails_or_prints_garbage_is_named_with_its_lines(
    tmp_path: Path, mapper: str, words: str
) -> None:
    (tmp_path / "in").write_text("a\n")
    with pytest.raises(DataError, match="bytes 0 to 2") as caught:
        map_reduce_lines(
            StreamingConfig(mapper=mapper, reducer="cat", max_attempts=2),
            [str(tmp_path / "in")],
            str(tmp_path / "out"),
        )
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_reducer_may_leave_early(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(
        "".join(f"{number:07}\n" for number in range(400_000))
    )  # more than pipes hold
    config = StreamingConfig(mapper="cat", reducer="head -n 1")
    map_reduce_lines(config, [str(tmp_path / "in")], str(tmp_path / "out"))
    assert result(tmp_path / "out") == [["0000000"]]


def test_lines_end_as_under_hadoop(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"a\r\nb\n\r\na\r")
    map_reduce_lines(
        StreamingConfig(mapper="cat", reducer="cat"), [str(tmp_path / "in")], str(tmp_path / "out")
    )
    assert (tmp_path / "out" / "part-00000").read_bytes() == b"\na\na\nb\n"


def test_tasks_run_in_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's workers were started elsewhere; names in the command are from where it was given."""

    def elsewhere(function: Callable[[Any], None], arguments: Iterable[Any], **_: Any) -> None:
        with contextlib.chdir("/"):
            for each in arguments:
                function(each)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(streaming, "run_tasks", elsewhere)
    Path("in").write_text("b\na\n")
    Path("copy.sh").write_text("#!/bin/sh\nexec cat\n")
    Path("copy.sh").chmod(0o755)
    map_reduce_lines(StreamingConfig(mapper="./copy.sh", reducer="sh copy.sh"), ["in"], "out")
    assert result(tmp_path / "out") == [["a", "b"]]


def test_a_full_disk_is_one_paragraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "in").write_text("a\n")
    monkeypatch.setattr(streaming, "run_tasks", full)
    with pytest.raises(DataError, match="No space left on device"):
        map_reduce_lines(StreamingConfig(mapper="cat"), [str(tmp_path / "in")], str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


ENDLESS = """#!/usr/bin/env python3
import os, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
with open("runs", "a") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
child.wait()
signal.pause()
"""


def endless_run(folder: Path, *words: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A run whose mapper, and what that started, sleeps and hears no SIGINT; and the ids of both."""
    (folder / "in").write_text("a\n")
    (folder / "endless.py").write_text(ENDLESS)
    (folder / "endless.py").chmod(0o755)
    mapper = " ".join(["./endless.py", *words])
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", "map-reduce", "--mapper", mapper, "--reducer", "cat", "in", "out"],
        cwd=folder,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell's background jobs ignore it
    )
    runs = folder / "runs"
    assert wait_until(lambda: runs.exists() and runs.read_text().endswith("\n"))
    return process, list(map(int, runs.read_text().split()))


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("words", "signum"), [((), signal.SIGINT), (("stubborn",), signal.SIGINT), ((), signal.SIGTERM)]
)
def test_interrupted_programs_end_and_are_not_started_again(
    tmp_path: Path, words: tuple[str, ...], signum: signal.Signals
) -> None:
    process, programs = endless_run(tmp_path, *words)
    process.send_signal(signum)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signum
    assert said.decode() == f"stopped by {signum.name}; no output was written.\n"
    assert not any(map(is_running, programs))
    assert len((tmp_path / "runs").read_text().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["endless.py", "in", "runs"]


@pytest.mark.skipif(not system.IS_LINUX, reason="only Linux ends a program with its parent")
def test_programs_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    process, (program, child) = endless_run(tmp_path)
    process.kill()
    process.communicate()
    try:
        assert wait_until(lambda: not is_running(program))
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_task_that_ctrl_c_ended_is_not_started_again() -> None:
    begun = []

    def interrupted(number: int) -> None:
        begun.append(number)
        os.kill(os.getpid(), signal.SIGINT)  # as a terminal does, to its program and to this process
        raise DataError("its program ended")

    with pytest.raises(KeyboardInterrupt):
        run_tasks(interrupted, [0])
    assert begun == [0]


def test_what_cannot_be_started_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a\n")
    (tmp_path / "not-executable").touch()
    there = str(tmp_path / "in")
    for config, output, words in (
        (StreamingConfig(mapper="cat"), str(tmp_path), "exists"),
        (StreamingConfig(mapper="./no-such"), "out", "is not there"),
        (StreamingConfig(mapper=str(tmp_path / "not-executable")), "out", "chmod +x"),
        (StreamingConfig(mapper="cat 'a"), "out", "No closing quotation"),
        (StreamingConfig(mapper="cat"), "s3://bucket/out", "is a URL"),
        (StreamingConfig(mapper="cat", num_reducers=2), "out", "--reducers is for a job with a --reducer"),
        (StreamingConfig(mapper="cat", combiner="cat"), "out", "--combiner is for a job with a --reducer"),
    ):
        with pytest.raises(ConfigError, match=words.replace("+", r"\+")):
            map_reduce_lines(config, [there], output)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no plain file"):
        map_reduce_lines(StreamingConfig(mapper="cat"), [str(tmp_path / "pipe")], str(tmp_path / "out"))
    (tmp_path / "not-executable").write_text("cat\n")
    (tmp_path / "not-executable").chmod(0o755)
    config = StreamingConfig(mapper=str(tmp_path / "not-executable"))
    with pytest.raises(DataError, match="begins with a line such as #!/usr/bin/env python3"):
        map_reduce_lines(config, [there], str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="tasks run on ray and spark"):
        map_reduce_lines(StreamingConfig(mapper="cat"), [there], str(tmp_path / "out"), on="mpi")
