"""Options of --strategy mapreduce: -n counts its tasks, and one worker drives them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.config.launch import LaunchConfig
from shoal.config.parallel_options import has_rank_local_state, refuse_own_loop
from shoal.engines import tasks
from shoal.errors import ConfigError


def test_workers_are_tasks_of_one_driver_and_stay_so_when_the_run_is_resumed() -> None:
    config = LaunchConfig(script="train.py", workers=4, strategy="mapreduce", sync_every=3)
    assert (config.workers, config.tasks) == (1, 4)
    assert not has_rank_local_state(config, "mapreduce")
    again = replace(config, resume=True, name="run")
    assert (again.workers, again.tasks) == (1, 4)
    assert replace(config, workers=2).tasks == 2
    assert replace(config, workers=2, strategy="ddp").tasks == 0


def test_what_rounds_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--outer nesterov.* is for ddp"):
        LaunchConfig(script="t.py", workers=2, strategy="mapreduce", sync_every=3, outer="nesterov")
    with pytest.raises(ConfigError, match="--exchange ring sums the gradients of ddp"):
        LaunchConfig(script="t.py", workers=2, strategy="mapreduce", exchange="ring")
    with pytest.raises(ConfigError, match="a loop of the script's own"):
        refuse_own_loop(2)
    with pytest.raises(ConfigError, match="--accumulate 4"):
        refuse_own_loop(0, 4)
    refuse_own_loop(0)
    with pytest.raises(ConfigError, match="--on mpi gives hosts, and map-reduce runs tasks"):
        tasks.parse("mpi")
