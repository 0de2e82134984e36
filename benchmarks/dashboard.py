"""Dashboard: time until a long, wide run is on the screen, until a new step is, and what looking costs a run.

The screen is headless Chromium's; the cost is samples/s of one job, in stretches with and without somebody who looks.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Report, summarise

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

SCRIPT = Path(__file__).parents[1] / "examples" / "clicks.py"


def main(quick: bool = False) -> None:
    report = Report("dashboard")
    read(report, steps=100_000 if quick else 1_000_000)
    on_screen(report, steps=100_000 if quick else 1_000_000, rounds=1 if quick else 3)
    cost(report, stretches=2 if quick else 8)
    report.save()


def on_screen(report: Report, *, steps: int, rounds: int) -> None:
    from playwright.sync_api import sync_playwright

    from shoal.observe.dashboard import process
    from simulated_run import START, write_run

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = write_run(Path(folder) / "long", workers=64, servers=8, steps=steps, seconds=600)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        loads: dict[str, list[float]] = {"overview": [], "overview with Plotly's charts": [], "workers": []}
        updates, spent = [], []
        drawn = "(document.querySelector('.js-plotly-plot')?.data ?? []).find((each) => each.name === 'loss')?.x.at(-1) ?? 0"
        for _ in range(rounds):
            with process.beside(path, port=0) as said:
                address = said.split()[-1]
                wait_for(address)
                page = browser.new_page()
                page.set_default_timeout(120_000)
                began, before = time.monotonic(), processor_s()
                # Nothing of the run is read before. Figures and sketched curves first.
                page.goto(address, wait_until="commit")
                page.wait_for_selector(".answer")
                page.wait_for_selector(".sketch polyline, .js-plotly-plot .scatterlayer")
                loads["overview"].append(time.monotonic() - began)
                spent.append(processor_s() - before)
                page.wait_for_selector(".js-plotly-plot .scatterlayer")
                loads["overview with Plotly's charts"].append(time.monotonic() - began)
                began = time.monotonic()
                page.locator("nav").get_by_role("link", name="workers").click()
                page.wait_for_selector("canvas.lanes")
                loads["workers"].append(time.monotonic() - began)
                page.locator("nav").get_by_role("link", name="overview").click()
                page.wait_for_selector(".notice", state="detached", timeout=120_000)  # all is read
                page.wait_for_selector(".js-plotly-plot .scatterlayer")
                for _ in range(3):
                    steps += 1024
                    began = time.monotonic()
                    with open(path / "metrics.jsonl", "a") as file:
                        line = {"step": steps, "loss": 0.3, "samples": 1024, "time": START + steps}
                        file.write(json.dumps(line) + "\n")
                    while page.evaluate(drawn) != steps:
                        time.sleep(0.01)
                    updates.append(time.monotonic() - began)
                page.close()
        browser.close()
    about = {"steps": steps, "workers": 64, "servers": 8}
    for name, found in loads.items():
        report.add(f"{name} on the screen", _seconds(found), **about)
    report.add("a new step on the screen", _seconds(updates), **about)
    report.add(
        "processor time of browser and server until the overview is on the screen", _seconds(spent), **about
    )


def processor_s() -> float:
    """Of this process's children: the server's and the browser's, which others on the machine change little."""
    times = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def _seconds(found: list[float]) -> dict[str, Any]:
    return {
        "seconds": round(statistics.median(found), 3),
        "worst_s": round(max(found), 3),
        "rounds": len(found),
    }


def read(report: Report, *, steps: int) -> None:
    """Processor time of the server's side, which others on the machine do not change."""
    from shoal.observe.dashboard import views
    from shoal.observe.dashboard.feed import RunFeed
    from simulated_run import write_run

    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder) / "long", workers=64, servers=8, steps=steps, seconds=600)
        feed, began = RunFeed(path), time.process_time()
        feed.poll(0.0)
        views.overview(feed)
        shown = time.process_time() - began
        while feed.left_bytes:
            feed.poll()
        whole = time.process_time() - began
        began = time.process_time()
        feed.poll()
        for view in (views.overview, views.workers, views.servers):
            view(feed)
        update = time.process_time() - began
    found = {"first_view_s": round(shown, 3), "all_read_s": round(whole, 3), "update_s": round(update, 3)}
    report.add("processor time of the server", found, steps=steps, workers=64, servers=8)


def cost(report: Report, *, stretches: int, seconds: float = 5.0) -> None:
    """Samples/s of a job while nobody looks and while somebody does, in turn; the dashboard's process runs throughout."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "shoal",
            "run",
            "-n",
            "2",
            "--name",
            "job",
            "--dashboard",
            "--dashboard-port",
            "0",
        ]
        job = subprocess.Popen(
            [*command, str(SCRIPT), "--epochs", "100"],
            cwd=folder,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert job.stderr is not None
            address = next(line for line in job.stderr if "dashboard: " in line).split()[-1]
            threading.Thread(target=job.stderr.read, daemon=True).start()
            metrics = Path(folder) / "runs" / "job" / "metrics.jsonl"
            while not metrics.exists() or metrics.stat().st_size < 10_000:
                time.sleep(0.2)
            rates: dict[bool, list[float]] = {False: [], True: []}
            for number in range(2 * stretches):
                looks = number % 2 == 1
                ended = threading.Event()
                viewer = threading.Thread(target=look, args=(address, ended))
                if looks:
                    viewer.start()
                before, began = metrics.read_bytes().count(b"\n"), time.monotonic()
                time.sleep(seconds)
                rates[looks].append((metrics.read_bytes().count(b"\n") - before) / (time.monotonic() - began))
                ended.set()
                if looks:
                    viewer.join()
        finally:
            job.terminate()
            job.wait()
    # Seconds of a step, so that more than 1 is slower.
    pairs = [(1 / with_it, 1 / without) for without, with_it in zip(rates[False], rates[True], strict=True)]
    report.add("a step while looked at, against while not", summarise(pairs), workers=2, stretch_s=seconds)


def look(address: str, ended: threading.Event) -> None:
    """What a page of the dashboard asks for, as often as the stream makes it."""
    where, _, token = address.partition("?token=")
    base, name = re.sub(r"/run/.*", "", where), where.rpartition("/")[2]
    headers = {"Authorization": f"Bearer {token}"}
    stream = urllib.request.urlopen(
        urllib.request.Request(f"{base}/api/stream?runs={name}", headers=headers), timeout=30
    )
    for line in stream:
        if ended.is_set():
            return
        if line.startswith(b"data:"):
            for page in ("overview", "workers"):
                urllib.request.urlopen(
                    urllib.request.Request(f"{base}/api/run/{name}/{page}", headers=headers)
                ).read()


def wait_for(address: str) -> None:
    """Until the server answers: it imports for a while."""
    where, _, token = address.partition("?token=")
    asked = urllib.request.Request(
        re.sub(r"/run/.*", "/static/dashboard.css", where), headers={"Authorization": f"Bearer {token}"}
    )
    urllib.request.urlopen(asked, timeout=60).read()


if __name__ == "__main__":
    main("--quick" in sys.argv)
