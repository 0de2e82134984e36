"""Files of one host read at others: several hosts in one process, each with a folder and a block server of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.hosts.authority import Authority
from shoal.data.remote import block_server, blocks, located_files
from shoal.data.remote.block_server import BlockServer
from shoal.data.remote.located_files import LocatedFiles, LocationConfig, files_at
from shoal.data.remote.peers import BlockConnection, PeerHosts, ServerAddress
from shoal.errors import ConfigError, DataError, FileLost, NoFiles, WireError
from shoal.runtime.transport.messages.blocks import (
    AskBlock,
    AskFiles,
    BlockRefused,
    BlocksNoted,
    FilesAre,
    ShareFiles,
    TakeBlock,
    UseCache,
    WhichBlocks,
)
from waiting import wait_until

BLOCK = 1000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(block_server, "FETCH_TIMEOUT_S", 2.0)
    monkeypatch.setattr(located_files, "_STALLED_S", 20.0)
    yield
    block_server.close_block_servers()


def contents(name: str, num_bytes: int) -> bytes:
    return bytes((sum(name.encode()) + number) % 251 for number in range(num_bytes))


def write(folder: Path, name: str, num_bytes: int) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    data = contents(name, num_bytes)
    (folder / name).write_bytes(data)
    return data


class Book(dict[str, str]):
    """The coordinator's address book."""

    def publish(self, name: str, address: str) -> None:
        self[name] = address

    def lookup(self, name: str) -> str | None:
        return self.get(name)


