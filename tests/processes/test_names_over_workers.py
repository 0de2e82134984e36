"""Names people know, over workers: a strategy of one's own, weights to begin with, predictions in files, over a death."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from launched import Launched
from torch import nn

from shoal import Faults

SCRIPT = """
import json, pathlib, torch, shoal
from torch import nn
from shoal.parallel.ddp import Ddp

class Counting(Ddp):
    def commit(self):
        result = super().commit()
        pathlib.Path(f"commits-{shoal.rank()}").write_text(str(self.step))
        return result

torch.manual_seed(shoal.rank())   # init_from makes them alike
x = torch.randn(41, 3, generator=torch.Generator().manual_seed(0))
trainer = shoal.Trainer(nn.Linear(3, 2), loss="mse", optimizer="sgd", lr=0.1, strategy=Counting, init_from="begin.pth")
trainer.summary()
trainer.fit(x, x[:, :2], batch_size=10, epochs=2)
trainer.predict(x, batch_size=10, out="out")
whole = trainer.predict(x, batch_size=10)
if shoal.rank() == 0:
    torch.save(whole, "whole.pt")
"""


def test_a_job_of_names_predicts_to_files_over_a_death(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "begin.pth")
    faults = Faults().kill("worker-2", at_step=4).kill("worker-1", at="worker: predicting")
    launched = launch_script(SCRIPT, workers=3, faults=faults)
    assert launched.exit_code == 0, f"{launched.error}\n{launched.stderr}"
    assert launched.stdout.count("8 parameters, 8 trained") == 1
    assert [(tmp_path / f"commits-{rank}").read_text() for rank in range(3)] == ["10"] * 3

    manifest = json.loads((tmp_path / "out/_manifest.json").read_text())
    tables = [pq.read_table(tmp_path / "out" / name) for name in manifest["files"]]
    rows = {
        at: row
        for table in tables
        for at, row in zip(*(table[name].to_pylist() for name in ("position", "output")), strict=True)
    }
    assert (manifest["rows"], sorted(rows)) == (41, list(range(41)))
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert torch.allclose(torch.tensor([rows[at] for at in range(41)]), whole, atol=1e-6)


TRIED = """
import torch, shoal
from torch import nn
torch.manual_seed(0)
x = torch.randn(41, 3)
trainer = shoal.Trainer(nn.Linear(3, 2), loss="mse", optimizer="sgd", lr=0.1, fast_dev_run=2,
    callbacks=[shoal.callbacks.ModelCheckpoint(every_steps=1)])
history = trainer.fit(x, x[:, :2], batch_size=10, epochs=3, validation_data=(x, x[:, :2]))
measured = trainer.evaluate(x, x[:, :2], batch_size=10)
predicted = trainer.predict(x, batch_size=10)
if shoal.rank() == 0:
    print("tried", trainer.step, len(history.epochs), len(predicted), history["val_loss"][-1], measured["loss"])
"""


def test_a_script_is_tried_out_alike_by_any_number_of_workers(launch_script: Callable[..., Launched]) -> None:
    said = []
    for workers in (1, 3):
        launched = launch_script(TRIED, workers=workers, name=f"tried-{workers}", quiet=True)
        assert launched.exit_code == 0, f"{launched.error}\n{launched.stderr}"
        said.append([float(word) for word in launched.stdout.split()[1:]])
        assert not list((launched.run_dir / "checkpoints").glob("*"))
    assert said[0][:3] == [2, 1, 20]
    assert said[1] == pytest.approx(said[0], rel=1e-5)
