"""shoal: distributed training for PyTorch. One script, any strategy, the same answer.

Names load when they are first used, so that `shoal --help` does not pay for torch.
"""

from __future__ import annotations

import importlib
import sys

if sys.platform == "win32":
    sys.tracebacklimit = 0
    raise ImportError(
        "shoal runs on Linux and macOS, and this is Windows: use it inside WSL 2 (`wsl --install`)."
    )

TYPE_CHECKING = False  # typing's own, which takes longer to load than everything here
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from shoal import callbacks as callbacks
    from shoal import collectives as collectives
    from shoal import data as data
    from shoal import estimator as estimator
    from shoal import features as features
    from shoal import keras as keras
    from shoal import memory as memory
    from shoal import nn as nn
    from shoal import ps as ps
    from shoal import spark as spark
    from shoal.cluster.launch.api import RunResult as RunResult
    from shoal.cluster.launch.api import run as run
    from shoal.config.faults import Faults as Faults
    from shoal.config.own_rank import num_workers as num_workers
    from shoal.config.own_rank import rank as rank
    from shoal.data import Dataset as Dataset
    from shoal.errors import ShoalError as ShoalError
    from shoal.parallel.gathering import gather as gather
    from shoal.train.custom.checkpoint import checkpoint as checkpoint
    from shoal.train.custom.checkpoint import resume as resume
    from shoal.train.custom.loop import clip_grad_norm_ as clip_grad_norm_
    from shoal.train.custom.loop import log as log
    from shoal.train.custom.loop import mean as mean
    from shoal.train.custom.loop import reduce as reduce
    from shoal.train.custom.loop import setup as setup
    from shoal.train.custom.loop import should_stop as should_stop
    from shoal.train.custom.loop import sum_gradients as sum_gradients
    from shoal.train.progress import History as History
    from shoal.train.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "Dataset": "shoal.data",
    "Faults": "shoal.config.faults",
    "History": "shoal.train.progress",
    "RunResult": "shoal.cluster.launch.api",
    "ShoalError": "shoal.errors",
    "Trainer": "shoal.train.trainer",
    "callbacks": "shoal.callbacks",
    "checkpoint": "shoal.train.custom.checkpoint",
    "clip_grad_norm_": "shoal.train.custom.loop",
    "collectives": "shoal.collectives",
    "data": "shoal.data",
    "estimator": "shoal.estimator",
    "features": "shoal.features",
    "gather": "shoal.parallel.gathering",
    "keras": "shoal.keras",
    "log": "shoal.train.custom.loop",
    "mean": "shoal.train.custom.loop",
    "memory": "shoal.memory",
    "nn": "shoal.nn",
    "num_workers": "shoal.config.own_rank",
    "ps": "shoal.ps",
    "rank": "shoal.config.own_rank",
    "reduce": "shoal.train.custom.loop",
    "resume": "shoal.train.custom.checkpoint",
    "run": "shoal.cluster.launch.api",
    "setup": "shoal.train.custom.loop",
    "should_stop": "shoal.train.custom.loop",
    "spark": "shoal.spark",
    "sum_gradients": "shoal.train.custom.loop",
}

__all__ = list(_HOMES)


def _print_uncaught(kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
    importlib.import_module("shoal.runtime.user_frames").print_uncaught(kind, error)


# Python prints uncaught errors without shoal's frames, unless another hook prints them, or `python -X dev`
# asks for all.
if sys.excepthook is sys.__excepthook__ and not sys.flags.dev_mode:
    sys.excepthook = _print_uncaught


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(
            f"module 'shoal' has no attribute '{name}'", name=name, obj=sys.modules[__name__]
        )
    module = importlib.import_module(home)
    value = module if home == f"shoal.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
