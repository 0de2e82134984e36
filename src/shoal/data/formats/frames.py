"""DataFrames of Spark and datasets of Ray: their partitions as shards, through Parquet files.

A DataFrame has no random access, and its partitions are in executors, away from the workers: the
engine writes each as a Parquet file, once for a job, and from there on it is an ordinary table. A
restarted worker reads the same files.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.config import job as jobs
from shoal.data.formats.arrow import column_of
from shoal.data.formats.parquet import open_parquet
from shoal.data.formats.table_source import TableSource, chosen, label_names
from shoal.errors import ConfigError, DataError

_numbers = itertools.count()


def open_spark(
    frame: Any,
    *,
    label: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    folder: str | None = None,
    **options: Any,
) -> TableSource:
    """Rows of a Spark DataFrame; each partition is a shard.

    Spark writes the partitions to Parquet once, below the run directory or,
    where Spark's executors or the workers are on other machines, below
    `folder`, a path or URL that all of them reach. Vectors of pyspark.ml
    become lists of numbers. `label`, `columns` and the other options are
    those of `from_parquet`.

        Dataset.from_spark(clicks, label="clicked")
        Dataset.from_spark(clicks, label="clicked", folder="s3://bucket/frames")
    """
    if not hasattr(frame, "sparkSession"):
        raise ConfigError(f"from_spark takes a DataFrame of Spark, but got a {type(frame).__name__}.")
    # `where` may name any column, and Spark writes those that were asked for.
    wanted = None if options.get("where") is not None else columns
    path = write_spark(frame, label=label, columns=wanted, folder=folder)
    return open_parquet(path, label=label, columns=columns, **options)


def open_ray(
    dataset: Any,
    *,
    label: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    folder: str | None = None,
    **options: Any,
) -> TableSource:
    """Rows of a Ray Dataset; each of its blocks is a shard.

    Ray writes them to Parquet once, below the run directory or, where Ray's
    nodes or the workers are on other machines, below `folder`, a path or URL
    that all of them reach. `label`, `columns` and the other options are those
    of `from_parquet`.

        Dataset.from_ray(ray.data.read_csv("clicks/"), label="clicked")
    """
    if not hasattr(dataset, "write_parquet") or not hasattr(dataset, "select_columns"):
        raise ConfigError(f"from_ray takes a Dataset of ray.data, but got a {type(dataset).__name__}.")
    schema = dataset.schema()
    if schema is None or not dataset.take(1):  # one that was filtered has a schema still
        raise ConfigError("from_ray got a Dataset without rows. Nothing was read.")
    names = chosen(schema.names, columns, "the Ray Dataset", needed=label_names(label))
    if columns is not None and options.get("where") is None:
        dataset = dataset.select_columns(names)
        schema = dataset.schema()
    for name, kind in zip(schema.names, schema.types, strict=True):
        _refuse_objects(name, kind)
        column_of(name, kind, "the Ray Dataset")
    path = _written_once(dataset.write_parquet, folder=folder)
    return open_parquet(path, label=label, columns=columns, **options)


def _refuse_objects(name: str, kind: Any) -> None:
    """Refuse columns of objects: Ray stores what Arrow has no type for as pickles, which would be read as bytes."""
    if kind is object or "pickled" in str(getattr(kind, "extension_name", "")):
        raise DataError(
            f"the column '{name}' of the Ray Dataset holds objects of Python, which cannot be read into tensors: numbers, strings and lists "
            "of them can; leave it out with columns=[...], or map it to those. Nothing was read."
        )


def write_spark(
    frame: Any,
    *,
    label: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    folder: str | None = None,
) -> str:
    """Write a DataFrame's partitions to Parquet, once for a job; returns where they are."""
    from pyspark.sql.pandas.types import to_arrow_schema

    names = chosen(frame.columns, columns, "the DataFrame", needed=label_names(label))
    if columns is not None:
        frame = frame.select(*names)
    frame = _without_vectors(frame)
    for field in to_arrow_schema(frame.schema):
        column_of(field.name, field.type, "the DataFrame")
    master = frame.sparkSession.conf.get("spark.master", "")
    if folder is None and not master.startswith("local"):
        raise ConfigError(
            f"from_spark: the executors of {master} write the DataFrame's partitions, and a folder of this machine alone is not "
            "theirs. Nothing was read; give folder=, a path or URL that executors and workers reach."
        )

    def write(url: str) -> None:
        # A path without a scheme would be one of Spark's default file system, which may be HDFS.
        frame.write.parquet(url if "://" in url else f"file://{url}")

    return _written_once(write, folder=folder)


def _without_vectors(frame: Any) -> Any:
    """Vectors of pyspark.ml as arrays, which Parquet knows."""
    vectors = [field.name for field in frame.schema if type(field.dataType).__name__ == "VectorUDT"]
    if not vectors:
        return frame
    from pyspark.ml.functions import vector_to_array

    return frame.withColumns({name: vector_to_array(frame[name]) for name in vectors})


def _written_once(write: Callable[[str], None], *, folder: str | None) -> str:
    """Path of the script's n-th frame; the first worker to ask has it written, the others wait."""
    job = jobs.share()
    number = next(_numbers)
    if job.num_workers > 1 and not job.shares_run_dir:
        raise ConfigError(
            "from_spark and from_ray write their rows once for all workers, who agree on it through the run directory, and the hosts "
            "of this job do not share one. Nothing was read; write Parquet files to a URL that all hosts reach, and read them with "
            "from_parquet."
        )
    if not job.launched:
        here = Path(tempfile.mkdtemp(prefix="shoal-frames-"))
        atexit.register(shutil.rmtree, here, ignore_errors=True)
    else:
        here = job.run_dir / "frames"
        here.mkdir(parents=True, exist_ok=True)
    said = here / f"{number}.url"
    with _locked(here / f"{number}.lock"):
        if not said.exists():  # the url is written last: a death before leaves files without a reader
            name = f"{job.name}-{number}-{secrets.token_hex(4)}"
            if folder is not None and "://" in folder:
                url = f"{folder.rstrip('/')}/{name}"
            else:
                url = str((Path(folder or here) / name).absolute())
            write(url)
            said.write_text(url)
        return said.read_text().replace("s3a://", "s3://", 1)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
