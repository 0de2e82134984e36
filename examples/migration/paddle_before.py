"""Paddle Fleet: python -m paddle.distributed.launch --nproc_per_node 2 paddle_before.py"""

import paddle
from paddle import nn
from paddle.distributed import fleet

fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
paddle.seed(0)
x = paddle.randn([4096, 20])
y = (x.sum(1) > 0).astype("int64")
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = paddle.optimizer.Adam(1e-2, parameters=model.parameters())
model = fleet.distributed_model(model)
optimizer = fleet.distributed_optimizer(optimizer)
dataset = paddle.io.TensorDataset([x, y])
sampler = paddle.io.DistributedBatchSampler(dataset, 32, shuffle=True)  # for each process
data = paddle.io.DataLoader(dataset, batch_sampler=sampler)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in data:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
if fleet.worker_index() == 0:
    paddle.save(model.state_dict(), "model.pdparams")
