"""Keras on its torch backend, one process: python keras_before.py"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(4096, 20)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
model = keras.Sequential(
    [keras.layers.Input((20,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(2)]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=loss, metrics=["accuracy"])
model.fit(x, y, batch_size=64, epochs=3, verbose=0)
_, accuracy = model.evaluate(x, y, verbose=0)
print(f"accuracy {accuracy:.3f}")
