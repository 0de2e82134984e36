"""Jobs that `shoal bench` launches: `jobs.py NAME OUT ARGUMENT`. Each rank writes its figures to OUT/RANK.json.

Imports are inside the jobs, so that each loads no more than it measures.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.collectives.reducer import Native, Reducer

KV_ROWS, DIM = 1 << 20, 16
SERVED_IDS = 200_000
ROW_BYTES = 4 * DIM + 8
"""Of a row of a sparse gradient and its id."""

NUM_IDS, BATCH, NUM_BATCHES = 1_000_000, 1024, 64
NUM_WARM_STEPS = 10

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
SHORT_SIZES = [4 << 10, 1 << 20, 8 << 20]
SHORT_S = 3.0
"""Shortest time of a case: in less, the largest tensors are left out: three rounds of all exchanges alone would take longer."""

MAX_ROUNDS = 200


def median_s(call: Callable[[], object], times: int) -> float:
    """Median over this many calls, after one that is not counted."""
    call()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def quick_s(call: Callable[[], object], times: int) -> float:
    """Lower quartile over this many calls: other processes make a call longer, and never shorter."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.quantiles(taken[1:], n=4)[0]


def run_kv(out: Path, num_pairs: int) -> None:
    """Push to a server and pull from it, in one worker.

    A push is over when it is acknowledged; a pull when the rows lie in an array
    of the caller's. Keys come in order; the first push of a table, which makes
    its rows, is not counted.
    """
    import numpy as np

    from shoal.ps.client.kv import connect

    figures = []
    with connect() as kv:
        table = kv.table("small", dim=DIM, num_rows=KV_ROWS)
        few, some = np.arange(16) * 1009, np.ones((16, DIM), np.float32)  # 1 KiB
        push_s = median_s(lambda: kv.push(table, few, some).result(), 1000)
        pull_s = median_s(lambda: kv.pull(table, few).result(), 1000)
        figures += [("push of 1 KiB", 1e6 * push_s, "us"), ("pull of 1 KiB", 1e6 * pull_s, "us")]

        for what, rows, dim, is_bounded, times in (
            ("64 MiB", KV_ROWS, DIM, True, 7),
            (f"{num_pairs / 1e6:g} M pairs, ids of a known range", num_pairs, 1, True, 3),
            (f"{num_pairs / 1e6:g} M pairs, any int64 key", num_pairs, 1, False, 3),
        ):
            table = kv.table(what, dim=dim, num_rows=rows if is_bounded else None)
            keys = np.arange(rows) if is_bounded else np.arange(rows) * 922_337_203_685
            draw = np.random.default_rng(0)
            first, second = draw.random((rows, dim), np.float32), draw.random((rows, dim), np.float32)
            # Other values each time: a push that did nothing would show.
            turns = itertools.cycle([first, second])
            push_s = median_s(lambda: kv.push(table, keys, next(turns)).result(), times)  # noqa: B023
            pull_s = median_s(lambda: kv.pull(table, keys).result(), times)  # noqa: B023
            if not np.array_equal(kv.pull(table, keys).result(), second if times % 2 else first):
                raise AssertionError("the server gave back other rows than it was given")
            size, unit = (first.nbytes / 1e9, "GB/s") if dim > 1 else (rows / 1e6, "M pairs/s")
            figures += [(f"push of {what}", size / push_s, unit), (f"pull of {what}", size / pull_s, unit)]
    lines = [{"what": what, "value": round(value, 2), "unit": unit} for what, value, unit in figures]
    (out / "0.json").write_text(json.dumps(lines))


