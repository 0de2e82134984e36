from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from shoal.errors import ConfigError
from shoal.train.planned import check_planned


def test_a_model_that_changed_since_the_plan_is_refused_by_what_changed(tmp_path: Path) -> None:
    check_planned(nn.Linear(3, 4), tmp_path)  # no plan
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"model": {"bias": [4], "weight": [4, 3]}}))
    check_planned(nn.Linear(3, 4), tmp_path)
    with pytest.raises(ConfigError, match="'bias' is 5 now and was 4 then, and 1 more parameters differ"):
        check_planned(nn.Linear(3, 5), tmp_path)
    with pytest.raises(ConfigError, match=r"'bias' \(4\) is gone"):
        check_planned(nn.Linear(3, 4, bias=False), tmp_path)
    plan.write_text(json.dumps({"model": {"weight": [4, 3]}}))
    with pytest.raises(ConfigError, match=r"'bias' \(4\) is new"):
        check_planned(nn.Linear(3, 4), tmp_path)
    plan.write_text(json.dumps({"model": {}}))  # a loop of the script's own
    check_planned(nn.Linear(3, 4), tmp_path)
