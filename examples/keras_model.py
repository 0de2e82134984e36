"""A Keras 3 model, on Keras's torch backend, trained by shoal: one line more than the script had.

Dense, Conv2D, LSTM and a layer of one's own; compile, fit, evaluate and predict stay as they are. `--plain` leaves shoal
out, and prints the same numbers.

    pip install 'keras>=3.10'
    python examples/keras_model.py --plain
    shoal run -n 3 examples/keras_model.py
    shoal run -n 2 --strategy fsdp examples/keras_model.py
    shoal run -n 2 --servers 2 --strategy ps examples/keras_model.py
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import shoal


@keras.saving.register_keras_serializable()
class Scale(keras.layers.Layer):
    """A factor for each channel."""

    def build(self, input_shape: Any) -> None:
        self.factor = self.add_weight(shape=(input_shape[-1],), initializer="ones", name="factor")

    def call(self, x: Any) -> Any:
        return x * self.factor


def convolutional() -> Any:
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            Scale(),
            keras.layers.Flatten(),
            keras.layers.Dense(3, activation="softmax", kernel_regularizer=keras.regularizers.L2(1e-3)),
        ]
    )


def recurrent() -> Any:
    series = keras.Input((6, 2))
    return keras.Model(series, keras.layers.Dense(1)(keras.layers.LSTM(5)(series)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train two Keras models.")
    parser.add_argument("--plain", action="store_true", help="by Keras alone")
    options = parser.parse_args()

    keras.utils.set_random_seed(0)  # the same first weights at every start
    generator = np.random.default_rng(0)
    pictures = generator.normal(size=(60, 8, 8, 1)).astype("float32")
    classes = (pictures.mean((1, 2, 3)) * 20).clip(-1, 1).round().astype("int64") + 1
    series = generator.normal(size=(50, 6, 2)).astype("float32")
    sums = series[:, :, 0].sum(1)

    model = convolutional()
    if not options.plain:
        model = shoal.keras.distribute(model)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer=sgd, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(pictures, classes, batch_size=20, epochs=3, shuffle=False, verbose=0)
    loss, accuracy = model.evaluate(pictures, classes, verbose=0)
    said = [*history.history["loss"], loss, accuracy, *model.predict(pictures, verbose=0).mean(0)]

    model = recurrent()
    if not options.plain:
        model = shoal.keras.distribute(model)
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    history = model.fit(
        series, sums, batch_size=16, epochs=3, shuffle=False, validation_data=(series, sums), verbose=0
    )
    said += [*history.history["val_loss"], *history.history["val_mae"]]
    said += [sum(float(np.abs(weight).sum()) for weight in model.get_weights())]
    if shoal.rank() == 0:
        print("numbers", " ".join(f"{float(number):.4f}" for number in said))


if __name__ == "__main__":
    main()
