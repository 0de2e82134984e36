"""Features in launched jobs: the same statistics at any number of workers, every strategy, and served elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched

SCRIPT = """
import json, sys
import numpy as np, torch
from pathlib import Path
from torch import nn
import shoal
from shoal.features import FeatureSet, bag, categorical, crossed, embedding, hashed, numeric

class Rows:
    def __len__(self):
        return 900
    def __getitem__(self, row):
        draws = np.random.default_rng(row)
        length = int(draws.integers(0, 4))
        clicked = np.full(3, -1)
        clicked[:length] = draws.integers(0, 30, length)
        city = f"city {int(draws.zipf(1.5)) % 20}"
        inputs = {"x": float(draws.normal(3, 2)), "city": city, "clicked": clicked}
        return inputs, np.float32(inputs["x"] > 3)

def build(features):
    layer = features.input_layer()
    return nn.Sequential(layer, nn.Linear(layer.out_features, 1), nn.Flatten(0))

def main():
    data = shoal.Dataset.from_torch(Rows())
    torch.manual_seed(0)
    features = FeatureSet([
        numeric("x"), numeric("x", normalize="quantile", name="rank"), categorical("city", min_count=3),
        embedding("city", dim=4), crossed(["city", "city"], 100, name="twice"), bag("clicked", 3, sparse=True),
        *([embedding(hashed("city", name="any"), dim=2)] if "ps" in sys.argv else []),
    ]).fit(data, batch_size=64)
    Path(f"statistics-{shoal.rank()}").write_bytes(features.input_layer().feature_set.numpy().tobytes())
    if "fit-only" in sys.argv:
        return
    trainer = shoal.Trainer(
        build(features), loss=nn.BCEWithLogitsLoss(), optimizer=lambda params: torch.optim.Adagrad(params, lr=0.1), seed=0
    )
    trainer.fit(data.shuffle(seed=0).batch(60).map(features), epochs=1)
    trainer.save("model")
    found = trainer.predict(data.batch(300).map(features))
    Path(f"predicted-{shoal.rank()}").write_text(json.dumps(found.double().tolist()))

if __name__ == "__main__":
    main()
"""

SERVER = """
import json
from pathlib import Path
import numpy as np, torch
from script import Rows, build
import shoal
from torch import nn
from shoal.features import FeatureSet

features = FeatureSet.load("model")
trainer = shoal.Trainer(build(features), loss=nn.BCEWithLogitsLoss(), optimizer=lambda params: torch.optim.SGD(params))
trainer.load("model")
found = trainer.predict(shoal.Dataset.from_torch(Rows()).batch(300).map(features))
Path("served").write_text(json.dumps(found.double().tolist()))
"""


pytestmark = pytest.mark.usefixtures("own_cache")


def test_statistics_are_the_same_at_any_number_of_workers(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    found = set()
    for workers in (1, 2, 3):
        launched = launch_script(SCRIPT, workers=workers, args=("fit-only",))
        assert launched.exit_code == 0, launched.error
        found |= {(tmp_path / f"statistics-{rank}").read_bytes() for rank in range(workers)}
    assert len(found) == 1
    statistics = json.loads(found.pop())
    assert statistics["num_samples"] == 900
    assert len(dict(statistics["vocabularies"])["city"]) > 3


def test_a_model_trained_by_three_workers_is_served_by_a_fresh_process(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = launch_script(SCRIPT, workers=3)
    assert launched.exit_code == 0, launched.error
    (tmp_path / "server.py").write_text(SERVER)
    subprocess.run([sys.executable, "server.py"], cwd=tmp_path, check=True, capture_output=True)
    served = json.loads((tmp_path / "served").read_text())
    predicted = [json.loads((tmp_path / f"predicted-{rank}").read_text()) for rank in range(3)]
    # A matrix product over fewer rows may round otherwise; what goes into it is the same to the bit.
    assert predicted[0] == pytest.approx(served, abs=1e-6)
    assert predicted[0] == predicted[1] == predicted[2]


def test_rows_of_the_input_layer_are_on_the_servers(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    alone = launch_script(SCRIPT, workers=1)
    assert alone.exit_code == 0, alone.error
    expected = json.loads((tmp_path / "predicted-0").read_text())
    served = launch_script(SCRIPT, workers=2, strategy="ps", servers=1)
    assert served.exit_code == 0, served.error
    for table in ("of_city", "of_twice", "of_clicked"):
        assert f"0.tables.{table}.rows.weight: rows on the servers" in served.stderr, served.stderr
    assert json.loads((tmp_path / "predicted-0").read_text()) == pytest.approx(expected, abs=2e-3)
    hashed = launch_script(SCRIPT, workers=2, strategy="ps", servers=1, args=("ps",))
    assert hashed.exit_code == 0, hashed.error
    assert "0.tables.of_any.rows.rows: rows on the servers" in hashed.stderr, hashed.stderr
