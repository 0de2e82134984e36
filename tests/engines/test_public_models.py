"""Models of transformers and timm with random weights: what one process computes, under every kind of strategy."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, default_collate

import shoal

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


def test_a_batch_encoding_goes_in_as_it_is_and_predictions_keep_their_class() -> None:
    if not os.environ.get("SHOAL_TEST_ENGINES"):
        pytest.skip("public models are installed by `make test-engines` alone")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    ids = torch.arange(40).reshape(8, 5) % 16
    model = transformers.GPT2LMHeadModel(config)
    trainer = shoal.Trainer(model, loss="model", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    data = DataLoader(
        rows, batch_size=4, collate_fn=lambda each: transformers.BatchEncoding(default_collate(each))
    )
    trainer.fit(data, epochs=1)
    predicted = trainer.predict(data)
    assert type(predicted).__name__ == "CausalLMOutputWithCrossAttentions"
    assert predicted.logits.shape == (8, 5, 16)
    assert predicted.past_key_values is None  # the cache is off


def _compared(folder: Path, name: str, strategy: str, workers: int) -> str:
    from benchmarks import models

    case = models.available()[name]
    alone = ALONE.setdefault("one process", models.OneProcess())(name, case, strategy, workers)
    return models.compare(load_file(folder / f"{name}.safetensors"), alone, case.tolerance)


ALONE: dict[str, object] = {}
