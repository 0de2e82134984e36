"""What each worker alone has, kept beside a snapshot by itself: nothing of it crosses the network.

In checkpoints that a script asked for, rank 0 writes everybody's; they may be
read by other workers. A snapshot is only ever read by those that took it, in
the same places, so each keeps its own part in the job's scratch directory.
"""

from __future__ import annotations

import shutil
from collections import ChainMap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.parallel.protocol import MeetsNowAndThen, Piece
from shoal.runtime import scratch
from shoal.train.checkpoint.checkpoint import Checkpoint, open_checkpoint, write_checkpoint

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


def state(trainer: Trainer, path: str) -> Iterable[Piece]:
    """The pieces of a checkpoint at `path`: of a snapshot, only what all have alike. Collective."""
    strategy, mine = trainer.strategy, _mine(trainer, path)
    if mine is None or not isinstance(strategy, MeetsNowAndThen):
        return strategy.state()
    common = list(strategy.common_pieces())
    write_checkpoint(str(mine), list(strategy.own_pieces()), progress={"step": trainer.step})
    strategy.reduce(torch.zeros(1))  # a snapshot counts once every part of it is there
    return common


def joined(trainer: Trainer, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """A checkpoint's tensors, and this worker's own beside them."""
    mine = _mine(trainer, checkpoint.path)
    if mine is None or not mine.exists():
        return checkpoint.pieces
    own = open_checkpoint(str(mine)).pieces
    return ChainMap({name: own[name] for name in own}, checkpoint.pieces)  # type: ignore[arg-type]  # only read


def remove(trainer: Trainer, path: str) -> None:
    """The snapshot at `path` goes, and this worker's part with it."""
    if (mine := _mine(trainer, path)) is not None:
        shutil.rmtree(mine, ignore_errors=True)


def _mine(trainer: Trainer, path: str) -> Path | None:
    """Where this worker's part of a snapshot is; None where `path` is none, or workers have no parts."""
    at = Path(path)
    if not trainer.job.launched or not isinstance(trainer.strategy, MeetsNowAndThen):
        return None
    if at.parent != scratch.directory("snapshots"):
        return None
    return scratch.directory("own-parts", f"worker-{trainer.rank}") / at.name
