"""A job of `shoal bench ps`: a click model under whatever strategy it was launched with. OUT SECONDS.

26 columns of ids into one table, three layers on top. Every rank tells how
many samples it trained a second, between a warm-up and the end; samples are
counted where the loss sees them, so the sum is right whatever a strategy
makes of a batch.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

NUM_IDS, DIM, BATCH, NUM_BATCHES = 1_000_000, 16, 1024, 64
NUM_WARM_STEPS = 10


def main(out: Path, seconds: float) -> None:
    """Train, and tell."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    from shoal.config import job
    from shoal.data import generated
    from shoal.data.dataset import Dataset
    from shoal.train.callbacks.base import Callback
    from shoal.train.trainer import Trainer

    seen = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal seen
        seen += len(target)
        return functional.binary_cross_entropy_with_logits(output, target)

    class Clock(Callback):
        """Ends the fit when enough was measured."""

        ranks = "every"

        def __init__(self) -> None:
            self.num_steps, self.began, self.last, self.first, self.newest = 0, 0.0, 0.0, 0, 0
            self.is_over = False

        def on_step_end(self, trainer: Trainer, logs: Any) -> None:
            self.num_steps += 1
            now = time.perf_counter()
            if self.num_steps == NUM_WARM_STEPS:
                self.began, self.first = now, seen
            if self.began and not self.is_over:
                self.last, self.newest = now, seen
                self.is_over = now - self.began >= seconds
                if self.is_over:
                    trainer.stop()

    torch.manual_seed(0)
    inputs, label = generated.click_arrays(NUM_BATCHES * BATCH, num_ids=NUM_IDS)
    rows = nn.Embedding(NUM_IDS, DIM, sparse=True)
    nn.init.normal_(rows.weight, std=0.01)
    layers = (nn.Linear(26 * DIM, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))
    clock = Clock()
    trainer = Trainer(
        nn.Sequential(rows, nn.Flatten(), *layers, nn.Flatten(0)),
        loss=loss,
        optimizer=lambda params: torch.optim.Adagrad(params, lr=0.02),
        callbacks=[clock],
        device="cpu",
        seed=0,
    )
    data = Dataset.from_arrays((inputs["ids"], label)).batch(BATCH)
    trainer.fit(data, epochs=1_000_000)
    # Another rank may have asked to stop before this one had seen enough: then up to its last step.
    lasted = clock.last - clock.began
    rate = (clock.newest - clock.first) / lasted if lasted > 0 else 0.0
    told = {"samples_per_s": rate, "threads": torch.get_num_threads(), "batch": BATCH}
    (out / f"{job.current().rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
