"""DistributedDataParallel: torchrun --nproc-per-node 2 ddp_before.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
x = torch.randn(4096, 20)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
sampler = DistributedSampler(TensorDataset(x, y))
data = DataLoader(TensorDataset(x, y), batch_size=64 // workers, sampler=sampler)

first = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt", weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"] + 1
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for inputs, labels in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    if rank == 0:
        saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(saved, "last.pt")

if rank == 0:
    with torch.no_grad():
        accuracy = (model.module(x).argmax(1) == y).float().mean()
    print(f"accuracy {accuracy:.3f}")
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
