"""Finding and reading files where every host sees them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import fsspec
import pytest

from shoal.data.files import SharedFiles, ending_of, in_threads
from shoal.errors import ConfigError, FileLost, NoFiles


def names(files: SharedFiles, where: object, *endings: str) -> list[str]:
    return [Path(info.url).name for info in files.expand(where, endings)]  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.csv", "a.CSV", "deep/c.csv", ".hidden.csv", "_tmp/d.csv", "e.txt", "[1].csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_a_directory_gives_what_has_the_ending_sorted_and_nothing_hidden(folder: Path) -> None:
    assert names(SharedFiles(), folder, ".csv") == ["[1].csv", "a.CSV", "b.csv", "c.csv"]


def test_patterns_lists_and_plain_paths(folder: Path) -> None:
    files = SharedFiles()
    assert names(files, f"{folder}/*.csv") == ["[1].csv", "b.csv"]
    assert sorted(names(files, f"{folder}/**/*.csv")) == ["[1].csv", "b.csv", "c.csv", "d.csv"]
    assert names(files, [folder / "e.txt", f"{folder}/b*"]) == ["e.txt", "b.csv"]  # a list keeps its order
    assert names(files, f"{folder}/[1].csv") == ["[1].csv"]  # a name that is there is no pattern
    assert names(files, f"file://{folder}/b.csv") == ["b.csv"]


def test_a_file_that_is_named_twice_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"b.csv is named twice, so its samples would be too"):
        SharedFiles().expand([f"{folder}/b.csv", f"{folder}/b*"])


def test_ranges_and_open_files(folder: Path) -> None:
    files = SharedFiles()
    [info] = files.expand(folder / "b.csv")
    assert info.num_bytes == 5
    assert files.read(info.url, 1, 4) == b".cs"
    assert files.read(info.url, 2, 2) == b""
    with files.open(info.url) as file:
        file.seek(2)
        assert file.read() == b"csv"
    with pytest.raises(FileLost, match="it gave 1 bytes of the 6 wanted from byte 4 on"):
        files.read(info.url, 4, 10)


def test_urls_of_file_systems(folder: Path) -> None:
    system = fsspec.filesystem("memory")
    for name in ("x/b.csv", "x/a.csv", "x/_no/c.csv", "x/d.txt"):
        system.pipe(f"/{name}", name.encode())
    try:
        files = SharedFiles()
        assert names(files, "memory://x", ".csv") == ["a.csv", "b.csv"]
        assert names(files, "memory://x/*.csv") == ["a.csv", "b.csv"]
        [info] = files.expand("memory://x/b.csv")
        assert files.read(info.url, 2, 5) == b"b.c"
        with files.open(info.url) as file:
            assert file.read() == b"x/b.csv"
        system.pipe("/x/b.csv", b"other bytes")
        with pytest.raises(FileLost, match="it changed since it was found: 7 bytes then, 11 now"):
            files.read(info.url, 0, 3)
        system.rm("/x/b.csv")
        with pytest.raises(FileLost, match="it is not there any more"):
            files.open(info.url)
        with pytest.raises(NoFiles, match="the pattern matches no file"):
            files.expand("memory://x/*.parquet")
        with pytest.raises(
            NoFiles, match=r"of its 2 files none ends in .jsonl \(endings there: .csv, .txt\)"
        ):
            files.expand("memory://x", [".jsonl"])
        with pytest.raises(
            NoFiles, match=r"there is nothing to read at memory://y/z.csv: there is no such file"
        ):
            files.expand("memory://y/z.csv")
    finally:
        system.rm("/x", recursive=True)


def test_urls_through_one_another(folder: Path) -> None:
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        archive.writestr("a.csv", "first")
        archive.writestr("b.csv", "second")
    files = SharedFiles()
    found = files.expand(f"zip://*.csv::file://{folder}/all.zip")
    assert [files.read(info.url, 0, info.num_bytes) for info in found] == [b"first", b"second"]


def test_a_scheme_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nosuch://a/b.csv cannot be opened: .*nosuch.*Nothing was read"):
        SharedFiles().expand("nosuch://a/b.csv")


def test_the_same_size_at_another_time_is_another_file(folder: Path) -> None:
    files = SharedFiles()
    [info] = files.expand(folder / "b.csv")
    os.utime(info.url, ns=(5, 5))
    with pytest.raises(
        FileLost, match=r"it was written again since it was found \(its time of change is another\)"
    ):
        files.read(info.url, 0, 1)
    files.expand(folder / "b.csv")  # looking again is agreeing
    assert files.read(info.url, 0, 1) == b"b"


def test_a_directory_cannot_be_read_as_a_file(folder: Path) -> None:
    (folder / "d.csv").mkdir()
    with pytest.raises(NoFiles, match="the directory holds no file"):
        SharedFiles().expand(folder / "d.csv")


def test_endings() -> None:
    assert [ending_of(name) for name in ("a/b.csv.gz", "a.b/c", ".x", "Q.CSV")] == [".csv.gz", "", "", ".csv"]


def test_results_come_in_the_order_of_the_items_and_errors_come_through() -> None:
    assert in_threads(lambda item: item * 2, list(range(20))) == list(range(0, 40, 2))
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda item: 1 // item, [1, 0])


def test_what_reads_files_is_loaded_when_it_is_first_used(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    code = f"""
import sys
import shoal.data.dataset
def loaded(*names):
    return [name for name in names if name in sys.modules]
print(loaded("pyarrow", "datasets", "fsspec", "pandas", "adbc_driver_manager"))
list(shoal.data.dataset.Dataset.from_csv({str(tmp_path / "a.csv")!r}).batch(1))
print(loaded("datasets", "pandas", "adbc_driver_manager"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]


def test_an_error_of_a_stores_own_client_is_one_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnError(Exception):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise OwnError("no credentials")

    fsspec.filesystem("memory").pipe_file("/store/a.csv", b"x\n1\n")
    files = SharedFiles()
    [found] = files.expand("memory://store/a.csv")
    monkeypatch.setattr(fsspec.filesystem("memory"), "info", refuse)
    with pytest.raises(FileLost, match="OwnError: no credentials"):
        files.read(found.url, 0, 1)
    with pytest.raises(NoFiles, match="OwnError: no credentials"):
        files.expand("memory://store/a.csv")
