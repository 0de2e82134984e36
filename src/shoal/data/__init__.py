"""Datasets as functions of an index."""

from __future__ import annotations

from shoal.data.batches import Batches, as_batches
from shoal.data.dataset import Dataset
from shoal.data.slice import Slice

__all__ = ["Batches", "Dataset", "Slice", "as_batches"]
