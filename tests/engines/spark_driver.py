"""Spark driver: trains on a DataFrame, predicts over it, and asks for what cannot be."""

import os
import sys
from pathlib import Path

import torch
from pyspark.sql import SparkSession
from pyspark.sql.functions import struct
from torch import nn

import shoal


def make_model():
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def as_tensors(sample):
    columns, y = sample
    return torch.stack([columns["a"], columns["b"]]).float(), y.float()[None]


def train(data):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = shoal.Trainer(model, loss=nn.MSELoss(), optimizer=optimizer)
    trainer.fit(data.map(as_tensors).shuffle(seed=0).batch(16), epochs=2)
    return trainer


SCRIPT = """
import shoal

assert len(shoal.spark.data()) == 200
print("rank", shoal.rank())
"""


def refused(call):
    try:
        call()
    except shoal.ShoalError as error:
        print("refused:", error)
    else:
        raise SystemExit("it was not refused")


if __name__ == "__main__":
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    rows = [(float(i % 7), float(i % 5), 2.0 * (i % 7) - (i % 5)) for i in range(200)]
    df = spark.createDataFrame(rows, ["a", "b", "y"]).repartition(4)
    data = shoal.Dataset.from_spark(df, label="y")
    assert len(data) == 200
    columns, _ = shoal.Dataset.from_spark(df, label="y", columns=["a"])[0]  # the label need not be among them
    assert list(columns) == ["a"]
    refused(lambda: shoal.Dataset.from_spark(df, label="z", columns=["a"]))
    print(df.rdd.getNumPartitions(), "partitions as 4 shards")

    trained = shoal.spark.run(train, df, workers=2, label="y", quiet=True, oversubscribe=True)
    scored = trained.transform(df, make_model(), inputs=["a", "b"]).toPandas()
    model = make_model()
    from safetensors.torch import load_file

    model.load_state_dict(load_file(f"{trained.model_url}/model.safetensors"))
    expected = model(torch.tensor(scored[["a", "b"]].to_numpy(), dtype=torch.float32)).detach()[:, 0]
    # Of batches of another size torch may add in another order.
    torch.testing.assert_close(torch.tensor(scored["prediction"]).float(), expected, rtol=1e-5, atol=1e-5)
    print("predictions are those of the weights")

    Path("reads.py").write_text(SCRIPT)
    nothing = shoal.spark.run("reads.py", df, workers=2, quiet=True, oversubscribe=True)
    refused(lambda: nothing.transform(df, make_model(), inputs=["a", "b"]))
    refused(lambda: shoal.Dataset.from_spark(df.withColumn("nested", struct("a", "b"))))
    refused(lambda: trained.transform(df, make_model(), inputs=["a", "missing"]))
