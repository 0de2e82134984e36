"""Rows on a GPU worker's device: `ps --row-cache` beside `ps` and beside all-in-HBM plain PyTorch with sparse gradients.

The click model with rows of 64 numbers, tables of 1 M and 20 M rows, Adagrad.
Runs of the three kinds take turns. On a machine without an accelerator small tables on
the CPU, which says whether it runs at all.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Report

SCRIPT = Path(__file__).parent / "scripts" / "device_cache_job.py"
NUM_COLUMNS, ZIPF_EXPONENT = 26, 1.05
BATCHES = (8192, 1024)
KINDS = ("all on the device, plain PyTorch", "ps", "ps --row-cache")


def write_data(folder: Path, num_rows: int, num_samples: int) -> None:
    """Ids by Zipf's law, popular ones anywhere in the table."""
    generator, rest = np.random.default_rng(0), 1 - ZIPF_EXPONENT
    drawn = generator.random((num_samples, NUM_COLUMNS))
    rank = (1 - drawn * (1 - float(num_rows) ** rest)) ** (1 / rest)
    ids = np.minimum(rank.astype(np.int64), num_rows) * 2654435761 % num_rows
    np.save(folder / "ids.npy", ids)
    np.save(folder / "label.npy", (ids.sum(1) % 7 < 3).astype(np.float32))


def measure(
    kind: str, folder: Path, num_rows: int, device: str, seconds: float, profile: Path | None
) -> dict[str, Any]:
    """One run; its samples/s and ms per step by batch size, and how long all of it took."""
    out, began = folder / "out.json", time.monotonic()
    own = ["--data", str(folder), "--out", str(out), "--rows", str(num_rows), "--device", device]
    own += ["--seconds", str(seconds), *(word for batch in BATCHES for word in ("--batch", str(batch)))]
    if kind == KINDS[0]:
        command = [sys.executable, str(SCRIPT), "plain", *own]
    else:
        cache = ["--row-cache", str(num_rows)] if kind == KINDS[2] else []
        if profile is not None and cache:
            own += ["--profile", str(profile)]
        command = [
            sys.executable, "-m", "shoal", "run", "-n", "1", "--servers", "1", "--strategy", "ps", "--device", device,
            *cache, "--run-dir", str(folder / "runs"), str(SCRIPT), "shoal", *own,
        ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    if done.returncode:
        return {"error": f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"}
    found = json.loads(out.read_text())
    shutil.rmtree(folder / "runs", ignore_errors=True)
    return {**found, "wall_s": round(time.monotonic() - began, 1)}


def main(quick: bool = False, minutes: float | None = None) -> None:
    has_device = torch.accelerator.is_available()
    device = "cuda:0" if has_device else "cpu"
    sizes = (1_000_000, 20_000_000) if has_device else (20_000, 100_000)
    num_samples = 1_000_000 if has_device else 40_000
    deadline = time.monotonic() + 60 * (minutes or 10)
    folder_out = Path(os.environ["OUT"]) if "OUT" in os.environ else None
    report, lines = Report("device_cache"), list[str]()

    def note(line: dict[str, Any]) -> None:
        lines.append(json.dumps(line))
        print(lines[-1], flush=True)
        if folder_out is not None:
            (folder_out / "device_cache.jsonl").write_text("\n".join(lines) + "\n")

    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for num_rows in sizes:
            (folder := Path(temporary) / str(num_rows)).mkdir()
            write_data(folder, num_rows, num_samples)
        for number in range(1 if quick else 3):
            for num_rows in sizes:
                for kind in reversed(KINDS) if number % 2 == 0 else KINDS:
                    past = [each["wall_s"] for each in found.get((num_rows, kind), [])]
                    if past and time.monotonic() + max(past) > deadline:
                        continue
                    profile = (
                        folder_out / f"device_cache_{num_rows}.txt" if folder_out and not number else None
                    )
                    run = measure(
                        kind,
                        Path(temporary) / str(num_rows),
                        num_rows,
                        device,
                        1.0 if quick else 4.0,
                        profile,
                    )
                    if "error" not in run:
                        found.setdefault((num_rows, kind), []).append(run)
                    note(
                        {"benchmark": "device_cache", "round": number, "rows": num_rows, "kind": kind, **run}
                    )
    for num_rows in sizes:
        for batch in BATCHES:
            if any((num_rows, kind) not in found for kind in KINDS):
                continue  # its error was told
            rate = {
                kind: statistics.median(run["samples_per_s"][str(batch)] for run in found[num_rows, kind])
                for kind in KINDS
            }
            values = {
                **{f"{kind}: samples/s": round(rate[kind]) for kind in KINDS},
                "row cache / all on the device": round(rate[KINDS[2]] / rate[KINDS[0]], 3),
                "row cache / ps": round(rate[KINDS[2]] / rate[KINDS[1]], 3),
            }
            name = torch.get_device_module(device).get_device_name() if has_device else "cpu"
            rounds = [len(found[num_rows, kind]) for kind in KINDS]
            report.add(
                f"click model, {num_rows:,} rows x 64, batch {batch:,}", values, device=name, rounds=rounds, workers=1, servers=1,
                optimizer="Adagrad", ids=f"Zipf {ZIPF_EXPONENT}", samples=num_samples,
            )  # fmt: skip
            note({"benchmark": "device_cache", "rows": num_rows, "batch": batch, **values})
    if has_device and not quick:
        report.save()


if __name__ == "__main__":
    main()
