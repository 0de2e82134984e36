"""--compress with servers: fewer bytes, a loss close to that without, and the same bits under deaths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from test_table_memory import SCRIPT, pieces

from shoal import Faults

Launch = Callable[..., Launched]


@pytest.fixture
def train(launch_script: Launch, tmp_path: Path) -> Callable[..., tuple[Launched, dict[str, torch.Tensor]]]:
    def train(name: str, **options: object) -> tuple[Launched, dict[str, torch.Tensor]]:
        out = tmp_path / name
        out.mkdir()
        done = launch_script(
            SCRIPT, workers=3, servers=2, replicas=2, args=(str(out),), name=name, quiet=True,
            step_timeout_s=30.0, **options,
        )  # fmt: skip
        assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        return done, pieces(out / "end")

    return train


def test_compressed_steps_are_the_same_bits_after_a_worker_and_a_server_died(
    train: Callable[..., tuple[Launched, dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    plain, exact = train("plain", strategy="ps")
    undisturbed, small = train("small", strategy="ps", compress="int8")
    faults = Faults().kill("worker-1", at_step=3).kill("server-0", at_step=5)
    killed, again = train("killed", strategy="ps", compress="int8", faults=faults)
    assert killed.summary["restarts"] == 2
    for name, tensor in small.items():
        assert torch.equal(again[name], tensor), name
    assert any(not torch.equal(small[name], exact[name]) for name in exact)
    assert small["model/head.bias"].dtype == torch.float32
    # Whole, not as they were pulled, also after a forward that only looked.
    head = small["model/head.weight"]
    assert not torch.equal(head, head.bfloat16().float())
    for name, tensor in pieces(tmp_path / "small" / "looked").items():
        assert torch.equal(tensor, small[name]), name
    assert undisturbed.summary["metrics"]["loss"] == pytest.approx(plain.summary["metrics"]["loss"], rel=0.02)
    assert undisturbed.summary["exchange"]["compress"] == "int8"
    # A row of 8 with its key: pushed in 40 bytes or, with a scale, in 20; pulled in 40 or, as bf16, in 24. The
    # forward of the trial before the first step pulls once more.
    assert undisturbed.summary["exchange"]["ratio"] == pytest.approx(80 / 44, abs=0.06)


def test_relaxed_pushes_are_compressed_too(
    train: Callable[..., tuple[Launched, dict[str, torch.Tensor]]],
) -> None:
    done, _ = train("async", strategy="ps:async", compress="bf16")
    assert done.summary["exchange"]["ratio"] == pytest.approx(40 / 24, abs=0.02)
    assert done.summary["exchange"]["exchange"] == "servers"
