"""Models of transformers and timm with random weights: what one process computes, under every kind of strategy."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
TIMM = Path(sys.prefix) / "models"
"""timm and its torchvision, apart: beside a CPU build of torch, other packages must not find torchvision."""

NAMES = ("bert classifier", "gpt2", "llama", "t5", "vit", "timm resnet")


@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 3), ("fsdp", 2), ("tp", 2), ("pp", 2), ("ps", 2)])
@pytest.mark.filterwarnings("ignore")
def test_public_models_train_as_in_one_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strategy: str, workers: int
) -> None:
    if not os.environ.get("SHOAL_TEST_ENGINES"):
        pytest.skip("public models are installed by `make test-engines` alone")
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(TIMM))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, TIMM))))
    from benchmarks import models

    cases = models.available()
    assert set(NAMES) <= set(cases)
    said = models.run(NAMES, strategy, workers, tmp_path)
    found = {name: said[name] or _compared(tmp_path, name, strategy, workers) for name in NAMES}
    assert found == dict.fromkeys(NAMES, "equal")


def _compared(folder: Path, name: str, strategy: str, workers: int) -> str:
    from benchmarks import models

    case = models.available()[name]
    alone = ALONE.setdefault("one process", models.OneProcess())(name, case, strategy, workers)
    return models.compare(load_file(folder / f"{name}.safetensors"), alone, case.tolerance)


ALONE: dict[str, object] = {}
