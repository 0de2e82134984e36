"""Trackers against their real clients, which `make test-engines` installs: a local OTLP server, W&B offline, a file store of MLflow."""

from __future__ import annotations

import gzip
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.callbacks import MLflow, OpenTelemetry
from shoal.train.callbacks.base import Callback, StepLogs
from shoal.train.callbacks.trackers import Tracker

NUM_STEPS = 10


def fit(callback: Tracker, *, more: Sequence[Callback] = ()) -> None:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    data = shoal.Dataset.from_arrays((inputs, inputs.sum(1, keepdim=True)))
    trainer = shoal.Trainer(
        nn.Linear(3, 1),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        callbacks=[callback, *more],
    )
    trainer.fit(data.batch(8), epochs=2)


class Stopping(Callback):
    def on_step_end(self, trainer: shoal.Trainer, logs: StepLogs) -> None:
        if logs.step == 3:
            raise ValueError("a bug")


@pytest.fixture
def received() -> Iterator[tuple[str, list[bytes]]]:
    """An address that takes what OTLP exporters send."""
    bodies: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_opentelemetry_sends_the_last_values(
    received: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    address, bodies = received
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    fit(OpenTelemetry(every_steps=2))
    request = ExportMetricsServiceRequest()
    request.ParseFromString(gzip.decompress(bodies[-1]) if bodies[-1][:2] == b"\x1f\x8b" else bodies[-1])
    metrics = request.resource_metrics[0].scope_metrics[0].metrics
    values = {metric.name: metric.gauge.data_points[0].as_double for metric in metrics}
    assert values["shoal.step"] == NUM_STEPS
    assert {"shoal.loss", "shoal.lr", "shoal.epoch.loss"} <= values.keys()


OFFLINE = """
import torch, shoal
from torch import nn
inputs = torch.randn(40, 3)
data = shoal.Dataset.from_arrays((inputs, inputs.sum(1, keepdim=True)))
trainer = shoal.Trainer(
    nn.Linear(3, 1),
    loss=nn.MSELoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    callbacks=[shoal.callbacks.WandB(mode="offline", every_steps=2)],
)
trainer.fit(data.batch(8), epochs=2)
"""


def test_wandb_writes_an_offline_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    # In a process of its own: its service keeps threads until the process ends.
    (tmp_path / "train.py").write_text(OFFLINE)
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, capture_output=True)
    assert len(list(tmp_path.glob("runs/train/wandb/offline-run-*/*.wandb"))) == 1


def test_mlflow_has_every_reported_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs the whole package
    fit(MLflow((tmp_path / "store").as_uri(), every_steps=2))
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "store").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("shoal").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted(each.step for each in history) == [
        2,
        4,
        6,
        8,
        10,
    ]  # in the order in which its threads wrote them
    assert run.data.params["strategy"] == "single"
    assert run.info.status == "FINISHED"
    with pytest.raises(ValueError, match="a bug"):
        fit(MLflow((tmp_path / "store").as_uri(), every_steps=2), more=[Stopping()])
    states = {each.info.status for each in client.search_runs([run.info.experiment_id])}
    assert states == {"FINISHED", "FAILED"}
