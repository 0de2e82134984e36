"""Each role as a command of its own: health endpoints, and services that are killed, evicted and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from launched import Launched

from etcd_members import free_ports
from waiting import wait_until

SCRIPT = Path(__file__).parent / "scripts" / "services.py"
GATES = (6, 9, 13)
KEY = "a-key-for-tests-0123456789"
SLOW_S = 120.0  # five interpreters import torch on two cores


class Service:
    """One command, with its output."""

    def __init__(self, folder: Path, name: str, *args: str) -> None:
        self.path = folder / f"{name}.log"
        with self.path.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shoal", *args],
                cwd=folder,
                env={**os.environ, "SHOAL_JOIN_KEY": KEY},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        return " ".join(self.path.read_text(errors="replace").split())

    def get(self, path: str) -> tuple[int, str]:
        """Answer of its health endpoint; 0 where it does not answer yet."""
        found = re.search(r"health at (http://\S+)/healthz", self.said())
        if found is None:
            return 0, ""
        try:
            with urllib.request.urlopen(f"{found[1]}{path}", timeout=10) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()

    def wait(self) -> int:
        try:
            return self.process.wait(SLOW_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended: {self.said()}") from None


class Services:
    """A coordinator with 2 workers and a server in one folder; a name says which of them is started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.out.mkdir()
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.all: list[Service] = []

    def start(self, name: str) -> Service:
        role = name.partition("-")[0]
        args = ["--join", f"shoal://{self.address}", "--timeout", "60"]
        if role == "coordinator":
            args = ["-n", "2", "--servers", "1", "--strategy", "ps", "--name", "job", "--bind", self.address]
        args += ["--health", "127.0.0.1:0"]
        script = [str(SCRIPT), str(self.out)] if role == "coordinator" else []
        self.all.append(Service(self.folder, f"{name}-{len(self.all)}", role, *args, *script))
        return self.all[-1]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        if not wait_until(condition, SLOW_S):
            raise AssertionError("\n".join(f"{each.path.name}: {each.said()}" for each in self.all))

    def wait_for_gate(self, step: int) -> None:
        self.wait_for(lambda: all((self.out / f"at-{step}-{rank}").exists() for rank in range(2)))

    def go_on(self, step: int) -> None:
        (self.out / f"go-{step}").touch()

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(torch.load(self.out / "weights.pt"))


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    made = Services(tmp_path)
    yield made
    for each in made.all:
        if each.process.poll() is None:
            each.process.kill()
        each.process.wait()


def weights_of(launch_script: Callable[..., Launched], folder: Path, workers: int) -> dict[str, torch.Tensor]:
    out = folder / f"undisturbed-{workers}"
    out.mkdir()
    for step in GATES:
        (out / f"go-{step}").touch()
    options = {"workers": 2, "servers": 1, "strategy": "ps"} if workers == 2 else {}
    done = launch_script(SCRIPT, args=(str(out),), **options)
    assert done.exit_code == 0, done.error
    return dict(torch.load(out / "weights.pt"))


@pytest.mark.timeout(500)
def test_services_that_are_killed_evicted_and_started_again_compute_what_one_process_does(
    services: Services, launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    coordinator = services.start("coordinator")
    services.wait_for(lambda: coordinator.get("/readyz")[0] == 200)
    assert 'shoal_hosts_missing{role="coordinator"} 3.0' in coordinator.get("/metrics")[1]
    started = [services.start(name) for name in ("worker-a", "worker-b", "server")]
    services.wait_for(lambda: all(each.get("/healthz")[0] == 200 for each in started))
    services.wait_for_gate(GATES[0])
    for each in started:
        assert each.get("/readyz") == (200, f"{each.path.name.partition('-')[0]}: ready\n")
    metrics = coordinator.get("/metrics")[1]
    assert 'shoal_hosts_joined{role="coordinator"} 3.0' in metrics
    assert re.search(r'shoal_step\{run="job"\} \d', metrics), metrics
    own = started[2].get("/metrics")[1]
    assert re.search(r'shoal_process_rss_bytes\{process="server-0",role="server"\} \d', own), own

    started[0].process.kill()
    services.wait_for(lambda: 'shoal_hosts_missing{role="coordinator"} 1.0' in coordinator.get("/metrics")[1])
    started[0] = services.start("worker-c")
    services.go_on(GATES[0])

    services.wait_for_gate(GATES[1])
    evicted = started[2]
    evicted.process.send_signal(signal.SIGTERM)
    services.wait_for(lambda: "leaving: all workers save" in evicted.said())
    services.go_on(GATES[1])
    assert evicted.wait() == 128 + signal.SIGTERM  # so that its supervisor starts it again
    started[2] = services.start("server-again")

    services.wait_for_gate(GATES[2])
    coordinator.process.kill()
    services.wait_for(lambda: all("waits for its coordinator" in each.said() for each in started))
    assert (started[1].get("/readyz")[0], started[1].get("/healthz")[0]) == (503, 200)
    services.go_on(GATES[2])
    coordinator = services.start("coordinator-again")
    assert coordinator.wait() == 0, coordinator.said()
    assert [each.wait() for each in started] == [0, 0, 0]
    assert "going on from" in coordinator.said()
    assert not any(KEY in each.said() for each in services.all)

    of_services, of_two = services.weights(), weights_of(launch_script, tmp_path, 2)
    assert all(torch.equal(of_services[name], of_two[name]) for name in of_two)
    for name, of_one in weights_of(launch_script, tmp_path, 1).items():
        torch.testing.assert_close(of_services[name], of_one, rtol=1e-10, atol=1e-12)
    finished = services.start("coordinator-once-more")  # as by a supervisor that restarts whatever ends
    assert (finished.wait(), "has finished" in finished.said()) == (0, True)
