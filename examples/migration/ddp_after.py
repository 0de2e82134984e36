"""The same loop: shoal run -n 2 ddp_after.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

torch.manual_seed(0)
x = torch.randn(4096, 20)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
model, optimizer, data = shoal.setup(model, optimizer, data)

start = shoal.resume(epoch=0)
for epoch in range(start.epoch, 3):
    for inputs, labels in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        shoal.checkpoint(every=100, epoch=epoch)

if shoal.rank() == 0:
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean()
    print(f"accuracy {accuracy:.3f}")
    torch.save(model.state_dict(), "model.pt")
