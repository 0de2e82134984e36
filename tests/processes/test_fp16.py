"""fp16 over workers: all skip the same steps, and a death changes no bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from launched import Launched
from safetensors.torch import load_file

from shoal import Faults

Launch = Callable[..., Launched]

SCRIPT = """
import json, sys, torch, shoal
from torch import nn

torch.manual_seed(0)
x = torch.randn(41, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
trainer = shoal.Trainer(
    model,
    loss=lambda output, target: (output - 300 * target).square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9),
    clip_norm=400.0,
    precision="fp16",
)
trainer.fit(shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).batch(10), epochs=3)
trainer.save(sys.argv[1])
if shoal.rank() == 0:
    print("scale", json.dumps([trainer.train_job.loss_scale.value, trainer.progress.num_skipped_steps]))
"""


def trained(launch: Launch, out: Path, **options: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    done = launch(SCRIPT, args=(str(out),), **options)
    assert done.exit_code == 0, done.stderr
    [told] = [line for line in done.stdout.splitlines() if "scale" in line]
    return json.loads(told.partition("scale ")[2]), load_file(out / "model.safetensors")


def test_workers_skip_the_steps_that_one_process_skips_and_a_death_changes_no_bit(
    launch_script: Launch, tmp_path: Path
) -> None:
    scale, alone = trained(launch_script, tmp_path / "alone", workers=1)
    assert scale[1] > 1
    for strategy in ("ddp", "fsdp", "ps"):
        found, weights = trained(launch_script, tmp_path / strategy, workers=3, strategy=strategy)
        assert found == scale, strategy
        for name, expected in alone.items():  # slices round otherwise in fp16
            torch.testing.assert_close(
                weights[name], expected, rtol=1e-2, atol=1e-2, msg=f"{strategy} {name}"
            )
        if strategy == "fsdp":
            continue
        # One dies at a step that is skipped, one at the first that is not.
        faults = Faults().kill("worker-1", at_step=2, at="worker: before commit")
        faults = faults.kill("worker-2", at_step=int(scale[1]) + 1, at="worker: committed")
        again, killed = trained(
            launch_script, tmp_path / f"{strategy}-killed", workers=3, strategy=strategy, faults=faults
        )
        assert again == scale, strategy
        assert [name for name in weights if not torch.equal(weights[name], killed[name])] == []
