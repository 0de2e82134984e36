"""shoal in a Spark driver: python spark_after.py"""

import torch
from pyspark.sql import SparkSession

import shoal

spark = SparkSession.builder.master("local[2]").getOrCreate()
frame = spark.range(4096).selectExpr("cast(id % 7 as float) x", "cast(3 * (id % 7) + 1 as float) y")


def train(data):
    def as_tensors(sample):
        row, target = sample
        return row["x"][None], target[None]

    trainer = shoal.Trainer(
        torch.nn.Linear(1, 1),
        loss=torch.nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.02),
    )
    trainer.fit(data.map(as_tensors).shuffle(seed=0).batch(128), epochs=20)
    return trainer


trained = shoal.spark.run(train, frame, workers=2, label="y")
trained.transform(frame, torch.nn.Linear(1, 1), inputs=["x"]).show(3)
