"""Click prediction: 26 columns of ids into one table of embeddings, a small network on top.

Shows a model whose inputs are a dict, gradients that are sparse (only the rows a batch touched travel and are
updated), metrics, validation and a saved model. The data is generated, so the best possible AUC is known.

    python examples/clicks.py                      one process
    shoal run -n 2 examples/clicks.py              two workers, the same result
    shoal run -n 2 examples/clicks.py --samples 1000000 --ids 1000000
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import shoal
from shoal.data import generated


class ClickModel(nn.Module):
    def __init__(self, num_ids: int, dim: int = 16) -> None:
        super().__init__()
        self.rows = nn.Embedding(num_ids, dim, sparse=True)
        nn.init.normal_(self.rows.weight, std=0.05)
        self.layers = nn.Sequential(
            nn.Linear(13 + 26 * dim, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:  # the batch's inputs, by their names
        features = torch.cat([dense.log1p(), self.rows(ids).flatten(1)], dim=1)
        return self.layers(features).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a click model on generated click logs.")
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--ids", type=int, default=100_000, help="rows of the embedding table")
    parser.add_argument(
        "--epochs", type=int, default=1, help="a second one mostly memorises, as with real click logs"
    )
    parser.add_argument("--batch", type=int, default=1024, help="samples of one update, over all workers")
    parser.add_argument("--out", default="out/clicks", help="directory for the trained model")
    options = parser.parse_args()

    torch.manual_seed(0)  # the same first weights at every start
    data = generated.clicks(options.samples, num_ids=options.ids)
    train, validation, test = data.split(0.8, 0.1, 0.1, seed=0)

    trainer = shoal.Trainer(
        ClickModel(options.ids),
        loss=nn.BCEWithLogitsLoss(),
        optimizer=lambda params: torch.optim.Adagrad(params, lr=0.02),
        metrics=["accuracy", "auroc"],
        seed=0,
    )
    history = trainer.fit(
        train.shuffle(seed=0).batch(options.batch),
        epochs=options.epochs,
        validation_data=validation.batch(4096),
    )
    result = trainer.evaluate(test.batch(4096))
    best = generated.best_auc(num_ids=options.ids)
    print(f"loss by epoch: {', '.join(f'{loss:.4f}' for loss in history['loss'])}")
    print(f"test: loss {result['loss']:.4f}, accuracy {result['accuracy']:.4f}")
    print(f"test: AUC {result['auroc']:.4f} of {best:.4f} possible")
    trainer.save(options.out)
    print(f"saved in {options.out}")


if __name__ == "__main__":
    main()
