from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from shoal.errors import ConfigError, TrainingError
from shoal.parallel.pipeline import stage as pipeline_stage
from shoal.parallel.pipeline.stage import UnevenStage


def test_gradients_go_to_the_stage_before_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero-bubble hands them over as autograd made them; that of a mean is one number seen many times."""
    monkeypatch.setattr(PipelineStage, "get_bwd_send_ops", lambda self, chunk: self.bwd_cache.pop(chunk))
    stage: Any = object.__new__(UnevenStage)
    stage._takes, stage._stage_meta = [None], SimpleNamespace(input_grads=None)
    stage.bwd_cache = {0: (torch.ones(3).expand(2, 3), None)}
    sent, none = stage.get_bwd_send_ops(0)
    assert sent.is_contiguous()
    assert torch.equal(sent, torch.ones(2, 3))
    assert none is None


def test_torch_without_what_stages_need_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline_stage.refuse_old_torch()
    monkeypatch.setattr(pipeline_stage, "HAS_SHAPES", False)
    with pytest.raises(ConfigError, match=f"as torch 2.13 can, and this is {torch.__version__[:4]}"):
        pipeline_stage.refuse_old_torch()


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.num_calls = nn.Linear(2, 2), nn.Linear(2, 2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        layer = self.one if self.num_calls % 2 else self.other
        return layer(x)


def test_trials_before_a_model_is_sharded_leave_its_counters_alone() -> None:
    """They are no forwards of the script: layers that run in turn would run in another turn."""
    model, rows = _Counts(), torch.randn(6, 2)
    pipeline_stage.refuse_written(model, rows, "fsdp")
    assert pipeline_stage.layers_by_sample(model, rows) == []
    assert model.num_calls == 0


class _Branches(_Counts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if x.sum() > 0 else self.other(x)


class _Experts(_Counts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for layer, chosen in ((self.one, x[:, 0] > 0), (self.other, x[:, 0] <= 0)):
            if chosen.any():
                out = out.index_add(0, chosen.nonzero()[:, 0], layer(x[chosen]))
        return out


def test_a_branch_by_the_whole_batch_is_refused_and_one_by_each_sample_is_not() -> None:
    rows = torch.tensor([[3.0, 0.0], [-1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]])
    with pytest.raises(
        TrainingError, match="runs the layer 'other' for a sample alone, and not for the batch"
    ):
        pipeline_stage.layers_by_sample(_Branches(), rows)
    experts = _Experts()
    assert pipeline_stage.layers_by_sample(experts, rows) == [experts.one, experts.other]
