"""TF1's Estimator (TensorFlow up to 2.15): python estimator_before.py"""

import numpy as np
import tensorflow.compat.v1 as tf


def model_fn(features, labels, mode, params):
    hidden = tf.layers.dense(features["x"], params["hidden"], tf.nn.relu)
    logits = tf.layers.dense(hidden, 2)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"class": tf.argmax(logits, 1)})
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    accuracy = tf.metrics.accuracy(labels, tf.argmax(logits, 1))
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": accuracy})
    optimizer = tf.train.AdagradOptimizer(params["learning_rate"])
    train_op = optimizer.minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


x = np.random.default_rng(0).normal(size=(4096, 20)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
train = tf.estimator.inputs.numpy_input_fn({"x": x}, y, batch_size=64, num_epochs=None, shuffle=True)
test = tf.estimator.inputs.numpy_input_fn({"x": x}, y, batch_size=512, shuffle=False)
classifier = tf.estimator.Estimator(
    model_fn,
    params={"hidden": 32, "learning_rate": 0.1},
    config=tf.estimator.RunConfig(save_checkpoints_steps=100),
)
train_spec = tf.estimator.TrainSpec(train, max_steps=200)
metrics, _ = tf.estimator.train_and_evaluate(classifier, train_spec, tf.estimator.EvalSpec(test))
print(f"accuracy {metrics['accuracy']:.3f}")
