"""A model_fn, an input_fn and train_and_evaluate, as in TF1's Estimator.

What TF1 builds as a graph is here an EstimatorSpec of a module, a loss and an optimizer; the rest keeps its names. Run it
again with the same --model-dir and it goes on from the newest checkpoint.

    python examples/estimator.py
    shoal run -n 2 examples/estimator.py
    shoal run -n 2 --servers 2 --strategy ps examples/estimator.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import shoal
from shoal import estimator as tf_estimator
from shoal.estimator import EstimatorSpec, EvalSpec, ModeKeys, RunConfig, TrainSpec


def model_fn(features: Any, labels: Any, mode: ModeKeys, params: dict[str, Any]) -> EstimatorSpec:
    """Two layers; their width is a param."""
    model = nn.Sequential(
        nn.Linear(features.shape[1], params["hidden"]), nn.ReLU(), nn.Linear(params["hidden"], 2)
    )
    return EstimatorSpec(
        mode=mode,
        model=model,
        loss="cross_entropy",
        optimizer=lambda weights: torch.optim.Adagrad(weights, lr=params["learning_rate"]),
        eval_metric_ops=["accuracy"],
        predictions=lambda logits: {"class": logits.argmax(1), "probability": logits.softmax(1)},
    )


def data(num_samples: int, seed: int) -> shoal.Dataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 8, generator=generator)
    return shoal.Dataset.from_arrays((x, (x[:, 0] * x[:, 1] > 0).long()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier with an Estimator.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--model-dir", default=None)
    options = parser.parse_args()

    classifier = tf_estimator.Estimator(
        model_fn,
        params={"hidden": 32, "learning_rate": 0.1},
        config=RunConfig(model_dir=options.model_dir, save_checkpoints_steps=100, keep_checkpoint_max=2),
    )
    train = TrainSpec(lambda: data(4000, seed=0).shuffle(seed=0).repeat().batch(64), max_steps=options.steps)
    metrics, _ = tf_estimator.train_and_evaluate(
        classifier, train, EvalSpec(lambda: data(1000, seed=1).batch(250))
    )
    first = next(classifier.predict(lambda: data(10, seed=2).batch(10)))
    classifier.export("out/estimator", serving_input_fn=lambda: torch.zeros(2, 8))
    if shoal.rank() == 0:
        print(
            f"global step {metrics['global_step']:.0f}: loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.3f}"
        )
        print(
            f"the first of ten: class {int(first['class'])}, probability {float(first['probability'].max()):.2f}"
        )


if __name__ == "__main__":
    main()
