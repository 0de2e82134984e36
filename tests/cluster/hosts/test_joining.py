"""Joining over real sockets: who is admitted, and what each refusal says."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.cluster.hosts import agent, authority, files, joining, opening, seats
from shoal.cluster.hosts.agent import HostAgent
from shoal.cluster.hosts.authority import Authority
from shoal.cluster.hosts.files import FileService, copy_shipped, measured_link
from shoal.cluster.hosts.joining import Admission, Door, JobFacts
from shoal.cluster.hosts.run_copy import RunCopy
from shoal.errors import ClusterError, ConfigError, HostNotAdmitted, RunDirectoryError, WireError
from shoal.runtime.health import Health
from shoal.runtime.transport import tls
from shoal.runtime.transport.framing import read_message, send_message
from shoal.runtime.transport.messages.hosts import AgentReady, AgentStart, HostRefused, ListFiles, ReadFile
from waiting import wait_until

KEY = "a-key-of-more-than-twenty-characters"


class Head:
    """A door on loopback, for hosts 1 and 2."""

    def __init__(
        self,
        folder: Path,
        *,
        numbers: tuple[int, ...] = (1, 2),
        names: dict[int, str] | None = None,
        services: tuple[str, ...] = (),
    ) -> None:
        self.script = folder / "train.py"
        self.script.write_text("print('hello')\n")
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.authority = Authority("job")
        listener = tls.listen("127.0.0.1")
        self.port = listener.getsockname()[1]
        self.address = f"shoal://127.0.0.1:{self.port}"
        facts = JobFacts(
            job="job",
            script=str(self.script),
            script_hash=joining.file_hash(str(self.script)),
            run_dir=str(self.run_dir),
            run_dir_mark=joining.make_mark(self.run_dir),
            is_shipped=False,
        )
        files = FileService(self.run_dir, folder)
        self.door = Door(listener, self.authority, KEY, facts, numbers, files, names or {}, services)

    def join(self, key: str = KEY, *, wants: int = -1, role: str = "") -> Admission:
        return joining.join(self.address, key, timeout_s=10.0, wants=wants, role=role)

    def agent_of(self, admission: Admission) -> ssl.SSLSocket:
        """The connection of an admitted host's agent, once the head has it."""
        number, incarnation = admission.number, admission.credentials.incarnation
        stream = admission.credentials.connect(
            self.address.replace("shoal", "tls"), expect="head", timeout_s=5
        )
        send_message(stream, AgentReady(number, incarnation, os.getpid()))
        wait_until(lambda: self.door.seats[number].agent_awaited_since is None)
        return stream


@pytest.fixture
def open_head(tmp_path: Path) -> Iterator[Callable[..., Head]]:
    with contextlib.ExitStack() as stack:

        def start(**options: object) -> Head:
            head = Head(tmp_path, **options)  # type: ignore[arg-type]
            stack.callback(head.door.close)
            return head

        yield start


