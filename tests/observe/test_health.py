"""Health endpoints over real sockets: what each answers while a loop turns, waits and is stuck, and addresses that are refused."""

from __future__ import annotations

import http.client
import os
import socket
import time

import pytest

from shoal.errors import ConfigError
from shoal.observe import health as endpoints
from shoal.runtime.health import Health


def get(url: str, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_service_is_alive_from_the_start_and_ready_once_its_loop_says_so() -> None:
    health = Health("worker")
    with endpoints.serving(health, "0") as url:
        assert get(url, "/healthz") == (200, "worker: alive\n")
        assert get(url, "/readyz") == (503, "worker: not ready, it is starting\n")
        health.waits_for = ""
        health.beat()
        assert get(url, "/readyz?verbose") == (200, "worker: ready\n")
        assert get(url, "/runs")[0] == 404
        assert get(url, "/metrics", "POST")[0] == 501
        assert get(url, "/healthz", "HEAD") == (200, "")


def test_a_loop_that_has_not_turned_for_long_is_told_as_stuck() -> None:
    health = Health("server", waits_for="", stalled_after_s=0.05)
    with endpoints.serving(health, "127.0.0.1:0") as url:
        health.beat()
        time.sleep(0.1)
        assert get(url, "/healthz")[0] == get(url, "/readyz")[0] == 503
        assert 'shoal_service_ready{role="server"} 0.0' in get(url, "/metrics")[1]
        health.rests()  # between two coordinators no loop runs
        assert get(url, "/healthz")[0] == 200


def test_metrics_are_those_of_the_service_its_processes_and_the_run() -> None:
    health = Health("worker", processes={"worker-1": os.getpid(), "worker-2": 1 << 30})
    health.beat(shoal_service_joins=2)
    run = [("shoal_step", {"run": "click"}, 7.0)]
    with endpoints.serving(health, "localhost:0", lambda: run) as url:
        text = get(url, "/metrics")[1]
    assert 'shoal_service_joins{role="worker"} 2.0' in text
    assert 'shoal_process_rss_bytes{process="worker-1",role="worker"} ' in text
    assert "worker-2" not in text  # it is gone
    assert 'shoal_step{run="click"} 7.0' in text


def test_connections_beyond_the_limit_are_hung_up_on_and_free_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoints, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(endpoints._Handler, "timeout", 0.5)
    with endpoints.serving(Health("worker"), "0") as url:
        host, _, port = url.removeprefix("http://").rpartition(":")
        with (
            socket.create_connection((host, int(port)), 10) as silent,
            socket.create_connection((host, int(port)), 10) as second,
        ):
            assert second.recv(1) == b""
            assert silent.recv(1) == b""  # it said nothing for the time-out
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                assert get(url, "/healthz")[0] == 200
                break
            except (http.client.HTTPException, OSError):
                time.sleep(0.01)
        else:
            raise AssertionError("it does not answer again")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("here", "is no address"),
        ("127.0.0.1:99999", "is no address"),
        ("0.0.0.0:9090", "every address of this machine"),
        ("nowhere0:9090", "neither an address nor a network interface of this machine"),
    ],
)
def test_addresses_that_cannot_be_meant_are_refused(said: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        endpoints.parse(said)


def test_an_interface_is_its_address_and_a_taken_port_is_refused() -> None:
    assert endpoints.parse("lo:9090") == ("127.0.0.1", 9090)
    assert endpoints.parse("[::1]:9090") == ("::1", 9090)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match="cannot be listened on"),
            endpoints.serving(Health("worker"), str(port)),
        ):
            pass
