"""Task process of `--strategy mapreduce`: the script run again, up to the end of one part of one round.

`run_task` starts it, locally or within a task of Ray or Spark, and is a function of the files in a
folder: if the result exists already, nothing is run.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from shoal import system
from shoal.errors import TaskFailed

TAIL_CHARACTERS = 600


@dataclass(frozen=True, slots=True)
class RoundTask:
    """One part of a round."""

    folder: str
    part: int

    @property
    def result(self) -> str:
        return f"{self.folder}/part-{self.part}.bin"

    @property
    def log(self) -> str:
        return f"{self.folder}/part-{self.part}.log"


def run_task(task: RoundTask) -> None:
    """Run a task to its end. TaskFailed, with its last output, if its process left no result."""
    if os.path.exists(task.result):
        return
    with open(task.log, "ab") as log:
        code = subprocess.run(
            [sys.executable, "-m", "shoal.cluster.worker.task", task.folder, str(task.part)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
            preexec_fn=system.program_dies_with_parent,
        ).returncode
    if code or not os.path.exists(task.result):
        said = " ".join(Path(task.log).read_text(errors="replace").split())[-TAIL_CHARACTERS:]
        raise TaskFailed(part=task.part, code=code, said=said, log=task.log)


def main(folder: str, part: int) -> int:
    """Run the script; its strategy ends it by SystemExit once the result is written."""
    from shoal.cluster.worker import process

    spec = process.decode_spec(Path(folder, "spec.bin").read_bytes())
    task = RoundTask(folder, part)
    assert spec.job.task is not None
    job = replace(spec.job, rank=part, task=replace(spec.job.task, result=task.result))
    process.enter(msgspec.structs.replace(spec, env=dict(os.environb)), job)
    try:
        if spec.module:
            runpy.run_module(spec.module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(spec.script, run_name="__main__")
    except SystemExit:
        if not os.path.exists(task.result):
            raise
    if not os.path.exists(task.result):
        print(
            "the script ended before the fit of this round: it took another way than in the driver",
            file=sys.stderr,
        )
        return 3
    process.clean_up()
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1], int(sys.argv[2])))
