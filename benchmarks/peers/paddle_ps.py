"""The click model under Paddle's parameter server, asynchronous: python -m benchmarks.peers.paddle_ps --workers 2.

One server, some workers, each a process of its own. Its server knows Adagrad
for rows only, so the MLP is trained with Adam: 62 k parameters, beside the
165 k numbers of the rows in a batch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.click_model import BATCH, DIM, HIDDEN, LR, NUM_COLUMNS, NUM_ROWS, ROW_STD, batches
from benchmarks.peers.meter import Meter, free_ports, options, tell

JOIN_TIMEOUT_S = 60.0
FIRST_SUM = 1e-2
"""Its Adagrad multiplies by sqrt(first / (first + sum of squares)); the smaller the first sum, the nearer to torch's.
Seen: with 3, its default, and lr 0.02 rows hardly move; with 1e-6 the loss rises above its start; this one learns."""


def adagrad_by_row() -> dict[str, object]:
    """Settings of the table `rows`: Adagrad per element, under both names its accessor splits a row into."""
    found: dict[str, object] = {}
    for part in ("embed", "embedx"):
        at = f"table_parameters.rows.accessor.{part}_sgd_param"
        found |= {
            f"{at}.name": "StdAdaGradSGDRule",
            f"{at}.adagrad.learning_rate": LR / FIRST_SUM**0.5,
            f"{at}.adagrad.initial_g2sum": FIRST_SUM,
            f"{at}.adagrad.initial_range": ROW_STD,
            f"{at}.adagrad.weight_bounds": [-10.0, 10.0],
        }
    return found


def build() -> tuple[object, object]:
    """The program as its guide writes one, made distributed by its strategy: the loss, and the strategy's fleet."""
    import paddle
    from paddle.distributed import fleet
    from paddle.static import nn

    paddle.enable_static()
    fleet.init(is_collective=False)
    ids = paddle.static.data("ids", [None, 1], "int64")  # all columns one below the other, as it insists
    label = paddle.static.data("label", [None, 1], "float32")
    rows = nn.sparse_embedding(ids, [NUM_ROWS, DIM], param_attr=paddle.ParamAttr(name="rows"))
    x = paddle.reshape(rows, [-1, NUM_COLUMNS * DIM])
    for size in HIDDEN:
        x = nn.fc(x, size, activation="relu")
    logit = nn.fc(x, 1)
    loss = paddle.mean(paddle.nn.functional.binary_cross_entropy_with_logits(logit, label, reduction="none"))
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    strategy.sparse_table_configs = {"rows": adagrad_by_row()}
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(learning_rate=LR / 10), strategy)
    optimizer.minimize(loss)
    return fleet, loss


def play(chosen: argparse.Namespace) -> None:
    """One process of the job; which one, the environment says, as Paddle wants it."""
    import paddle

    fleet, loss = build()
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    worker = int(os.environ["PADDLE_TRAINER_ID"])
    program = paddle.static.default_main_program()
    stream = batches(chosen.data, worker=worker, num_workers=chosen.workers)
    executor_run = executor.run

    def step(fetch: list[object]) -> list[object]:
        ids, label = next(stream)
        return executor_run(
            program, feed={"ids": ids.reshape(-1, 1), "label": label[:, None]}, fetch_list=fetch
        )

    step([])
    together = Path(chosen.together)
    (together / f"ready-{worker}").touch()
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while len(list(together.glob("ready-*"))) < chosen.workers:
        if time.monotonic() > deadline:
            raise SystemExit(f"worker {worker} waited {JOIN_TIMEOUT_S:g} s for the other workers")
        time.sleep(0.01)
    meter = Meter(warm_s=chosen.warm, seconds=chosen.seconds)
    while meter.goes_on():
        step([])
        meter.step(BATCH)
    rate = meter.samples_per_s
    (last,) = step([loss])
    told = {
        "samples_per_s": rate,
        "steps": meter.num_steps,
        "loss": float(last),
        "version": paddle.__version__,
    }
    (together / f"told-{worker}.json").write_text(json.dumps(told))
    os._exit(0)  # its own farewell waits for workers that may be gone


def environment(chosen: argparse.Namespace, ports: list[int], role: str, index: int) -> dict[str, str]:
    at = [f"127.0.0.1:{port}" for port in ports]
    return {
        **os.environ,
        "TRAINING_ROLE": role,
        "PADDLE_PSERVERS_IP_PORT_LIST": at[0],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(at[1:]),
        "PADDLE_TRAINERS_NUM": str(chosen.workers),
        "PADDLE_TRAINER_ID": str(index),
        "PADDLE_WITH_GLOO": "0",
        "POD_IP": "127.0.0.1",
        "PADDLE_PORT": str(ports[0 if role == "PSERVER" else 1 + index]),
        "OMP_NUM_THREADS": str(chosen.threads),
        "GLOG_minloglevel": "2",
    }


def main() -> None:
    chosen = options(lambda parser: parser.add_argument("--together", help="set for the processes of a job"))
    if chosen.together:
        play(chosen)
        return
    ports = free_ports(1 + chosen.workers)
    roles = [("PSERVER", 0), *(("TRAINER", number) for number in range(chosen.workers))]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.peers.paddle_ps", *sys.argv[1:], "--together", folder]
        with open(Path(folder) / "log", "w+") as log:
            processes = [
                subprocess.Popen(
                    [*command, "--threads", str(chosen.threads)],
                    env=environment(chosen, ports, *role),
                    stdout=log,
                    stderr=log,
                    cwd=os.getcwd(),
                )
                for role in roles
            ]
            try:
                for each in processes[1:]:
                    each.wait(JOIN_TIMEOUT_S + chosen.warm + chosen.seconds)
            finally:
                for each in processes:  # the server waits for ever
                    each.kill()
                    each.wait()
            told = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("told-*.json"))]
            if len(told) < chosen.workers:
                log.seek(0)
                raise SystemExit(log.read()[-4000:])
    tell(
        "Paddle parameter server, async",
        sum(each["samples_per_s"] for each in told),
        version=told[0]["version"],
        servers=1,
        workers=chosen.workers,
        threads=chosen.threads,
        batch_per_update=BATCH,
        optimizer="Adagrad for rows, Adam for the MLP: its server has no dense Adagrad",
        steps=sum(each["steps"] for each in told),
        last_loss=round(told[0]["loss"], 4),
    )


if __name__ == "__main__":
    main()
