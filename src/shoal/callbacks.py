"""What can be put into `Trainer(callbacks=[...])`. One of your own derives from `Callback`."""

from __future__ import annotations

from shoal.train.callbacks.base import Callback
from shoal.train.callbacks.csv_log import CSVLog
from shoal.train.callbacks.early_stopping import EarlyStopping
from shoal.train.callbacks.json_log import JSONLog
from shoal.train.callbacks.learning_rate import LearningRateMonitor
from shoal.train.callbacks.model_checkpoint import ModelCheckpoint
from shoal.train.callbacks.stop_at_step import StopAtStep
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
