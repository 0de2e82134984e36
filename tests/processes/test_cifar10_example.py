"""examples/cifar10.py: the recipe on 2 workers, on generated pictures and on files in CIFAR-10's format."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from examples_expected import FOLDER, falls, numbers
from launched import Launched
from typer.testing import Result

from shoal.train.checkpoint.checkpoint import list_checkpoints, open_checkpoint


def test_the_recipe_runs_to_the_letter_on_two_workers(
    launch_script: Callable[..., Launched], invoke: Callable[..., Result]
) -> None:
    args = ("--samples", "800", "--epochs", "2", "--width", "4")
    done = launch_script(FOLDER / "cifar10.py", workers=2, args=args, name="cifar", quiet=True)
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    assert "global batch 64 (32 x 2 workers), learning rate 0.04 (0.02 x 2)" in done.stderr
    falls(numbers(r"loss ([\d.]+)", done.stdout), by=0.01)
    assert len(numbers(r"top-5 ([\d.]+)", done.stdout)) == 2

    first, second = map(open_checkpoint, list_checkpoints(done.run_dir / "checkpoints"))  # one per epoch
    assert (first.progress["step"], second.progress["step"]) == (10, 20)
    [group] = first.progress["optimizer"]["groups"]
    settings = {name: group["settings"][name] for name in ("lr", "momentum", "weight_decay")}
    assert settings == pytest.approx(
        {"lr": 0.004, "momentum": 0.9, "weight_decay": 5e-4}
    )  # past half the epochs

    shown = invoke("status", str(done.run_dir), "--json")
    assert json.loads(shown.output)["params"] == {"lr": 0.02, "width": 4, "epochs": 2}


def test_files_of_cifar_10_are_read_and_augmented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    cifar10 = importlib.import_module("cifar10")
    records = np.zeros((4, 3073), dtype=np.uint8)
    records[:, 0] = [3, 1, 4, 1]
    records[2, 1:1025] = 255  # red
    records.tofile(tmp_path / "test_batch.bin")
    data = cifar10.from_files(tmp_path, "test_batch.bin")
    picture, label = data.map(cifar10.normalised)[2]
    assert int(label) == 4
    red, green = picture[0], picture[1]
    assert torch.allclose(red, (torch.ones(32, 32) - 0.4914) / 0.2470)
    assert torch.allclose(green, torch.full((32, 32), -0.4822 / 0.2435))
    cropped, _ = data.augment(cifar10.augmented, seed=0)[2]
    assert cropped.shape == (3, 32, 32)
    assert (cropped[0] < 0).any()  # the padding is black


def test_the_recipe_trains_on_files_of_cifar_10(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        records = generator.integers(0, 256, (32, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(32) % 10
        records.tofile(folder / name)
    args = ("--data", str(folder), "--epochs", "1", "--width", "4")
    done = launch_script(FOLDER / "cifar10.py", workers=2, args=args, name="files", quiet=True)
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    assert done.summary["steps"] == 3  # 160 pictures, 64 of them in a step
    assert numbers(r"epoch 1: loss ([\d.]+), top-1 [\d.]+, top-5 ([\d.]+)", done.stdout)