@pytest.fixture
def hostnames(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Machines of one test have one name and address: give the next one another."""
    return lambda name: monkeypatch.setattr(joining.platform, "node", lambda: name)


def test_a_host_with_the_key_is_given_a_number_and_a_certificate_of_it(
    open_head: Callable[..., Head],
) -> None:
    head = open_head()
    admission = head.join()
    assert (admission.number, admission.credentials.name, admission.sees_run_dir) == (1, "host-1", True)
    stream = admission.credentials.connect(head.address.replace("shoal", "tls"), expect="head", timeout_s=5)
    with stream:
        send_message(stream, AgentReady(1, 0, os.getpid()))
        deadline = time.monotonic() + 5
        while not (joined := head.door.joined()) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [(each.number, each.incarnation) for each in joined] == [(1, 0)]
    joined[0].stream.close()


def test_a_wrong_key_is_refused_before_anything_of_the_job_is_told(open_head: Callable[..., Head]) -> None:
    head = open_head()
    with pytest.raises(HostNotAdmitted, match="the join key is not this job's"):
        head.join("another-key-of-twenty-characters")
    assert "the join key" in head.door.refusals.get(timeout=5)
    assert head.door.seats == {}


def test_the_key_is_used_up_when_all_hosts_have_joined_and_serves_again_for_one_that_was_lost(
    open_head: Callable[..., Head], hostnames: Callable[[str], None]
) -> None:
    head = open_head(numbers=(1,))
    hostnames("a")
    head.join()
    hostnames("b")
    with pytest.raises(HostNotAdmitted, match="the key is used up"):
        head.join()
    head.door.release(1, 0)
    again = head.join()
    assert (again.number, again.credentials.incarnation) == (1, 1)


def test_services_of_one_machine_are_given_numbers_of_their_role_until_all_have_joined(
    open_head: Callable[..., Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = open_head(numbers=(1, 2, 3), services=("coordinator", "worker", "worker", "server"))
    pids = iter(range(100, 200))
    monkeypatch.setattr(joining.os, "getpid", lambda: next(pids))
    assert [head.join(role=role).number for role in ("server", "worker", "worker")] == [3, 1, 2]
    monkeypatch.setattr(seats, "SEAT_TIMEOUT_S", 0.1)
    with pytest.raises(HostNotAdmitted, match="all 2 worker services of this job have joined"):
        head.join(role="worker")
    head.door.release(2, 0)
    assert head.join(role="worker").number == 2


@pytest.mark.parametrize(
    ("services", "role", "why"),
    [
        ((), "worker", "was started by `shoal run`.*join it with `shoal join`"),
        (("coordinator", "worker", "worker"), "server", "this job has no servers"),
    ],
)
def test_a_service_that_the_job_does_not_have_is_refused(
    open_head: Callable[..., Head], services: tuple[str, ...], role: str, why: str
) -> None:
    with pytest.raises(HostNotAdmitted, match=why):
        open_head(services=services).join(role=role)


def test_a_host_that_joins_twice_is_refused(
    open_head: Callable[..., Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = open_head()
    with head.agent_of(head.join()):
        monkeypatch.setattr(seats, "SEAT_TIMEOUT_S", 0.1)
        with pytest.raises(HostNotAdmitted, match="is host 1 of this job already"):
            head.join()


def test_a_host_that_was_interrupted_before_its_agent_came_joins_again(
    open_head: Callable[..., Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "SEAT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(seats, "AGENT_TIMEOUT_S", 0.5)
    head = open_head()
    assert [head.join().credentials.incarnation for _ in range(2)] == [0, 1]


def test_slots_that_an_engine_put_on_one_machine_are_hosts_of_their_own(
    open_head: Callable[..., Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "SEAT_TIMEOUT_S", 0.1)
    head = open_head()

    agents = contextlib.ExitStack()

    def join(wants: int, **options: Any) -> int:
        there = {"timeout_s": 10.0, "source": "127.0.0.1", **options}
        admission = joining.join(head.address, KEY, wants=wants, **there)
        agents.enter_context(head.agent_of(admission))
        return admission.number

    with agents:
        assert [join(number, cores=1) for number in (1, 2)] == [1, 2]
        with pytest.raises(HostNotAdmitted, match="is host 2 of this job already"):
            join(2, cores=1)
        head.door.release(1, 0)
        join(1)  # all of the machine, as by ssh
        head.door.release(2, 0)
        with pytest.raises(HostNotAdmitted, match="is host 1 of this job already"):
            join(2)


def test_a_handshake_that_hangs_and_ends_does_not_free_the_number_that_its_machine_has_got_anew(
    open_head: Callable[..., Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = open_head()
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE
    with plain.wrap_socket(socket.create_connection(("127.0.0.1", head.port))) as hung:
        joining._prove(hung, KEY.encode(), "127.0.0.1", -1, None, "")
        monkeypatch.setattr(seats, "AGENT_TIMEOUT_S", 0.0)
        again = head.join()
        assert (again.number, again.credentials.incarnation) == (1, 1)
    assert "hung up" in head.door.refusals.get(timeout=5)
    assert head.door.seats.keys() == {1}


def test_a_clone_behind_the_same_address_is_another_host_and_the_machine_itself_may_come_back(
    open_head: Callable[..., Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "AGENT_TIMEOUT_S", 0.0)  # the first one's agent does not come
    monkeypatch.setattr(seats, "SEAT_TIMEOUT_S", 0.2)
    head = open_head()
    first = head.join()
    own = joining.machine_id("127.0.0.1")
    with monkeypatch.context() as patch:
        # The same name, seen from the same address; a network card of its own.
        patch.setattr(joining, "machine_id", lambda own_address: bytes(32))
        clone = head.join()
    again = head.join()
    assert [(each.number, each.credentials.incarnation) for each in (first, clone, again)] == [
        (1, 0),
        (2, 0),
        (1, 1),
    ]
    assert {number: seat.machine for number, seat in head.door.seats.items()} == {1: own, 2: bytes(32)}


def test_named_hosts_get_the_number_of_their_name_and_others_are_refused(
    open_head: Callable[..., Head], hostnames: Callable[[str], None]
) -> None:
    head = open_head(names={1: "one.invalid", 2: "two.invalid"})
    hostnames("two.invalid")
    assert head.join().number == 2
    hostnames("three")
    with pytest.raises(
        HostNotAdmitted, match=r"is none of the hosts of this job: one\.invalid, two\.invalid"
    ):
        head.join()
    assert head.join(wants=1).number == 1  # as ssh starts it, whatever it calls itself


@pytest.mark.parametrize("what", ["python", "torch", "shoal"])
def test_another_version_is_named(
    open_head: Callable[..., Head], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    head = open_head()
    ours, real = joining.own_versions(), threading.current_thread()
    there = {**ours, what: "9.9.9"}
    # The joiner runs in this thread, the head in others.
    monkeypatch.setattr(
        joining, "own_versions", lambda: there if threading.current_thread() is real else ours
    )
    with pytest.raises(
        HostNotAdmitted, match=f"has {what} 9.9.9 and the head {ours[what]}".replace("+", r"\+")
    ):
        head.join()


@pytest.mark.parametrize(("skew_s", "said"), [(3600.0, "3,600 s ahead of"), (-7200.0, "7,200 s behind")])
def test_a_clock_that_is_off_is_named(
    open_head: Callable[..., Head], monkeypatch: pytest.MonkeyPatch, skew_s: float, said: str
) -> None:
    head, real, clock = open_head(), threading.current_thread(), time.time
    monkeypatch.setattr(
        joining.time, "time", lambda: clock() + (skew_s if threading.current_thread() is real else 0.0)
    )
    with pytest.raises(HostNotAdmitted, match=said):
        head.join()


def test_another_script_and_a_missing_one_are_told_apart(
    open_head: Callable[..., Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, real, own = open_head(), threading.current_thread(), joining.file_hash
    for there, said in (("0" * 64, "is not the script of this job"), ("", "does not exist on")):
        monkeypatch.setattr(
            joining,
            "file_hash",
            lambda path, there=there: there if threading.current_thread() is real else own(path),
        )
        with pytest.raises(HostNotAdmitted, match=said):
            head.join()
    assert head.door.seats == {}  # its number is free for the next


def test_whoever_answers_without_the_key_is_not_the_head(tmp_path: Path) -> None:
    """A man in the middle relays all messages: the MACs cover the certificate that the joiner saw."""
    head = Head(tmp_path)
    other = Authority("job")
    private = other.issue("head")
    context = tls.context(private, ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_NONE
    listener = socket.create_server(("127.0.0.1", 0))

    def relay() -> None:
        sock, _ = listener.accept()
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE
        with (
            context.wrap_socket(sock, server_side=True) as victim,
            plain.wrap_socket(socket.create_connection(("127.0.0.1", head.port))) as real,
        ):
            victim.settimeout(5)
            real.settimeout(5)
            with contextlib.suppress(OSError, EOFError, WireError):
                while True:
                    send_message(real, read_message(victim)[0])
                    send_message(victim, read_message(real)[0])

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    try:
        with pytest.raises((HostNotAdmitted, ConfigError)):
            joining.join(f"shoal://127.0.0.1:{listener.getsockname()[1]}", KEY, timeout_s=5)
        assert head.door.seats == {}
    finally:
        listener.close()
        head.door.close()
        thread.join(10)


def _ask_with(credentials: tls.Credentials, head: Head) -> None:
    stream = credentials.connect(head.address.replace("shoal", "tls"), expect="head", timeout_s=5)
    with stream:
        send_message(stream, AgentReady(1, 0, 1))
        read_message(stream, timeout_s=5)


def test_a_certificate_of_another_job_and_an_expired_one_are_refused(
    open_head: Callable[..., Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = open_head()
    stranger = Authority("job").issue("host-1")
    monkeypatch.setattr(authority, "VALID_FOR", -authority.CLOCK_SKEW / 2)
    expired = msgspec.structs.replace(head.authority.issue("host-1"), authority=head.authority.certificate)
    for credentials in (stranger, expired):
        with pytest.raises((OSError, WireError, EOFError)):
            _ask_with(credentials, head)
    assert head.door.joined() == []
    assert sum("certificate" in head.door.refusals.get(timeout=5) for _ in range(2)) >= 1


def test_an_agent_that_was_replaced_is_no_longer_heard(
    open_head: Callable[..., Head], hostnames: Callable[[str], None]
) -> None:
    head = open_head(numbers=(1,))
    old = head.join()
    head.door.release(1, 0)
    head.join()
    with old.credentials.connect(head.address.replace("shoal", "tls"), expect="head", timeout_s=5) as stream:
        send_message(stream, AgentReady(1, 0, os.getpid()))
        answer = read_message(stream, timeout_s=5)[0]
    assert isinstance(answer, HostRefused)
    assert "joined anew" in answer.reason
    assert head.door.joined() == []


@pytest.mark.parametrize("addresses", [["127.0.0.1"], [f"127.0.0.{number}" for number in range(2, 22)]])
def test_silent_connections_that_stay_do_not_keep_a_host_out(
    open_head: Callable[..., Head], addresses: list[str]
) -> None:
    head = open_head()
    with contextlib.ExitStack() as silent:
        for address in itertools.islice(itertools.cycle(addresses), 200):
            sock = socket.create_connection(("127.0.0.1", head.port), source_address=(address, 0))
            silent.enter_context(sock)
        assert head.join().number == 1


def test_more_joins_at_once_than_handshakes_of_an_address_all_succeed(
    open_head: Callable[..., Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_hosts = 3 * joining.MAX_HANDSHAKES_PER_ADDRESS
    # Each thread is a machine.
    monkeypatch.setattr(joining, "machine_id", lambda own: threading.current_thread().name.encode())
    head, admitted = open_head(numbers=tuple(range(1, num_hosts + 1))), list[int]()

    def join() -> None:
        admitted.append(joining.join(head.address, KEY, timeout_s=60.0).number)

    joins = [threading.Thread(target=join, name=f"machine {number:024}") for number in range(num_hosts)]
    for thread in joins:
        thread.start()
    for thread in joins:
        thread.join(90)
    assert sorted(admitted) == list(range(1, num_hosts + 1))


def test_a_join_that_is_refused_is_not_tried_again(open_head: Callable[..., Head]) -> None:
    head = open_head()
    for _ in range(2):
        with pytest.raises(HostNotAdmitted):
            head.join("another-key-of-twenty-characters")
    assert [head.door.refusals.get(timeout=5) for _ in range(2)]
    assert head.door.refusals.empty()


def test_a_host_that_cannot_reach_the_head_once_it_has_joined_is_told_so(
    open_head: Callable[..., Head], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "TRY_TO_CONNECT_S", 0.1)
    monkeypatch.setattr(opening, "setproctitle", lambda title: None)
    admission = open_head().join()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(ClusterError, match=r"host 1 joined job, and then .* \(Connection refused\)"):
        opening._serve(f"shoal://127.0.0.1:{port}", admission, tmp_path, "", Health("host"))


def test_an_agent_whose_first_connection_is_dropped_connects_again(open_head: Callable[..., Head]) -> None:
    head = open_head()
    admission = head.join()
    listener = socket.create_server(("127.0.0.1", 0))

    def drop_one_and_pass_the_next_on() -> None:
        listener.accept()[0].close()
        near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", head.port))
        with listener, near, far:
            while ready := select.select([near, far], [], [])[0]:
                data = ready[0].recv(65536)
                if not data:
                    return
                (far if ready[0] is near else near).sendall(data)

    def start_it() -> None:
        wait_until(lambda: joined.extend(head.door.joined()) or joined, 10)
        send_message(joined[0].stream, AgentStart(0.5, 3.0, []))

    joined: list[joining.JoinedHost] = []
    warm: Any = SimpleNamespace(close=lambda: None)
    agent = HostAgent(
        admission, f"tls://127.0.0.1:{listener.getsockname()[1]}", warm, run_dir=head.run_dir, folder=None
    )
    helpers = [threading.Thread(target=act) for act in (drop_one_and_pass_the_next_on, start_it)]
    for thread in helpers:
        thread.start()
    agent._connect()
    assert joined[0].number == 1
    agent._close()
    for thread in helpers:
        thread.join(10)
    for sock in (joined[0].stream, agent._wake, agent._waker):
        sock.close()


def test_peers_with_a_certificate_that_say_nothing_are_not_dropped_for_others(
    open_head: Callable[..., Head],
) -> None:
    head = open_head()
    admission = head.join()
    with contextlib.ExitStack() as stack:
        first = admission.credentials.connect(
            head.address.replace("shoal", "tls"), expect="head", timeout_s=5
        )
        stack.enter_context(first)
        assert wait_until(lambda: not head.door._under_way, 5)
        for _ in range(2 * joining.MAX_HANDSHAKES_PER_ADDRESS):
            stack.enter_context(socket.create_connection(("127.0.0.1", head.port)))
        assert wait_until(lambda: head.door.refusals.qsize() >= joining.MAX_HANDSHAKES_PER_ADDRESS, 10)
        send_message(first, AgentReady(1, 0, os.getpid()))
        joined: list[joining.JoinedHost] = []
        assert wait_until(lambda: joined.extend(head.door.joined()) or joined, 10)
        joined[0].stream.close()


# ---- the key's file -----------------------------------------------------------------------------


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        joining.read_key(str(path))
    path.chmod(0o600)
    assert joining.read_key(str(path)) == KEY
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        joining.read_key(str(tmp_path / "fifo"))


def test_a_short_key_and_a_missing_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(joining.KEY_VARIABLE, "short")
    with pytest.raises(ConfigError, match="5 characters"):
        joining.read_key(None)
    with pytest.raises(ConfigError, match="cannot be read"):
        joining.read_key(str(tmp_path / "none"))


def test_the_key_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(joining.KEY_VARIABLE, KEY)
    assert joining.read_key(None) == KEY
    assert joining.KEY_VARIABLE not in os.environ


# ---- files of the head --------------------------------------------------------------------------


def test_hosts_copy_the_scripts_folder(open_head: Callable[..., Head], tmp_path: Path) -> None:
    head = open_head()
    admission, there = head.join(), head.address.replace("shoal", "tls")
    copy_shipped(there, admission.credentials, tmp_path / "copy")
    assert (tmp_path / "copy" / "train.py").read_text() == head.script.read_text()


def _drop_reads(monkeypatch: pytest.MonkeyPatch, num_times: int) -> list[str]:
    """The head hangs up instead of sending a file, the first times; returns the paths that are read."""
    read, paths = FileService._read, list[str]()

    def dropping(self: FileService, is_shipped: bool, path: str, offset: int) -> bytes:
        paths.append(path)
        if path.startswith("z") and sum(each.startswith("z") for each in paths) <= num_times:
            raise ConnectionResetError("cut")
        return read(self, is_shipped, path, offset)

    monkeypatch.setattr(FileService, "_read", dropping)
    monkeypatch.setattr(files, "SHIP_RETRY_S", 0.01)
    return paths


def test_a_dropped_connection_goes_on_with_the_files_that_are_missing(
    open_head: Callable[..., Head], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zoo.py").write_text("animals = []\n")
    head, paths = open_head(), _drop_reads(monkeypatch, files.SHIP_TRIES - 1)
    copy_shipped(head.address.replace("shoal", "tls"), head.join().credentials, tmp_path / "copy")
    assert (tmp_path / "copy" / "zoo.py").read_text() == "animals = []\n"
    assert paths == ["train.py", *["zoo.py"] * files.SHIP_TRIES, "run/host-mark"]


def test_connections_that_are_dropped_again_and_again_are_one_paragraph(
    open_head: Callable[..., Head], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zoo.py").write_text("animals = []\n")
    head, paths = open_head(), _drop_reads(monkeypatch, 100)
    with pytest.raises(ClusterError, match=r"5 connections were dropped, the last by .*; files copied: 1\."):
        copy_shipped(head.address.replace("shoal", "tls"), head.join().credentials, tmp_path / "copy")
    assert paths.count("zoo.py") == files.SHIP_TRIES


def test_a_problem_of_the_own_disk_is_not_tried_again(
    open_head: Callable[..., Head], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, paths = open_head(), _drop_reads(monkeypatch, 0)
    (tmp_path / "copy").write_text("a file where the folder should be")
    with pytest.raises(FileExistsError):
        copy_shipped(head.address.replace("shoal", "tls"), head.join().credentials, tmp_path / "copy")
    assert paths == []


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_place_where_no_copy_of_the_run_can_be_made_is_one_paragraph(
    name: str, open_head: Callable[..., Head], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    admission, folder = open_head().join(), tmp_path / name
    with (
        pytest.raises(RunDirectoryError, match=r"host 1 cannot keep its files of the run job in .*file"),
        opening._disk_problems(admission, folder),
    ):
        RunCopy.claim(folder, "job", [], lambda config: config)
    with pytest.raises(ConnectionResetError), opening._disk_problems(admission, folder):
        raise ConnectionResetError("cut")


@pytest.mark.parametrize("path", ["../train.py", "/etc/passwd", "lock", "checkpoints/../../train.py"])
def test_nothing_else_of_the_head_can_be_read(open_head: Callable[..., Head], path: str) -> None:
    head = open_head()
    (head.run_dir / "lock").write_text("locked")
    admission = head.join()
    with admission.credentials.connect(
        head.address.replace("shoal", "tls"), expect="head", timeout_s=5
    ) as stream:
        send_message(stream, ListFiles(False))
        read_message(stream, timeout_s=5)
        send_message(stream, ReadFile(False, path, 0))
        try:
            answer = read_message(stream, timeout_s=5)[0]
        except (OSError, EOFError, WireError):
            return
    assert getattr(answer, "data", b"") == b""


def test_a_link_that_cannot_be_measured_is_unknown_and_keeps_no_host_out(
    open_head: Callable[..., Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = open_head()
    admission, there = head.join(), head.address.replace("shoal", "tls")
    assert measured_link(there, admission.credentials) > 1e6
    monkeypatch.setattr(FileService, "serve", lambda self, stream, request: None)  # hangs up
    assert measured_link(there, admission.credentials) == 0.0


def test_a_folder_that_is_more_than_scripts_is_not_shipped(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"\0" * (65 << 20))
    with pytest.raises(ConfigError, match="64 MiB"):
        FileService(tmp_path / "run", tmp_path)
