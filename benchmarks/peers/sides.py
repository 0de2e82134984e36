"""Sides of a comparison, and one run of a side: a process of its own that answers with samples a second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.click_model import BATCH
from benchmarks.click_torch import WIDE_BATCH
from benchmarks.peers.environments import ROOT, Skipped

START_TIMEOUT_S = 120.0
"""What a side may take beyond warm-up and measuring: imports, forming a group, tracing."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One configuration of one peer."""

    key: str
    name: str
    module: str
    arguments: tuple[str, ...] = ()
    environment: str | None = None
    """Under .peers/; None: shoal's own, which has the same torch."""
    model: str = "click"


PEERS = (
    Peer("torch-1", "PyTorch, sparse gradients, 1 thread", "plain_torch", ("--threads", "1")),
    Peer("torch-2", "PyTorch, sparse gradients, 2 threads", "plain_torch", ("--threads", "2")),
    Peer("torchrec-1", "TorchRec, 1 process", "torchrec_sharded", ("--workers", "1"), "torchrec"),
    Peer("torchrec-2", "TorchRec, 2 processes", "torchrec_sharded", ("--workers", "2"), "torchrec"),
    *(
        Peer(
            f"tensorflow-{style}-{workers}",
            f"TensorFlow parameter server, {about}, {workers} worker{'s'[: workers - 1]}",
            "tensorflow_ps",
            ("--workers", str(workers), "--style", style),
            "tensorflow",
        )
        for style, about in (("plain", "as in its guide"), ("careful", "unique rows, 4 steps a call"))
        for workers in (1, 2)
    ),
    Peer("paddle-1", "Paddle parameter server, async, 1 worker", "paddle_ps", ("--workers", "1"), "paddle"),
    Peer("paddle-2", "Paddle parameter server, async, 2 workers", "paddle_ps", ("--workers", "2"), "paddle"),
    Peer("ddp", "torch DDP, 2 processes", "torch_ddp", ("--workers", "2"), model="wide"),
)

# The least ratio of samples a second that is aimed at, by (strategy, peer).
AIMS = {
    ("ps:async", "torch-2"): 1.6,
    ("ps", "torch-2"): 1.2,
    ("ps:async", "tensorflow-plain-2"): 2.2,
    ("ps:async", "tensorflow-careful-2"): 2.2,
    ("ps:async", "paddle-2"): 3.0,
    ("ps", "ddp"): 0.9,
    ("ps:async", "ddp"): 1.0,
}


@dataclass(frozen=True, slots=True)
class Timing:
    """How long each run warms up and is measured."""

    warm_s: float
    seconds: float

    @property
    def arguments(self) -> list[str]:
        return ["--warm", str(self.warm_s), "--seconds", str(self.seconds)]


def run_peer(peer: Peer, python: Path, data: Path, timing: Timing) -> dict[str, Any] | Skipped:
    """One run of a peer, by its own interpreter: what it printed as its last line."""
    command = [str(python), "-m", f"benchmarks.peers.{peer.module}", *peer.arguments, *timing.arguments]
    output = _run([*command, "--data", str(data)], timing)
    if isinstance(output, Skipped):
        return output
    lines = [line for line in output.splitlines() if line.startswith('{"peer"')]
    return json.loads(lines[-1]) if lines else Skipped(f"it printed no figure: {output[-300:]}")


def run_shoal(
    strategy: str, model: str, data: Path, timing: Timing, *, workers: int = 2, servers: int = 1
) -> dict[str, Any] | Skipped:
    """One launch of shoal: the sum of its ranks' rates. Relaxed modes update by each worker's own batch, as peers do."""
    served = strategy.split(":")[0] == "ps"
    per_worker = served and strategy != "ps"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).parent / "shoal"), "run", "-n", str(workers)]
        command += ["--servers", str(servers)] if served else []
        command += ["--strategy", strategy, "--run-dir", f"{folder}/runs", "benchmarks/click_train.py"]
        command += ["--model", model, "--data", str(data), "--out", f"{folder}/out", *timing.arguments]
        output = _run([*command, *(["--per-worker"] if per_worker else [])], timing)
        if isinstance(output, Skipped):
            return output
        told = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("out/*.json"))]
    if len(told) < workers:
        return Skipped(f"{len(told)} of {workers} ranks told their rate: {output[-300:]}")
    configuration = {
        "workers": workers,
        "servers": servers if served else 0,
        "threads": told[0]["threads"],
        "batch_per_update": BATCH if model == "click" else WIDE_BATCH,
        "batch_is": "each worker's" if per_worker else "all workers' together",
        "last_loss": round(told[0]["last_loss"], 4),
    }
    return {
        "peer": f"shoal {strategy}",
        "samples_per_s": round(sum(each["samples_per_s"] for each in told), 1),
        "configuration": configuration,
    }


def _run(command: list[str], timing: Timing) -> str | Skipped:
    """Run a side in a session of its own, so that one that hangs is ended with all its processes."""
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}
    limit_s = timing.warm_s + timing.seconds + START_TIMEOUT_S
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **quiet},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Skipped(f"not over after {limit_s:g} s")
    if process.returncode:
        said = [line for line in (output + errors).splitlines() if line.strip()]
        return Skipped(f"exit code {process.returncode}: {said[-1][:300] if said else 'without a word'}")
    return output
