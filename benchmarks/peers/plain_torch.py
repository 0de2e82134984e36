"""The click model in plain PyTorch with sparse gradients, one process: python -m benchmarks.peers.plain_torch."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.click_model import BATCH, LR, batches
from benchmarks.click_torch import ClickModel
from benchmarks.peers.meter import Meter, options, tell


def main() -> None:
    chosen = options(lambda parser: parser.add_argument("--batch", type=int, default=BATCH))
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    model = ClickModel()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    loss_of = nn.BCEWithLogitsLoss()
    stream = batches(chosen.data, batch=chosen.batch)
    meter = Meter(warm_s=chosen.warm, seconds=chosen.seconds)
    loss = torch.zeros(())
    while meter.goes_on():
        ids, label = next(stream)
        optimizer.zero_grad()
        loss = loss_of(model(torch.from_numpy(ids)), torch.from_numpy(label))
        loss.backward()
        optimizer.step()
        meter.step(chosen.batch)
    tell(
        "PyTorch, sparse gradients",
        meter.samples_per_s,
        version=torch.__version__,
        processes=1,
        threads=chosen.threads,
        batch_per_update=chosen.batch,
        steps=meter.num_steps,
        last_loss=round(loss.item(), 4),
    )


if __name__ == "__main__":
    main()
