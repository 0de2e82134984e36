"""Spark's TorchDistributor: spark-submit spark_before.py"""

import torch
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").getOrCreate()
frame = spark.range(4096).selectExpr("cast(id % 7 as float) x", "cast(3 * (id % 7) + 1 as float) y")
frame.write.mode("overwrite").parquet("rows.parquet")


def train():
    import pyarrow.parquet
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    table = pyarrow.parquet.read_table("rows.parquet")
    x, y = (
        torch.tensor(table[name].to_numpy())[dist.get_rank() :: dist.get_world_size(), None] for name in "xy"
    )
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _epoch in range(20):
        for chosen in torch.arange(len(x)).split(64):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return {name: value.tolist() for name, value in model.module.state_dict().items()}


print(TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(train))
