"""The same model: KERAS_BACKEND=torch shoal run -n 2 keras_after.py"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import shoal

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(4096, 20)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
model = keras.Sequential(
    [keras.layers.Input((20,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(2)]
)
model = shoal.keras.distribute(model)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=loss, metrics=["accuracy"])
model.fit(x, y, batch_size=64, epochs=3, verbose=0)
_, accuracy = model.evaluate(x, y, verbose=0)
if shoal.rank() == 0:
    print(f"accuracy {accuracy:.3f}")