def run_click(out: Path, seconds: float) -> None:
    """Train a click model under the strategy of the launch: 26 columns of ids into one table, three layers on top.

    Every rank writes how many samples it trained a second, between a warm-up
    and the end; samples are counted where the loss sees them, so the sum is
    right whatever a strategy makes of a batch.
    """
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    from shoal.config import job
    from shoal.data import generated
    from shoal.data.dataset import Dataset
    from shoal.train.callbacks.base import Callback
    from shoal.train.trainer import Trainer

    seen = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal seen
        seen += len(target)
        return functional.binary_cross_entropy_with_logits(output, target)

    class Clock(Callback):
        """Ends the fit when enough was measured."""

        ranks = "every"

        def __init__(self) -> None:
            self.num_steps, self.began, self.last, self.first, self.newest = 0, 0.0, 0.0, 0, 0
            self.is_over = False

        def on_step_end(self, trainer: Trainer, logs: Any) -> None:
            self.num_steps += 1
            now = time.perf_counter()
            if self.num_steps == NUM_WARM_STEPS:
                self.began, self.first = now, seen
            if self.began and not self.is_over:
                self.last, self.newest = now, seen
                self.is_over = now - self.began >= seconds
                if self.is_over:
                    trainer.stop()

    torch.manual_seed(0)
    inputs, label = generated.click_arrays(NUM_BATCHES * BATCH, num_ids=NUM_IDS)
    rows = nn.Embedding(NUM_IDS, DIM, sparse=True)
    nn.init.normal_(rows.weight, std=0.01)
    layers = (nn.Linear(26 * DIM, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))
    clock = Clock()
    trainer = Trainer(
        nn.Sequential(rows, nn.Flatten(), *layers, nn.Flatten(0)),
        loss=loss,
        optimizer=lambda params: torch.optim.Adagrad(params, lr=0.02),
        callbacks=[clock],
        device="cpu",
        seed=0,
    )
    data = Dataset.from_arrays((inputs["ids"], label)).batch(BATCH)
    trainer.fit(data, epochs=1_000_000)
    # Another rank may have asked to stop before this one had seen enough: then up to its last step.
    lasted = clock.last - clock.began
    rate = (clock.newest - clock.first) / lasted if lasted > 0 else 0.0
    measured = {"samples_per_s": rate, "threads": torch.get_num_threads(), "batch": BATCH}
    (out / f"{job.current().rank}.json").write_text(json.dumps(measured))


def run_exchange(out: Path, seconds: float) -> None:
    """Sum tensors of every size by every exchange. Alternating: what disturbs the machine disturbs all of them."""
    from shoal.collectives.exchanges import open_exchange
    from shoal.collectives.reducer import Native
    from shoal.config import job as jobs
    from shoal.config.choices import EXCHANGES
    from shoal.recovery.elastic_group import elastic_group
    from shoal.recovery.rendezvous import is_broken

    job = jobs.current()
    _ = elastic_group().reducer  # the group is there
    group = Native(rank=job.rank, num_workers=job.num_workers, is_broken=is_broken)
    names = [name for name in EXCHANGES if name not in ("auto", "hierarchical")]
    reducers = {name: open_exchange(replace(job, exchange=name), group) for name in names}
    sizes = SIZES if seconds >= SHORT_S else SHORT_SIZES
    medians = {size: _medians(reducers, group, size, seconds / len(sizes)) for size in sizes}
    for reducer in reducers.values():
        reducer.close()
    if job.rank == 0:
        (out / "0.json").write_text(json.dumps(medians))


