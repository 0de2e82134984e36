"""Callbacks for `Trainer(callbacks=[...])`. One of your own derives from `Callback`."""

from __future__ import annotations

from shoal.train.callbacks.base import Callback
from shoal.train.callbacks.logs import CSVLog, JSONLog, LearningRateMonitor
from shoal.train.callbacks.model_checkpoint import ModelCheckpoint
from shoal.train.callbacks.stopping import EarlyStopping, StopAtStep
from shoal.train.callbacks.tensorboard import TensorBoard

__all__ = [
    "CSVLog",
    "Callback",
    "EarlyStopping",
    "JSONLog",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "StopAtStep",
    "TensorBoard",
]
