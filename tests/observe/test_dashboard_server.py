"""Dashboard server: who may see what, and that nothing else is served."""

from __future__ import annotations

import asyncio
import fcntl
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from shoal.errors import ConfigError
from shoal.observe.dashboard import process, server
from shoal.observe.dashboard.feed import RunFeed
from shoal.observe.dashboard.server import application
from simulated_run import write_run
from waiting import wait_until

TOKEN = "not-a-secret"
HOST = "127.0.0.1:8265"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "click", steps=60, killed=1)
    write_run(tmp_path / "elsewhere" / "secret", steps=5)
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "elsewhere" / "secret")
    return tmp_path / "runs"


@pytest.fixture
def client(root: Path) -> TestClient:
    return TestClient(
        application(root, token=TOKEN, hosts={HOST}), base_url=f"http://{HOST}", follow_redirects=False
    )


@pytest.fixture
def inside(client: TestClient) -> TestClient:
    client.get("/", params={"token": TOKEN})
    return client


def test_the_token_opens_once_and_leaves_the_address(client: TestClient) -> None:
    assert client.get("/").status_code == 403
    answer = client.get("/run/click/overview", params={"token": TOKEN, "x": "1"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/run/click/overview?x=1")
    assert {"HttpOnly", "SameSite=lax"} <= set(answer.headers["set-cookie"].split("; "))
    assert client.get("/run/click/overview").status_code == 200


@pytest.mark.parametrize(
    "wrong", ["", "not-a-secre", "not-a-secret ", "ü\udc80".encode("utf-8", "replace").decode()]
)
def test_a_wrong_token_is_refused_even_beside_a_right_cookie(inside: TestClient, wrong: str) -> None:
    answer = inside.get("/", params={"token": wrong})
    assert answer.status_code == 403
    assert "printed at its start" in answer.text
    assert inside.get("/api/runs", headers={"authorization": f"Bearer {wrong}".encode()}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example:8265"}, 421),  # a name that was pointed at this machine
        ({"host": "127.0.0.1:9999"}, 421),
        ({"host": ""}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, 403),
        ({"origin": f"http://{HOST}"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
    ],
)
def test_hosts_and_origins(inside: TestClient, headers: dict[str, str], status: int) -> None:
    assert inside.get("/api/runs", headers=headers).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(inside: TestClient, method: str) -> None:
    assert inside.request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/api/run/linked/overview",
        "/api/run/..%2felsewhere%2fsecret/overview",
        "/api/run/../elsewhere/overview",
        "/api/run/%2e%2e/overview",
        "/api/run/.hidden/overview",
        "/api/run/click%00/overview",
        "/api/run/click/config",
        "/static/..%2fserver.py",
        "/static/server.py",
        "/graph/linked.svg",
        "/api/compare?runs=linked",
        "/api/stream?runs=linked",
    ],
)
def test_nothing_outside_the_runs_is_served(inside: TestClient, path: str) -> None:
    assert inside.get(path).status_code == 404


def test_every_page_and_file_is_there_with_its_policy(inside: TestClient) -> None:
    for path in (
        "/",
        "/compare",
        "/run/click",
        "/static/dashboard.js",
        "/static/sketch.js",
        "/static/plotly.min.js",
        "/graph/click.svg",
        "/metrics",
    ):
        answer = inside.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "default-src 'none'" in policy
    assert "<script>" not in inside.get("/").text
    for page in ("overview", "workers", "servers", "data", "events", "graph"):
        assert inside.get(f"/api/run/click/{page}").json()["head"]["name"] == "click"
    assert [run["name"] for run in inside.get("/api/runs").json()["runs"]] == ["click"]
    compared = inside.get("/api/compare", params={"runs": "click"}).json()
    assert compared["runs"][0]["loss"]["step"][-1] == 60
    unchanged = inside.get(
        "/static/dashboard.css",
        headers={"if-none-match": inside.get("/static/dashboard.css").headers["etag"]},
    )
    assert unchanged.status_code == 304


@pytest.mark.parametrize("is_training", [True, False])
def test_browsers_are_told_less_often_where_that_costs_a_run_that_trains(
    root: Path, monkeypatch: pytest.MonkeyPatch, is_training: bool
) -> None:
    """With a share that any poll exceeds, the second change waits its longest; of a run that is over it does not wait."""
    monkeypatch.setattr(server, "MAX_SHARE", 1e-6)
    monkeypatch.setattr(server, "SLOWEST_S", 2.0)
    monkeypatch.setattr(server, "POLL_EVERY_S", 0.01)
    path = root / "click"

    async def time_of_two_changes() -> float:
        told = server._changes([RunFeed(path)])
        assert (await anext(told)).startswith("retry")
        await anext(told)
        began = time.monotonic()
        with open(path / "metrics.jsonl", "a") as file:
            file.write('{"step": 61, "loss": 0.1, "samples": 8, "time": 1.0}\n')
        assert (await anext(told)).startswith("data: ")
        return time.monotonic() - began

    with open(path / "lock", "w") as lock:
        if is_training:
            fcntl.flock(lock, fcntl.LOCK_EX)
        passed_s = asyncio.run(time_of_two_changes())
    assert (passed_s >= 1.8) is is_training


def test_a_port_in_use_is_followed_by_the_next_free_one() -> None:
    with socket.socket() as taken:
        taken.bind((process.LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        address = process.listen(port=port)
        address.listener.close()
    assert address.port > port
    assert f"port {port} is in use" in address.note
    assert address.url().startswith(f"http://127.0.0.1:{address.port}/?token=")


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        process.listen("192.0.2.1")


def test_the_process_beside_a_run_serves_it_and_ends_with_it(root: Path) -> None:
    with process.beside(root / "click", port=0) as said:
        address = said.split()[-1]
        where, _, token = address.partition("?token=")
        host = where.split("/")[2]

        def get(path: str) -> bytes:
            with socket.create_connection(host.split(":")) as connection:  # type: ignore[arg-type]
                connection.sendall(
                    f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n".encode()
                )
                return b"".join(iter(lambda: connection.recv(65536), b""))

        body = get("/api/run/click/overview").partition(b"\r\n\r\n")[2]
        assert json.loads(body)["progress"]["step"] == 60
    with pytest.raises(OSError):  # noqa: PT011  refused, or reset
        get("/")


def test_the_process_ends_when_its_parent_is_killed(root: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom shoal.observe.dashboard.process import beside\n"
        f"with beside(Path({str(root / 'click')!r}), port=0) as said:\n    print(said, flush=True)\n    time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    host, port = parent.stdout.readline().split("/")[2].split(":")
    parent.kill()
    parent.wait()
    parent.stdout.close()

    def is_gone() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) != 0

    assert wait_until(is_gone)
