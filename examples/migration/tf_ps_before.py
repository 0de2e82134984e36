"""TensorFlow's ParameterServerStrategy, with Keras 2 (TensorFlow up to 2.15): on every machine, with its own TF_CONFIG, python tf_ps_before.py"""

import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc"
    )
    server.join()

partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(max_shards=2)
strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(10_000, 16, input_length=8),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(1),
        ]
    )
    model.compile(
        tf.keras.optimizers.Adagrad(0.1),
        tf.keras.losses.BinaryCrossentropy(from_logits=True),
        steps_per_execution=10,
    )


def read(context):
    ids = tf.random.uniform((4096, 8), 0, 10_000, tf.int64, seed=0)
    labels = tf.cast(ids[:, :1] % 2 == 0, tf.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).shard(
        context.num_input_pipelines, context.input_pipeline_id
    )
    return data.shuffle(4096).repeat().batch(64)


model.fit(tf.keras.utils.experimental.DatasetCreator(read), epochs=3, steps_per_epoch=64)
