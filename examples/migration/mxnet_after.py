"""Push and pull: shoal run -n 2 --servers 2 --strategy ps:async mxnet_after.py"""

import torch

import shoal

kv = shoal.ps.connect()
kv.table("weights", dim=1, rule="adagrad", lr=0.5)
generator = torch.Generator().manual_seed(shoal.rank())

for _step in range(200):
    ids = torch.randint(0, 1000, (64,), generator=generator).unique()
    labels = (ids % 2).float()[:, None]
    scores = torch.from_numpy(kv.wait(kv.pull("weights", ids)))
    gradient = torch.sigmoid(scores) - labels
    kv.push("weights", ids, gradient)

kv.wait()
shoal.collectives.barrier()
ids = torch.arange(1000)
weights = torch.from_numpy(kv.wait(kv.pull("weights", ids)))[:, 0]
right = ((weights > 0) == (ids % 2 == 1)).float().mean()
if shoal.rank() == 0:
    print(f"accuracy {right:.3f}")
