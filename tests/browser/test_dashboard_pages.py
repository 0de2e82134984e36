"""The dashboard in a browser: what a user sees of runs that train, lose a worker, and end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.observe.dashboard import process
from simulated_run import START, write_run
from waiting import wait_until

SCRIPT = """
import torch, shoal
from torch import nn

inputs = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
data = shoal.Dataset.from_arrays((inputs, inputs.sum(1, keepdim=True)))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
trainer = shoal.Trainer(model, loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.01), seed=0)
trainer.fit(data.batch(32), epochs=40)
"""

READY = "#main[data-ready=yes]"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "click", straggler=2, killed=1)
    write_run(tmp_path / "runs" / "plain", servers=0, strategy="ddp", steps=300, seed=4)
    return tmp_path / "runs"


@pytest.fixture
def address(runs: Path) -> Iterator[str]:
    with process.beside(runs, port=0) as said:
        yield re.sub(r"/run/[^?]*", "/", said.split()[-1])


def newest_step(page: Any) -> int:
    return int(page.locator(".card .value").first.inner_text().replace(",", ""))


def last_point(page: Any) -> float:
    """The last step that the chart of the loss has drawn."""
    return float(
        page.evaluate(
            "(document.querySelector('.js-plotly-plot')?.data ?? []).find((each) => each.name === 'loss')?.x.at(-1) ?? 0"
        )
    )


def test_a_finished_run_opens_on_every_page_and_fits_a_narrow_window(page: Any, address: str) -> None:
    page.goto(address)
    assert "token" not in page.url
    page.get_by_role("link", name="click").click()
    page.wait_for_selector(".js-plotly-plot")
    assert newest_step(page) == 400
    assert "finished" in page.locator("#run").inner_text()
    seen = {}
    for name in ("workers", "servers", "data", "events", "graph", "compare"):
        page.locator("nav").get_by_role("link", name=name, exact=True).click()
        page.wait_for_selector(f"nav .here:has-text('{name}')")
        page.wait_for_selector(READY)
        seen[name] = page.locator("main").inner_text()
    assert "straggler" in seen["workers"]
    assert re.search(r"\d MB\b", seen["workers"])  # the units of `shoal status` and of the graph
    assert re.search(r"server-1\s+gone\s+128", seen["servers"])
    assert re.search(r"worker-1\s+SIGKILL\s+200", seen["events"])
    assert "pull rows, push gradients" in seen["graph"]
    assert "ps:ssp=4" in seen["compare"]
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme="dark")
    for name in ("overview", "workers", "graph"):
        page.goto(f"{address.split('/?')[0]}/run/click/{name}")
        page.wait_for_selector(READY)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(11, 18, 32)"


def test_charts_are_sketched_before_plotly_is_there_and_where_it_is_missing(page: Any, address: str) -> None:
    asked: list[Any] = []
    page.route("**/plotly.min.js", lambda route: asked.append(route))
    page.goto(address.replace("/?", "/run/click/overview?"))
    page.wait_for_selector(".chart .sketch polyline")
    assert newest_step(page) == 400
    # It is asked for once there is something to see. `count` lets the route's handler run.
    assert wait_until(lambda: page.locator(".sketch").count() and len(asked) == 1)
    assert page.locator(".chart .sketch").count() == page.locator(".chart").count() > 2
    asked[0].continue_()
    page.wait_for_selector(".js-plotly-plot .scatterlayer")
    assert wait_until(lambda: page.locator(".sketch").count() == 0)
    page.unroute("**/plotly.min.js")
    page.route("**/plotly.min.js", lambda route: route.abort())
    page.reload()
    missing = json.dumps("Plotly's script could not be loaded")
    page.wait_for_selector(f".chart:has-text({missing}) polyline")
    page.locator("nav").get_by_role("link", name="servers", exact=True).click()
    page.wait_for_selector(f".chart.small:has-text({missing}) rect")


def test_skips_are_listed_whatever_their_event_is_called(page: Any, address: str, runs: Path) -> None:
    with open(runs / "click" / "events.jsonl", "a") as file:
        for name in ("sample skipped", "quarantine-exited"):
            file.write(json.dumps({"time": START + 9, "event": name, "index": 7}) + "\n")
    page.goto(address.replace("/?", "/run/click/data?"))
    page.wait_for_selector("td:has-text('quarantine-exited')")


def test_a_wrong_token_is_refused(page: Any, address: str) -> None:
    answer = page.goto(address[:-3] + "xyz")
    assert answer.status == 403
    assert "the one in this address is another" in page.locator("body").inner_text()
    assert page.goto(address.split("/?")[0] + "/api/runs").status == 403


def test_what_a_run_writes_appears_without_a_reload(page: Any, address: str, runs: Path) -> None:
    """A file is all that the dashboard knows of a run: a line more is a point more."""
    page.goto(address.replace("/?", "/run/plain/overview?"))
    assert wait_until(lambda: last_point(page) == 300)
    page.evaluate("window.untouched = true")
    with open(runs / "plain" / "metrics.jsonl", "a") as file:
        file.write(
            json.dumps({"step": 333, "epoch": 1, "loss": 0.1, "samples": 1024, "time": START + 140}) + "\n"
        )
    assert wait_until(lambda: last_point(page) == 333)
    assert page.evaluate("window.untouched")


def test_curves_grow_while_a_run_trains_and_a_killed_worker_appears(page: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "shoal",
        "run",
        "-n",
        "3",
        "--oversubscribe",
        "--name",
        "live",
        "--dashboard",
        "--dashboard-port",
        "0",
    ]
    faults = ["--faults", "slow worker-2 at step 1 by 0.02 s; kill worker-1 at step 60"]
    job = subprocess.Popen([*command, *faults, "train.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        assert job.stderr is not None
        said = next(line for line in job.stderr if "dashboard: " in line)
        page.goto(said.split()[-1])
        assert wait_until(lambda: last_point(page) > 5)
        first = last_point(page)
        assert wait_until(lambda: last_point(page) > first + 5)
        page.locator("nav").get_by_role("link", name="events").click()
        page.wait_for_selector("td:has-text('SIGKILL')", timeout=90_000)
        assert "worker-1" in page.locator("table").first.inner_text()
        page.locator("nav").get_by_role("link", name="graph").click()
        page.wait_for_selector(".drawing svg")
        assert "all-reduce of gradients" in page.locator("main").inner_text()
    finally:
        job.terminate()
        job.communicate(timeout=60)
    page.wait_for_selector("#live.off")
    page.evaluate(
        "dispatchEvent(new Event('chosen'))"
    )  # asks a dashboard that is gone: the graph stays, no script fails
    page.wait_for_timeout(300)
    assert page.locator(".drawing svg").count() == 1
    assert page.locator("#live").inner_text() == "dashboard ended"
