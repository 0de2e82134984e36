"""Matrix factorisation: ratings of items by users, as products of two vectors, on parameter servers.

Shows `shoal.ps` with two tables, and requests that overlap: the rows of the next batch are pulled while this one is
computed. The ratings are generated from vectors and noise, so the best possible error is known: the noise.

    shoal run -n 2 --servers 2 --strategy ps:async examples/matrix_factorisation.py
    shoal run -n 2 --servers 2 --strategy ps:ssp=4 examples/matrix_factorisation.py --rule adagrad --lr 0.5
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

import shoal

DIM, NOISE = 8, 0.3
TEST = 1 << 40  # the batch of this number is never trained on


def generate(number: int, size: int, users: int, items: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users, items and ratings of a batch: a function of its number."""
    of_users, of_items = (np.random.default_rng(n).normal(size=(n, DIM)) for n in (users, items))
    rng = np.random.default_rng([number, users, items])
    user, item = rng.integers(0, users, size), rng.integers(0, items, size)
    rating = (of_users[user] * of_items[item]).sum(1) / DIM**0.5 + rng.normal(0, NOISE, size)
    return user, item, rating.astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description="Factorise generated ratings on parameter servers.")
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--ratings", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1000, help="ratings of one push")
    parser.add_argument("--rule", default="sgd", help="how rows change: sgd, adagrad, adam, ...")
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()
    sizes = (options.users, options.items)
    test_users, test_items, test_ratings = generate(TEST, 20_000, *sizes)

    with shoal.ps.connect() as kv:
        users, items = (
            kv.table(
                name, DIM, options.rule, lr=options.lr, num_rows=size, init="normal", scale=0.3, seed=seed
            )
            for seed, (name, size) in enumerate(zip(("users", "items"), sizes, strict=True))
        )

        def batches() -> Iterator[tuple]:
            """This worker's batches, with the rows they need under way."""
            for number in range(shoal.rank(), options.ratings // options.batch, shoal.num_workers()):
                user, item, rating = generate(number, options.batch, *sizes)
                yield user, item, rating, kv.pull(users, user), kv.pull(items, item)

        def train(user: np.ndarray, item: np.ndarray, rating: np.ndarray, *pulled: shoal.ps.Handle) -> None:
            p, q = (handle.result() for handle in pulled)
            error = (p * q).sum(1, keepdims=True) / DIM**0.5 - rating[:, None]
            kv.push(users, user, error * q)
            kv.push(items, item, error * p)

        def rmse() -> float:
            p, q = kv.pull(users, test_users), kv.pull(items, test_items)
            guess = (p.result() * q.result()).sum(1) / DIM**0.5
            return float(np.sqrt(np.mean((guess - test_ratings) ** 2)))

        print(f"before: RMSE {rmse():.4f}")
        for epoch in range(options.epochs):
            this = None
            for ahead in batches():
                if this is not None:
                    train(*this)
                this = ahead
            if this is not None:
                train(*this)
            kv.wait()
            shoal.reduce(0.0)  # all workers are through with the epoch
            print(f"epoch {epoch + 1}: RMSE {rmse():.4f}, noise {NOISE}")
            shoal.reduce(0.0)  # nobody goes on while others measure


if __name__ == "__main__":
    main()
