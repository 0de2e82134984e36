"""The click model under TensorFlow's ParameterServerStrategy: python -m benchmarks.peers.tensorflow_ps --workers 2.

One server, some workers, and the coordinator its design wants, each a process
of its own, and batches read on the worker. Two styles: `plain`, as its guide
writes a training step, and `careful`, with ids made unique before rows are
fetched and several steps in each scheduled function. Keras is left out: a
step by hand is all that is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing as mp
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.click_model import BATCH, DIM, HIDDEN, LR, NUM_COLUMNS, NUM_ROWS, ROW_STD, read_data
from benchmarks.peers.meter import free_ports, options, tell

CAREFUL_STEPS_PER_CALL = 4


def cluster(chosen: argparse.Namespace) -> dict[str, list[str]]:
    ports = free_ports(chosen.workers + 2)
    at = [f"127.0.0.1:{port}" for port in ports]
    return {"ps": at[:1], "chief": at[1:2], "worker": at[2:]}


def prepare(members: dict[str, list[str]], role: str, index: int, threads: int) -> Any:
    """TensorFlow with this process's place in the cluster, taken from the environment as it wants it."""
    task = {"cluster": members, "task": {"type": role, "index": index}}
    os.environ |= {"TF_CONFIG": json.dumps(task), "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    return tf


def serve(members: dict[str, list[str]], role: str, index: int, threads: int) -> None:
    """A server or a worker: waits for what the coordinator sends, for ever."""
    tf = prepare(members, role, index, threads)
    server = tf.distribute.Server(
        tf.train.ClusterSpec(members), job_name=role, task_index=index, protocol="grpc", start=True
    )
    server.join()


class Model:
    """Variables on the server, with the accumulators of Adagrad beside them."""

    def __init__(self, tf: Any) -> None:
        self._tf = tf
        sizes = (NUM_COLUMNS * DIM, *HIDDEN, 1)
        self.rows = tf.Variable(tf.random.normal((NUM_ROWS, DIM), stddev=ROW_STD), name="rows")
        self.dense: list[Any] = []
        for inside, outside in itertools.pairwise(sizes):
            reach = inside**-0.5
            self.dense.append(tf.Variable(tf.random.uniform((inside, outside), -reach, reach)))
            self.dense.append(tf.Variable(tf.zeros((outside,))))
        self.rows_sum = tf.Variable(tf.zeros((NUM_ROWS, DIM)), name="rows_sum")
        self.dense_sum = [tf.Variable(tf.zeros_like(each)) for each in self.dense]

    def train_plainly(self, ids: Any, label: Any) -> Any:
        """As TensorFlow's guide writes it: a look-up of all ids; the optimizer makes their rows unique."""
        tf = self._tf
        ids = tf.reshape(ids, (-1,))
        rows = tf.nn.embedding_lookup(self.rows, ids)
        loss, of_rows, of_dense = self._gradients(rows, None, label)
        keys, inverse = tf.unique(ids)
        self._update(keys, tf.math.unsorted_segment_sum(of_rows, inverse, tf.shape(keys)[0]), of_dense)
        return loss

    def train_unique(self, ids: Any, label: Any) -> Any:
        """As it is fastest: only unique rows travel, there and back."""
        tf = self._tf
        keys, inverse = tf.unique(tf.reshape(ids, (-1,)))
        loss, of_rows, of_dense = self._gradients(tf.gather(self.rows, keys), inverse, label)
        summed = tf.math.unsorted_segment_sum(of_rows.values, of_rows.indices, tf.shape(keys)[0])
        self._update(keys, summed, of_dense)
        return loss

    def _gradients(self, rows: Any, inverse: Any, label: Any) -> tuple[Any, Any, list[Any]]:
        tf = self._tf
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(rows)
            dense = [each.read_value() for each in self.dense]
            for each in dense:
                tape.watch(each)
            x = tf.reshape(rows if inverse is None else tf.gather(rows, inverse), (-1, NUM_COLUMNS * DIM))
            for number in range(0, len(dense), 2):
                x = tf.matmul(x, dense[number]) + dense[number + 1]
                x = tf.nn.relu(x) if number < len(dense) - 2 else x
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(label, tf.squeeze(x, 1)))
        of_rows, *of_dense = tape.gradient(loss, [rows, *dense])
        return loss, of_rows, of_dense

    def _update(self, keys: Any, of_rows: Any, of_dense: list[Any]) -> None:
        """Adagrad, where the variable is: TensorFlow places an update by the variable's handle."""
        ops = self._tf.raw_ops
        how = {"lr": LR, "epsilon": 1e-10}
        ops.ResourceSparseApplyAdagradV2(
            var=self.rows.handle, accum=self.rows_sum.handle, grad=of_rows, indices=keys, **how
        )
        for variable, total, grad in zip(self.dense, self.dense_sum, of_dense, strict=True):
            ops.ResourceApplyAdagradV2(var=variable.handle, accum=total.handle, grad=grad, **how)


