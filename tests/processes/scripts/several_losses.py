"""A GAN with two optimizers and an average of its generator, or a GradScaler, in a loop; named losses in the Trainer: OUT KIND."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import shoal

out = Path(sys.argv[1])
generator = torch.Generator().manual_seed(1)
x = torch.randn(41, 6, dtype=torch.float64, generator=generator)
z = torch.randn(
    41, 3, dtype=torch.float64, generator=generator
)  # with the data, so that one process draws the same
pairs = shoal.Dataset.from_arrays((x, z)).shuffle(seed=0).batch(10)


def mlp(seed, *sizes):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:])).double()


results = {}
if sys.argv[2] == "gan":
    fake, critic = mlp(0, 3, 8, 6), mlp(1, 6, 8, 1)
    average = torch.optim.swa_utils.AveragedModel(
        fake, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    of_fake, of_critic = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (fake, critic))
    shoal.setup(fake, of_fake, pairs)
    _, _, batches = shoal.setup(critic, of_critic, pairs)
    for _ in range(2):
        for real, noise in batches:
            of_critic.zero_grad()
            scores = critic(real), critic(fake(noise).detach())
            loss_critic = F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()
            loss_critic.backward()
            of_critic.step()
            of_fake.zero_grad()
            loss_fake = F.softplus(-critic(fake(noise))).mean()
            loss_fake.backward()  # leaves gradients in the critic as well, which its zero_grad drops
            shoal.log(loss=loss_fake, critic=loss_critic)
            of_fake.step()
            average.update_parameters(fake)
    for name, model in (("fake", fake), ("critic", critic), ("average", average)):
        results |= {f"{name}/{key}": value.clone() for key, value in model.state_dict().items()}
elif sys.argv[2].startswith("scaled"):
    model = mlp(3, 6, 8, 3)
    fused = sys.argv[2] == "scaled-fused"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    model, optimizer, batches = shoal.setup(model, optimizer, pairs)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for epoch in range(2):
        for number, (a, b) in enumerate(batches):
            optimizer.zero_grad()
            # Too large for one worker alone is too large for all: the step is skipped, and the scale halved.
            loss = F.mse_loss(model(a), b) * (
                float("inf") if (epoch, number, shoal.rank()) == (0, 3, 0) else 1.0
            )
            scaler.scale(loss).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
    results |= {key: value.clone() for key, value in model.state_dict().items()}
    results["scale"] = torch.tensor([scaler.get_scale()])
else:
    data = shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).shuffle(seed=0).batch(10)

    def several(output, target):
        fit, size = F.mse_loss(output, target), output.abs()
        return {"loss": fit + 0.1 * size.mean(), "fit": fit, "balance": (size.sum(), float(len(size)))}

    trainer = shoal.Trainer(mlp(2, 6, 8, 1), loss=several, optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    trainer.fit(data, epochs=2)
    results |= {key: value.clone() for key, value in trainer.model.state_dict().items()}

if shoal.rank() == 0:
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, out)
