"""Cost of recording: spans, the line a second and the file of spans, on against off. Aim: at most 1 % of a step.

In one process by processor time, which others on the machine change least; in two workers under ddp by time on the
clock of rank 0, in stretches of steps that alternate within one job.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.dashboard import look
from benchmarks.harness import Report, alternate, summarise
from benchmarks.plain_models import ClickModel, click_arrays
from shoal.runtime import recorder

SCRIPT = Path(__file__).parent / "scripts" / "observed_ddp.py"


def processor_s(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def compare(
    report: Report, name: str, trainer: shoal.Trainer, data: Any, steps: int, rounds: int, **about: Any
) -> None:
    def run() -> float:
        return processor_s(lambda: trainer.fit(data, max_steps=steps))

    with tempfile.TemporaryDirectory() as folder:

        def recorded() -> float:
            recorder.start("worker-0", 0, run_dir=folder, send=lambda line: True)
            try:
                return run()
            finally:
                recorder.stop()

        def unrecorded() -> float:
            recorder.RECORDER.owner = 0
            return run()

        report.add(
            f"{name}, processor time: recorded / not",
            alternate(recorded, unrecorded, rounds=rounds),
            steps_per_round=steps,
            threads=torch.get_num_threads(),
            aim="ratio <= 1.01",
            **about,
        )


def span_ns(rounds: int = 20, count: int = 20_000) -> float:
    """Processor time of one span, the fastest of some rounds."""
    recorder.RECORDER.own()

    def spans() -> None:
        for _ in range(count):
            with recorder.COMPUTE:
                pass

    return min(processor_s(spans) for _ in range(rounds)) / count * 1e9


def line_us(rounds: int = 30, spans: int = 1000) -> float:
    """Processor time of what is done once a second: a line, and the spans since the last one, the fastest of some rounds."""
    made = recorder.Recorder()
    made.own()
    compute = recorder.Span(made, "compute")
    with tempfile.TemporaryDirectory() as folder:
        sampler = recorder.Sampler(
            made, process="worker-0", incarnation=0, trace=Path(folder), send=lambda line: True
        )
        spent = []
        for _ in range(rounds):
            for _ in range(spans):
                with compute:
                    pass
            spent.append(processor_s(sampler._send_line))
        sampler.close()
    return min(spent) * 1e6


def of_ddp(report: Report, *, steps: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pairs.json"
        command = [sys.executable, "-m", "shoal", "run", "-n", "2", "--run-dir", folder, str(SCRIPT)]
        subprocess.run([*command, str(out), str(steps), str(rounds)], check=True, stderr=subprocess.DEVNULL)
        pairs = [tuple(pair) for pair in json.loads(out.read_text())]
    values = summarise(pairs, digits=4)
    report.add(
        "MLP of 0.3 M parameters, ddp, 2 workers, wall clock: recorded / not",
        values,
        steps_per_round=steps,
        aim="ratio <= 1.01",
    )


def together(report: Report, *, steps: int, rounds: int) -> None:
    """Spans, reports of progress and a dashboard that somebody looks at, against none of them, in turn within one job.

    The dashboard's process is there throughout: without somebody who looks it reads nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pairs.json"
        job = subprocess.Popen(
            [
                *(sys.executable, "-m", "shoal", "run", "-n", "2", "--run-dir", folder, "--name", "job"),
                *("--dashboard", "--dashboard-port", "0"),
                *(str(SCRIPT), str(out), str(steps), str(rounds), "together"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert job.stderr is not None
        address = next(line for line in job.stderr if "dashboard: " in line).split()[-1]
        threading.Thread(target=job.stderr.read, daemon=True).start()
        while job.poll() is None:
            if not out.with_suffix(".look").exists():
                time.sleep(0.02)
                continue
            ended = threading.Event()
            viewer = threading.Thread(target=look, args=(address, ended), daemon=True)
            viewer.start()
            while out.with_suffix(".look").exists() and job.poll() is None:
                time.sleep(0.02)
            ended.set()
            viewer.join(1.0)
        pairs = [tuple(pair) for pair in json.loads(out.read_text())]
    report.add(
        "MLP of 0.3 M parameters, ddp, 2 workers, wall clock: spans, progress and a dashboard looked at / none",
        summarise(pairs, digits=4),
        steps_per_round=steps,
        aim="ratio <= 1.01",
    )


def main(quick: bool = False) -> None:
    torch.set_num_threads(1)  # the second core is for whatever else runs here
    report = Report("observe_cost")
    report.add("one span", {"value": round(span_ns(), 1), "unit": "ns of processor time"})
    report.add(
        "one line and 1,000 spans, once a second",
        {"value": round(line_us(), 1), "unit": "us of processor time"},
    )
    dense, ids, label = click_arrays(100_000)
    compare(
        report,
        "click model",
        shoal.Trainer(
            ClickModel(),
            loss=nn.BCEWithLogitsLoss(),
            optimizer=lambda params: torch.optim.Adagrad(params, lr=0.02),
            device="cpu",
            progress=False,
        ),
        shoal.Dataset.from_arrays(({"dense": dense, "ids": ids}, label)).shuffle(seed=0).batch(1024),
        steps=4 if quick else 10,
        rounds=4 if quick else 8,
        batch=1024,
    )
    inputs = torch.randn(20_000, 64)
    compare(
        report,
        "MLP of 0.1 M parameters",
        shoal.Trainer(
            nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)),
            loss=nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            device="cpu",
            progress=False,
        ),
        shoal.Dataset.from_arrays((inputs, inputs.sum(1, keepdim=True))).shuffle(seed=0).batch(128),
        steps=100 if quick else 200,
        rounds=4 if quick else 12,
        batch=128,
    )
    # Stretches of seconds: lines, the stream and its viewer come once a second.
    of_ddp(report, steps=20 if quick else 1000, rounds=4 if quick else 12)
    together(report, steps=20 if quick else 1000, rounds=4 if quick else 12)
    report.save()


if __name__ == "__main__":
    main("--quick" in sys.argv)
