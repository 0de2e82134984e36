"""Data between hosts, over authenticated connections: files that not every host has, and map-reduce."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import HostsJob
from namespaces import DISK
from reading_located import digest, fitted

import shoal

HERE = Path(__file__).parent


def write_table(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(number)
    pq.write_table(
        pa.table({name: rng.normal(size=300).astype(np.float32) for name in "aby"}), path, row_group_size=100
    )


def test_three_hosts_read_as_if_each_had_all_files_also_when_their_server_is_killed(
    start_cluster: Callable[[int], Any], zygote: Any, shared_folder: Path
) -> None:
    cluster = start_cluster(3)
    for number in range(3):
        write_table(shared_folder / "all" / f"{number}.parquet", number)
        for folder in range(3):
            write_table(cluster[0].path(DISK / "central" / str(folder) / f"{number}.parquet"), number)
        write_table(cluster[number].path(DISK / "resident" / f"{number}.parquet"), number)
    job = HostsJob(cluster, zygote, shared_folder, HERE / "reading_located.py", own_disks=True)
    arguments = [str(shared_folder), str(DISK / "central"), str(DISK / "resident")]
    options = ("--exchange", "native", "--batchnorm", "sync", "--faults", "kill worker-0 at step 5")
    try:
        assert job.start(3, *arguments, options=options).wait() == 0, job.story()
    finally:
        job.close()
    data = shoal.Dataset.from_parquet(f"{shared_folder}/all/*.parquet", label="y")
    expected, alone = digest(data), fitted(data)
    kinds = ("on-demand", "chain", "broadcast", "resident")
    for rank in range(3):
        told = json.loads((shared_folder / f"rank-{rank}.json").read_text())
        near, trained = told.pop("near"), told.pop("fitted")
        assert trained == pytest.approx(alone, rel=1e-4, abs=1e-6)
        assert told == dict.fromkeys(kinds, expected)
        assert near == list(range(5 * rank, 5 * (rank + 1)))
    assert len(job.events("worker-replaced")) == 1
    assert {each["how"] for each in job.events("files-spread")} == {"chain", "broadcast"}
    for host in cluster:
        assert not list(host.path(DISK / "runs").glob("*/scratch")), host


def test_map_reduce_over_hosts_gives_the_bits_of_one_process_also_when_a_host_is_lost(
    start_job: Callable[..., HostsJob], shared_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shared_folder / "out"
    out.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    alone = subprocess.run(
        [sys.executable, str(HERE / "mapping.py"), str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    expected = (out / "rank-0.json").read_text()
    monkeypatch.setenv("XDG_CACHE_HOME", str(DISK / "cache"))
    job = start_job(HERE / "mapping.py", str(out), workers=3, hosts=3, own_disks=True)
    job.wait_for((out / "mapping-2").exists)
    job.cluster[2].kill()
    job.wait_for(lambda: job.events("worker-replaced"))
    (out / "go").touch()
    assert job.wait() == 0, job.story()
    for rank in range(3):
        assert (out / f"rank-{rank}.json").read_text() == expected
