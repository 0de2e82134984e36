"""A HashEmbedding: trained, resumed and looked up under whatever strategy; what comes of it is written down by rank 0."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import shoal

OUT, DO, FROM = Path(sys.argv[1]), sys.argv[2], (sys.argv[3:] or [None])[0]
IDS = (torch.arange(36 * 3).reshape(36, 3) * 7 % 50 - 9) * 10**16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rows = shoal.nn.HashEmbedding(4, scale=0.5)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids).sum(1))


torch.set_num_threads(1)
model = Model().double()
data = shoal.Dataset.from_arrays((IDS, (IDS % 11).sum(1, keepdim=True).double().sin()))
if DO == "loop":
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.1)
    model, optimizer, batches = shoal.setup(model, optimizer, data.shuffle(seed=4).batch(10))
    for _ in range(2):
        for ids, target in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(ids), target).backward()
            with torch.no_grad():
                model(ids)  # leaves nothing behind
            optimizer.step()
else:
    trainer = shoal.Trainer(
        model,
        loss=nn.MSELoss(),
        seed=0,
        clip_norm=2.0,
        optimizer=lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
    )
    trainer.fit(data.shuffle(seed=4).batch(10), epochs=int(DO), resume=FROM)
    trainer.save_checkpoint(str(OUT))
    trainer.save(OUT / "model")
    before = model(IDS[:5]).detach()  # by the script itself, where rows may be on servers
    assert torch.equal(before, trainer.predict(data.batch(6))[:5])
    trainer.fit(data.batch(12), epochs=1)
    assert not torch.equal(model(IDS[:5]), before)
    trainer.load(OUT / "model")
    assert torch.equal(trainer.predict(data.batch(6))[:5], before)
    assert torch.equal(copy.deepcopy(model)(IDS[:5]), before)
with torch.no_grad():
    looked_up = model(IDS).clone()
if shoal.rank() == 0:
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file({**state, "looked up": looked_up}, OUT / "state.safetensors")
