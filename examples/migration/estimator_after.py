"""shoal's Estimator: shoal run -n 2 --servers 2 --strategy ps estimator_after.py"""

import numpy as np
import torch
from torch import nn

import shoal
from shoal.estimator import Estimator, EstimatorSpec, EvalSpec, RunConfig, TrainSpec, train_and_evaluate


def model_fn(features, labels, mode, params):
    model = nn.Sequential(
        nn.Linear(features.shape[1], params["hidden"]), nn.ReLU(), nn.Linear(params["hidden"], 2)
    )
    return EstimatorSpec(
        mode=mode,
        model=model,
        loss="cross_entropy",
        optimizer=lambda weights: torch.optim.Adagrad(weights, lr=params["learning_rate"]),
        eval_metric_ops=["accuracy"],
        predictions=lambda logits: {"class": logits.argmax(1)},
    )


x = np.random.default_rng(0).normal(size=(4096, 20)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
data = shoal.Dataset.from_arrays((x, y))
classifier = Estimator(
    model_fn, params={"hidden": 32, "learning_rate": 0.1}, config=RunConfig(save_checkpoints_steps=100)
)
train_spec = TrainSpec(lambda: data.shuffle(seed=0).repeat().batch(64), max_steps=200)
metrics, _ = train_and_evaluate(classifier, train_spec, EvalSpec(lambda: data.batch(512)))
if shoal.rank() == 0:
    print(f"accuracy {metrics['accuracy']:.3f}")
