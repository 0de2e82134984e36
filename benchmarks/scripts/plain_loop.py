"""The training of the migration pages in one process of plain PyTorch: what each system's script is compared with."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(4096, 20)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

for _epoch in range(3):
    for inputs, labels in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    accuracy = (model(x).argmax(1) == y).float().mean()
print(f"accuracy {accuracy:.3f}")