class Cluster:
    """Several hosts' files, opened at the same time as their scripts would."""

    def __init__(
        self, tmp_path: Path, num_hosts: int, authority: Authority, book: Book, **options: Any
    ) -> None:
        config = LocationConfig(**{"kind": "central", "timeout_s": 5.0, **options})
        self.authority = authority
        self.files = [
            LocatedFiles(
                config,
                PeerHosts(
                    tmp_path / "hosts",
                    rank=host,
                    homes=range(num_hosts),
                    bind="127.0.0.1",
                    credentials=self.authority.issue(f"worker-{host}", 1),
                    book=book,
                ),
            )
            for host in range(num_hosts)
        ]

    def expand(self, *wheres: Any) -> list[Any]:
        with ThreadPoolExecutor(len(self.files)) as pool:
            wheres = wheres if len(wheres) == len(self.files) else wheres * len(self.files)
            return list(pool.map(lambda files, where: files.expand(where), self.files, wheres))

    def stage(self) -> None:
        with ThreadPoolExecutor(len(self.files)) as pool:
            list(pool.map(LocatedFiles.stage, self.files))

    def close(self) -> None:
        for files in self.files:
            files.close()

    def server(self, host: int) -> BlockServer:
        return block_server._servers[self.files[host]._hosts.folder()][0]

    def address(self, host: int) -> ServerAddress:
        address = self.files[host]._hosts.server_of(host)
        assert address is not None
        return address


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    made: list[Cluster] = []
    authority, book = Authority("job"), Book()

    def make(num_hosts: int, **options: Any) -> Cluster:
        made.append(Cluster(tmp_path, num_hosts, authority, book, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_what_one_host_has_all_can_read(cluster: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "data", "a.bin", 4321)
    hosts = cluster(3)
    infos = hosts.expand(str(tmp_path / "data" / "*.bin"))
    assert infos[0] == infos[1] == infos[2]
    [info] = infos[0]
    for files in hosts.files:
        assert files.read(info.url, 990, 2500) == data[990:2500]
        with files.open(info.url) as file:
            file.seek(-10, 2)
            assert file.read() == data[-10:]
            file.seek(0)
            assert file.read() == data


def test_a_host_keeps_what_its_first_worker_read(cluster: Any, tmp_path: Path) -> None:
    write(tmp_path / "data", "a.bin", 3000)
    hosts = cluster(2)
    [[info], _] = hosts.expand(str(tmp_path / "data" / "a.bin"))
    second = LocatedFiles(hosts.files[1]._config, hosts.files[1]._hosts)
    second.expand(str(tmp_path / "data" / "a.bin"))
    hosts.files[1].read(info.url, 0, 3000)
    second.read(info.url, 0, 3000)
    second.close()
    assert hosts.files[1].origins == {"source": 3}
    assert second.origins == {}


def test_a_block_leaves_its_source_once_and_is_given_on_by_those_who_have_it(
    cluster: Any, tmp_path: Path
) -> None:
    write(tmp_path / "data", "a.bin", 5000)
    hosts = cluster(4)
    [[info], *_] = hosts.expand(str(tmp_path / "data" / "a.bin"))
    for files in hosts.files[1:]:
        files.read(info.url, 0, 5000)
    assert hosts.server(0).sent_bytes == 5000
    assert hosts.files[1].origins == {"source": 5}
    assert hosts.files[3].origins == {"host 2": 5}


@pytest.mark.parametrize(("spread", "times"), [("broadcast", 3), ("chain", 1)])
def test_spread_files_are_everywhere_before_they_are_read(
    cluster: Any, tmp_path: Path, spread: str, times: int
) -> None:
    data = write(tmp_path / "data", "a.bin", 20_500)
    hosts = cluster(4, spread=spread)
    [[info], *_] = hosts.expand(str(tmp_path / "data" / "a.bin"))
    hosts.stage()
    assert wait_until(lambda: hosts.server(0).sent_bytes == times * 20_500)
    for files in hosts.files:
        assert files.read(info.url, 0, 20_500) == data
        assert files.origins == {}  # nobody had to ask


@pytest.mark.parametrize("spread", ["broadcast", "chain"])
def test_a_block_that_is_held_or_not_needed_is_not_sent(cluster: Any, tmp_path: Path, spread: str) -> None:
    write(tmp_path / "data", "a.bin", 10_000)
    hosts = cluster(2, spread="on-demand")
    [[info], _] = hosts.expand(str(tmp_path / "data" / "a.bin"))
    hosts.files[1].read(info.url, 0, 2000)  # two blocks are there
    assert wait_until(lambda: hosts.server(0).sent_bytes == 2000)
    hosts.close()
    hosts = cluster(2, spread=spread)
    receiver, source = hosts.files[1], hosts.files[0]
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(receiver.expand, str(tmp_path / "data" / "a.bin"))
        # The source begins to spread as soon as it opens the file: the receiver's need must be known before.
        receiver._infos[info.url], receiver._holders[info.url] = info, [0]
        receiver.narrow(info.url, [(0, 5000)])
        source.expand(str(tmp_path / "data" / "a.bin"))
        coming.result()
    receiver.stage()
    assert wait_until(lambda: hosts.server(0).sent_bytes == 5000)
    assert not receiver._cache.has(blocks.FileBlock(info.url, info.stamp, 7))


def test_each_host_brings_what_it_has(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {
        name: write(tmp_path / "data", name, size) for name, size in (("a", 2500), ("b", 1500), ("c", 10))
    }
    held = [{"a", "c"}, {"b", "c"}, set()]
    hosts = cluster(3, kind="resident")
    for host, files in enumerate(hosts.files):
        # Three hosts that have different files at one place, as three machines would.
        expand = files._local.expand

        def own(where: Any, endings: Any, host: int = host, expand: Any = expand) -> Any:
            found = [info for info in expand(where, endings) if Path(info.url).name in held[host]]
            if not found:
                raise NoFiles(where="here", problem="none")
            return found

        monkeypatch.setattr(files._local, "expand", own)
    found = hosts.expand(str(tmp_path / "data" / "*"))
    assert found[0] == found[1] == found[2]
    assert [Path(info.url).name for info in found[0]] == ["a", "b", "c"]
    for host, files in enumerate(hosts.files):
        for info in found[0]:
            name = Path(info.url).name
            assert files.read(info.url, 0, info.num_bytes) == data[name]
            assert files.is_here(info.url) == (name in held[host])


def test_a_dead_link_of_the_chain_is_passed_over(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "data", "a.bin", 8000)
    hosts = cluster(4, spread="chain")
    where = str(tmp_path / "data" / "a.bin")
    hosts.expand(where)
    block_server.close_block_server(hosts.files[2]._hosts.folder())
    monkeypatch.setattr(located_files, "_STALLED_S", 0.1)
    hosts.stage()
    for files in hosts.files:
        assert files.read(where, 0, 8000) == data


def test_a_block_server_that_dies_is_followed_by_the_next_who_needs_it(cluster: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "data", "a.bin", 5000)
    hosts = cluster(2)
    where = str(tmp_path / "data" / "a.bin")
    hosts.expand(where)
    hosts.files[1].read(where, 0, 1000)
    block_server.close_block_servers()  # both hosts'
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(hosts.files[1].read, where, 0, 5000)
        hosts.files[0].expand(where)  # the replacement's script comes to the same line
        hosts.files[0].close()
        hosts.files[0]._server.ensure_connected()
        assert reading.result(60.0) == data
    assert hosts.files[1].origins["source"] == 5


def test_many_readers_of_one_host_fetch_a_block_once(cluster: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "data", "a.bin", 9000)
    hosts = cluster(2)
    where = str(tmp_path / "data" / "a.bin")
    hosts.expand(where)
    readers = [LocatedFiles(hosts.files[1]._config, hosts.files[1]._hosts) for _ in range(6)]
    barrier = threading.Barrier(6)

    def read(files: LocatedFiles) -> bytes:
        files.expand(where)
        barrier.wait()
        return files.read(where, 0, 9000)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(read, readers)) == [data] * 6
    for files in readers:
        files.close()
    # Counted once it is sent, which its reader may know a moment earlier.
    assert wait_until(lambda: hosts.server(0).sent_bytes >= 9000)
    assert hosts.server(0).sent_bytes == 9000


def test_a_cache_smaller_than_the_file_gives_the_same_bytes(cluster: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "data", "a.bin", 9500)
    hosts = cluster(2, cache_bytes=2500)
    where = str(tmp_path / "data" / "a.bin")
    hosts.expand(where)
    for _ in range(2):
        assert hosts.files[1].read(where, 0, 9500) == data
    kept = list((hosts.files[1]._hosts.folder() / "blocks").iterdir())
    assert sum(path.stat().st_size for path in kept) <= 2500


def test_a_file_that_changes_at_its_host_is_refused_there(cluster: Any, tmp_path: Path) -> None:
    write(tmp_path / "data", "a.bin", 5000)
    hosts = cluster(2)
    where = str(tmp_path / "data" / "a.bin")
    hosts.expand(where)
    write(tmp_path / "data", "a.bin", 4000)
    with pytest.raises(FileLost, match="5000 bytes then, 4000 now"):
        hosts.files[1].read(where, 0, 1000)


def test_a_host_that_never_opens_the_files_is_named(cluster: Any, tmp_path: Path) -> None:
    hosts = cluster(2, timeout_s=0.2)
    with pytest.raises(DataError, match=r"host 0 has not opened the files of central: .*a\.bin"):
        hosts.files[1].expand(str(tmp_path / "a.bin"))


def test_no_host_has_any(cluster: Any, tmp_path: Path) -> None:
    hosts = cluster(2, kind="resident")
    with pytest.raises(NoFiles, match="none of 2 hosts"):
        hosts.expand(str(tmp_path / "nothing*"))


@pytest.mark.parametrize(("location", "spread"), [("everywhere", "chain"), ("central", "carrier pigeon")])
def test_unknown_words_are_refused(location: str, spread: str) -> None:
    with pytest.raises(ConfigError, match=r"is not known: 'shared'|is not known: 'on-demand'"):
        files_at("somewhere", location, spread)


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_pieces_make_up_the_range(begin: int, end: int) -> None:
    covered = [
        number * BLOCK + at for number, first, last in blocks.pieces(begin, end) for at in range(first, last)
    ]
    assert covered == list(range(begin, end))
    assert all(0 <= first < last <= BLOCK for _, first, last in blocks.pieces(begin, end))


@given(
    st.sampled_from(["chain", "broadcast"]), st.dictionaries(st.integers(1, 6), st.sets(st.integers(0, 9)))
)
def test_every_host_gets_what_it_wants_once(how: str, wanted: dict[int, set[int]]) -> None:
    got: dict[int, list[int]] = {host: [] for host in wanted}
    for number, ways in blocks.routes(how, {host: sorted(numbers) for host, numbers in wanted.items()}):
        assert how == "broadcast" or len(ways) == 1
        for way in ways:
            for host in way:
                got[host].append(number)
    assert got == {host: sorted(numbers) for host, numbers in wanted.items()}


# ---- callers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "incarnation"), [("worker-1", 0), ("worker-2", 1), ("server-0", 0), ("host-1", 0), ("head", 0)]
)
def test_a_caller_that_is_no_worker_of_the_job_or_was_replaced_is_not_answered(
    cluster: Any, tmp_path: Path, name: str, incarnation: int
) -> None:
    where = str(tmp_path / "data" / "a.bin")
    write(tmp_path / "data", "a.bin", 3000)
    hosts = cluster(2)
    hosts.expand(where)  # worker-1 speaks in incarnation 1
    line = BlockConnection(hosts.address(0), hosts.authority.issue(name, incarnation))
    with pytest.raises(ConnectionError):
        line.ask(AskFiles(f"central: {where} ()"))
    line.close()
    assert hosts.files[1].read(where, 0, 3000)


def test_a_certificate_of_another_job_reaches_no_block_server(cluster: Any, tmp_path: Path) -> None:
    write(tmp_path / "data", "a.bin", 3000)
    hosts = cluster(2)
    hosts.expand(str(tmp_path / "data" / "a.bin"))
    with pytest.raises(WireError, match="no certificate of this job"):
        BlockConnection(hosts.address(0), Authority("another").issue("worker-1", 1))


def test_only_files_of_the_dataset_are_served_and_only_a_hosts_own_workers_say_which(
    cluster: Any, tmp_path: Path
) -> None:
    where = str(tmp_path / "data" / "a.bin")
    write(tmp_path / "data", "a.bin", 3000)
    write(tmp_path / "data", "secret", 100)
    hosts = cluster(3)
    [[info], *_] = hosts.expand(where)
    line = BlockConnection(hosts.address(0), hosts.authority.issue("worker-1", 1))
    assert isinstance(line.ask(AskFiles(f"central: {where} ()"))[0], FilesAre)
    secret = str(tmp_path / "data" / "secret")
    for refused in (
        AskBlock(secret, "", 0),
        ShareFiles("central: mine", [(secret, 100, "")]),
        UseCache(str(tmp_path / "elsewhere"), None),
        TakeBlock(where, info.stamp, 0, []),
    ):
        assert isinstance(line.ask(refused, b"x")[0], BlockRefused), refused
    assert isinstance(line.ask(AskBlock(secret, "", 0))[0], BlockRefused)
    assert isinstance(line.ask(AskBlock(where, info.stamp, 2**62))[0], BlockRefused)
    line.close()


def test_a_block_is_taken_once_from_whoever_was_told_to_send_it(cluster: Any, tmp_path: Path) -> None:
    write(tmp_path / "data", "a.bin", 3000)
    hosts = cluster(2)
    hosts.expand(str(tmp_path / "data" / "a.bin"))
    line = BlockConnection(hosts.address(1), hosts.authority.issue("worker-0", 1))
    assert len(line.ask(WhichBlocks("new", "1", 0, 2**62))[0].numbers) == block_server.WINDOW
    take = TakeBlock("new", "1", 3, [0, 0, 7])
    assert line.ask(take, b"x")[0] == BlocksNoted()
    assert isinstance(line.ask(take, b"x")[0], BlockRefused)
    line.close()


def test_silent_connections_keep_no_worker_out(cluster: Any, tmp_path: Path) -> None:
    where = str(tmp_path / "data" / "a.bin")
    data = write(tmp_path / "data", "a.bin", 3000)
    hosts = cluster(2)
    hosts.expand(where)
    host, _, port = hosts.address(0).address.removeprefix("tls://").partition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(3 * block_server.MAX_STRANGERS)]
    assert hosts.files[1].read(where, 0, 3000) == data
    assert len(hosts.server(0)._strangers) <= block_server.MAX_STRANGERS
    for each in silent:
        each.close()


def test_a_second_dataset_with_another_cache_is_refused(cluster: Any, tmp_path: Path) -> None:
    where = str(tmp_path / "data" / "a.bin")
    write(tmp_path / "data", "a.bin", 3000)
    hosts = cluster(2)
    hosts.expand(where)
    other = LocatedFiles(LocationConfig(kind="central", cache_bytes=10), hosts.files[1]._hosts)
    with pytest.raises(DataError, match="the same cache_directory"):
        other.expand(where)
    other.close()
