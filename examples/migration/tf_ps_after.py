"""Parameter servers: shoal run -n 2 --servers 2 --strategy ps tf_ps_after.py (TF_CONFIG is understood with --bind)"""

import torch
from torch import nn

import shoal

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(10_000, 16), nn.Flatten(), nn.Linear(8 * 16, 64), nn.ReLU(), nn.Linear(64, 1)
)
trainer = shoal.Trainer(
    model,
    loss=nn.BCEWithLogitsLoss(),
    optimizer=lambda params: torch.optim.Adagrad(params, lr=0.1),
)

ids = torch.randint(0, 10_000, (4096, 8))
labels = (ids[:, :1] % 2 == 0).float()
data = shoal.Dataset.from_arrays((ids, labels))
history = trainer.fit(data.shuffle(seed=0).batch(64), epochs=3)
if shoal.rank() == 0:
    print(f"loss {history['loss'][-1]:.3f}")
