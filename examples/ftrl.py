"""Logistic regression over 100 million sparse features, with FTRL on parameter servers, through push and pull.

Shows `shoal.ps`: a table that any worker reads and updates by key, and in which only what was touched takes memory.
No model, no Trainer. A sample has 40 of the 100 million features; the data is generated, so the best possible loss is
known, and most features mean nothing: FTRL's l1 leaves their weights at exactly zero.

    shoal run -n 2 --servers 2 --strategy ps:async examples/ftrl.py
    shoal run -n 4 --servers 2 --strategy ps:async examples/ftrl.py --samples 1000000
"""

from __future__ import annotations

import argparse

import numpy as np

import shoal

NUM_FEATURES = 100_000_000
NUM_COLUMNS = 40
TEST = 1 << 40  # the batch of this number is never trained on


def generate(number: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features (size, 40), labels, and the probabilities they were drawn with: a function of the batch's number."""
    rng = np.random.default_rng(number)
    # Of the 2.5 million values of a column a few are frequent and most are rare.
    rarity = rng.random((size, NUM_COLUMNS)) ** 2
    values = ((NUM_FEATURES / NUM_COLUMNS) ** rarity).astype(np.int64)
    features = (values * NUM_COLUMNS + np.arange(NUM_COLUMNS)) * 7_368_787 % NUM_FEATURES
    drawn = (features.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) / 2.0**24
    weights = np.where(drawn < 0.2, drawn * 10 - 1, 0.0)  # four of five features mean nothing
    chance = sigmoid(weights.sum(1) - 1)
    return features, (rng.random(size) < chance).astype(np.float32), chance


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def log_loss(labels: np.ndarray, chance: np.ndarray) -> float:
    return float(-np.mean(np.log(np.where(labels > 0, chance, 1 - chance))))


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    ranks = np.empty(len(scores))
    ranks[scores.argsort()] = np.arange(1, len(scores) + 1)
    positive = labels > 0
    num = int(positive.sum())
    return float((ranks[positive].sum() - num * (num + 1) / 2) / (num * (len(labels) - num)))


def main() -> None:
    parser = argparse.ArgumentParser(description="FTRL over 100 M sparse features on parameter servers.")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=500, help="samples of one push")
    options = parser.parse_args()

    with shoal.ps.connect() as kv:
        weights = kv.table("weights", dim=1, rule="ftrl", num_rows=NUM_FEATURES, lr=0.2, l1=1.0)
        bias = kv.table("bias", dim=1, rule="ftrl", num_rows=1, lr=0.1)

        def predict(features: np.ndarray) -> np.ndarray:
            rows, constant = kv.pull(weights, features), kv.pull(bias, [0])  # both under way
            return sigmoid(rows.result()[..., 0].sum(1) + constant.result()[0, 0])

        num_batches = options.samples // options.batch
        for number in range(shoal.rank(), num_batches, shoal.num_workers()):
            features, labels, _ = generate(number, options.batch)
            error = (predict(features) - labels).astype(np.float32)
            # Nobody waits for a push: it is on its way, and the next pull sees it.
            kv.push(weights, features, np.repeat(error[:, None], NUM_COLUMNS, axis=1))
            kv.push(bias, [0], [error.sum()])
        kv.wait()
        shoal.reduce(0.0)  # all workers are through

        features, labels, chance = generate(TEST, 20_000)
        guess = predict(features)
        print(f"test: AUC {auc(labels, guess):.4f} of {auc(labels, chance):.4f} possible")
        constant = np.full(len(labels), labels.mean())
        print(
            f"test: loss {log_loss(labels, guess):.4f}, best possible {log_loss(labels, chance):.4f}, "
            f"without features {log_loss(labels, constant):.4f}"
        )
        seen = np.unique(np.concatenate([generate(n, options.batch)[0].ravel() for n in range(num_batches)]))
        used = np.count_nonzero(kv.pull(weights, seen).result())
        print(
            f"weights: {used:,} are not zero, of {len(seen):,} features seen and {NUM_FEATURES:,} there are"
        )


if __name__ == "__main__":
    main()
