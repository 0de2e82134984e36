"""A loop with a checkpoint every four steps: OUT [one]. Asks to be stopped at the step in ./stop-at.

It trains two models on each batch and keeps an average of the first; or "one" of them, so that workers are replaced alone.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.cluster.worker import session

out = Path(sys.argv[1])
generator = torch.Generator().manual_seed(1)
x = torch.randn(47, 6, dtype=torch.float64, generator=generator)
data = shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).shuffle(seed=0).batch(10)


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)).double()


first, second = network(0), network(1)
torch.manual_seed(7)
one = torch.optim.Adam(first.parameters(), lr=0.01)
two = torch.optim.SGD(second.parameters(), lr=0.01, momentum=0.9)
average = torch.optim.swa_utils.AveragedModel(first)
is_alone = sys.argv[2:] == ["one"]
_, _, batches = shoal.setup(first, one, data)
if not is_alone:
    _, _, batches = shoal.setup(second, two, data)
scheduler = torch.optim.lr_scheduler.StepLR(one, 3, 0.7)
values = {} if is_alone else {"average": average}
start = shoal.resume(step=0, epoch=0, indices=[], best=torch.full((3,), 9.0), **values)
step, indices, best = start.step, start.indices, start.best
stop_at = int(Path("stop-at").read_text()) if Path("stop-at").exists() else 0

for epoch in range(start.epoch, 4):
    for i, (a, b) in enumerate(batches):
        one.zero_grad()
        loss = F.mse_loss(first(a), b)
        loss.backward()
        shoal.log(loss=loss, part=(float(len(a) if batches.num_local else 0), 1.0))
        one.step()
        if not is_alone:
            two.zero_grad()
            F.mse_loss(second(a), first(a).detach() + random.random()).backward()
            two.step()
            average.update_parameters(first)
        scheduler.step()
        step += 1
        indices.append(i)
        best[0] = step
        if step == stop_at and shoal.rank() == 0:
            Path("now").touch()
            while session.stop_requested() is None:
                time.sleep(0.001)
        shoal.checkpoint(every=4, step=step, epoch=epoch, indices=indices, best=best, **values)

bits = {
    f"{name}/{key}": value.full_tensor() if hasattr(value, "full_tensor") else value
    for name, model in (("first", first), ("second", second), ("average", average))
    for key, value in model.state_dict().items()
}
digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in bits.values())).hexdigest()
facts = {"step": step, "indices": indices, "best": best.tolist(), "rate": one.param_groups[0]["lr"]}
(out / f"{shoal.rank()}.json").write_text(json.dumps({"digest": digest, **facts}))
torch.save(bits, out / f"{shoal.rank()}.pt")
