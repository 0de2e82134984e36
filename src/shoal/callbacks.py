"""Callbacks for `Trainer(callbacks=[...])`. One of your own derives from `Callback`."""

from __future__ import annotations

from shoal.train.callbacks.average import EMA, SWA, WeightAverage
from shoal.train.callbacks.base import Callback
from shoal.train.callbacks.logs import CSVLog, JSONLog, LearningRateMonitor, TensorBoard
from shoal.train.callbacks.monitored import (
    EarlyStopping,
    ModelCheckpoint,
    ReduceLROnPlateau,
    StopAtConvergence,
    StopAtStep,
)
from shoal.train.callbacks.trackers import MLflow, OpenTelemetry, WandB

__all__ = [
    "EMA",
    "SWA",
    "CSVLog",
    "Callback",
    "EarlyStopping",
    "JSONLog",
    "LearningRateMonitor",
    "MLflow",
    "ModelCheckpoint",
    "OpenTelemetry",
    "ReduceLROnPlateau",
    "StopAtConvergence",
    "StopAtStep",
    "TensorBoard",
    "WandB",
    "WeightAverage",
]
