"""PyTorch's loop: shoal run -n 2 paddle_after.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

torch.manual_seed(0)
x = torch.randn(4096, 20)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)  # over all workers
model, optimizer, data = shoal.setup(model, optimizer, data)

for _epoch in range(3):
    for inputs, labels in data:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
if shoal.rank() == 0:
    torch.save(model.state_dict(), "model.pt")
    with torch.no_grad():
        print(f"accuracy {(model(x).argmax(1) == y).float().mean():.3f}")
