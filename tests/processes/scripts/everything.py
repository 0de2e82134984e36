"""All that a script does with the Trainer, small, and what came of it written down by every rank: OUT [VARIANT]."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import shoal

out, variant = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "plain"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(50, 4, sparse=variant == "sparse")
        mixing = [nn.BatchNorm1d(8), nn.Dropout(0.2)] if variant == "mixing" else []
        self.layers = nn.Sequential(nn.Linear(9, 8), *mixing, nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layers(torch.cat([x, self.rows(ids)], dim=1))


def optimizer(params: object) -> torch.optim.Optimizer:
    if variant == "sparse":
        return torch.optim.Adagrad(params, lr=0.05)
    if variant == "adam":
        return torch.optim.Adam(params, lr=0.01)
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


generator = torch.Generator().manual_seed(1)
x, ids = torch.randn(86, 5, generator=generator), torch.randint(50, (86,), generator=generator)
data = shoal.Dataset.from_arrays(({"x": x, "ids": ids}, (x.sum(1) > 0).long()))
train, test = data.split(0.8, 0.2, seed=0)

torch.manual_seed(0)
model = Model()
trainer = shoal.Trainer(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=optimizer,
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7),
    metrics=["accuracy"],
    callbacks=[shoal.callbacks.ModelCheckpoint(every_steps=4)],
    clip_norm=0.5 if variant == "adam" else None,
    accumulate=2 if variant == "adam" else 1,
    seed=0,
)
history = trainer.fit(train.shuffle(seed=0).batch(12), epochs=2, validation_data=test.batch(6))
print("first fit:", [round(value, 7) for value in history["val_loss"]])
evaluated = trainer.evaluate(test.batch(4))
print("evaluated:", {name: round(value, 7) for name, value in evaluated.items()})
history = trainer.fit(train.shuffle(seed=1).batch(20), max_steps=4)
predicted = trainer.predict(test.batch(5))
print("predicted:", [round(value, 6) for value in predicted.sum(0).tolist()])

digest = hashlib.sha256()
for name, tensor in model.state_dict().items():
    digest.update(name.encode() + tensor.numpy().tobytes())
came_of_it = {
    "weights": digest.hexdigest(),
    "evaluated": evaluated,
    "loss": history["loss"],
    "predicted": predicted.tolist(),
    "step": trainer.step,
    "lr": trainer.learning_rates,
}
(out / f"{shoal.rank()}.json").write_text(json.dumps(came_of_it, sort_keys=True))