def worker_batches(tf: Any, folder: str) -> Any:
    """Batches read by the worker itself, straight out of the two files."""
    ids, label = read_data(folder)
    of_ids = tf.data.FixedLengthRecordDataset(
        str(Path(folder) / "ids.npy"), BATCH * NUM_COLUMNS * 8, header_bytes=int(ids.offset)
    ).map(lambda raw: tf.reshape(tf.io.decode_raw(raw, tf.int64), (BATCH, NUM_COLUMNS)))
    of_label = tf.data.FixedLengthRecordDataset(
        str(Path(folder) / "label.npy"), BATCH * 4, header_bytes=int(label.offset)
    ).map(lambda raw: tf.reshape(tf.io.decode_raw(raw, tf.float32), (BATCH,)))
    # The function does not learn which worker it runs on: each begins somewhere else by lot.
    first = tf.random.uniform((), 0, len(label) // BATCH, tf.int64)
    return tf.data.Dataset.zip((of_ids, of_label)).repeat().skip(first).prefetch(4)


def coordinate(chosen: argparse.Namespace, members: dict[str, list[str]]) -> None:
    tf = prepare(members, "chief", 0, 1)
    where = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(where)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = Model(tf)
    stream = iter(coordinator.create_per_worker_dataset(lambda: worker_batches(tf, chosen.data)))

    steps_per_call = CAREFUL_STEPS_PER_CALL if chosen.style == "careful" else 1
    train = model.train_unique if chosen.style == "careful" else model.train_plainly

    @tf.function
    def steps(iterator: Any) -> Any:
        loss = 0.0
        for _ in range(steps_per_call):
            loss = train(*next(iterator))
        return loss

    def pump(seconds: float) -> tuple[float, float]:
        """Keep every worker busy, then wait for the last one: samples a second and the last loss."""
        began, num_calls, waiting, loss = time.perf_counter(), 0, [], 0.0
        while time.perf_counter() - began < seconds:
            while len(waiting) < 4 * chosen.workers:
                waiting.append(coordinator.schedule(steps, args=(stream,)))
                num_calls += 1
            loss = float(waiting.pop(0).fetch())
        coordinator.join()
        return num_calls * steps_per_call * BATCH / (time.perf_counter() - began), loss

    pump(chosen.warm)
    samples_per_s, loss = pump(chosen.seconds)
    tell(
        "TensorFlow ParameterServerStrategy",
        samples_per_s,
        version=tf.__version__,
        servers=1,
        workers=chosen.workers,
        threads=chosen.threads,
        batch_per_update=BATCH,
        steps_per_call=steps_per_call,
        style=chosen.style,
        last_loss=round(loss, 4),
    )


def main() -> None:
    chosen = options(
        lambda parser: parser.add_argument("--style", choices=("plain", "careful"), default="careful")
    )
    members = cluster(chosen)
    mp.set_start_method("spawn")
    roles = [("ps", 0), *(("worker", number) for number in range(chosen.workers))]
    others = [mp.Process(target=serve, args=(members, *role, chosen.threads), daemon=True) for role in roles]
    for each in others:
        each.start()
    try:
        coordinate(chosen, members)
    finally:
        for each in others:  # they wait for ever by design
            each.kill()
            each.join()
    sys.stdout.flush()
    os._exit(0)  # its own farewell calls the processes that are gone, with pages of errors


if __name__ == "__main__":
    main()
