"""A GAN on a ring of points: two optimizers that take turns, and an average of the generator's weights.

    python examples/gan.py
    shoal run -n 3 examples/gan.py
    shoal run -n 3 --strategy fsdp examples/gan.py
    shoal run -n 3 examples/gan.py --own-loop

Noise is a column of the data, so that any number of workers draws the same.
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import shoal

NUM_SAMPLES, BATCH, EPOCHS, DECAY = 1500, 250, 10, 0.9


def layers(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_in, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, num_out)
    )


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic, self.generator = layers(2, 1), layers(4, 2)
        self.average = copy.deepcopy(self.generator).requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        return self.average(noise)


def training_step(model: Gan, batch: tuple[Tensor, Tensor], optimizer: str) -> Tensor:
    noise, real = batch
    made = model.generator(noise)
    if optimizer == "critic":
        return softplus(-model.critic(real)).mean() + softplus(model.critic(made.detach())).mean()
    return softplus(-model.critic(made)).mean()


def adam(params: object) -> torch.optim.Adam:
    return torch.optim.Adam(params, lr=5e-3, betas=(0.5, 0.99))


def with_trainer(model: Gan, data: shoal.Dataset, noise: Tensor) -> Tensor:
    trainer = shoal.Trainer(
        model,
        training_step=training_step,
        optimizer={"critic": adam, "generator": adam},
        callbacks=[shoal.callbacks.WeightAverage("average", of="generator", decay=DECAY)],
    )
    trainer.fit(data.batch(BATCH), epochs=EPOCHS)
    return trainer.predict(shoal.Dataset.from_arrays(noise).batch(BATCH))


def with_own_loop(model: Gan, data: shoal.Dataset, noise: Tensor) -> Tensor:
    critic, generator = adam(model.critic.parameters()), adam(model.generator.parameters())
    shoal.setup(model.critic, critic, data.batch(BATCH))
    _, _, batches = shoal.setup(model.generator, generator, data.batch(BATCH))
    for _ in range(EPOCHS):
        for batch in batches:
            for name, optimizer in (("critic", critic), ("generator", generator)):
                critic.zero_grad()
                generator.zero_grad()
                training_step(model, batch, name).backward()
                optimizer.step()
            with torch.no_grad():  # the same on every worker, as the weights are
                pairs = zip(model.average.parameters(), model.generator.parameters(), strict=True)
                for average, weight in pairs:
                    average.lerp_(weight, 1 - DECAY)
    with torch.no_grad():
        return model(noise)


def main() -> None:
    draw = torch.Generator().manual_seed(0)
    angle = 2 * torch.pi * torch.rand(NUM_SAMPLES, 1, generator=draw)
    ring = torch.cat([angle.cos(), angle.sin()], 1) + 0.02 * torch.randn(NUM_SAMPLES, 2, generator=draw)
    noise = torch.randn(NUM_SAMPLES, 4, generator=draw)
    torch.manual_seed(0)
    model, data = Gan(), shoal.Dataset.from_arrays((noise, ring))
    made = (with_own_loop if "--own-loop" in sys.argv else with_trainer)(model, data, noise)
    if shoal.rank() == 0:
        off = (made.norm(dim=1) - 1).abs().mean()
        print(
            f"made {len(made)} points, {off:.4f} from the ring on average, mean {made.mean(0).norm():.4f} from its centre"
        )


if __name__ == "__main__":
    main()
