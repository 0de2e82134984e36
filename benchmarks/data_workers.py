"""Processes that read data: a millisecond of Python per sample, in 2 of them, and what handing batches over costs.

Against the same in one process, and against torch's DataLoader with 2 workers.
Both sides keep their processes from epoch to epoch, so starting them is not counted.
Beside the time of an epoch stands the CPU time of all processes in it, which says
more where the machine is shared.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

import shoal
from benchmarks.harness import Report, alternate, timed

NUM_PROCESSES = 2
LOOPS_PER_MS = 0


def one_ms(sample: Any) -> Any:
    """A millisecond of Python, as a parser or a tokenizer would need."""
    total = 0
    for number in range(LOOPS_PER_MS):
        total += number & 7
    return sample[0] + total % 2, sample[1]


def calibrate() -> None:
    global LOOPS_PER_MS
    LOOPS_PER_MS = 10_000
    taken_s = []
    for _ in range(200):  # by the thread's own clock: others may be at work here
        began = time.thread_time()
        one_ms((0.0, 0))
        taken_s.append(time.thread_time() - began)
    LOOPS_PER_MS = max(1, int(LOOPS_PER_MS * 1e-3 / statistics.median(taken_s)))


class Mapped(TorchDataset):  # type: ignore[type-arg]
    """What `from_arrays(...).map(one_ms)` is, for a DataLoader."""

    def __init__(self, inputs: torch.Tensor, target: torch.Tensor) -> None:
        self.inputs, self.target = inputs, target

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return one_ms((self.inputs[index], self.target[index]))


class InBatches(TorchDataset):  # type: ignore[type-arg]
    """Whole batches of a tensor, so that only the way of a batch between two processes is measured."""

    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self.inputs[torch.tensor(indices)]


def whole(batch: torch.Tensor) -> torch.Tensor:
    return batch


def through(batches: Any) -> None:
    for _ in batches:
        pass


class Watched:
    """Passes over some batches, with the CPU time of each, the processes' that read included."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.cpu_s: list[float] = []

    def __call__(self) -> float:
        before = _cpu_s()
        wall_s = timed(lambda: through(self._batches))
        after = _cpu_s()
        self.cpu_s.append(sum(after[pid] - before.get(pid, 0.0) for pid in after))
        return wall_s


def _cpu_s() -> dict[int, float]:
    own = psutil.Process()
    return {process.pid: sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True))}


def compared(ours: Any, theirs: Any, rounds: int) -> dict[str, Any]:
    mine, other = Watched(ours), Watched(theirs)
    values = alternate(mine, other, rounds=rounds)
    # Without the warm-up, in which processes start.
    values["ours_cpu_s"] = round(statistics.median(mine.cpu_s[1:]), 3)
    values["theirs_cpu_s"] = round(statistics.median(other.cpu_s[1:]), 3)
    return values


def compare_work(report: Report, num_samples: int, rounds: int) -> None:
    inputs, target = torch.rand(num_samples, 16), torch.zeros(num_samples)
    data = shoal.Dataset.from_arrays((inputs, target))
    apart = data.map(one_ms, workers=NUM_PROCESSES).batch(32)
    alone = data.map(one_ms).batch(32)
    loader = DataLoader(
        Mapped(inputs, target), batch_size=32, num_workers=NUM_PROCESSES, persistent_workers=True
    )
    asked = {"samples": num_samples, "batch": 32, "ms_per_sample": 1, "processes": NUM_PROCESSES}
    with apart.held():
        for name, other in (("1 process", alone), ("DataLoader(num_workers=2)", loader)):
            values = compared(apart, other, rounds)
            values["samples_per_s"] = round(num_samples / values["ours_s"])
            report.add(f"1 ms of Python per sample: map(workers=2) / {name}", values, **asked)


def compare_handing_over(
    report: Report, name: str, rows: torch.Tensor, batch: int, rounds: int, aim: str
) -> None:
    apart = shoal.Dataset.from_arrays(rows).shuffle(seed=0).map(whole, batched=True, workers=NUM_PROCESSES)
    batches = apart.batch(batch)
    loader = DataLoader(
        InBatches(rows),
        batch_size=batch,
        shuffle=True,
        collate_fn=whole,
        num_workers=NUM_PROCESSES,
        persistent_workers=True,
    )
    with batches.held():
        values = compared(batches, loader, rounds)
    num_batches = -(-len(rows) // batch)
    values["ours_us_per_batch"] = round(values["ours_s"] / num_batches * 1e6)
    values["mib_per_s"] = round(rows.numel() * rows.element_size() / values["ours_s"] / (1 << 20))
    report.add(name, values, batch=batch, batches=num_batches, processes=NUM_PROCESSES, aim=aim)


def main(quick: bool = False) -> None:
    report = Report("data_workers")
    calibrate()
    compare_work(report, num_samples=128 if quick else 512, rounds=2 if quick else 5)
    generator = np.random.default_rng(0)
    table = torch.from_numpy(generator.random((100 * 1024, 39), dtype=np.float32))
    images = torch.from_numpy(generator.integers(0, 255, (64 * 12, 3, 224, 224), dtype=np.uint8))
    over = "handing over: map(workers=2) / DataLoader(num_workers=2)"
    compare_handing_over(report, f"1,024 x 39 floats, {over}", table, 1024, 2 if quick else 5, "ratio <= 1")
    compare_handing_over(
        report, f"64 images of 3 x 224 x 224, {over}", images, 64, 2 if quick else 5, "ratio <= 1"
    )
    report.save()


if __name__ == "__main__":
    main()
