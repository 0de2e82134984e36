"""Addresses that a job on several hosts cannot have, or cannot be joined at: refused in one paragraph, nothing started."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.hosts import joining, opening
from shoal.config.hosts import HostsConfig
from shoal.errors import ConfigError
from shoal.runtime.transport import tls
from waiting import wait_until

OWN = "10.77.0.1"
NAMES = {"this": {OWN}, OWN: {OWN}, "that": {"127.0.1.1"}, "node": {"10.77.0.2"}}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"bind": "nowhere.invalid"}, "this machine knows no such address"),
        ({"bind": "localhost"}, "which no other host can reach"),
        ({"bind": "0.0.0.0"}, "is every address of this machine"),
        ({"bind": OWN, "advertise": "127.0.0.1"}, "--advertise 127.0.0.1 is 127.0.0.1, which no other host"),
        ({"bind": "8.8.8.8", "plaintext": True}, "--plaintext is refused at 8.8.8.8, a public address"),
        (
            {"bind": OWN, "advertise": "8.8.8.8", "plaintext": True},
            "--plaintext is refused at 8.8.8.8, a public address",
        ),
        ({"bind": OWN, "names": ("this", "that")}, "that is 127.0.1.1 here, a loopback address"),
        ({"bind": OWN, "names": ("node", "this")}, "node, the first of the hosts, is not this machine"),
        ({"bind": OWN}, "cannot listen at 10.77.0.1 port 7070"),  # it is another machine's
    ],
)
def test_an_address_that_cannot_be_meant_is_refused_before_anything_listens(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], problem: str
) -> None:
    monkeypatch.setattr(joining, "resolved", lambda name: NAMES.get(name, set()))
    with pytest.raises(ConfigError) as refused:
        opening.listen(HostsConfig(num_hosts=2, **options), script="train.py")
    assert problem in str(refused.value)
    assert "Nothing was started" in str(refused.value)


def test_a_port_in_use_is_named() -> None:
    with contextlib.closing(tls.listen("127.0.0.1")) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: Address already in use"):
            tls.listen("127.0.0.1", port)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1",
        "10.0.0.1:7070",
        "http://10.0.0.1:7070",
        "shoal://10.0.0.1:7070:1",
        "shoal://fd00::1:7070",
        "shoal://10.0.0.1:99999",
        "shoal://:7070",
    ],
)
def test_what_is_no_address_of_a_job_is_refused_before_anything_is_tried(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is no address; .* Nothing was started"):
        joining.join(address, joining.new_join_key(), timeout_s=30.0)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -5.0, 0.0])
@pytest.mark.parametrize(("role", "what"), [("", "the head"), ("worker", "the coordinator")])
def test_a_wait_for_the_head_without_a_proper_end_is_refused_before_the_key_is_read(
    tmp_path: Path, timeout_s: float, role: str, what: str
) -> None:
    no_key = str(tmp_path / "no-key")
    with pytest.raises(
        ConfigError, match=rf"--timeout {timeout_s} is no time to wait for {what}\. Nothing was"
    ):
        opening.join(
            "shoal://127.0.0.1:7070", key_file=no_key, run_dir=tmp_path, timeout_s=timeout_s, role=role
        )


def test_an_address_of_ipv6_is_in_brackets() -> None:
    assert tls.split_address(tls.join_address("shoal://", "fd00::1", 7070)) == ("fd00::1", 7070)


def test_joining_where_no_job_is_any_more_and_at_a_name_that_nobody_knows() -> None:
    key = joining.new_join_key()
    with socket.create_server(("127.0.0.1", 0)) as over:
        port = over.getsockname()[1]
    with pytest.raises(ConfigError, match=r"no job can be joined at .*refused.*Nothing was started"):
        joining.join(f"shoal://127.0.0.1:{port}", key, timeout_s=0.1)
    with pytest.raises(ConfigError, match=r"nowhere\.invalid is no host that this one knows"):
        joining.join("shoal://nowhere.invalid:7070", key, timeout_s=0.1)
    said: list[str] = []
    with pytest.raises(ConfigError, match="no job can be joined"):
        joining.join(f"shoal://127.0.0.1:{port}", key, timeout_s=1.0, say=said.append)
    assert said == [f"no head answers at 127.0.0.1:{port} yet (Connection refused); trying for 1 s"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            "it does not speak TLS 1.3 as hosts of a job do: WRONG_VERSION_NUMBER",
        ),
        (b"", "it hung up"),
        (None, "it was silent for too long"),
    ],
    ids=["http", "hangs up", "silent"],
)
def test_what_listens_where_no_head_does_is_told_in_words(
    answer: bytes | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "HANDSHAKE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as kept:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock = kept.enter_context(server.accept()[0])
                    if answer is not None:
                        sock.recv(1 << 16)
                        sock.sendall(answer)
                        sock.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConfigError) as refused:
            joining.join(
                f"shoal://127.0.0.1:{server.getsockname()[1]}", joining.new_join_key(), timeout_s=0.5
            )
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert said in str(refused.value)
    assert "_ssl" not in str(refused.value)


def test_an_ssh_that_prints_more_than_a_pipe_holds_is_not_stopped_by_it() -> None:
    said = "import sys; sys.stderr.write('debug\\n' * 50_000 + 'no such machine\\n'); sys.exit(255)"
    starter = opening.SshStart(1, "node2", f'{sys.executable} -c "{said}"', "shoal://10.0.0.1:7070", "key")
    try:
        wait_until(lambda: starter.problem() is not None)
        assert starter.problem() == "node2: exit code 255; debug debug no such machine"
    finally:
        starter.close()
