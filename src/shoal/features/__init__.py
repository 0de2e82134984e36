"""Features of tables: what of their columns a model sees, declared once, for training and for serving.

declared.py      what a feature is
feature_set.py   a list of them: fit, the map stage, the input layer, saving
columns.py       columns of a batch: numbers, tokens, what is missing
statistics.py    what has to be known of the data, by map, combine and reduce
moments.py       count, mean, spread: mergeable
quantiles.py     a mergeable sketch with a proved bound
token_counts.py  how often values occur: mergeable
vocabulary.py    values by frequency, and the unknown
hashing.py       hashes for ever
transform.py     columns to tensors
input_layer.py   tensors to the input of a model
encoding.py      all of it as bytes
"""

from shoal.features.declared import bag, bucketized, categorical, crossed, embedding, hashed, numeric
from shoal.features.feature_set import FeatureSet
from shoal.features.input_layer import InputLayer

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
