"""Launchers other than shoal, known by the variables they set for each process they start."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shoal.errors import OtherLauncher

TORCHELASTIC_RUN_ID = "shoal"
"""torchrun's name of a job, in the workers of `shoal run`: they have torchrun's other variables too."""


def refuse_others(env: Mapping[str, str] = os.environ) -> None:
    """Refuse to be one of several processes that another launcher started: each would train by itself."""
    for launcher, size in (
        ("torchrun", _torchrun_size(env)),
        ("srun", _srun_size(env)),
        ("mpirun", _number(env, "OMPI_COMM_WORLD_SIZE")),
        ("mpirun", _number(env, "PMI_SIZE")),
    ):
        if size > 1:
            raise OtherLauncher(launcher=launcher, num_processes=size)


def _torchrun_size(env: Mapping[str, str]) -> int:
    """Of `accelerate launch` too. A process that a worker of ours started is not one of several."""
    is_ours = env.get("TORCHELASTIC_RUN_ID") == TORCHELASTIC_RUN_ID
    return _number(env, "WORLD_SIZE") if "RANK" in env and not is_ours else 1


def _srun_size(env: Mapping[str, str]) -> int:
    """Tasks of a step. A batch script, which is one process, knows the number of its job's tasks as well, but is in no step."""
    if "SLURM_STEP_NUM_TASKS" in env:
        return _number(env, "SLURM_STEP_NUM_TASKS")
    is_in_step = "SLURM_STEP_ID" in env or _number(env, "SLURM_PROCID") > 0
    return _number(env, "SLURM_NTASKS") if is_in_step else 1


def _number(env: Mapping[str, str], name: str) -> int:
    said = env.get(name, "")
    return int(said) if said.isdecimal() else 0
