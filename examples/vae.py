"""A variational autoencoder: batches without a target, a model that draws random numbers.

Shows a loss over the model's whole output (it is called as loss(output) where a batch has no target). The random
numbers are a function of (seed, rank, step), so a run can be repeated to the bit.

    python examples/vae.py
    shoal run -n 2 examples/vae.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import shoal
from shoal.data import generated

PIXEL_NOISE = 0.3  # how exactly a pixel has to be met: smaller asks more of the code


class VAE(nn.Module):
    def __init__(self, num_pixels: int, num_latent: int = 16, num_hidden: int = 128) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Flatten(), nn.Linear(num_pixels, num_hidden), nn.ReLU(), nn.Linear(num_hidden, 2 * num_latent)
        )
        self.decode = nn.Sequential(
            nn.Linear(num_latent, num_hidden), nn.ReLU(), nn.Linear(num_hidden, num_pixels)
        )

    def forward(self, picture: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(picture).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else mean
        return picture.flatten(1), self.decode(latent), mean, log_variance


def negative_elbo(output: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Mean over the samples of: scaled squared error of the picture, plus how far its code is from a standard normal."""
    picture, decoded, mean, log_variance = output
    error = 0.5 * ((picture - decoded) / PIXEL_NOISE).square().sum(dim=1)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1)
    return (error + divergence).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a VAE on generated pictures.")
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="samples of one update, over all workers")
    parser.add_argument("--size", type=int, default=16, help="pixels on a side")
    options = parser.parse_args()

    torch.manual_seed(0)  # the same first weights at every start
    data = generated.images(options.samples, size=options.size, noise=0.05).map(lambda sample: sample[0])
    train, test = data.split(0.9, 0.1, seed=0)
    trainer = shoal.Trainer(
        VAE(3 * options.size**2),
        loss=negative_elbo,
        optimizer=lambda params: torch.optim.Adam(params, lr=2e-3),
        seed=0,
    )
    history = trainer.fit(train.shuffle(seed=0).batch(options.batch), epochs=options.epochs)
    result = trainer.evaluate(test.batch(256))
    print(f"negative ELBO by epoch: {', '.join(f'{loss:.3f}' for loss in history['loss'])}")
    print(f"test: {result['loss']:.3f}")

    picture, decoded, *_ = trainer.predict(test.batch(256))
    explained = 1 - (picture - decoded).square().mean() / picture.var()
    print(f"test: {explained:.1%} of the pictures' variance is explained by 16 numbers")


if __name__ == "__main__":
    main()
