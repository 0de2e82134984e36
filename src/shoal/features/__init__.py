"""Features: columns of tables as a model sees them, declared once for training and serving.

declared.py      declarations of features
feature_set.py   a list of them: fit, the map stage, the input layer, saving
columns.py       columns of a batch: numbers, tokens, what is missing; hashes for ever
statistics.py    moments, quantile sketches and token counts, by map, combine and reduce
transform.py     vocabularies; columns to tensors
"""

from shoal.features.declared import bag, bucketized, categorical, crossed, embedding, hashed, numeric
from shoal.features.feature_set import FeatureSet, InputLayer

__all__ = [
    "FeatureSet",
    "InputLayer",
    "bag",
    "bucketized",
    "categorical",
    "crossed",
    "embedding",
    "hashed",
    "numeric",
]
