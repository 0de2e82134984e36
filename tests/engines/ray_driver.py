"""Ray driver: trains on a Dataset of ray.data, and asks for what cannot be.

ray_driver.py ADDRESS
"""

import sys

import numpy as np
import ray
import torch
from torch import nn

import shoal


def refused(call):
    try:
        call()
    except shoal.ShoalError as error:
        print("refused:", error)
    else:
        raise SystemExit("it was not refused")


def as_tensors(sample):
    columns, y = sample
    return torch.stack([columns["a"], columns["b"]]).float(), y.float()[None]


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"a": i % 7, "b": i % 5, "y": 2.0 * (i % 7) - (i % 5)} for i in range(200)]
    dataset = ray.data.from_items(rows, override_num_blocks=4)
    data = shoal.Dataset.from_ray(dataset, label="y")
    found = sorted((int(x["a"]), int(x["b"]), float(y)) for x, y in data)
    assert found == sorted((row["a"], row["b"], row["y"]) for row in rows), found[:5]
    # A block is a file, and a file is a shard.
    print(len(data._source.table.blocks), "shards of 4 blocks")
    columns, _ = shoal.Dataset.from_ray(dataset, label="y", columns=["a"])[
        0
    ]  # the label need not be among them
    assert list(columns) == ["a"]

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = shoal.Trainer(model, loss=nn.MSELoss(), optimizer=optimizer)
    history = trainer.fit(data.map(as_tensors).shuffle(seed=0).batch(16), epochs=8)
    assert history["loss"][-1] < 0.5 * history["loss"][0], dict(history)

    tensors = ray.data.from_numpy(np.arange(24, dtype=np.float32).reshape(6, 4))
    assert shoal.Dataset.from_ray(tensors)[5]["data"].tolist() == [20, 21, 22, 23]
    refused(lambda: shoal.Dataset.from_ray(dataset, label="z"))
    refused(lambda: shoal.Dataset.from_ray(ray.data.from_items([{"a": 1, "nested": {"b": 2}}])))
    refused(lambda: shoal.Dataset.from_ray(ray.data.from_items([{"a": 1, "object": complex(1, 2)}])))
    refused(lambda: shoal.Dataset.from_ray(dataset.filter(lambda row: row["a"] > 10)))
    refused(lambda: shoal.Dataset.from_ray([1, 2]))
    print("all of it")
