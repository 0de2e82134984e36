"""Datasets in a launched job: what is skipped is in its events, all ranks choose alike, and an error is the user's own."""

from __future__ import annotations

from collections.abc import Callable

from launched import Launched

from shoal.errors import CallsDiffer, ScriptFailed, TooManySkipped

PRELUDE = """
import torch, shoal
from torch import nn

N = 30

def fragile(sample):
    if int(sample[1]) % 10 == 4:
        raise ValueError(f"sample {int(sample[1])} is spoilt")
    return sample[0], (sample[1] % 2).float().reshape(1)

data = shoal.Dataset.from_arrays((torch.randn(N, 3, generator=torch.Generator().manual_seed(1)), torch.arange(N)))
trainer = shoal.Trainer(
    nn.Linear(3, 1), loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1), progress=False
)
"""


def test_every_skipped_sample_is_in_the_events_once_per_epoch(launch_script: Callable[..., Launched]) -> None:
    done = launch_script(
        PRELUDE + "trainer.fit(data.map(fragile, on_error='skip').shuffle(seed=1).batch(6), epochs=2)",
        workers=3,
    )
    assert done.exit_code == 0, done.error
    skipped = [event for event in done.events if event["event"] == "sample skipped"]
    assert sorted((event["epoch"], event["index"]) for event in skipped) == [
        (epoch, index) for epoch in range(2) for index in (4, 14, 24)
    ]
    assert all(event["where"] == "map(fragile)" for event in skipped)
    assert all("is spoilt" in event["reason"] for event in skipped)


def test_more_skips_than_allowed_over_all_workers_end_the_job_with_their_number(
    launch_script: Callable[..., Launched],
) -> None:
    # Each of the three workers meets one bad sample.
    done = launch_script(
        PRELUDE + "trainer.fit(data.map(fragile, on_error='skip', max_skips=2).batch(6), epochs=2)", workers=3
    )
    assert isinstance(done.error, TooManySkipped), done.error
    assert "3 bad samples were left out, and max_skips=2 allows no more" in str(done.error)


def test_an_error_in_map_is_the_users_own_with_sample_and_line(
    launch_script: Callable[..., Launched],
) -> None:
    done = launch_script(PRELUDE + "trainer.fit(data.map(fragile).batch(6), epochs=2)", workers=3)
    assert isinstance(done.error, ScriptFailed)
    told = str(done.error)
    assert told.startswith("Traceback")
    assert "ValueError: sample 4 is spoilt" in told
    assert "raised by map(fragile) for the sample with index 4, in epoch 0" in told
    assert "shoal/data" not in told.split("ValueError:")[0]  # only frames of the script


def test_ranks_that_filter_differently_are_told_before_anything_is_trained(
    launch_script: Callable[..., Launched],
) -> None:
    same = "trainer.fit(data.map(lambda s: (s[0], s[1].float().reshape(1))).filter(lambda s: KEEP).batch(6), epochs=1)"
    done = launch_script(PRELUDE + same.replace("KEEP", "int(s[1]) % 2 == 0"), workers=2)
    assert done.exit_code == 0, done.error
    done = launch_script(PRELUDE + same.replace("KEEP", "int(s[1]) % 2 == shoal.rank()"), workers=2)
    assert isinstance(done.error, CallsDiffer), done.error
    assert "chosen=" in str(done.error)
