"""`shoal run -n 2` with `shm` against hand-written torch DDP: ResNet-18 and an MLP of 2 M parameters, per step.

Aim: faster; the figure is by how much. Both sides alternate in the same two
processes, so the ratio is of the step alone.
"""

from __future__ import annotations

from benchmarks.ddp_step import compare_steps
from benchmarks.harness import Report


def main(quick: bool = False) -> None:
    report = Report("ddp_shm")
    for kind, steps, rounds in (("mlp", 20, 24), ("resnet", 4, 12)):
        compare_steps(
            report,
            kind,
            workers=2,
            steps=2 if quick else steps,
            rounds=2 if quick else rounds,
            exchange="shm",
            aim="ratio < 1",
        )
    report.save()


if __name__ == "__main__":
    main()
