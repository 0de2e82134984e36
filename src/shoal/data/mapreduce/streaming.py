"""Map-reduce with programs that read lines and print `key<TAB>value` lines, by Hadoop Streaming's contract.

Inputs are divided at line ends into map tasks. A map task feeds its lines to the mapper, partitions
its output by a hash of the key, and sorts each partition by `sort(1)`. A reduce task merges one
partition of all map tasks, in their order, into the reducer. So the result is the same for any
number of workers, here and on an engine. A task writes under a name of its attempt and renames at
the end: a failed one is retried, alone.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fsspec.compression import compr
from fsspec.utils import infer_compression

from shoal.data.files import SharedFiles
from shoal.data.mapreduce.programs import Programs
from shoal.engines.tasks import run_tasks, session
from shoal.errors import ConfigError, DataError

SPLIT_BYTES = 64 << 20
MAX_LINE = 64 << 20
BUFFER = 1 << 20
_SORT = ("sort", "-s", "-t", "\t", "-k1,1")
_BYTEWISE = {"LC_ALL": "C"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingConfig:
    """One map-reduce over lines."""

    mapper: str
    """Command that reads lines of the input and prints `key<TAB>value` lines."""

    reducer: str = ""
    """Command that reads those lines, ordered by key, and prints the result; empty: the mapper's lines are the result."""

    combiner: str = ""
    """Command that reduces the lines of one map task before they are passed on."""

    num_reducers: int = 1
    """Parts of the result."""

    max_attempts: int = 4
    """Attempts of a task; Hadoop's default."""

    split_bytes: int = SPLIT_BYTES
    """Bytes of a map task; a compressed file is one."""


@dataclass(frozen=True, slots=True)
class _Split:
    """Lines of a file that begin within a range of bytes."""

    number: int
    url: str
    start: int
    end: int | None
    """None: to the end of the file, whatever its length is."""

    def __str__(self) -> str:
        return self.url if self.end is None else f"{self.url}, bytes {self.start} to {self.end}"