def _medians(reducers: dict[str, Reducer], group: Native, size: int, seconds: float) -> dict[str, float]:
    import torch

    tensor = torch.zeros(size // 4)
    took_s: dict[str, list[float]] = {name: [] for name in reducers}
    begun = time.monotonic()
    for number in range(MAX_ROUNDS):
        for name, reducer in reducers.items():
            tensor.fill_(group.rank + 1.0)
            group.all_gather(torch.zeros(1))  # all begin together
            started = time.perf_counter()
            reducer.finish(reducer.start_all_reduce(tensor), f"a sum by {name}")
            took_s[name].append(time.perf_counter() - started)
            expected = group.num_workers * (group.num_workers + 1) / 2
            assert float(tensor[0]) == float(tensor[-1]) == expected, f"{name}: {tensor[0]} is not {expected}"
        is_over = number >= 2 and time.monotonic() - begun > seconds
        # Rank 0's clock decides for all.
        over = group.all_gather(torch.tensor([float(is_over and group.rank == 0)]))
        if any(map(bool, over)):
            break
    return {name: statistics.median(took[1:]) for name, took in took_s.items()}


CODEC_SIDES = (128, 1024)
"""Sides of square gradients: 64 KiB and 4 MiB."""


def run_codecs(out: Path, times: int) -> None:
    """Sum gradients of two sizes by every compressor; their times, and with "none" those of the sum alone."""
    import torch

    from shoal.collectives.compression import Gradient, compressor
    from shoal.collectives.exchanges import open_exchange
    from shoal.collectives.reducer import Native
    from shoal.config import job as jobs
    from shoal.config.choices import COMPRESSORS
    from shoal.recovery.elastic_group import elastic_group
    from shoal.recovery.rendezvous import is_broken

    job = jobs.current()
    _ = elastic_group().reducer  # the group is there
    reducer = open_exchange(job, Native(rank=job.rank, num_workers=job.num_workers, is_broken=is_broken))
    found: dict[str, dict[int, float]] = {"none": {}}
    for side in CODEC_SIDES:
        flat, layout = torch.randn(side**2), [Gradient(0, (side, side))]

        def plain(flat: torch.Tensor = flat) -> None:
            reducer.finish(reducer.start_all_reduce(flat), "a sum")

        found["none"][4 * side**2] = quick_s(plain, times)
        for name in COMPRESSORS:
            codec = compressor(name)
            if codec is not None:

                def summed(codec: Any = codec, flat: Any = flat, layout: Any = layout) -> None:
                    codec.finish(codec.start(0, flat, layout, reducer), reducer, "a sum")
                    codec.commit()

                found.setdefault(name, {})[4 * side**2] = quick_s(summed, times)
    reducer.close()
    if job.rank == 0:
        (out / "0.json").write_text(json.dumps(found))


ROWS = (64, 8192)
"""Rows of each worker, of 16 numbers."""


def run_rows(out: Path, times: int) -> None:
    """Sum rows of a sparse gradient by the exchange of the launch, and by torch's gathers, over which they go under any other."""
    import torch

    from shoal.collectives.exchanges import open_exchange
    from shoal.collectives.reducer import Native
    from shoal.collectives.sparse_rows import Rows, TableExchange
    from shoal.config import job as jobs
    from shoal.recovery.elastic_group import elastic_group
    from shoal.recovery.rendezvous import is_broken

    job = jobs.current()
    _ = elastic_group().reducer  # the group is there
    native = Native(rank=job.rank, num_workers=job.num_workers, is_broken=is_broken)
    reducers = {"auto": open_exchange(job, native), "native": native}
    found: dict[str, dict[int, float]] = {}
    draw = torch.Generator().manual_seed(job.rank)
    for count in ROWS:
        keys = torch.randperm(SERVED_IDS, generator=draw)[:count].sort().values
        rows = Rows(keys, torch.randn(count, DIM, generator=draw))
        for name, reducer in reducers.items():

            def summed(rows: Rows = rows, reducer: Any = reducer) -> None:
                TableExchange([rows], reducer).finish()

            found.setdefault(name, {})[count * ROW_BYTES] = quick_s(summed, times)
    reducers["auto"].close()
    if job.rank == 0:
        (out / "0.json").write_text(json.dumps(found))


SHARDED = ((64 << 10, 8), (64 << 10, 64), (4 << 20, 8))
"""Bytes and parameters of models by which fsdp is measured: what a parameter costs, and what bytes do."""


def run_shards(out: Path, times: int) -> None:
    """Forward, backward and update under fsdp of models that compute next to nothing, and the same without fsdp."""
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import init_device_mesh

    from shoal.config import job as jobs
    from shoal.parallel import fsdp
    from shoal.parallel.tensor_parallel.dtensor_update import on_local_tensors
    from shoal.recovery.elastic_group import elastic_group

    class Sums(nn.Module):
        def __init__(self, num_bytes: int, num_parameters: int) -> None:
            super().__init__()
            shape = 64, num_bytes // num_parameters // 256
            self.rows = nn.ParameterList(torch.ones(shape) for _ in range(num_parameters))

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.stack([(row * inputs).sum() for row in self.rows]).sum()

    job = jobs.current()
    _ = elastic_group().reducer  # the group is there
    mesh = init_device_mesh("cpu", (job.num_workers,))
    found = []
    for num_bytes, num_parameters in SHARDED:
        line: dict[str, float] = {"bytes": num_bytes, "parameters": num_parameters}
        for kind in ("plain", "sharded"):
            model = Sums(num_bytes, num_parameters)
            if kind == "sharded":
                fsdp.shard(model, mesh)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-9)

            def step(model: nn.Module = model) -> None:
                model(torch.ones(1)).backward()

            def update(optimizer: torch.optim.Optimizer = optimizer) -> None:
                with on_local_tensors(optimizer):
                    optimizer.step()

            line[f"{kind}_s"] = quick_s(step, times)
            line[f"{kind}_apply_s"] = quick_s(update, times)
        found.append(line)
    if job.rank == 0:
        (out / "0.json").write_text(json.dumps(found))


