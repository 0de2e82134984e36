"""MXNet's KVStore: tools/launch.py -n 2 -s 2 python mxnet_before.py"""

import mxnet as mx

kv = mx.kv.create("dist_async")
kv.set_optimizer(mx.optimizer.AdaGrad(learning_rate=0.5))
kv.init("weights", mx.nd.zeros((1000, 1)).tostype("row_sparse"))
mx.random.seed(kv.rank)

for _step in range(200):
    ids = mx.nd.random.randint(0, 1000, (64,))
    labels = (ids % 2).astype("float32").reshape((-1, 1))
    rows = mx.nd.sparse.zeros("row_sparse", (1000, 1))
    kv.row_sparse_pull("weights", out=rows, row_ids=ids)
    scores = mx.nd.take(rows.tostype("default"), ids)
    gradient = mx.nd.sigmoid(scores) - labels
    kv.push("weights", mx.nd.sparse.row_sparse_array((gradient, ids), shape=(1000, 1)))
