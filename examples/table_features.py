"""A table in a CSV file: columns become features, statistics are computed once, and the model carries them.

Purchases by age (sometimes missing), city, device, hour and money spent before. How likely each was is in the table
too, so the best possible AUC is known. The saved model is served without the table it was trained on.

    python examples/table_features.py                            one process
    shoal run -n 3 examples/table_features.py                    three workers share the statistics and the training
    shoal run -n 2 --servers 1 --strategy ps examples/table_features.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torchmetrics.functional.classification import binary_auroc

import shoal
from shoal.features import FeatureSet, bucketized, categorical, crossed, embedding, hashed, numeric


def write_table(path: Path, num_rows: int) -> None:
    draws = np.random.default_rng(0)
    city = np.minimum(draws.zipf(1.4, num_rows), 40) - 1
    age, hour = draws.normal(42, 15, num_rows).clip(16, 95).round(), draws.integers(0, 24, num_rows)
    spent, phone = draws.lognormal(3, 1.5, num_rows).round(2), draws.random(num_rows) < 0.5
    taste = draws.normal(0, 1, (40, 3))[city, np.digitize(age, [30, 50])]
    logit = taste + 0.5 * np.log(spent / 20) + np.where(phone & (hour > 18), 1.0, -0.5)
    chance = (1 / (1 + np.exp(-logit))).round(6)
    columns = {
        "age": np.where(draws.random(num_rows) < 0.03, "", age.astype(np.str_)),
        "city": np.char.add("city ", city.astype(np.str_)),
        "device": np.where(phone, "phone", "desk"), "hour": hour, "spent": spent, "chance": chance,
        "bought": (draws.random(num_rows) < chance).astype(int),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    own, rows = path.with_suffix(f".{os.getpid()}"), zip(*columns.values(), strict=True)
    own.write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows), ""]))
    with contextlib.suppress(FileExistsError):  # of several workers one comes first
        os.link(own, path)
    own.unlink()


def build(features: FeatureSet) -> nn.Module:
    layer = features.input_layer()
    return nn.Sequential(layer, nn.Linear(layer.out_features, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on features of a CSV table.")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--out", default="out/table", help="directory for the table and the model")
    options = parser.parse_args()
    torch.manual_seed(0)
    write_table(table := Path(options.out) / f"purchases-{options.rows}.csv", options.rows)
    data = shoal.Dataset.from_csv(table, label="bought", schema={"bought": "float32"}, fill={"age": np.nan})
    train, test = data.split(0.8, 0.2, seed=0)

    features = FeatureSet([
        numeric("age", indicator=True),
        numeric("spent", normalize="quantile"),
        bucketized("hour", [6, 12, 18]),
        categorical("city", min_count=5), embedding("city", dim=8),
        hashed("device", buckets=8),
        crossed(["city", bucketized("age", quantiles=4)], buckets=500),
        crossed(["device", "hour_bucket"], buckets=50),
    ])  # fmt: skip
    trainer = shoal.Trainer(
        build(features.fit(train)),
        loss=nn.BCEWithLogitsLoss(),
        optimizer=lambda params: torch.optim.Adagrad(params, lr=0.05),
        metrics=["auroc"],
        seed=0,
    )
    trainer.fit(train.shuffle(seed=0).batch(256).map(features), epochs=2)
    result = trainer.evaluate(test.batch(2048).map(features))
    inputs, bought = next(iter(test.batch(len(test))))
    print(f"test: AUC {result['auroc']:.4f} of {binary_auroc(inputs['chance'], bought.int()):.4f} possible")
    trainer.save(f"{options.out}/model")

    served = FeatureSet.load(f"{options.out}/model")  # with what fit found out, wherever the model goes
    visitors = {
        "age": [33, np.nan],
        "city": ["city 3", "?"],
        "device": ["phone"] * 2,
        "hour": [20, 9],
        "spent": [80, 1],
    }
    chances = trainer.model(served(visitors)).sigmoid().tolist()
    print(f"chances of two visitors: {chances[0]:.3f}, {chances[1]:.3f}")


if __name__ == "__main__":
    main()
