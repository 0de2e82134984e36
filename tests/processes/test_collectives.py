"""The exchanges over real processes and gloo: what threads in one process cannot show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from launched import Launched

from whole_matrix import matrix_only


@pytest.mark.parametrize("workers", [3, *matrix_only(2)])
def test_gathers_sums_and_gradients_over_gloo(launch_script: Callable[..., Launched], workers: int) -> None:
    done = launch_script(
        """
        import torch
        import shoal
        from shoal.recovery.rendezvous import group
        from shoal.collectives.reducer import gather_any, sum_in_rank_order
        from shoal.collectives.gradients import GradientExchange
        from shoal.collectives.reducer import Native
        from torch import nn

        group()
        rank, workers = shoal.rank(), shoal.num_workers()
        group = Native(rank=rank, num_workers=workers)

        def brought(rank, trial):
            g = torch.Generator().manual_seed(100 * trial + rank)
            dtype = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64][trial % 5]
            return None if (rank + trial) % 4 == 3 else (torch.randn(rank, 3, trial, generator=g) * 9).to(dtype)

        for trial in range(12):
            for other, part in enumerate(gather_any(group, brought(rank, trial))):
                theirs = brought(other, trial)
                assert torch.equal(part, theirs) if theirs is not None else part.numel() == 0, (trial, other)

        values = [0.1, 0.2, 0.3][:workers]
        total = 0.0
        for value in values:
            total = total + value
        assert float(sum_in_rank_order(group, torch.tensor([values[rank]], dtype=torch.float64))) == total

        # 1.2 MB of float32 and some float64: several buckets, filled last parameter first.
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16).double(), *(nn.Linear(16, 16) for _ in range(2)), nn.Linear(16, 20_000))
        table = nn.Embedding(50, 4, sparse=True)
        named = [*model.named_parameters(), ("table", table.weight)]
        exchange = GradientExchange(named, sparse=frozenset({"table"}))
        assert len(exchange.layout) > 2

        def loss(rank, step):
            g = torch.Generator().manual_seed(1000 * step + rank)
            out = model[0](torch.randn(4, 8, generator=g).double()).float()
            for layer in list(model)[1:] if rank != 1 else list(model)[2:]:
                out = layer(out)
            return out.pow(2).mean() + table(torch.randint(0, 50, (7 * rank,), generator=g)).pow(2).sum()

        for step in range(3):
            expected = None
            for other in range(workers):
                loss(other, step).backward()
            expected = [p.grad.to_dense().clone() for _, p in named]
            for _, p in named:
                p.grad = None
            exchange.arm(group)
            loss(rank, step).backward()
            exchange.finish()
            for (name, p), wanted in zip(named, expected):
                torch.testing.assert_close(p.grad.to_dense(), wanted, msg=name)
                p.grad = None
        print("all right")
        """,
        workers=workers,
    )
    assert (done.exit_code, done.stdout) == (0, "all right\n"), done.error
