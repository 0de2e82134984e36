"""The same loop: shoal run -n 2 horovod_after.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

torch.manual_seed(0)
x = torch.randn(4096, 20)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)  # over all workers
model, optimizer, data = shoal.setup(model, optimizer, data)

for epoch in range(3):
    for inputs, labels in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    mean = shoal.reduce(loss.detach()) / shoal.num_workers()
    if shoal.rank() == 0:
        print(f"epoch {epoch}: loss {mean:.3f}")
