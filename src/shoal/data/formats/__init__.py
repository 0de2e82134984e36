"""Table formats: a function `open_<format>` each, the constructor `Dataset.from_<format>`.

A new format is a function, its lines below, and its name in `Dataset`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data.formats.frames import open_ray as open_ray
    from shoal.data.formats.frames import open_spark as open_spark
    from shoal.data.formats.huggingface import open_huggingface as open_huggingface
    from shoal.data.formats.parquet import open_parquet as open_parquet
    from shoal.data.formats.sql import open_sql as open_sql
    from shoal.data.formats.stream import open_stream as open_stream
    from shoal.data.formats.text import open_csv as open_csv
    from shoal.data.formats.text import open_jsonl as open_jsonl
    from shoal.data.formats.tfrecord import open_tfrecord as open_tfrecord


def __getattr__(name: str) -> Any:
    # Formats import compiled kernels: only the ones that are used are loaded.
    if not name.startswith("open_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {"open_csv": "text", "open_jsonl": "text", "open_spark": "frames", "open_ray": "frames"}
    module = homes.get(name, name.removeprefix("open_"))
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
