"""On an accelerator: what the Trainer costs against a loop written by hand, what offloading saves, what a CPU beside it adds.

Only where there is one; everything is measured on the first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from benchmarks.harness import Report, alternate, timed
from benchmarks.plain_models import image_arrays, resnet18
from benchmarks.scripts.job import ByName

SCRIPT = Path(__file__).parent / "scripts" / "device_job.py"


class Decoder(nn.Module):
    """A small GPT: 6 blocks of 512 over 256 characters."""

    def __init__(self, width: int = 512, num_blocks: int = 6, length: int = 256) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, num_blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, text: Tensor) -> Tensor:
        mask = self.get_buffer("mask")
        return self.head(self.blocks(self.embed(text) + self.places, mask=mask, is_causal=True)).flatten(0, 1)


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: nn.Module,
    arrays: tuple[dict[str, Tensor], Tensor],
    *,
    batch: int,
    steps: int,
    device: torch.device,
    reads_loss: bool,
) -> None:
    """As most scripts have it: pinned batches, copies that do not block, bf16 where torch finds it right."""
    inputs, target = arrays
    order = torch.randperm(len(target))
    value = torch.zeros(())
    for step in range(steps):
        begin = step * batch % (len(target) - batch + 1)
        chosen = order[begin : begin + batch]
        placed = {
            name: tensor[chosen].pin_memory().to(device, non_blocking=True) for name, tensor in inputs.items()
        }
        wanted = target[chosen].pin_memory().to(device, non_blocking=True).flatten()
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            value = loss(model(**placed), wanted)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if reads_loss:
            value.item()
    value.item()


def compare(
    report: Report,
    name: str,
    model: Any,
    arrays: tuple[dict[str, Tensor], Tensor],
    *,
    batch: int,
    steps: int,
    rounds: int,
    reads_loss: bool,
) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    loss = nn.CrossEntropyLoss()

    def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4)

    torch.manual_seed(0)
    theirs = model().to(device)
    optimizer = adam(theirs.parameters())
    trainer = shoal.Trainer(
        model,
        loss=_flat(loss),
        optimizer=adam,
        device=f"{device.type}:0",
        precision="bf16",
        progress=False,
    )
    data = shoal.Dataset.from_arrays(arrays).shuffle(seed=0).batch(batch, drop_last=True)
    values = alternate(
        lambda: timed(lambda: trainer.fit(data, max_steps=steps)),
        lambda: timed(
            lambda: by_hand(
                theirs,
                optimizer,
                loss,
                arrays,
                batch=batch,
                steps=steps,
                device=device,
                reads_loss=reads_loss,
            )
        ),
        rounds=rounds,
    )
    of_loop = "reads the loss at every step" if reads_loss else "reads the loss at the end"
    report.add(
        f"{name}: Trainer / loop by hand that {of_loop}",
        values,
        batch=batch,
        steps_per_round=steps,
        precision="bf16",
        device=torch.get_device_module(device).get_device_name(),
    )


def _flat(loss: nn.Module) -> Any:
    return lambda output, target: loss(output, target.flatten())


def job(*options: str, kind: str, steps: int) -> list[dict[str, Any]]:
    """Run the script under `shoal run`; what each worker wrote."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shoal", "run", *options, "--run-dir", f"{folder}/runs", str(SCRIPT)]
        subprocess.run([*command, kind, str(steps), f"{folder}/out"], check=True, stdout=subprocess.DEVNULL)
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("out.*"))]


def main(quick: bool = False) -> None:
    if not torch.accelerator.is_available():
        print("no accelerator here: nothing to measure", file=sys.stderr)
        return
    report = Report("on_device")
    images, labels = image_arrays(4096)
    text = torch.randint(0, 256, (1024, 257), generator=torch.Generator().manual_seed(0))
    rounds = 2 if quick else 8
    for reads_loss in (True, False):
        settings = {"steps": 16 if quick else 64, "rounds": rounds, "reads_loss": reads_loss}
        arrays = {"image": images}, labels
        compare(report, "ResNet-18 (32x32)", lambda: ByName(resnet18()), arrays, batch=256, **settings)
        shifted = {"text": text[:, :-1].contiguous()}, text[:, 1:].contiguous()
        compare(report, "GPT of 19 M parameters", Decoder, shifted, batch=16, **settings)
    device = f"{torch.accelerator.current_accelerator()}:0"
    steps = 8 if quick else 40
    for what, options in (
        ("single", ("--strategy", "single")),
        ("fsdp", ("--strategy", "fsdp")),
        ("fsdp, offloaded", ("--strategy", "fsdp", "--offload")),
        ("fsdp, activations run again", ("--strategy", "fsdp", "--checkpoint-activations")),
        ("ps, 1 server", ("--strategy", "ps", "--servers", "1")),
        ("ps:async, 1 server", ("--strategy", "ps:async", "--servers", "1")),
        ("ps, 1 server on it", ("--strategy", "ps", "--servers", "1", "--server-device", "auto")),
        ("ps:async, 1 server on it", ("--strategy", "ps:async", "--servers", "1", "--server-device", "auto")),
    ):
        [found] = job("-n", "1", "--device", device, *options, kind="gpt", steps=steps)
        report.add(f"GPT of 19 M parameters on the device, {what}", found, batch=16, steps=steps)
    for device_list in (device, f"{device},cpu"):
        workers = str(device_list.count(",") + 1)
        found = job("-n", workers, "--strategy", "ddp", "--device", device_list, kind="mlp", steps=4 * steps)
        report.add(f"MLP over {device_list}", {"workers": found}, batch=8192, steps=4 * steps)
    report.save()


if __name__ == "__main__":
    main()
