"""Worlds of other launchers: this process as torchrun, mpirun or srun numbered it, read from their variables. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

TORCHELASTIC_RUN_ID = "shoal"
"""torchrun's name of a job, in the workers of `shoal run`: they have torchrun's other variables too."""

_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|OMPI_COMM_\w+|PMI_\w+|SLURM_(PROCID|LOCALID|STEP_\w+)"
)


class World(NamedTuple):
    """One process among those that a launcher started."""

    launcher: str
    """torchrun, mpirun or srun."""

    engine: str
    """As --on names it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    head: str = ""
    """Address of rank 0's machine, where the launcher tells it."""

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.local_size)

    @property
    def node(self) -> int:
        return self.rank // self.local_size


def world_of(env: Mapping[str, str]) -> World | None:
    """World that this process is one of; None where it was started alone."""
    if env.get("TORCHELASTIC_RUN_ID") == TORCHELASTIC_RUN_ID:  # a worker of ours, or started by one
        return None
    for world in (_torchrun(env), _mpirun(env), _srun(env)):
        if world is not None and world.size > 1:
            return world
    return None


def forget(env: MutableMapping[str, str]) -> None:
    """Remove the launcher's variables: processes started from here on are not its."""
    for name in [name for name in env if _VARIABLES.fullmatch(name)]:
        del env[name]


def _torchrun(env: Mapping[str, str]) -> World | None:
    """The ranks of torchrun, and of `accelerate launch`, which sets the same variables."""
    if "RANK" not in env:
        return None
    size = _number(env, "WORLD_SIZE")
    return World(
        launcher="torchrun",
        engine="torchrun",
        rank=_number(env, "RANK"),
        size=size,
        local_rank=_number(env, "LOCAL_RANK"),
        local_size=_number(env, "LOCAL_WORLD_SIZE") or size or 1,
        head=env.get("MASTER_ADDR", ""),
    )


def _mpirun(env: Mapping[str, str]) -> World | None:
    for prefix, local in (("OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_LOCAL_"), ("PMI_", "MPI_LOCAL")):
        if size := _number(env, f"{prefix}SIZE"):
            return World(
                launcher="mpirun",
                engine="mpi",
                rank=_number(env, f"{prefix}RANK"),
                size=size,
                local_rank=_number(env, f"{local}RANK"),
                local_size=_number(env, f"{local}SIZE") or size,
            )
    return None


def _srun(env: Mapping[str, str]) -> World | None:
    """Tasks of a step. A batch script, which is one process, knows the number of its job's tasks as well, but is in no step."""
    size = _number(env, "SLURM_STEP_NUM_TASKS")
    if "SLURM_STEP_NUM_TASKS" not in env:
        is_in_step = "SLURM_STEP_ID" in env or _number(env, "SLURM_PROCID") > 0
        size = _number(env, "SLURM_NTASKS") if is_in_step else 1
    num_nodes = _number(env, "SLURM_STEP_NUM_NODES") or _number(env, "SLURM_NNODES") or 1
    return World(
        launcher="srun",
        engine="slurm",
        rank=_number(env, "SLURM_PROCID"),
        size=size,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_size=-(-size // num_nodes) or 1,
        head=first_host(env.get("SLURM_STEP_NODELIST", "")),
    )


def first_host(nodelist: str) -> str:
    """`node[3-5,8],other` is node3."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", nodelist)
    return match[1] + (match[2] or "") if match else ""


def _number(env: Mapping[str, str], name: str) -> int:
    said = env.get(name, "")
    return int(said) if said.isdecimal() else 0
