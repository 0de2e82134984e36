from __future__ import annotations

import pytest

from shoal.config.job import refuse_others
from shoal.config.launchers import TORCHELASTIC_RUN_ID, first_host, world_of
from shoal.errors import OtherLauncher

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
SRUN = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "torchrun"),
        (SRUN, "srun"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "srun"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "mpirun"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "mpirun"),
    ],
)
def test_one_of_several_processes_of_another_launcher_is_refused(env: dict[str, str], launcher: str) -> None:
    with pytest.raises(OtherLauncher, match="`shoal run -n 2 SCRIPT`, or with `shoal run --on") as refused:
        refuse_others(env)
    assert refused.value.launcher == launcher


@pytest.mark.parametrize(
    "env",
    [
        {},
        TORCHRUN | {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "2"},  # a variable of the user's own
        {"RANK": "first", "WORLD_SIZE": "many"},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},  # the batch script itself: one process
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"},
        TORCHRUN | {"TORCHELASTIC_RUN_ID": TORCHELASTIC_RUN_ID},  # what a worker of ours started
    ],
)
def test_a_process_that_is_alone_is_not(env: dict[str, str]) -> None:
    refuse_others(env)


def test_world_of_srun_has_its_nodes() -> None:
    env = SRUN | {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "node[07-08]",
    }
    world = world_of(env)
    assert world is not None
    assert (world.num_nodes, world.node, world.local_rank, world.head) == (2, 1, 1, "node07")


@pytest.mark.parametrize(("nodes", "first"), [("a,b", "a"), ("n[1,3]", "n1"), ("", "")])
def test_first_of_a_list_of_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
