"""Commands of the engines page, run as they stand: those that need no address, partition or GPU of somebody's cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, unsupported

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "engines.md").read_text()
ELSEWHERE = ("10.0.0.", "partition=gpu", "gpus=", "--host ")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
WORDS = "#!/usr/bin/env python\nimport sys\nfor line in sys.stdin:\n    for word in line.split():\n        print(f'{word}\\t1')\n"
COUNT = (
    "#!/usr/bin/env python\nimport itertools, sys\n"
    "for word, lines in itertools.groupby(sys.stdin, key=lambda line: line.split('\\t')[0]):\n"
    "    print(f'{word}\\t{len(list(lines))}')\n"
)


def blocks() -> dict[str, str]:
    """Commands by the heading they stand under; lines that name a cluster are left out."""
    found: dict[str, list[str]] = {}
    heading = is_code = ""
    for line in PAGE.splitlines():
        is_code = is_code if not line.startswith("```") else "" if is_code else line
        if line.startswith("## ") and not is_code:
            heading = line[3:]
        elif line.startswith("    ") and not is_code and not any(word in line for word in ELSEWHERE):
            found.setdefault(heading, []).append(line.strip())
    return {heading: "\n".join(lines) for heading, lines in found.items()}


def test_the_page_has_a_command_for_every_engine() -> None:
    assert {"Ray", "Spark", "MPI", "Slurm", "Kubernetes", "A cloud"} <= set(blocks())


@pytest.mark.matrix
@pytest.mark.parametrize("heading", blocks())
def test_the_commands_run_as_they_stand(
    heading: str, installed: Callable[[str], None], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    installed("mpi")
    commands = blocks()[heading]
    script = re.search(r"```python\n(# train\.py\n.*?)```", PAGE, re.DOTALL)
    assert script is not None
    (tmp_path / "train.py").write_text(script[1])
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("one fish two fish\n")
    for name, text in (("words.py", WORDS), ("count.py", COUNT)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, **AS_ROOT, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "shoal").write_text(f'#!/bin/sh\nexec {sys.executable} -m shoal "$@"\n')
    (tmp_path / "bin" / "torchrun").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    )
    for each in (tmp_path / "bin").iterdir():
        each.chmod(0o755)
    env["PATH"] = f"{tmp_path}/bin:{env['PATH']}"
    cluster = None
    if "slurm" in commands:
        installed("slurm")
        if reason := unsupported():
            pytest.skip(reason)
        cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
        env |= cluster.env
    try:
        for number, command in enumerate(_runs(commands)):
            done = subprocess.run(
                ["bash", "-e", "-c", command.replace(" counts", f" counts-{number}")],
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
            if "train.py" in command and "shoal run" in command and "mapreduce" not in command:
                assert "trained on 2 workers" in done.stdout + done.stderr, command
    finally:
        if cluster is not None:
            cluster.close()


def _runs(commands: str) -> list[str]:
    """Lines that belong together (a variable, something in the background) as one script, others each alone."""
    return [commands + "\nwait"] if "export " in commands and "&" in commands else commands.splitlines()
