"""A Parquet file, read shuffled, against a bare scan of it by pyarrow and against HF datasets.

2 M rows of 39 columns and a label, batches of 1,024. The first epoch decodes
everything before its first batch; later ones find it decoded. The bare scan
only decodes, in the order of the file: into whole row groups, which is the
fastest it can, or into batches of the same size, which is what one would
train on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shoal
from benchmarks.data_tables import per_million, whole, with_rates, write_parquet
from benchmarks.harness import Report, alternate

BATCH = 1024


def bare(path: Path, *, in_batches: bool) -> Iterator[Any]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    if in_batches:
        for batch in file.iter_batches(BATCH):
            yield [column.to_numpy(zero_copy_only=False) for column in batch.columns]
    else:
        for group in range(file.num_row_groups):
            yield [column.to_numpy() for column in file.read_row_group(group).columns]


def main(quick: bool = False) -> None:
    report = Report("data_parquet")
    num_rows = 200_000 if quick else 2_000_000
    rounds = 3 if quick else 9
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        path = Path(folder) / "clicks.parquet"
        write_parquet(path, num_rows)
        configuration = {"rows": num_rows, "columns": 40, "batch": BATCH, "file_bytes": path.stat().st_size}

        def opened() -> Any:
            return shoal.Dataset.from_parquet(path, label="label").shuffle(seed=0).batch(BATCH)

        kept = opened()
        whole(lambda: kept)

        def five_epochs() -> float:
            batches = opened()
            return sum(whole(lambda: batches) for _ in range(5))

        sides = {
            "first epoch": lambda: whole(opened),
            "later epoch": lambda: whole(lambda: kept),
        }
        for in_batches in (False, True):
            unit = f"batches of {BATCH}" if in_batches else "row groups"
            scan = lambda in_batches=in_batches: whole(lambda: bare(path, in_batches=in_batches))  # noqa: E731
            for name, ours in sides.items():
                values = alternate(ours, scan, rounds=rounds)
                report.add(
                    f"{name}: shoal, shuffled / bare pyarrow scan into {unit}",
                    values,
                    **configuration,
                    aim="ratio <= 1.67 (0.6x)",
                )
            values = alternate(
                five_epochs,
                lambda scan=scan: sum(scan() for _ in range(5)),
                rounds=2 if quick else 3,
                warmup=0,
            )
            report.add(
                f"five epochs from nothing: shoal, shuffled / five bare pyarrow scans into {unit}",
                values,
                **configuration,
                aim="ratio <= 1.67 (0.6x)",
            )
        _against_huggingface(report, path, folder, kept, configuration, quick=quick)
    report.save()


def _against_huggingface(
    report: Report, path: Path, folder: str, kept: Any, configuration: dict[str, Any], *, quick: bool
) -> None:
    try:
        import datasets
    except ImportError:
        print("HF datasets is not installed: not compared")
        return
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_parquet(str(path), cache_dir=f"{folder}/hf")
    steps = 10 if quick else 60
    for name, shuffled in (
        ("in a random order", table.shuffle(seed=0).with_format("torch")),
        ("in the order of the file", table.with_format("torch")),
    ):
        values = alternate(
            lambda: per_million(kept, steps, BATCH),
            lambda shuffled=shuffled: per_million(shuffled.iter(batch_size=BATCH), steps, BATCH),
            rounds=2 if quick else 5,
        )
        report.add(
            f"time per 1 M samples: shoal, shuffled / HF datasets {name}", with_rates(values), **configuration
        )


if __name__ == "__main__":
    main()
