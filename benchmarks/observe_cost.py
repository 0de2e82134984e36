"""Cost of recording: spans, the line a second and the file of spans, on against off. Aim: at most 1 % of a step.

In one process by the processor time of each step, with spans and without in turn within one fit; in two workers under ddp by time on the
clock of rank 0, in stretches of steps that alternate within one job.
"""

from __future__ import annotations

import json
import statistics
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
from benchmarks.harness import Report, summarise
from benchmarks.plain_models import ClickModel, click_arrays
from shoal.runtime import recorder
from shoal.train.callbacks.base import Callback

SCRIPT = Path(__file__).parent / "scripts" / "observed_ddp.py"


def processor_s(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


class InTurn(Callback):
    """Switches recording on and off every few steps, and takes the processor time of each step's thread."""

    def __init__(self) -> None:
        self.spent: dict[bool, list[int]] = {True: [], False: []}
        self.is_on, self.last_ns, self.num_steps = False, 0, 0

    def on_step_end(self, trainer: shoal.Trainer, logs: Any) -> None:
        now_ns = time.thread_time_ns()
        if self.last_ns:
            self.spent[self.is_on].append(now_ns - self.last_ns)
        self.num_steps += 1
        self.is_on = self.num_steps // STEPS_IN_TURN % 2 == 0
        recorder.RECORDER.owner = threading.get_ident() if self.is_on else 0
        recorder.RECORDER.depth = 0  # spans that were open at the switch
        self.last_ns = time.thread_time_ns()


STEPS_IN_TURN = 5


def compare(
    report: Report,
    name: str,
    model: nn.Module,
    loss: nn.Module,
    optimizer: Callable[[Any], Any],
    data: Any,
    steps: int,
    **about: Any,
) -> None:
    """Steps with spans against steps without, in turn within one fit: what disturbs the machine disturbs both."""
    turns = InTurn()
    trainer = shoal.Trainer(
        model, loss=loss, optimizer=optimizer, device="cpu", progress=False, callbacks=[turns]
    )
    recorder.RECORDER.own()
    trainer.fit(data, max_steps=steps, epochs=steps)
    recorded, not_recorded = (sorted(turns.spent[is_on][STEPS_IN_TURN:]) for is_on in (True, False))
    ratios = {
        name: round(recorded[len(recorded) // share] / not_recorded[len(not_recorded) // share], 4)
        for name, share in (("ratio", 2), ("ratio_of_quartiles", 4), ("ratio_of_tenths", 10))
    }
    report.add(
        f"{name}, processor time of a step: recorded / not",
        {**ratios, "step_ms": round(statistics.median(not_recorded) / 1e6, 3), "steps": steps},
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
        ClickModel(),
        nn.BCEWithLogitsLoss(),
        lambda params: torch.optim.Adagrad(params, lr=0.02),
        shoal.Dataset.from_arrays(({"dense": dense, "ids": ids}, label)).shuffle(seed=0).batch(1024),
        steps=100 if quick else 600,
        batch=1024,
    )
    inputs = torch.randn(20_000, 64)
    compare(
        report,
        "MLP of 0.1 M parameters",
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)),
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.01),
        shoal.Dataset.from_arrays((inputs, inputs.sum(1, keepdim=True))).shuffle(seed=0).batch(128),
        steps=500 if quick else 10_000,
        batch=128,
    )
    # Stretches of seconds: lines, the stream and its viewer come once a second.
    of_ddp(report, steps=20 if quick else 1000, rounds=4 if quick else 12)
    together(report, steps=20 if quick else 1000, rounds=4 if quick else 12)
    report.save()


if __name__ == "__main__":
    main("--quick" in sys.argv)
