"""A matrix product that no single worker computes whole.

python examples/matmul.py
shoal run -n 4 examples/matmul.py
"""

from __future__ import annotations

import argparse

import torch

import shoal


def main() -> None:
    parser = argparse.ArgumentParser(description="Multiply two matrices over all workers.")
    parser.add_argument("--size", type=int, default=1023)
    size = parser.parse_args().size

    torch.manual_seed(0)  # the same factors on every worker
    a, b = (torch.randn(size, size, dtype=torch.float64) for _ in range(2))
    expected = a @ b

    for cut in ("blocks", "inner"):
        product = shoal.collectives.matmul(a, b, cut=cut, timeout_s=60)
        print(f"{cut}: largest difference {float((product - expected).abs().max()):.1e}")

    block = shoal.collectives.matmul(a, b, gather=False)  # left where it was computed
    total = shoal.collectives.all_reduce(block.sum())
    print(f"sum of all blocks {float(total):.6f}, of the product {float(expected.sum()):.6f}")


if __name__ == "__main__":
    main()
