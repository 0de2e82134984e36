"""Output of workers that `shoal verify` and `shoal chaos` compare.

Under `shoal verify` a job runs in another precision, for a few steps, and writes its weights; the
script ends with the last of the steps. Under `shoal chaos` every rank hashes its final weights when
the script has ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from shoal.cluster.worker import session
from shoal.config import job as jobs
from shoal.config import own_rank
from shoal.config.job import VerifyPlan
from shoal.parallel.batch_dependence import MixingLayer, mixing_layers, noted_mixing, watch_randomness
from shoal.parallel.protocol import RunsMicroBatches, Strategy, holds_parts
from shoal.parallel.state import MODEL
from shoal.runtime import user_frames


class Verification:
    """Counts a job's steps for a VerifyPlan and ends the script after the last."""

    def __init__(self, plan: VerifyPlan, *, rank: int, is_own_loop: bool = False) -> None:
        self.plan = plan
        self.dtype: torch.dtype = getattr(torch, plan.dtype)
        self._rank, self._is_own_loop = rank, is_own_loop
        self._losses: list[float] = []
        self._mixing: list[MixingLayer] = []
        self._stop_watching: Callable[[], list[MixingLayer]] | None = None
        self.dry_run: Callable[[Strategy], list[dict[str, Any]]] | None = None
        """Dry runs that `plan.dry_runs` asks for; run after the last step."""

    def cast(self, model: nn.Module) -> None:
        """Cast the model to the plan's precision, and watch its first forward for randomness."""
        model.to(self.dtype)
        self._model = model
        for name in self.plan.at_rest:
            keep_at_rest(model.get_submodule(name))
        self._stop_watching = watch_randomness(model)

    @property
    def checks_every_loss(self) -> bool:
        """True if every step's loss has to recombine, not only the first: masks may come later. In
        float64 rounding does not show.
        """
        return self.dtype is torch.float64

    def count(self, strategy: Strategy, loss: float) -> None:
        self._losses.append(loss)
        if self._stop_watching is not None:
            # Now, not before the strategy had it: its BatchNorm may see whole batches.
            self._mixing = mixing_layers(self._model)
            named = {layer.layer for layer in self._mixing}
            self._mixing += [layer for layer in self._stop_watching() if layer.layer not in named]
            self._stop_watching = None
        if len(self._losses) >= self.plan.num_steps:
            self.end(strategy)

    def end(self, strategy: Strategy) -> None:
        """Write the weights, and end the script."""
        self.write(strategy)
        raise SystemExit(0)

    def write(self, strategy: Strategy) -> None:
        """Write the weights, replacing earlier ones."""
        if not self._losses:
            return
        # With sharded state all ranks contribute.
        pieces = list(strategy.state()) if self._rank == 0 or holds_parts(strategy) else []
        if self._rank == 0:
            state = {
                piece.name.removeprefix(MODEL): piece.tensor.detach().cpu().clone().contiguous()
                for piece in pieces
                if piece.name.startswith(MODEL)
            }
            directory = Path(self.plan.dump_to)
            directory.mkdir(parents=True, exist_ok=True)
            save_file(state, directory / "state.safetensors")
            report = {
                "losses": self._losses,
                "mixes": [dataclasses.asdict(layer) for layer in self._mixing],
                "suspects": [dataclasses.asdict(layer) for layer in noted_mixing()],
                "rank_asked_at": [
                    f"{file}, line {line}"
                    for file, line in own_rank.asked_at
                    if not user_frames.is_ours(file)
                ],
                "steps": len(self._losses),
                "own_loop": self._is_own_loop,
                "micro_batches": strategy.num_micro if isinstance(strategy, RunsMicroBatches) else None,
                "dry_runs": self.dry_run(strategy) if self.dry_run is not None else [],
            }
            (directory / "report.json").write_text(json.dumps(report))


def keep_at_rest(module: nn.Module) -> None:
    """Keep a module, but not those inside it, in evaluation mode, whatever `train()` is called with."""
    train = module.train

    def resting(mode: bool = True) -> nn.Module:
        train(mode)
        module.training = False
        return module

    module.train = resting  # type: ignore[method-assign]
    module.training = False


_models: list[nn.Module] = []


def fingerprint_at_end(model: nn.Module) -> None:
    """Register a trained model, whose weights are hashed at the end."""
    if jobs.current().fingerprints is None or any(known is model for known in _models):
        return
    if not _models:
        session.at_end(_write_fingerprints)
    _models.append(model)


def _write_fingerprints() -> None:
    job = jobs.current()
    directory = Path(str(job.fingerprints))
    directory.mkdir(parents=True, exist_ok=True)
    hashes = {
        f"model {number}: {name}": _hash(tensor)
        for number, model in enumerate(_models)
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta  # another stage's
    }
    (directory / f"worker-{job.rank}.json").write_text(json.dumps(hashes))


def _hash(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
