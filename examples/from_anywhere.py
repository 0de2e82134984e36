"""One model from arrays, CSV, Parquet, TFRecord, SQLite and PostgreSQL: the weights at the end are the same to the bit.

The same generated click log is written in every form, read from each, shuffled by the same seed and trained on.

    python examples/from_anywhere.py                           all of them; PostgreSQL from a server that is started
    python examples/from_anywhere.py --source csv postgres --postgres postgresql://me:secret@localhost/test
    shoal run -n 2 examples/from_anywhere.py --source parquet
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import tempfile

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
from databases import own_postgres
from databases.filled import fill_postgres, fill_sqlite
from torch import Tensor, nn

import shoal
from shoal.data import Dataset, generated, write_tfrecord

DENSE, IDS = [f"I{n}" for n in range(1, 14)], [f"C{n}" for n in range(1, 27)]
TYPES = {**dict.fromkeys(DENSE, "float32"), **dict.fromkeys(IDS, "int64"), "clicked": "float32"}
SOURCES = ["arrays", "csv", "parquet", "tfrecord", "sqlite", "postgres"]


class ClickModel(nn.Module):
    def __init__(self, num_ids: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(num_ids, 8)
        self.layers = nn.Sequential(nn.Linear(13 + 26 * 8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, columns: dict[str, Tensor]) -> Tensor:  # all columns but the label, by their names
        dense = torch.stack([columns[name] for name in DENSE], dim=1).log1p()
        rows = self.rows(torch.stack([columns[name] for name in IDS], dim=1))
        return self.layers(torch.cat([dense, rows.flatten(1)], dim=1)).squeeze(1)


def written(source: str, log: pa.Table, folder: str, postgres: str) -> Dataset:
    """Write the click log to where a source reads, and open it there."""
    path = f"{folder}/clicks.{source}"
    if source == "arrays":
        arrays = {name: torch.from_numpy(log[name].to_numpy().copy()) for name in TYPES}
        return Dataset.from_arrays(({name: arrays[name] for name in DENSE + IDS}, arrays["clicked"]))
    if source == "csv":
        pa.csv.write_csv(log, path)
        return Dataset.from_csv(path, schema=TYPES, label="clicked")
    if source == "parquet":
        pa.parquet.write_table(log, path, row_group_size=1000)
        return Dataset.from_parquet(path, label="clicked")
    if source == "tfrecord":
        write_tfrecord(path, log.to_pylist())
        return Dataset.from_tfrecord(path, TYPES, label="clicked")
    # A table of a database has no order until a column says it.
    keyed, table = log.append_column("number", pa.array(range(len(log)))), f"clicks_{shoal.rank()}"
    address = path if source == "sqlite" else postgres
    (fill_sqlite if source == "sqlite" else fill_postgres)(address, table, keyed)
    return Dataset.from_sql(
        table, address, key="number", partitions=8, columns=list(TYPES), schema=TYPES, label="clicked"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one model from every kind of source.")
    parser.add_argument("--source", nargs="+", default=["all"], choices=[*SOURCES, "all"])
    parser.add_argument("--postgres", default="", help="URL of a server; without it one is started")
    parser.add_argument("--samples", type=int, default=10_000)
    options = parser.parse_args()
    sources = SOURCES if "all" in options.source else options.source
    inputs, clicked = generated.click_arrays(options.samples, num_ids=5000)
    values = [*inputs["dense"].T.contiguous(), *inputs["ids"].T.contiguous(), clicked]
    log = pa.table({name: value.numpy() for name, value in zip(TYPES, values, strict=True)})
    hashes: list[str] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as server:
        for source in sources:
            if source == "postgres" and not options.postgres:
                if not own_postgres.is_installed():
                    print("postgres  left out: no server is installed here, and --postgres names none")
                    continue
                options.postgres = server.enter_context(own_postgres.server(folder))
            torch.manual_seed(0)
            model = ClickModel(5000)
            trainer = shoal.Trainer(model, loss=nn.BCEWithLogitsLoss(), optimizer=torch.optim.Adam, seed=0)
            data = written(source, log, folder, options.postgres)
            history = trainer.fit(data.shuffle(seed=0).batch(250), epochs=1)
            weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
            hashes.append(hashlib.sha256(weights).hexdigest()[:16])
            print(f"{source:9} loss {history['loss'][-1]:.4f}  weights {hashes[-1]}")
    print("all weights are equal" if len(set(hashes)) == 1 else "the weights differ")


if __name__ == "__main__":
    main()
