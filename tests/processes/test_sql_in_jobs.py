"""Jobs that train from PostgreSQL: workers agree on the ranges, and connections that end in mid-epoch cost nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from launched import Launched

from postgres_server import PostgresServer, Unavailable
from shoal.data.formats.databases import PostgresDatabase

TRAINS = """
import pathlib, sys, time
import torch
import shoal

url, folder = sys.argv[1], pathlib.Path(sys.argv[2])

class Pause(shoal.callbacks.Callback):  # on rank 0; the other waits for it at the next step
    def on_step_end(self, trainer, logs):
        if logs.step == 2 and folder.name == "disturbed":
            (folder / "read").touch()
            while not (folder / "ended").exists():
                time.sleep(0.01)

torch.manual_seed(0)
data = shoal.Dataset.from_sql("numbers", url, partitions=20, label="y", schema={"x": "float32", "y": "float32"},
                              columns=["x", "y"])
class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
    def forward(self, columns):
        return self.line(columns["x"][:, None])[:, 0]
model = Line()
trainer = shoal.Trainer(model, loss=torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), seed=0,
                        callbacks=[Pause()])
trainer.fit(data.batch(50), epochs=1)
print([weight.tolist() for weight in model.parameters()])
"""


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    try:
        server = PostgresServer.start()
    except Unavailable as why:
        pytest.skip(str(why))
    numbers = np.arange(1000)
    server.ingest("numbers", pa.table({"id": numbers * 3, "x": numbers / 1000, "y": numbers / 500}))
    server.run("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    yield server
    server.remove()


def test_connections_that_end_in_mid_epoch_cost_no_sample_and_no_worker(
    postgres: PostgresServer,
    launch_script: Callable[..., Launched],
    at_file: Callable[[Path, Callable[[], object]], None],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "disturbed"
    folder.mkdir()

    def end_connections() -> None:
        session = PostgresDatabase(postgres.url).connect()
        session.values(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'shoal' "
            "AND pid <> pg_backend_pid()"
        )
        session.close()
        (folder / "ended").touch()

    at_file(folder / "read", end_connections)
    options = {"workers": 2, "quiet": True}
    disturbed = launch_script(TRAINS, args=(postgres.url, str(folder)), name="disturbed", **options)
    assert (disturbed.exit_code, disturbed.error) == (0, None)
    calm = launch_script(TRAINS, args=(postgres.url, str(tmp_path)), name="calm", **options)
    assert (calm.exit_code, calm.error) == (0, None)
    assert disturbed.stdout == calm.stdout
    events = [json.loads(line) for line in (disturbed.run_dir / "events.jsonl").read_text().splitlines()]
    lost = [event for event in events if "database connection lost" in json.dumps(event)]
    assert lost
    assert all(postgres.place in json.dumps(event) for event in lost)
