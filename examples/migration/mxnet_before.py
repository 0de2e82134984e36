"""MXNet's KVStore: tools/launch.py -n 2 -s 2 python mxnet_before.py"""

import mxnet as mx

kv = mx.kv.create("dist_async")
every = mx.nd.arange(1000)
kv.init("weights", mx.nd.sparse.row_sparse_array((mx.nd.zeros((1000, 1)), every), shape=(1000, 1)))
kv.set_optimizer(mx.optimizer.AdaGrad(learning_rate=0.5))
mx.random.seed(kv.rank)

for _step in range(200):
    ids = mx.nd.sort(mx.nd.random.shuffle(every)[:64])  # a row_sparse array has each row once, in order
    labels = (ids % 2).reshape((-1, 1))
    rows = mx.nd.sparse.zeros("row_sparse", (1000, 1))
    kv.row_sparse_pull("weights", out=rows, row_ids=ids.astype("int64"))
    scores = mx.nd.take(rows.tostype("default"), ids)
    gradient = mx.nd.sigmoid(scores) - labels
    kv.push("weights", mx.nd.sparse.row_sparse_array((gradient, ids), shape=(1000, 1)))