SERVED = ((64 << 10, 0), (4 << 20, 0), (64 << 10, 8192))
"""Bytes of dense parameters and rows of each worker, of models by which servers are measured."""

SERVED_LOOKUPS = 32


def run_served(out: Path, times: int) -> None:
    """Steps on the servers of the launch of models that compute next to nothing: what is neither computing nor reading."""
    import torch
    from torch import Tensor, nn

    from shoal.config import job as jobs
    from shoal.data.dataset import Dataset
    from shoal.runtime import recorder
    from shoal.train.callbacks.base import Callback
    from shoal.train.trainer import Trainer

    job = jobs.current()

    class Pushed(nn.Module):
        def __init__(self, num_bytes: int, num_rows: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(num_bytes // 4))
            self.rows = nn.Embedding(SERVED_IDS, DIM, sparse=True) if num_rows else None

        def forward(self, ids: Tensor) -> Tensor:
            found = self.weight.sum().expand(len(ids))
            return found if self.rows is None else found + self.rows(ids).sum((1, 2))

    class ServedSteps(Callback):
        """Seconds of each step: at the servers, and in all that is neither computing nor reading."""

        ranks = "every"

        def __init__(self) -> None:
            self.spent: list[tuple[float, float]] = []
            self.last = self._now()

        def _now(self) -> tuple[float, float, float]:
            totals = dict(zip(recorder.KINDS, recorder.RECORDER.totals_ns(), strict=True))
            served = totals["push"] + totals["pull"] + totals["wait"]
            own = totals["compute"] + totals["apply"] + totals["read"]
            return time.perf_counter(), served / 1e9, own / 1e9

        def on_step_end(self, trainer: Trainer, logs: Any) -> None:
            before, self.last = self.last, self._now()
            passed, served, own = (now - then for now, then in zip(self.last, before, strict=True))
            self.spent.append((served, passed - own))

    found = []
    for num_bytes, num_rows in SERVED:
        size = max(num_rows // SERVED_LOOKUPS, 8) * job.num_workers
        ids = torch.randint(
            SERVED_IDS, (4 * size, SERVED_LOOKUPS), generator=torch.Generator().manual_seed(0)
        )
        watch = ServedSteps()
        trainer = Trainer(
            Pushed(num_bytes, num_rows),
            loss=nn.L1Loss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-9),
            callbacks=[watch],
            device="cpu",
            seed=0,
            progress=False,
        )
        trainer.fit(
            Dataset.from_arrays((ids, torch.zeros(len(ids)))).batch(size), max_steps=times, epochs=times
        )
        # The first steps make rows and buffers.
        served, whole = (statistics.quantiles(each, n=4)[0] for each in zip(*watch.spent[3:], strict=True))
        row_bytes = len(torch.unique(ids[: size // job.num_workers])) * ROW_BYTES if num_rows else 0
        found.append({"bytes": num_bytes, "row_bytes": row_bytes, "served_s": served, "whole_s": whole})
    if job.rank == 0:
        (out / "0.json").write_text(json.dumps(found))


if __name__ == "__main__":
    _, name, folder, argument = sys.argv
    if name == "kv":
        run_kv(Path(folder), int(argument))
    elif name == "click":
        run_click(Path(folder), float(argument))
    elif name == "codecs":
        run_codecs(Path(folder), int(argument))
    elif name == "rows":
        run_rows(Path(folder), int(argument))
    elif name == "shards":
        run_shards(Path(folder), int(argument))
    elif name == "served":
        run_served(Path(folder), int(argument))
    else:
        run_exchange(Path(folder), float(argument))
