"""Accelerate: accelerate launch --cpu --num_processes 2 accelerate_before.py"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x = torch.randn(4096, 20)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)  # for each of two processes
model, optimizer, data = accelerator.prepare(model, optimizer, data)

for _epoch in range(3):
    for inputs, labels in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

if accelerator.is_main_process:
    with torch.no_grad():
        accuracy = (accelerator.unwrap_model(model)(x).argmax(1) == y).float().mean()
    print(f"accuracy {accuracy:.3f}")
