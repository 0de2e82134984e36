"""Datasets as functions of an index."""

from __future__ import annotations

from shoal.data.batches import Batches, as_batches
from shoal.data.dataset import Dataset
from shoal.data.formats.example import Feature, TFRecordWriter, write_tfrecord
from shoal.data.remote.copies import copies
from shoal.data.slice import Slice

__all__ = [
    "Batches",
    "Dataset",
    "Feature",
    "Slice",
    "TFRecordWriter",
    "as_batches",
    "copies",
    "write_tfrecord",
]
