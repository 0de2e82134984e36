from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from shoal.errors import ConfigError
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