def map_reduce_lines(
    config: StreamingConfig, inputs: Sequence[str], output: str, *, on: str = "", workers: int = 1
) -> int:
    """Run programs over the lines of files into `output/part-00000` and so on; returns the number of map tasks."""
    for role, command in (
        ("mapper", config.mapper),
        ("reducer", config.reducer),
        ("combiner", config.combiner),
    ):
        _refuse_command(role, command)
    if not config.reducer and (config.combiner or config.num_reducers > 1):
        raise ConfigError(
            f"--{'combiner' if config.combiner else 'reducers'} is for a job with a --reducer, and none is given. Nothing was "
            "started; without one the lines of the mappers are the result."
        )
    if "://" in output:
        raise ConfigError(
            f"the output {output} is a URL, and parts are renamed when they are whole, which takes a file system. Nothing was "
            "started; name a folder, and copy it there afterwards."
        )
    target = Path(output).absolute()  # tasks of an engine run in another directory
    if target.exists():
        raise ConfigError(f"the output {output} exists. Nothing was started; remove it, or name another.")
    splits = list(_splits(inputs, config.split_bytes))
    folder, programs = None, Programs()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        mapping = _MapTask(config, programs, str(folder), os.getcwd())
        with session(on):
            run_tasks(mapping, splits, on=on, workers=workers, attempts=config.max_attempts, end=programs.end)
            if config.reducer:
                reducing = _ReduceTask(config, programs, str(folder), os.getcwd(), len(splits))
                numbers = range(config.num_reducers)
                run_tasks(
                    reducing, numbers, on=on, workers=workers, attempts=config.max_attempts, end=programs.end
                )
        (folder / "out").mkdir(exist_ok=True)
        (folder / "out" / "_SUCCESS").touch()
        os.rename(folder / "out", target)
    except OSError as error:
        raise DataError(
            f"map-reduce cannot go on: {error.strerror or error}. No output was written to {output}, and the input is as it was. Beside "
            "the output it needs room for all that the mappers print."
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return len(splits)


def _refuse_command(role: str, command: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--{role} {command}: {error}. Nothing was started.") from None
    if not words and role == "mapper":
        raise ConfigError("--mapper is empty. Nothing was started.")
    if words and shutil.which(words[0]) is None:
        there = "is not executable; chmod +x it" if Path(words[0]).exists() else "is not there"
        raise ConfigError(f"the {role} {words[0]} {there}. Nothing was started.")


def _splits(inputs: Sequence[str], split_bytes: int) -> Iterator[_Split]:
    number = 0
    for url, nbytes, _ in SharedFiles().expand(list(inputs)):
        if "://" not in url:
            if not os.path.isfile(url):  # its length is not known before it has been read
                raise ConfigError(
                    f"the input {url} is no plain file: a pipe or a device cannot be cut into tasks. Nothing was started; write "
                    "it to a file first."
                )
            url = os.path.abspath(url)
        is_whole = infer_compression(url) is not None
        for start in [0] if is_whole else range(0, max(1, nbytes), split_bytes):
            yield _Split(number, url, start, None if is_whole else min(start + split_bytes, nbytes))
            number += 1


@dataclass(frozen=True, slots=True)
class _MapTask:
    config: StreamingConfig
    programs: Programs
    folder: str
    directory: str
    """Directory of the command: programs are named from there."""

    def __call__(self, split: _Split) -> None:
        config = self.config
        if not config.reducer:
            out = Path(self.folder) / "out"
            out.mkdir(exist_ok=True)
            with _whole(out / f"part-{split.number:05}") as file:
                for line in self._mapped(split):
                    file.write(line)
            return
        attempt = Path(tempfile.mkdtemp(prefix=f"attempt-{split.number}-", dir=self.folder))
        names = [attempt / str(part) for part in range(config.num_reducers)]
        files = [
            name.open("wb", buffering=max(io.DEFAULT_BUFFER_SIZE, BUFFER // len(names))) for name in names
        ]
        try:
            for line in self._mapped(split):
                key = line.rstrip(b"\n").split(b"\t", 1)[0]
                files[zlib.crc32(key) % len(files)].write(line)
        finally:
            for file in files:
                file.close()
        for name in names:
            _sorted(self.programs, name, str(split))
            if config.combiner:
                self._combine(split, name)
        done = Path(self.folder) / f"map-{split.number}"
        if not done.exists():  # of a copy of this task that was quicker
            os.rename(attempt, done)

    def _mapped(self, split: _Split) -> Iterator[bytes]:
        variables = {"mapreduce_map_input_file": split.url, "mapreduce_task_partition": str(split.number)}
        yield from _piped(
            self.programs, self.config.mapper, "mapper", str(split), self.directory, _lines(split), variables
        )

    def _combine(self, split: _Split, name: Path) -> None:
        combined = name.with_suffix(".combined")
        with name.open("rb") as lines, combined.open("wb") as file:
            for line in _piped(
                self.programs, self.config.combiner, "combiner", str(split), self.directory, lines, {}
            ):
                file.write(line)
        os.rename(combined, name)
        _sorted(self.programs, name, str(split))


@dataclass(frozen=True, slots=True)
class _ReduceTask:
    config: StreamingConfig
    programs: Programs
    folder: str
    directory: str
    num_maps: int

    def __call__(self, number: int) -> None:
        parts = [str(Path(self.folder) / f"map-{each}" / str(number)) for each in range(self.num_maps)]
        out = Path(self.folder) / "out"
        out.mkdir(exist_ok=True)
        variables = {"mapreduce_task_partition": str(number)}
        with (
            # Names by a file: a command line holds too few.
            self.programs.start(
                [*_SORT, "-m", "-T", self.folder, "--files0-from=-"],
                env={**os.environ, **_BYTEWISE},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            ) as merge,
            merge,
            _whole(out / f"part-{number:05}") as file,
        ):
            assert merge.stdin is not None
            assert merge.stdout is not None
            assert merge.stderr is not None
            merge.stdin.write(b"\0".join(map(os.fsencode, parts)))
            merge.stdin.close()
            where = f"partition {number} of {self.config.num_reducers}"
            for line in _piped(
                self.programs, self.config.reducer, "reducer", where, self.directory, merge.stdout, variables
            ):
                file.write(line)
            merge.stdout.close()  # a reducer that stopped reading leaves lines behind
            if merge.wait() not in (0, -signal.SIGPIPE):
                raise _unsorted(merge.stderr.read(), where)


def _lines(split: _Split) -> Iterator[bytes]:
    """Lines that begin in the split; the one that begins before it belongs to the split before."""
    unpacked = compr[infer_compression(split.url) if split.end is None else None]
    with SharedFiles().open(split.url) as raw, unpacked(raw, mode="rb") as file:
        at = split.start
        if at > 0:
            file.seek(at - 1)
            at += len(file.readline(MAX_LINE)) - 1
        while split.end is None or at < split.end:
            line = file.readline(MAX_LINE)
            if not line:
                return
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                raise _failed(
                    "reader", str(split), f"the line at byte {at} is longer than {MAX_LINE >> 20} MiB"
                )
            at += len(line)
            yield line.removesuffix(b"\n").removesuffix(b"\r") + b"\n"  # as Hadoop's reader ends lines


def _piped(
    programs: Programs,
    command: str,
    role: str,
    where: str,
    directory: str,
    lines: Iterator[bytes] | IO[bytes],
    variables: dict[str, str],
) -> Iterator[bytes]:
    """Lines that a program, run in `directory`, prints for these. DataError where it fails, or prints what is no text."""
    with tempfile.TemporaryFile() as said, contextlib.ExitStack() as stack:
        try:
            process = stack.enter_context(
                programs.start(
                    shlex.split(command),
                    cwd=directory,
                    env={**os.environ, **variables},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    bufsize=BUFFER,
                )
            )
        except OSError as error:
            hint = "; a script begins with a line such as #!/usr/bin/env python3" * (
                error.errno == errno.ENOEXEC
            )
            raise _failed(
                f"{role} {command}", where, f"it cannot be started ({error.strerror}{hint})"
            ) from None
        assert process.stdin is not None
        assert process.stdout is not None
        stack.callback(process.stdout.close)
        problems: list[BaseException] = []
        feeder = threading.Thread(target=_feed, args=(process.stdin, lines, problems), daemon=True)
        feeder.start()
        for number, line in enumerate(process.stdout, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                raise _failed(
                    f"{role} {command}",
                    where,
                    f"line {number} of what it printed is not UTF-8 text: {line[:60]!r}",
                ) from None
            yield line if line.endswith(b"\n") else line + b"\n"
        code = process.wait()
        feeder.join()
        if problems:
            raise problems[0]
        if code:
            said.seek(0)
            words = said.read()[-2000:].decode(errors="replace").strip().splitlines()
            raise _failed(
                f"{role} {command}",
                where,
                f"it ended with exit code {code}; last it said: {words[-1] if words else 'nothing'}",
            )


def _feed(stdin: IO[bytes], lines: Iterator[bytes] | IO[bytes], problems: list[BaseException]) -> None:
    try:
        with stdin:
            for line in lines:
                stdin.write(line)
    except BrokenPipeError:
        return  # it wanted no more, which its exit code judges
    except Exception as error:
        problems.append(error)


def _failed(program: str, where: str, problem: str) -> DataError:
    return DataError(
        f"{program} failed on {where}: {problem}. No output was written, and the input is as it was; run the program by hand on "
        "those lines, then start again."
    )


def _sorted(programs: Programs, name: Path, where: str) -> None:
    with programs.start(
        [*_SORT, "-T", str(name.parent), "-o", str(name), str(name)],
        env={**os.environ, **_BYTEWISE},
        stderr=subprocess.PIPE,
    ) as sort:
        _, said = sort.communicate()
        if sort.returncode:
            raise _unsorted(said, where)


def _unsorted(said: bytes, where: str) -> DataError:
    return DataError(
        f"the lines of {where} cannot be sorted: {said.decode(errors='replace').strip() or 'sort(1) was killed'}. No output was "
        "written, and the input is as it was."
    )


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name when it is whole."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with part.open("wb", buffering=BUFFER) as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
