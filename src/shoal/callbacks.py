"""Callbacks for `Trainer(callbacks=[...])`. One of your own derives from `Callback`."""

from __future__ import annotations

from shoal.train.callbacks.average import WeightAverage
from shoal.train.callbacks.base import Callback
from shoal.train.callbacks.logs import CSVLog, JSONLog, LearningRateMonitor, TensorBoard
from shoal.train.callbacks.monitored import EarlyStopping, ModelCheckpoint, StopAtStep
from shoal.train.callbacks.trackers import MLflow, OpenTelemetry, WandB

__all__ = [
    "CSVLog",
    "Callback",
    "EarlyStopping",
    "JSONLog",
    "LearningRateMonitor",
    "MLflow",
    "ModelCheckpoint",
    "OpenTelemetry",
    "StopAtStep",
    "TensorBoard",
    "WandB",
    "WeightAverage",
]
