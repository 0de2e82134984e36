"""`training_step` in the Trainer: a GAN with two optimizers, the same under every strategy, after a kill and a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file

from shoal import Faults

Launch = Callable[..., Launched]
SCRIPT = Path(__file__).parent / "scripts" / "training_step.py"


@pytest.fixture
def train(launch_script: Launch, tmp_path: Path) -> Callable[..., tuple[Launched, dict[str, torch.Tensor]]]:
    def run(name: str, *args: str, **options: object) -> tuple[Launched, dict[str, torch.Tensor]]:
        out = tmp_path / name
        done = launch_script(SCRIPT, args=(str(out), *args), name=name, **options)
        assert done.exit_code == 0, done.error
        assert "made (41, 6)" in done.stdout
        return done, load_file(out / "model.safetensors")

    return run


def test_a_gan_of_two_optimizers_ends_as_in_one_process_at_three_workers(train: Callable[..., tuple]) -> None:  # type: ignore[type-arg]
    alone, expected = train("alone", workers=1)
    lines = [json.loads(line) for line in (alone.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 11)]
    assert all(
        line["loss"] == pytest.approx(line["loss_critic"] + line["loss_fake"], rel=1e-9) for line in lines
    )
    assert not torch.equal(expected["average.0.weight"], expected["fake.0.weight"])

    _, undisturbed = train("ddp", workers=3)
    killed, after = train(
        "killed", workers=3, faults=Faults().kill("worker-1", at_step=3).kill("worker-0", at_step=6)
    )
    assert killed.summary["restarts"] == 2
    assert all(torch.equal(after[name], value) for name, value in undisturbed.items())
    _, sharded = train("fsdp", workers=3, strategy="fsdp")
    checkpoint = max((alone.run_dir / "checkpoints").glob("step-*"))
    _, resumed = train("resumed", str(checkpoint), workers=3)
    for other in (undisturbed, sharded, resumed):
        for name, value in expected.items():
            torch.testing.assert_close(other[name], value, rtol=1e-11, atol=1e-12, msg=name)


def test_servers_update_the_part_whose_turn_it_is(train: Callable[..., tuple]) -> None:  # type: ignore[type-arg]
    _, expected = train("alone", workers=1)
    _, served = train("ps", workers=3, servers=1, strategy="ps", faults=Faults().kill("worker-2", at_step=4))
    for name, value in expected.items():
        if not name.startswith("average"):
            torch.testing.assert_close(served[name], value, rtol=1e-11, atol=1e-12, msg=name)
